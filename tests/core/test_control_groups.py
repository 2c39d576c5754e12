"""The strictest control group above a process is what it may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from hasten.machine import host
from hasten.machine.host import limits, memory_limit

GROUP = "sys/fs/cgroup"
JOB = "system.slice/slurmstepd.scope/job_9"
NO_LIMIT = str(2**63 - 4096)
MACHINES: dict[str, tuple[dict[str, str], int | None]] = {
    "a container": ({"proc/self/cgroup": "0::/", f"{GROUP}/memory.max": "700"}, 700),
    "a job of Slurm": (
        {
            "proc/self/cgroup": f"0::/{JOB}/step_0/user/task_0",
            f"{GROUP}/{JOB}/memory.max": "300",
            f"{GROUP}/{JOB}/step_0/memory.max": "500",
            f"{GROUP}/{JOB}/step_0/user/task_0/memory.max": "max",
        },
        300,
    ),
    "a job of Slurm, version 1": (
        {
            "proc/self/cgroup": "5:cpuset:/other\n4:memory:/slurm/uid_7/job_9/step_0",
            f"{GROUP}/memory/memory.limit_in_bytes": NO_LIMIT,
            f"{GROUP}/memory/slurm/uid_7/job_9/memory.limit_in_bytes": "400",
            f"{GROUP}/memory/other/memory.limit_in_bytes": "1",
        },
        400,
    ),
    "no limit": (
        {
            "proc/self/cgroup": "4:memory:/\n0::/user.slice",
            f"{GROUP}/user.slice/memory.max": "max",
            f"{GROUP}/memory/memory.limit_in_bytes": NO_LIMIT,
        },
        None,
    ),
    "another view of the tree": (
        {"proc/self/cgroup": "0::/../../secret", "sys/fs/secret/memory.max": "1"},
        None,
    ),
    "nothing to read": ({}, None),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_the_strictest_group_counts_as_the_survey_says_too(machine: str, tmp_path: Path) -> None:
    files, expected = MACHINES[machine]
    for name, text in files.items():
        place = tmp_path / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    assert memory_limit(tmp_path) == limits(tmp_path).memory_bytes == expected


def test_this_machine_is_within_its_memory() -> None:
    found = host.hardware()
    assert 0 < found.memory_limit_bytes <= found.memory_bytes
