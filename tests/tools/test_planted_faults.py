"""The planted faults fit the package as it is, and a comparison of results tells what was lost."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from script_modules import load

ROOT = Path(__file__).parents[2]


script = load("planted_faults")


def results(path: Path, **outcomes: str) -> Path:
    """A results file with these outcomes by fault."""
    lines = [
        {"fault": name, "kind": "", "package": "core", "outcome": word, "seconds": 1, "commit": "c"}
        for name, word in outcomes.items()
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_every_fault_has_one_place_and_tests_that_exist() -> None:
    assert script.refusals(script.FAULTS, ROOT) == []


def test_a_text_that_stands_elsewhere_is_refused_with_the_number_of_places(tmp_path: Path) -> None:
    (tmp_path / "src/hasten/core").mkdir(parents=True)
    (tmp_path / "src/hasten/core/step.py").write_text("a = 1\nb = 1\n")
    fault = script.Fault("twice", "", "core/step.py", "= 1", "= 2", ("tests/no_such.py",))
    assert script.refusals([fault], tmp_path) == [
        "twice: its text stands in 2 places of core/step.py.",
        "twice: tests/no_such.py isn't in the checkout.",
    ]


def test_every_planted_file_compiles_and_is_another() -> None:
    for fault in script.FAULTS:
        before = (ROOT / "src" / "hasten" / fault.file).read_text(encoding="utf-8")
        assert fault.planted(before) != before, fault.name
        compile(fault.planted(before), fault.file, "exec")


def test_names_are_unique_and_every_package_has_its_share() -> None:
    names = Counter(fault.name for fault in script.FAULTS)
    assert [name for name, count in names.items() if count > 1] == []
    packages = Counter(fault.package for fault in script.FAULTS)
    least = {"core": 12, "parts": 22, "measure": 9, "data": 8, "recipe": 6}
    assert {package: count for package, count in least.items() if packages[package] < count} == {}


@pytest.mark.parametrize(
    ("now", "code"),
    [
        ({"a": "caught", "b": "survived"}, 0),
        ({"a": "caught", "b": "caught"}, 0),
        ({"a": "survived", "b": "caught"}, 1),
        ({"a": "error", "b": "survived"}, 1),
        ({"b": "caught"}, 1),
    ],
    ids=str,
)
def test_a_fault_that_is_no_longer_caught_is_lost(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    now: dict[str, str],
    code: int,
) -> None:
    old = results(tmp_path / "old.jsonl", a="caught", b="survived")
    new = results(tmp_path / "new.jsonl", **now)
    monkeypatch.setattr(sys, "argv", ["planted_faults.py", "--compare", str(old), str(new)])
    assert script.main() == code
    assert ("LOST" in capsys.readouterr().out) == bool(code)


def test_a_file_to_compare_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    new = results(tmp_path / "new.jsonl", a="caught")
    absent = str(tmp_path / "absent.jsonl")
    monkeypatch.setattr(sys, "argv", ["planted_faults.py", "--compare", absent, str(new)])
    assert script.main() == 2
    assert "no such file" in capsys.readouterr().err


def test_a_line_that_a_killed_process_began_is_cut_off(tmp_path: Path) -> None:
    path = results(tmp_path / "some.jsonl", a="caught")
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"fault": "b"')
    assert list(script.read_results(path).faults) == ["a"]
    script.ResultsFile(path)
    assert path.read_bytes() == whole
