"""The scripts of a launch, run with stand-ins for torchrun, srun and scontrol."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.errors import InputError
from hasten.launch.cluster import CloudConfig
from hasten.launch.targets import Launch, files, write
from hasten.launch.targets.job import MARK, exports, name_of, variables
from netlab.rehearsal import rehearse

PYTHON = """#!/usr/bin/env bash
# python: an agent (torch.distributed.run) starts one rank as torchrun would; a rank trains
here=$(dirname -- "$0")
printf '%s\\0' "$PWD" "$@" >"$here/called-$2"
if [ "$2" = torch.distributed.run ]; then
  while [ "$1" != --no-python ]; do shift; done
  shift
  LOCAL_RANK=0 "$@"
  exit $?
fi
if [ -e "$here/slow" ]; then
  trap 'exit 75' USR1
  until [ -s "$HASTEN_NODE/rank-$LOCAL_RANK" ]; do sleep 0.01; done # the node knows its number
  touch "$here/training"
  while :; do sleep 0.05; done
fi
exit "$(cat "$here/ends" 2>/dev/null || echo 0)"
"""
SRUN = """#!/usr/bin/env bash
# srun: signals it gets go to the task's whole group
while [ "$1" != bash ]; do shift; done
heard=0
trap 'heard=1; kill -USR1 -- "-$!"' USR1
SLURM_NODEID=0 setsid "$@" &
while :; do # a signal ends the wait early; who has ended in between is waited for all the same
  wait "$!"
  code=$?
  [ "$heard" = 1 ] || exit "$code"
  heard=0
done
"""
SCONTROL = """#!/usr/bin/env bash
# scontrol: names of hosts, and a note of what is queued again
if [ "$1" = show ]; then printf 'node1\\nnode2\\n'; else echo "$@" >>"$NOTES"; fi
"""


def program(place: Path, text: str) -> Path:
    """Make it a program."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)
    place.chmod(0o755)
    return place


def called(place: Path, module: str) -> list[str]:
    """The work folder and the words with which the stand-in for Python was called."""
    return (place.parent / f"called-{module}").read_bytes().decode().split("\0")[:-1]


RECIPE = f"{MARK}: the recipe as it runs there\nmodel: x\n"
CLOUD = CloudConfig(2, 4, "fat_tree")
HOSTILE = (
    "a b",
    "$(touch PWNED)",
    "`touch PWNED`",
    "'; touch PWNED; '",
    '"\n#SBATCH --x\n',
    "-e",
    "\\",
)
names = st.one_of(
    st.sampled_from(HOSTILE),
    st.text(
        st.characters(exclude_characters="\0/", exclude_categories=["Cs"]), min_size=1, max_size=12
    ),
)


def launched(**changes: Any) -> Launch:
    return replace(Launch(RECIPE, CLOUD, name="job"), **changes)


def bash(script: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(script), *words],
        env={"PATH": os.environ["PATH"], "TMPDIR": tempfile.gettempdir(), **environment},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
    )


