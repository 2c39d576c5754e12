"""The drawings: read back with an XML parser, their geometry compared with the numbers given."""

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hasten.report.svg import (
    Bar,
    Curve,
    Stack,
    Strip,
    bar_chart,
    line_chart,
    nice_ticks,
    stack_chart,
    strip_chart,
    thin,
    visible,
)

NUMBERS = st.none() | st.floats(-1e12, 1e12) | st.just(math.nan) | st.just(math.inf)
WIDTHS = [800, 340]


def parsed(svg: str) -> ET.Element:
    return ET.fromstring(re.sub(r' xmlns="[^"]*"', "", svg))


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in parsed(svg).iter("text")]


def times(value: float) -> str:
    return f"{value:.1f}×"


@pytest.mark.parametrize("width", WIDTHS)
def test_a_bar_is_as_long_as_its_distance_from_the_origin(width: int) -> None:
    bars = [Bar("a", "", 1.5), Bar("b", "", 2.0), Bar("c", "", 0.75)]
    boxes = list(parsed(bar_chart("t", bars, width, 1, times)).iter("rect"))
    half, full, less = (float(box.attrib["width"]) for box in boxes)
    assert full == pytest.approx(2 * half, abs=0.2)
    assert less == pytest.approx(half / 2, abs=0.2)
    left, _, before = (float(box.attrib["x"]) for box in boxes)
    assert before + less == pytest.approx(left, abs=0.2)  # below 1 it grows to the left


@pytest.mark.parametrize("width", WIDTHS)
def test_error_bars_reach_from_low_to_high(width: int) -> None:
    svg = parsed(bar_chart("t", [Bar("a", "", 2.0, 1.0, 3.0)], width, 0, times))
    box, whisker = svg.find("rect"), svg.find("line[@class='whisker']")
    assert box is not None
    assert whisker is not None
    low, high = float(whisker.attrib["x1"]), float(whisker.attrib["x2"])
    assert (low + high) / 2 == pytest.approx(
        float(box.attrib["x"]) + float(box.attrib["width"]), abs=0.2
    )
    assert high - low == pytest.approx(float(box.attrib["width"]), abs=0.2)


def test_what_was_not_measured_has_its_row_but_no_bar() -> None:
    svg = bar_chart("t", [Bar("a", "not measured", None), Bar("b", "2", 2.0)], 800, 0, times)
    assert len(list(parsed(svg).iter("rect"))) == 1
    assert {"a", "not measured"} <= set(texts(svg))


def test_a_bar_of_a_waterfall_begins_where_it_is_told() -> None:
    bars = [Bar("a", "", 1.5), Bar("b", "", 2.0, start=1.5), Bar("c", "", 1.75, start=2.0)]
    boxes = list(parsed(bar_chart("t", bars, 800, 1, times)).iter("rect"))
    ends = [(float(b.attrib["x"]), float(b.attrib["x"]) + float(b.attrib["width"])) for b in boxes]
    assert ends[1][0] == pytest.approx(ends[0][1], abs=0.2)
    assert ends[2][1] == pytest.approx(ends[1][1], abs=0.2)
    assert ends[2][0] > ends[1][0]


def test_the_noise_floor_is_a_band_around_the_origin() -> None:
    svg = parsed(bar_chart("t", [Bar("a", "", 1.5)], 800, 1, times, floor=0.25))
    band, bar = (svg.find(f"rect[@class='{css}']") for css in ("band", "bar plain"))
    assert band is not None
    assert bar is not None
    left, width = float(band.attrib["x"]), float(band.attrib["width"])
    assert left + width / 2 == pytest.approx(float(bar.attrib["x"]), abs=0.2)
    assert width == pytest.approx(float(bar.attrib["width"]), abs=0.2)  # 0.5 wide, as the bar


@pytest.mark.parametrize("width", WIDTHS)
def test_the_parts_of_a_stack_lie_end_to_end_and_keep_their_colours(width: int) -> None:
    parts: dict[str, float | None] = {"a": 1.0, "b": None, "c": 3.0, "d": 0.0}
    stacks = [Stack("before", "4", parts), Stack("after", "2", {"a": 1.0, "b": 1.0})]
    svg = stack_chart("t", stacks, width, times)
    boxes = list(parsed(svg).iter("rect"))
    assert [box.attrib["class"] for box in boxes] == [
        *("part s1", "part s3"),
        *("part s1", "part s2"),
    ]
    spans = [(float(b.attrib["x"]), float(b.attrib["width"])) for b in boxes]
    assert spans[1][0] == pytest.approx(sum(spans[0]), abs=0.2)
    assert spans[1][1] == pytest.approx(3 * spans[0][1], abs=0.3)
    assert spans[0][0] == pytest.approx(spans[2][0], abs=0.2)
    account = parsed(svg).findtext("desc") or ""
    assert "before, b: not measured" in account
    assert boxes[1].findtext("title") == "c: 3.0×"


def test_levels_are_drawn_from_zero_up() -> None:
    svg = strip_chart("t", [Strip("a", "", [0.0, 0.1, 0.2])], 800, levels=True)
    heights = [float(dot.attrib["cy"]) for dot in parsed(svg).iter("circle")]
    floor = parsed(svg).find("line[@class='grid']")
    assert floor is not None
    assert heights[0] == pytest.approx(float(floor.attrib["y1"]))
    assert heights[0] - heights[2] == pytest.approx(2 * (heights[0] - heights[1]), abs=0.2)


