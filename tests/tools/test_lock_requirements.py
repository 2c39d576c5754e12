"""requirements.lock has the versions of constraints.txt, each with the hashes of its wheels."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.utils import parse_wheel_filename

from lock_requirements import is_wanted, pinned

ROOT = Path(__file__).parents[2]
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def test_the_lock_has_the_versions_of_the_constraints_and_hashes_for_each() -> None:
    text = (ROOT / "requirements.lock").read_text()
    entries = [
        entry.split()
        for entry in text.replace("\\\n", "").splitlines()
        if not entry.startswith("#")
    ]
    locked = dict(entry[0].split("==") for entry in entries)
    assert locked == pinned((ROOT / "constraints.txt").read_text())
    for name, *hashes in entries:
        assert hashes, name
        assert all(HASH.fullmatch(each) for each in hashes), name
        assert len({*hashes}) == len(hashes), name


@pytest.mark.parametrize(
    ("file", "wanted"),
    [
        ("click-8.5.1-py3-none-any.whl", True),
        ("shellingham-1.5.4-py2.py3-none-any.whl", True),
        ("numpy-2.4.6-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl", True),
        ("numpy-2.4.6-cp313-cp313-manylinux_2_28_aarch64.whl", True),
        ("safetensors-0.8.0-cp310-abi3-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", True),
        ("data_server-0.7.2-py3-none-manylinux_2_31_x86_64.whl", True),
        ("numpy-2.4.6-cp310-cp310-manylinux_2_28_x86_64.whl", False),
        ("numpy-2.4.6-cp314-cp314-manylinux_2_28_x86_64.whl", False),
        ("numpy-2.4.6-cp313-cp313t-manylinux_2_28_x86_64.whl", False),
        ("x-1-cp314-abi3-manylinux_2_28_x86_64.whl", False),
        ("numpy-2.4.6-cp312-cp312-musllinux_1_2_x86_64.whl", False),
        ("numpy-2.4.6-cp312-cp312-win_amd64.whl", False),
        ("numpy-2.4.6-cp312-cp312-macosx_14_0_arm64.whl", False),
        ("numpy-2.4.6.tar.gz", False),
    ],
)
def test_wheels_of_linux_and_supported_pythons_are_listed(file: str, wanted: bool) -> None:
    assert is_wanted(file) is wanted
    if file.endswith(".whl"):
        parse_wheel_filename(file)  # the names are real ones
