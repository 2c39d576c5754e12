"""The range of tested releases: what is inside it, and what is said outside."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import transformers
from packaging.requirements import Requirement
from packaging.version import Version

from hasten.errors import InputError
from hasten.machine import versions
from hasten.models.source_check import check_native

ROOT = Path(__file__).resolve().parents[2]
RANGES = versions.tested()["ranges"]


def test_the_pins_allow_both_ends_and_the_constraints_lie_inside() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    every = project["dependencies"] + project["optional-dependencies"]["hosts"]
    pins = {r.name: r.specifier for r in map(Requirement, every)}
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    for name, (oldest, newest) in RANGES.items():
        assert {oldest, newest} <= set(pins[name].filter([oldest, newest])), name
        least = next(s.version for s in pins[name] if s.operator == ">=")
        assert Version(oldest).release[:2] == Version(least).release[:2], name
        if name in pinned:
            assert Version(oldest) <= Version(pinned[name]) <= Version(newest), name


def test_releases_inside_the_range_need_no_word() -> None:
    assert versions.untested({name: ends[0] for name, ends in RANGES.items()}) is None
    assert versions.untested({name: ends[1] for name, ends in RANGES.items()}) is None
    assert versions.untested({"torch": f"{RANGES['torch'][1]}+cpu", "numpy": "9.9"}) is None
    newest = Version(RANGES["transformers"][1])
    assert versions.untested({"transformers": f"{newest.major}.{newest.minor}.99"}) is None


def test_a_release_outside_is_named_with_the_range() -> None:
    newest = Version(RANGES["transformers"][1])
    later = f"{newest.major}.{newest.minor + 1}.0"
    said = versions.untested({"transformers": later, "torch": RANGES["torch"][0], "peft": "0.1"})
    assert said is not None
    assert said.startswith(f"hasten wasn't tested with transformers {later} (tested: ")
    assert "peft 0.1 (tested:" in said
    assert "torch" not in said


def test_this_environment_is_asked_without_arguments() -> None:
    found = versions.untested()
    assert found is None or "hasten wasn't tested with" in found


@pytest.mark.parametrize(
    ("model_type", "advice"),
    [
        ("deepseek_v33", "no release up to .* has it either, so choose another model, or correct"),
        ("qqqq", "no release up to .* has it either, so choose another model$"),
    ],
)
def test_a_model_type_that_no_release_knows_is_called_so(model_type: str, advice: str) -> None:
    with pytest.raises(InputError, match=advice):
        check_native("a/b", {"model_type": model_type}, needs_weights=False)


def test_a_model_type_of_a_later_release_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    name, since = next(iter(versions.tested()["model_types"].items()))
    monkeypatch.setattr(transformers, "CONFIG_MAPPING", {"llama": None})
    with pytest.raises(InputError, match=f"install {since} or newer"):
        check_native("a/b", {"model_type": name}, needs_weights=False)


def test_the_table_and_the_range_are_of_one_run() -> None:
    """``make test-versions`` writes both."""
    page = (ROOT / "docs" / "reference" / "models.md").read_text()
    table = page.partition("<!-- table of make test-versions -->")[2].partition("<!-- end")[0]
    rows = {line.split("|")[1].strip(): line for line in table.splitlines() if line.startswith("|")}
    if not rows:
        pytest.skip("no complete run of make test-versions since the ranges changed last")
    for place, end in enumerate(("oldest", "newest")):
        for name, ends in RANGES.items():
            assert ends[place] in rows[end], (end, name)