@settings(max_examples=25)
@given(name=names)
def test_no_path_is_read_as_shell_by_the_node_s_script(name: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        folder = root / f"x{name}"
        python = program(folder / "bin" / "python", PYTHON)
        launch = launched(workdir=str(folder), python=str(python))
        write(files("torchrun", launch, folder / "out"), folder / "out")
        ended = bash(folder / "out" / "node.sh", "first:29500")
        assert ended.returncode == 0, ended.stderr
        where, *words = called(python, "torch.distributed.run")
        assert where == str(folder)
        assert words[:6] == [
            *("-m", "torch.distributed.run", "--nnodes=2", "--rdzv-backend=c10d"),
            *("--rdzv-endpoint=first:29500", "--rdzv-id=job"),
        ]
        assert called(python, "hasten")[1:] == [
            *("-m", "hasten", "train", str(folder / "out" / "recipe.yaml"))
        ]
        assert not list(root.rglob("PWNED"))


@settings(max_examples=25)
@given(name=names)
def test_a_batch_script_s_directives_hold_nothing_of_a_path(name: str) -> None:
    texts = files(
        "slurm", launched(workdir=f"/x{name}", python=f"/{name}"), Path("/out") / f"x{name}"
    )
    head = texts["job.sbatch"].split("\nset -u\n")[0].splitlines()
    assert len(head) == 12
    assert all(line.startswith(("#SBATCH --", "#!", MARK)) or not line for line in head)
    for text in (texts["job.sbatch"], texts["node.sh"]):
        checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
        assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("code", [0, 2, 3])
def test_a_rank_s_code_is_the_node_s(tmp_path: Path, code: int) -> None:
    python = program(tmp_path / "python", PYTHON)
    (tmp_path / "ends").write_text(str(code))
    write(
        files("torchrun", launched(python=str(python), workdir=str(tmp_path)), tmp_path), tmp_path
    )
    assert bash(tmp_path / "node.sh", "first:1").returncode == code


def asked_to_leave(script: Path, python: Path, number: int, **environment: str) -> tuple[int, str]:
    """Start it, wait until it trains, send the signal; its code and what it said."""
    (python.parent / "slow").touch()
    started = subprocess.Popen(
        ["bash", str(script), "first:1"],
        env={"PATH": os.environ["PATH"], **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    end = time.monotonic() + 60
    while not (python.parent / "training").exists() and time.monotonic() < end:
        time.sleep(0.02)
    started.send_signal(number)
    said, _ = started.communicate(timeout=60)
    return started.returncode, said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_node_that_is_asked_lets_its_ranks_save_and_ends_with_75(
    tmp_path: Path, number: int
) -> None:
    python = program(tmp_path / "python", PYTHON)
    write(
        files("torchrun", launched(python=str(python), workdir=str(tmp_path)), tmp_path), tmp_path
    )
    assert asked_to_leave(tmp_path / "node.sh", python, number)[0] == 75


def test_slurm_s_warning_reaches_the_ranks_and_queues_the_job_again(tmp_path: Path) -> None:
    python = program(tmp_path / "python", PYTHON)
    program(tmp_path / "bin" / "srun", SRUN)
    program(tmp_path / "bin" / "scontrol", SCONTROL)
    launch = launched(python=str(python), workdir=str(tmp_path), fewest=1)
    write(files("slurm", launch, tmp_path), tmp_path)
    slurm = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "17",
        "SLURMD_NODENAME": "node1",
        "NOTES": str(tmp_path / "notes"),
    }
    assert asked_to_leave(tmp_path / "job.sbatch", python, signal.SIGUSR1, **slurm)[0] == 75
    assert (tmp_path / "notes").read_text() == "requeue 17\n"
    words = called(python, "torch.distributed.run")
    assert {"--nnodes=1:2", "--rdzv-endpoint=node1:29500", "--rdzv-conf=is_host=1"} <= set(words)


def test_a_job_that_fails_by_itself_is_not_queued_again(tmp_path: Path) -> None:
    python = program(tmp_path / "python", PYTHON)
    (tmp_path / "ends").write_text("3")
    program(tmp_path / "bin" / "srun", SRUN)
    program(tmp_path / "bin" / "scontrol", SCONTROL)
    write(files("slurm", launched(python=str(python), workdir=str(tmp_path)), tmp_path), tmp_path)
    ended = bash(
        tmp_path / "job.sbatch",
        PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        SLURM_JOB_NODELIST="n",
        SLURM_JOB_NUM_NODES="2",
        SLURM_JOB_ID="17",
        SLURMD_NODENAME="n",
        NOTES=str(tmp_path / "notes"),
    )
    assert ended.returncode == 3
    assert not (tmp_path / "notes").exists()


def test_start_runs_the_node_s_script_on_every_host_and_gives_the_worst_code(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "a 'b' $(c)"
    python = program(folder / "python", PYTHON)
    (folder / "ends").write_text("3")
    program(tmp_path / "bin" / "ssh", '#!/usr/bin/env bash\nshift 4\nexec "$@"\n')
    launch = launched(python=str(python), workdir=str(folder), hosts=("one", "two"))
    write(files("torchrun", launch, folder), folder)
    ended = bash(folder / "start.sh", PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert ended.returncode == 3, ended.stderr
    assert (folder / "one.log").exists()
    assert (folder / "two.log").exists()
    assert "--rdzv-endpoint=one:29500" in called(python, "torch.distributed.run")


@pytest.mark.parametrize("code", [0, 3])
def test_a_rehearsal_runs_the_node_s_script_on_each_host_of_a_lab(
    tmp_path: Path, code: int
) -> None:
    output = tmp_path / "run"
    saves = f"mkdir -p '{output}' && echo '{{\"steps\": 3}}' >'{output}/summary.json'\nexit"
    python = program(tmp_path / "python", PYTHON.replace('exit "$(cat', f'{saves} "$(cat'))
    (tmp_path / "ends").write_text(str(code))
    launch = launched(python=str(python), workdir=str(tmp_path))
    found = rehearse(launch, tmp_path / "scripts", output)
    assert [result.code for result in found.results] == [code, code]
    assert found.summary == {"steps": 3}
    assert found.worked == (code == 0)
    assert called(python, "hasten")[1:] == [
        *("-m", "hasten", "train", str(tmp_path / "scripts" / "recipe.yaml"))
    ]


def test_every_variable_has_its_reason_above_it() -> None:
    for topology in ("single_node", "fat_tree", "rail_optimized", "ethernet", "dgx_h100"):
        cloud = CloudConfig(1 if topology == "single_node" else 128, 8, topology)
        lines = exports(cloud, "eth0")
        for number, line in enumerate(lines):
            assert line.startswith(("# ", "export "))
            if line.startswith("export "):
                assert lines[number - 1].startswith("# ")
        assert subprocess.run(["bash", "-n"], input="\n".join(lines), text=True).returncode == 0


def test_the_topology_decides_the_variables() -> None:
    found = {t: set(variables(CloudConfig(2, 8, t))) for t in ("ethernet", "fat_tree")}
    assert "NCCL_IB_DISABLE" in found["ethernet"] - found["fat_tree"]
    rails = variables(CloudConfig(2, 8, "rail_optimized"))
    assert rails["NCCL_CROSS_NIC"][0] == "0"


def test_files_of_others_are_left_alone_and_nothing_is_half_written(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("mine")
    with pytest.raises(InputError, match="wasn't written by hasten launch"):
        write(files("torchrun", launched(), tmp_path), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]
    assert (tmp_path / "recipe.yaml").read_text() == "mine"
    (tmp_path / "recipe.yaml").unlink()
    (tmp_path / "node.sh").symlink_to("/etc/hostname")
    with pytest.raises(InputError, match="wasn't written"):
        write(files("torchrun", launched(), tmp_path), tmp_path)


def test_own_files_are_written_anew(tmp_path: Path) -> None:
    write(files("torchrun", launched(), tmp_path), tmp_path)
    write(files("torchrun", launched(grace=60), tmp_path), tmp_path)
    assert "SHUTDOWN_TIMEOUT=60" in (tmp_path / "node.sh").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"recipe.yaml", "node.sh"}


def test_a_folder_that_takes_no_files_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="can't be written"):
        write(files("torchrun", launched(), tmp_path), tmp_path / "file" / "under")


@given(text=st.text(max_size=80))
def test_any_text_becomes_a_name_that_schedulers_take(text: str) -> None:
    assert Launch(RECIPE, CLOUD, name=name_of(text)).name


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "a\n#SBATCH --wrap=x"}, "lower case letters"),
        ({"fewest": 3}, "1 to 2"),
        ({"hosts": ("one",)}, "names 1 hosts"),
        ({"hosts": ("one", "-oProxyCommand=x")}, "no host's name"),
        ({"scheduler_options": {"partition": "gpu --wrap"}}, "--partition"),
        ({"image": "x y"}, "--image"),
        ({"minutes": 5}, "not longer than"),
        ({"port": 0}, "--port"),
        ({"workdir": ""}, "--workdir"),
    ],
)
def test_words_that_a_scheduler_would_misread_are_refused(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        launched(**changes)


def test_an_unknown_target_names_the_near_one() -> None:
    with pytest.raises(InputError, match="did you mean 'slurm'"):
        files("slrum", launched(), Path("/x"))
