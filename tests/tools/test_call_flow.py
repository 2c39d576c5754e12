"""The counter of moves between packages: what it counts on a file tree of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from call_flow import CallFlow, part_of
from hasten.data import containers


def test_entries_of_counted_parts_are_counted_once_in_a_loop(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n')
    flow = CallFlow(Path(containers.__file__).parents[1])
    before = sys.getprofile()
    sys.setprofile(flow)
    try:
        for _ in range(3):
            containers.container_of(path)
    finally:
        sys.setprofile(before)
    assert flow.entries == {("data", "foreign_files"): 1}
    called = ("data/containers.py:container_of", "foreign_files.py:first_bytes")
    assert flow.edges == {called}
    assert "moves between them: 1" in flow.report()


@pytest.mark.parametrize(
    ("file", "part"), [("data/json_reader.py", "data"), ("foreign_files.py", "foreign_files")]
)
def test_a_file_belongs_to_its_package_or_is_one(file: str, part: str) -> None:
    assert part_of(file) == part
