"""Reports that depart from the schema are refused with their place, before a file is touched."""

import re
from pathlib import Path
from typing import Any

import pytest

from hasten.errors import InputError
from hasten.report.page import write_report
from hasten.report.schema import read_report

Report = dict[str, Any]


def path_of(report: Report, place: str) -> tuple[Any, str]:
    """The container and the key of a place such as variants.1.ratio.low."""
    *way, last = place.split(".")
    for step in way:
        report = report[int(step) if step.isdigit() else step]  # type: ignore[index]
    return report, last


@pytest.mark.parametrize(
    "place",
    [
        *(
            "schema",
            "title",
            "command",
            "variants",
            "hardware",
            "recipe",
            "seed",
            "variants.1.name",
        ),
        *(
            "variants.2.ratio.low",
            "variants.0.tokens_per_second",
            "claims.0.source",
            "quality.margin",
        ),
    ],
)
def test_a_missing_key_is_named_with_its_place(report: Report, place: str, tmp_path: Path) -> None:
    container, key = path_of(report, place)
    del container[key]
    parent = re.sub(r"\.(\d+)", r"[\1]", f"report.{place}".rpartition(".")[0])
    with pytest.raises(InputError, match=re.escape(f"{parent} lacks the key '{key}'")):
        write_report(report, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("place", "value", "complaint"),
    [
        ("title", 3, "report.title must be text, not 3"),
        (
            "variants.1.ratio.low",
            "1.2",
            "report.variants[1].ratio.low must be a number or null, not '1.2'",
        ),
        ("variants.1.padding_share", True, "must be a number or null, not True"),
        ("variants.1.loss_curve", [[1.0]], "report.variants[1].loss_curve[0] must be a pair"),
        ("variants.1.effective", {}, "report.variants[1].effective must be a list"),
        ("variants.1", None, "report.variants[1] must be an object"),
        ("recipe", ["a"], "report.recipe must be an object"),
        ("recipe", {"path": Path("x")}, "report.recipe.path is a PosixPath"),
        ("variants", [], "at least one variant"),
        ("variants.1.name", "baseline", "no name twice"),
        ("schema", 3, "schema 3"),
        ("created", "yesterday", "ISO 8601"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place(
    report: Report, place: str, value: Any, complaint: str
) -> None:
    container, key = path_of(report, place)
    container[int(key) if key.isdigit() else key] = value
    with pytest.raises(InputError, match=re.escape(complaint)):
        read_report(report)