def test_a_long_strip_is_a_light_line() -> None:
    svg = strip_chart("t", [Strip("a", "", [float(i) for i in range(1, 10_000)])], 800)
    assert len(svg) < 5_000
    assert not list(parsed(svg).iter("circle"))


def test_a_strip_shows_each_round_around_its_own_median() -> None:
    svg = strip_chart("t", [Strip("a", "", [90, 100, 110]), Strip("b", "", [1.0, 1.0, 1.0])], 800)
    heights = [float(dot.attrib["cy"]) for dot in parsed(svg).iter("circle")]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)
    assert heights[0] > heights[2]  # slower lies lower; an SVG counts downwards
    assert len(set(heights[3:])) == 1


def test_curves_share_their_axes_and_skip_what_was_not_measured() -> None:
    curves = [Curve("a", [[0, 3.0], [10, None], [20, 1.0]]), Curve("b", [[0, 1.0], [20, 3.0]])]
    lines = parsed(line_chart("t", curves, (390, 250), times)).iter("polyline")
    b, a = (line.attrib["points"].split() for line in lines)
    assert len(a) == len(b) == 2
    assert a[0].split(",")[1] == b[1].split(",")[1]
    assert a[1].split(",")[0] == b[1].split(",")[0]


@given(rows=st.lists(st.tuples(st.text(max_size=60), NUMBERS, NUMBERS, NUMBERS), max_size=5))
@example(rows=[("", 0.0, -1.0, -2.2250738585e-313)])  # quotients by the median overflow
def test_no_number_and_no_name_breaks_a_drawing(
    rows: list[tuple[str, float, float, float]],
) -> None:
    bars = [Bar(name, name, value, low, high) for name, value, low, high in rows]
    strips = [Strip(name, name, numbers) for name, *numbers in rows]
    curves = [Curve(name, [numbers[:2], numbers[1:]]) for name, *numbers in rows]
    drawings = [line_chart("t", curves, (390, 250), times)]
    stacks = [Stack(name, name, dict(zip("abc", numbers, strict=True))) for name, *numbers in rows]
    for width in WIDTHS:
        drawings.append(stack_chart("t", stacks, width, times))
        drawings += [bar_chart("t", bars, width, 1, times), strip_chart("t", strips, width)]
    for svg in drawings:
        marks = [mark for mark in ET.fromstring(_xml(svg)).iter() if not mark.tag.endswith("svg")]
        values = " ".join(value for mark in marks for value in mark.attrib.values())
        assert not re.search(r"\b(nan|inf)\b", values)


def _xml(svg: str) -> str:
    """HTML allows two code points in text that XML does not."""
    return re.sub("[\ufffe\uffff]", "", svg)


def test_a_name_cannot_become_markup() -> None:
    name = '</text><script>alert("x")</script>'
    svg = bar_chart(name, [Bar(name, name, 1.0)], 800, 0, times)
    assert not list(parsed(svg).iter("script"))
    assert name in texts(svg)


def test_a_drawing_has_a_name_and_tells_its_numbers_in_words() -> None:
    svg = parsed(bar_chart("Speed", [Bar("packing", "1.5×", 1.5)], 800, 1, times))
    assert svg.attrib["role"] == "img"
    assert svg.findtext("title") == "Speed"
    assert svg.findtext("desc") == "packing: 1.5×."


def test_a_long_name_is_cut_and_a_chinese_one_counts_double() -> None:
    svg = bar_chart("t", [Bar("a" * 90, "", 1.0), Bar("梯" * 90, "", 1.0)], 800, 0, times)
    latin, chinese = (text for text in texts(svg) if text.endswith("…"))
    assert len(latin) > 1.8 * len(chinese)


@given(values=st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=6), count=st.integers(3, 6))
def test_ticks_enclose_the_values_with_even_steps(values: Sequence[float], count: int) -> None:
    ticks = nice_ticks(values, count)
    step = ticks[1] - ticks[0]
    assert ticks[0] <= min(values) + 1e-3 * step
    assert ticks[-1] >= max(values) - 1e-3 * step
    assert 2 <= len(ticks) <= 2 * count + 2
    assert all(b - a == pytest.approx(step, rel=1e-3) for a, b in pairwise(ticks))


def test_ticks_are_round_numbers() -> None:
    assert nice_ticks([0.93, 1.63], 5) == pytest.approx([0.8, 1.0, 1.2, 1.4, 1.6, 1.8])
    assert nice_ticks([0, 61.2], 3) == pytest.approx([0, 20, 40, 60, 80])


def test_thinning_keeps_the_mean_and_short_curves() -> None:
    points = [(float(i), float(i % 7)) for i in range(1000)]
    few = thin(points, 100)
    assert len(few) == 100
    assert sum(y for _, y in few) / 100 == pytest.approx(sum(y for _, y in points) / 1000)
    assert thin(points[:90], 100) == points[:90]


@pytest.mark.parametrize("hidden", ["\x00", "\x1b", "\x9f", "\u202e", "\u2066", "\ufeff", "\ud800"])
def test_hidden_characters_are_shown_by_their_code(hidden: str) -> None:
    assert visible(f"a{hidden}b") == f"a[U+{ord(hidden):04X}]b"


def test_visible_text_stays_as_it_is() -> None:
    plain = "Zeile 1\n\tZeile 2: 梯度 <b> 👩\u200d💻"
    assert visible(plain) == plain
    assert visible("a\r\nb") == "a\nb"
