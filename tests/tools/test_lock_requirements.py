"""The lock files have the versions of constraints.txt, each with the hashes of its wheels."""

from __future__ import annotations

import hashlib
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lock_requirements import CUDA, entries, entry_of, lock_text, pinned

ROOT = Path(__file__).parents[2]
LOCKS = ("requirements.lock", "requirements-cpu.lock", "requirements-cuda.lock")
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def test_the_lock_has_the_versions_of_the_constraints_and_no_others() -> None:
    assert pinned(text_of("requirements.lock")) == pinned(text_of("constraints.txt"))


def test_what_torch_s_build_for_cuda_needs_is_in_a_file_of_its_own() -> None:
    assert not any(CUDA.match(name) for name in pinned(text_of("requirements.lock")))
    assert all(CUDA.match(name) for name in pinned(text_of("requirements-cuda.lock")))


@pytest.mark.parametrize("name", LOCKS)
def test_every_requirement_has_hashes_and_none_twice(name: str) -> None:
    lines = text_of(name).replace("\\\n", "").splitlines()
    for line in (line for line in lines if not line.startswith("#")):
        requirement, *hashes = line.split(" --hash")
        found = [f"--hash{each}".strip() for each in hashes]
        assert found, requirement
        assert all(map(HASH.fullmatch, found)), requirement
        assert len({*found}) == len(found), requirement


def test_the_lock_has_every_package_that_the_project_names_for_its_development() -> None:
    project = tomllib.loads(text_of("pyproject.toml"))
    extras = project["project"]["optional-dependencies"]
    listed = [*project["project"]["dependencies"], *extras["dev"], *extras["docs"]]
    listed += project["build-system"]["requires"]  # built without an environment of its own
    locked = pinned(text_of("requirements.lock"))
    for requirement in map(Requirement, listed):
        version = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), requirement


OUTPUT = """\
a-b==1.0 \\
    --hash=sha256:{0} \\
    --hash=sha256:{1}
c==2 ; sys_platform == 'win32' \\
    --hash=sha256:{0}
nvidia-x==3 ; platform_machine == 'aarch64' and sys_platform == 'linux' \\
    --hash=sha256:{1}
""".format("0" * 64, "1" * 64)


def test_what_linux_needs_is_locked() -> None:
    rows = [*entries(OUTPUT)]
    assert [row[0].name for row in rows] == ["a-b", "nvidia-x"]
    assert rows[0][1] == ["0" * 64, "1" * 64]
    assert pinned(lock_text("x.lock", rows)) == {"a-b": "1.0", "nvidia-x": "3"}


def test_a_wheel_is_locked_for_its_python_and_machine(tmp_path: Path) -> None:
    wheel = tmp_path / "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"
    wheel.write_bytes(b"wheel")
    requirement, hashes = entry_of(wheel)
    assert hashes == [hashlib.sha256(b"wheel").hexdigest()]
    assert requirement.marker is not None
    for python, machine in (("3.11", "x86_64"), ("3.12", "x86_64"), ("3.11", "aarch64")):
        environment = {"python_version": python, "platform_machine": machine}
        assert requirement.marker.evaluate(environment) == ((python, machine) == ("3.11", "x86_64"))


def test_torch_s_build_for_cpus_has_the_version_of_its_build_for_cuda() -> None:
    public, _, build = pinned(text_of("requirements-cpu.lock"))["torch"].partition("+")
    assert (public, build) == (pinned(text_of("constraints.txt"))["torch"], "cpu")
