"""Ranks find their place under any launcher, meet, and refuse to train when they differ."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from gpu_rank_jobs import joined, of_nccl_alone, summed
from hasten.errors import InputError
from hasten.launch.ranks import LinkError, backend_for, join_process_group
from hasten.launch.supervisor import FINAL
from hasten.machine.environment import (
    LAUNCHERS,
    RankPlace,
    World,
    first_node,
    meeting_method,
    meeting_place,
    place_of,
)
from hasten.machine.processes import ATTEMPT
from launch.starting_rank_jobs import NAMES, variables
from ranks import on_ranks

JOB = Path(__file__).with_name("starting_rank_jobs.py")
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "40017"}


def free_port() -> int:
    """One that is free now: another program may take it before it's used."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port where nobody listens, and nobody can."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


def on_a_free_port(
    run: Callable[[], tuple[list[int], str]], tries: int = 5
) -> tuple[list[int], str]:
    """Exit codes and what was said; again where somebody else had taken the port."""
    for _ in range(tries):
        codes, said = run()
        if not any(codes) or not re.search("as another program does|already in use", said):
            break
    return codes, said


@pytest.fixture(scope="module")
def met(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Two processes that meet under one launcher's variables after the other."""
    folder = tmp_path_factory.mktemp("met")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD", "MASTER"))}
    files = [folder / f"{rank}.json" for rank in range(2)]

    def meet() -> tuple[list[int], str]:
        ports = json.dumps({launcher: free_port() for launcher in NAMES})
        processes = [
            subprocess.Popen(
                [sys.executable, str(JOB), str(rank), ports, str(file)],
                env=clean,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, file in enumerate(files)
        ]
        said = ""
        try:
            for process in processes:
                said += process.communicate(timeout=240)[1]
                for other in processes if process.returncode else []:
                    other.kill()  # nobody comes any more
        finally:
            for process in processes:
                process.kill()
        return [p.returncode for p in processes], said

    codes, said = on_a_free_port(meet)
    assert codes == [0, 0], said
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("launcher", NAMES)
def test_ranks_meet_under_the_variables_of(met: list[dict[str, Any]], launcher: str) -> None:
    assert [found[launcher] for found in met] == [[3.0, 2]] * 2


def test_a_rank_with_another_recipe_or_version_is_told_on_all_ranks(
    met: list[dict[str, Any]],
) -> None:
    assert met[0]["said"] == met[1]["said"]
    recipe, version = met[0]["said"]
    host = socket.gethostname()
    assert recipe.startswith(f"rank 1 ({host}) has another recipe than rank 0 ({host}): ")
    assert "learning_rate is 0.1 there and 0.0 on rank 0" in recipe
    assert 'torch is "2.12" there and "2.13" on rank 0' in version


def test_torchrun_starts_ranks_that_meet(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch, pathlib\n"
        "from hasten.launch.ranks import process_group\n"
        "from hasten.core.context import world\n"
        "with process_group(world(), 'cpu'):\n"
        "    found = torch.tensor([world().rank + 1.0])\n"
        "    torch.distributed.all_reduce(found)\n"
        f"pathlib.Path({str(tmp_path)!r}, str(world().rank)).write_text(str(found.item()))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]

    def launched() -> tuple[list[int], str]:
        words = [*command, f"--master-port={free_port()}", str(script)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=240)
        return [done.returncode], done.stderr

    codes, said = on_a_free_port(launched)
    assert codes == [0], said
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["3.0", "3.0"]


def test_a_port_in_use_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for name, value in variables("PMI", 0, port).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(InputError, match=f"can't listen at 127.0.0.1:{port}, as another"):
            join_process_group(World(0, 0, 2), "gloo", timedelta(seconds=2))


def test_a_first_rank_that_is_not_there_is_one_sentence(
    silent_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables("PMI", 1, silent_port).items():
        monkeypatch.setenv(name, value)
    place = f"127.0.0.1:{silent_port}"
    with pytest.raises(InputError, match=f"rank 1 of 2 didn't meet the others at {place}"):
        join_process_group(World(1, 1, 2), "gloo", timedelta(seconds=1))


def test_ranks_that_have_met_before_may_be_started_again(
    silent_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables("PMI", 1, silent_port).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(ATTEMPT, "2")
    with pytest.raises(LinkError, match="rank 1 of 2 didn't meet the others") as told:
        join_process_group(World(1, 1, 2), "gloo", timedelta(seconds=1))
    assert told.value.code not in FINAL


def test_a_process_of_its_own_is_no_rank() -> None:
    assert place_of({}) is None
    assert place_of({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"}) is None


def test_a_batch_script_is_no_rank_though_slurm_says_so() -> None:
    assert place_of(SLURM) is None
    assert place_of({**SLURM, "SLURM_STEP_ID": "0"}) == RankPlace("Slurm", 3, 8, 1, None)
    with_step = {**SLURM, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
    assert place_of(with_step) == RankPlace("Slurm", 3, 4, 1, None)


def test_torchrun_inside_a_slurm_step_comes_first() -> None:
    both = {**SLURM, "SLURM_STEP_ID": "0", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    assert place_of(both) == RankPlace("torchrun", 1, 2, 1, None)


@given(st.sampled_from(sorted(LAUNCHERS)), st.integers(1, 4096), st.data())
def test_every_launcher_gives_the_place_it_was_told(
    launcher: str, size: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, size - 1))
    names = LAUNCHERS[launcher]
    found = place_of(dict(zip(names, map(str, (rank, size, rank, size)), strict=True)))
    assert found == RankPlace(launcher, rank, size, rank, size)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK is 'one'; it must be a number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 and WORLD_SIZE is 2: no such rank"),
        ({"PMI_RANK": "0", "PMI_SIZE": "x"}, "PMI_SIZE is 'x'"),
    ],
)
def test_variables_that_make_no_sense_are_named(wrong: dict[str, str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        place_of(wrong)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu07", "gpu07"),
        ("gpu[07-12,15],login1", "gpu07"),
        ("gpu[3,5-9]", "gpu3"),
        ("a1,b[2-3]", "a1"),
        ("rack[1-2]-node", "rack1-node"),
    ],
)
def test_the_first_of_a_node_list_is_where_ranks_meet(nodes: str, first: str) -> None:
    assert first_node(nodes) == first
    step = {**SLURM, "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": nodes}
    assert meeting_place(step) == (first, 20_000 + 40017 % 10_000)


def test_what_the_user_sets_is_where_ranks_meet() -> None:
    step = {**SLURM, "SLURM_STEP_ID": "0", "MASTER_ADDR": "head", "MASTER_PORT": "1234"}
    assert meeting_method(step) == ("env://", "head:1234")
    assert meeting_method({"HASTEN_RENDEZVOUS": "/run/here"})[0] == "file:///run/here"


def test_ranks_of_several_machines_need_the_first_one_s_address() -> None:
    names = LAUNCHERS["Open MPI"]
    several = dict(zip(names, ("5", "8", "1", "4"), strict=True))
    with pytest.raises(InputError, match=r"4 of them here, .*set MASTER_ADDR"):
        meeting_place(several)


def test_a_backend_that_can_not_reach_the_device_is_refused() -> None:
    assert backend_for("cpu") == "gloo"
    assert backend_for("cuda:0") == "cpu:gloo,cuda:nccl"
    assert backend_for("cuda:0", "gloo") == "gloo"
    with pytest.raises(InputError, match="nccl moves a GPU's memory and this run is on cpu"):
        backend_for("cpu", "nccl")
    with pytest.raises(InputError, match="it is one of auto, gloo, nccl"):
        backend_for("cpu", "mpi")


def test_more_ranks_than_gpus_are_refused_unless_each_is_shown_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert backend_for("cuda:1", ranks=2) == "cpu:gloo,cuda:nccl"
    assert backend_for("cuda:1", "gloo", ranks=3) == "gloo"  # gloo lets ranks share one
    with pytest.raises(InputError, match=r"3 ranks here and 2 GPU\(s\): .*start no more ranks"):
        backend_for("cuda:1", ranks=3)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(InputError, match="2 ranks here and 1 GPU"):
        backend_for("cuda:0", ranks=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert backend_for("cuda:0", ranks=2) == "cpu:gloo,cuda:nccl"


def test_two_ranks_on_one_gpu_are_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise dist.DistBackendError("NCCL error\nDuplicate GPU detected : rank 1 and rank 0")

    monkeypatch.setattr(dist, "init_process_group", refuse)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    with pytest.raises(InputError, match=r"rank 1 has the GPU of another rank: .*start no more"):
        join_process_group(World(1, 1, 2), "cpu:gloo,cuda:nccl", timedelta(seconds=1), "cuda:0")


def test_a_rank_takes_its_own_gpu_before_it_meets_the_others(tmp_path: Path) -> None:
    ranks = on_ranks(joined, tmp_path)
    for rank, calls in enumerate(ranks):
        assert calls == [
            ["set_device", f"cuda:{rank}"],
            ["init_process_group", "cpu:gloo,cuda:nccl", f"cuda:{rank}"],
            ["objects", [f"cuda:{r}" for r in range(2)]],
        ]


def test_numbers_of_gpu_ranks_are_summed_on_the_host(tmp_path: Path) -> None:
    for rank, found in enumerate(on_ranks(summed, tmp_path)):
        assert found == [[3.0, 4.0], [3.0, 4.0], [1.0 + rank, 2.0]]


def test_without_gloo_they_go_over_the_ranks_own_gpu(tmp_path: Path) -> None:
    for rank, found in enumerate(on_ranks(of_nccl_alone, tmp_path)):
        assert found == [f"cuda:{rank}"] * 2
