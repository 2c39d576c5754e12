"""Reports that depart from the schema are refused; numbers as people read them."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hasten.errors import InputError
from hasten.formatting import count_text, flow, number_text, outline, size, span
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


@pytest.mark.parametrize(
    ("value", "unit", "said"),
    [
        (21_448.3, "amount", "21,448"),
        (12.345, "amount", "12.3"),
        (1.6249, "times", "1.62×"),
        (1.6e9, "memory", "1.60 GB"),
        (2.5e8, "memory", "250 MB"),
        (0.0381, "percent", "3.8 %"),
        (-0.37, "change", "−37.0 %"),
        (0.412, "seconds", "412 ms"),
        (0.00955, "seconds", "10 ms"),
        (0.00013, "seconds", "0.13 ms"),
        (0.0, "seconds", "0 ms"),
        (1.5e6, "tokens", "1.5 M"),
        (-0.0002, "loss_change", "−0.0002"),
        (-0.00001, "loss_change", "0.0000"),
        (0.0, "change", "0.0 %"),
        (None, "loss", "not measured"),
    ],
)
def test_numbers_read_as_people_write_them(value: float | None, unit: str, said: str) -> None:
    assert number_text(value, unit) == said


def test_a_span_prints_its_interval_only_if_it_has_one() -> None:
    assert span({"median": 1.5, "low": 1.4, "high": 1.6}, "times") == "1.50× [1.40, 1.60]"
    assert span({"median": 1.5, "low": None, "high": None}, "times") == "1.50×"
    assert span({"median": 1.0, "low": 1.0, "high": 1.0}, "times") == "1.00×"


@pytest.mark.parametrize("count", [3e6, 9.996e8, 1e9, 2_126_233_600, 137_438_953_472])
def test_bytes_read_as_on_the_command_line(count: float) -> None:
    assert number_text(count, "memory") == size(count)


def test_the_outline_is_yaml_that_means_the_same() -> None:
    yaml = pytest.importorskip("yaml")
    recipe = {
        "model": "deepseek-ai/DeepSeek-V2-Lite",
        "techniques": ["PackWithinStep", {"Prefetch": {"depth": 2}}, ["a", []]],
        "strange keys: yes": {"on": "off", "empty": {}, "text": "a: b # c\n- d", "no": None},
        "numbers": [
            1,
            2.5,
            1e-05,
            -3e30,
            True,
            "1",
            "1e3",
            "null",
            "true",
            "",
            " x",
            "~",
            "2026-11-20",
        ],
        "text": "梯度",
    }
    assert yaml.safe_load(outline(recipe)) == recipe


@pytest.mark.parametrize(
    "plan",
    [
        [
            "packed",
            {"checkpoints": {"interval": 10, "compression": True}},
            {"topk": {"ratio": 1e-05}},
        ],
        [{"a": {"b": [], "c": None, "d": "on", "e": "x: y", "f": {}, "g h": ["1", 2.5]}}],
    ],
)
def test_a_plan_on_one_line_is_read_back_as_it_was(plan: list[Any]) -> None:
    text = f"plan: {flow(plan)}"
    assert "\n" not in text
    assert yaml.safe_load(text) == {"plan": plan}


def test_few_weights_are_counted_and_not_rounded_to_nothing() -> None:
    assert [count_text(n) for n in (12_288, 3_400_000, 6_910_365_696)] == [
        *("12,288", "3.4 M", "6,910.4 M")
    ]
