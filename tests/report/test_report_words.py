"""Numbers as people read them, and the outline read back by an independent YAML parser."""

import pytest

from hasten.formatting import number_text, outline, size, span


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
