"""Every benchmark runs with ``--smoke`` and prints a table of finite numbers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from labs import missing

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FILES = {p.relative_to(BENCHMARKS).as_posix() for p in BENCHMARKS.rglob("bench_*.py")}
# What starts ranks, hosts of a lab, workers or peers.
LONG = {
    "bench_article.py",
    "bench_auto.py",
    "bench_batching.py",
    "bench_expert_parallel.py",
    "bench_full_duplex.py",
    "bench_host.py",
    "bench_input.py",
    "bench_layouts.py",
    "bench_netlab.py",
    "bench_pipeline.py",
    "bench_resume.py",
    "bench_scale.py",
    "bench_step.py",
    "bench_supervisor.py",
    "bench_tokenize.py",
    "bench_topology.py",
    "bench_communication.py",
    "bench_workers.py",
}
MORE = (
    "bench_article.py --beside-auto",
    "bench_auto.py --planted 1",
    "bench_hosts.py --hosts sft,sft_packed",
    "bench_packing.py --trl",
    "bench_pipeline.py link",
    "bench_plan.py own",
    "bench_step.py --loss --profile --variants hasten hf_best",
    "bench_verdicts.py --real 1",
    "bench_verdicts.py --replays 1",
    "bench_verdicts.py --record speeds.json",
    "bench_verdicts.py --spread 2",
    "bench_communication.py loss",
    "bench_communication.py table",
)
COLD = "bench_gpu_simulation.py"  # its simulated GPU has to be there before torch is imported
IN_A_LAB = ("full_duplex", "netlab", "link", "topology", "communication")
PEERS = os.environ.get("HASTEN_PEERS")  # a Python with trl, datasets, lightning and hasten
PEERS_OPTION = {
    "bench_step.py": "--peers",
    "bench_tokenize.py": "--trl",
    "bench_hosts.py --hosts sft,sft_packed": "",  # runs in that Python as a whole
    "bench_packing.py --trl": "",
}
NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*\.?\d*")
WRONG = re.compile(r"\b(nan|inf)\b|failed: (?!None)", re.IGNORECASE)


def check(name: str, *more: str, python: str = sys.executable) -> None:
    done = subprocess.run(
        [python, str(BENCHMARKS / name), *more, "--smoke"],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert not WRONG.search(done.stdout), done.stdout
    assert any(len(NUMBER.findall(line)) > 1 for line in done.stdout.splitlines()), done.stdout


@pytest.mark.parametrize("name", sorted(FILES - LONG - {COLD}))
def test_one_of_one_process_prints_its_table(name: str) -> None:
    check(name)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [*sorted(LONG), *MORE, pytest.param(COLD, marks=pytest.mark.cold)]
)
def test_a_longer_one_prints_its_table(words: str) -> None:
    name, *more = words.split()
    if any(part in words for part in IN_A_LAB) and (reason := missing(switch=True)):
        pytest.skip(reason)
    option = PEERS_OPTION.get(words)
    if PEERS is None:
        if option == "":
            pytest.skip("HASTEN_PEERS names no Python with trl, datasets and lightning")
        check(name, *more)
    elif option == "":
        check(name, *more, python=PEERS)
    else:
        check(name, *more, *([option, PEERS] if option else []))
