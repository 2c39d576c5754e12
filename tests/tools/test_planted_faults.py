"""The planted faults fit the package as it is, and its tests are seen to catch one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from script_modules import load

ROOT = Path(__file__).parents[2]


script = load("planted_faults")
FAULTS = script.read_faults()


def test_every_fault_has_one_place_and_tests_that_exist() -> None:
    assert script.refusals(FAULTS, ROOT) == []


def test_a_text_that_stands_elsewhere_is_refused_with_the_number_of_places(tmp_path: Path) -> None:
    (tmp_path / "src/hasten/core").mkdir(parents=True)
    (tmp_path / "src/hasten/core/step.py").write_text("a = 1\nb = 1\n")
    fault = script.Fault("twice", "", "core/step.py", "= 1", "= 2", ("tests/no_such.py",))
    assert script.refusals([fault], tmp_path) == [
        "twice: its text stands in 2 places of core/step.py.",
        "twice: tests/no_such.py isn't in the checkout.",
    ]


def test_every_planted_file_compiles_and_is_another() -> None:
    for fault in FAULTS:
        before = (ROOT / "src" / "hasten" / fault.file).read_text(encoding="utf-8")
        after = before.replace(fault.old, fault.new)
        assert after != before, fault.name
        compile(after, fault.file, "exec")


def test_names_are_unique_and_every_package_has_its_share() -> None:
    names = Counter(fault.name for fault in FAULTS)
    assert [name for name, count in names.items() if count > 1] == []
    packages = Counter(fault.file.partition("/")[0] for fault in FAULTS)
    least = {"core": 12, "parts": 22, "measure": 9, "data": 8, "recipe": 6}
    assert {package: count for package, count in least.items() if packages[package] < count} == {}


CASES = {
    "assert one() == 1": ("caught", "tests/test_one.py::test_one"),
    "one()": ("survived", "all pass"),
    "assert one() == 3": ("error", "fails without it: tests/test_one.py::test_one"),
    "assert one() == 1 or __import__('time').sleep(600)": ("caught", "hangs"),
}


@pytest.mark.cold
@pytest.mark.parametrize("line", CASES)
def test_a_fault_is_caught_by_a_test_that_passes_without_it(line: str, tmp_path: Path) -> None:
    package = tmp_path / script.PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def one(): return 1\n")
    (tmp_path / "tests").mkdir()
    test = f"from hasten import one\ndef test_one(): {line}\n"
    (tmp_path / "tests/test_one.py").write_text(test)
    fault = script.Fault("two", "", "__init__.py", "return 1", "return 2", ("tests",))
    seconds = 2.0 if "sleep" in line else 60.0
    assert script.attempt(fault, tmp_path, seconds) == CASES[line]
