"""Draws the report's charts as accessible inline SVG; selects each chart's variants.

Every drawing takes its width in CSS pixels. The page can therefore contain a wide and a
narrow one, and text keeps its size on a phone. A value that wasn't measured (None, NaN,
infinite) leaves a gap, never a zero.
"""

from __future__ import annotations

import math
import re
import statistics
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import pairwise
from typing import Any

from hasten.formatting import NOT_MEASURED, UNITS, number_text, span
from hasten.report.conclusions import (
    SwitchGain,
    any_known,
    gain_text,
    on_the_whole,
    result_of,
    switches,
    term_name,
    word_of,
)
from hasten.report.judgement import Row, cumulative_of, verdict_word

# Elements of the drawings: the frame of rows, marks, ticks, and text.
#
# Every drawing is one accessible inline SVG with a name and its numbers in words. Colours are CSS
# classes of the page, for light, dark and paper.

NARROW = 500  # pixels; below it, a row's label is above its mark
EDGE = 8  # pixels free on the left and right, so that marks and tick labels aren't cut
LETTER = 7.2  # pixels, generous mean width of a letter of the page's 13 pixel labels
LARGEST = 1e150  # larger than any measurement; squares and differences of it are still finite
_HARMLESS = re.compile(r"[ -~\n\t]*")

Point = tuple[float, float]
Scale = Callable[[float], float]  # data to pixels
Words = Callable[[float], str]  # data to the label of a tick


class Frame:
    """Positions of the rows of a chart: label, mark and text side by side, or mark below."""

    def __init__(self, width: int, rows: int, mark: int) -> None:
        self.narrow = width < NARROW
        self.label = width * 0.6 if self.narrow else width * 0.28  # width of labels in pixels
        self.left = 2.5 * EDGE if self.narrow else self.label + EDGE
        self.right = width - 2.5 * EDGE - (0 if self.narrow else width * 0.23)
        self.pitch, self.mark = mark + (32 if self.narrow else 14), mark
        self.width, self.top = width, 2
        self.bottom = self.top + rows * self.pitch

    def middle(self, row: int) -> float:
        """Returns the vertical centre of a row's mark."""
        below = self.mark / 2 + (5 if self.narrow else 7)
        return self.top + (row + 1) * self.pitch - below

    def row_text(self, row: int, label: str, text: str) -> str:
        """Returns a row's label, at the left, and its text, at the right."""
        y = self.middle(row) + (-self.mark / 2 - 8 if self.narrow else 4.5)
        short = fit(label, int(self.label / LETTER))
        return svg_text("label", 0, y, short) + svg_text("value end", self.width, y, text)

    def axis(self, ends: Sequence[float], formatter: Words) -> tuple[Scale, list[str]]:
        """Returns the scale that encloses `ends`, and its grid with tick labels."""
        ticks = nice_ticks(ends, 3 if self.narrow else 5)
        x = linear((ticks[0], ticks[-1]), (self.left, self.right))
        grid = [line("grid", x(v), self.top, x(v), self.bottom) for v in ticks]
        return x, grid + [
            svg_text("tick middle", x(v), self.bottom + 16, formatter(v)) for v in ticks
        ]


def nice_ticks(values: Iterable[float], count: int) -> list[float]:
    """Returns about `count` + 1 round numbers (1, 2 or 5 times a power of ten) around `values`."""
    numbers = list(values) or [0.0, 1.0]
    low, high = min(numbers), max(numbers)
    if high - low <= max(1e-12, 1e-9 * max(abs(low), abs(high))):  # all alike: add some range
        margin = max(abs(low), abs(high)) * 0.05 or 1.0
        low, high = low - margin, high + margin
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(m for m in (1, 2, 5, 10) if m * power >= rough * 0.8)
    first, last = math.floor(low / step + 1e-6), math.ceil(high / step - 1e-6)
    return [i * step for i in range(first, last + 1)]


def thin(points: Sequence[Sequence[float | None]], most: int) -> list[Point]:
    """Returns the points, or the means of `most` parts if there are more."""
    pairs = (finite(point) for point in points)
    measured = [(pair[0], pair[1]) for pair in pairs if len(pair) == 2]
    if len(measured) <= most:
        return measured
    cuts = [round(i * len(measured) / most) for i in range(most + 1)]
    stretches = (zip(*measured[a:b], strict=True) for a, b in pairwise(cuts))
    return [(statistics.fmean(xs), statistics.fmean(ys)) for xs, ys in stretches]


def visible(text: str) -> str:
    """Returns the text with characters that could corrupt or disguise a page made visible.

    They become their code in brackets. They are control characters other than newline and
    tab, lone surrogates, and the invisible marks that reorder text (Unicode's Cc, Cs and
    Cf).
    """

    def shown(character: str) -> str:
        harmless = character in "\n\t\u200c\u200d"  # joiners belong to scripts and emoji
        if harmless or unicodedata.category(character) not in ("Cc", "Cs", "Cf"):
            return character
        return f"[U+{ord(character):04X}]"

    if _HARMLESS.fullmatch(text):  # fast, and true for nearly every text
        return text
    return "".join(map(shown, text.replace("\r\n", "\n")))


def finite(values: Iterable[float | None]) -> list[float]:
    """Returns the values that were measured and can be drawn."""
    return [v for v in values if v is not None and math.isfinite(v) and abs(v) < LARGEST]


def linear(data: Point, pixels: Point) -> Scale:
    """Returns the linear map of an interval of data to one of pixels."""
    span = data[1] - data[0] or 1.0
    return lambda value: pixels[0] + (value - data[0]) / span * (pixels[1] - pixels[0])


def path(points: Sequence[Point], tone: str, dots: bool) -> list[str]:
    """Returns points joined by straight lines."""
    joined = " ".join(f"{px(x)},{px(y)}" for x, y in points)
    marks = [f'<polyline class="curve {tone}" points="{joined}"/>']
    if dots:
        circles = (f'cx="{px(x)}" cy="{px(y)}" r="3"' for x, y in points)
        marks += [f'<circle class="dot {tone}" {circle}/>' for circle in circles]
    return marks


def rect(
    css: str, left_x: float, top: float, width: float, height: float, tooltip: str = ""
) -> str:
    """Returns a box; `tooltip` appears under the mouse."""
    box = f'x="{px(left_x)}" y="{px(top)}" width="{px(width)}" height="{px(height)}"'
    inner = f"><title>{_safe(tooltip)}</title></rect>" if tooltip else "/>"
    return f'<rect class="{css}" {box} rx="2"{inner}'


def line(css: str, x1: float, y1: float, x2: float, y2: float) -> str:
    ends = f'x1="{px(x1)}" y1="{px(y1)}" x2="{px(x2)}" y2="{px(y2)}"'
    return f'<line class="{css}" {ends}/>'


def svg_text(css: str, x: float, y: float, text: str) -> str:
    return f'<text class="{css}" x="{px(x)}" y="{px(y)}">{_safe(text)}</text>'


def svg(title: str, account: Iterable[str], size: tuple[int, float], body: Iterable[str]) -> str:
    """Returns the drawing with its name and a text for assistive software."""
    width, height = map(px, size)
    beginning = f"<title>{_safe(title)}</title><desc>{_safe('; '.join(account))}.</desc>"
    box = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {box}>{beginning}{"".join(body)}</svg>'
    )


def px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def fit(text: str, letters: int) -> str:
    """Returns the text cut to a number of Latin letters; Chinese and other wide ones are two."""
    room = letters
    for i, character in enumerate(text):
        room -= 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if room < 0:
            return text[: i - 1] + "…"
    return text


def _safe(text: str) -> str:
    return escape(visible(text), quote=True)


# The drawings

_DOTTED = 160  # points; a strip chart with more has only lines, which take a fifth of the bytes


@dataclass(frozen=True)
class Bar:
    """One row of a bar chart; `text` is printed at its end, `tone` is a CSS class.

    `start` is where the bar begins if that isn't the chart's origin, as in a waterfall.
    """

    label: str
    text: str
    value: float | None
    low: float | None = None
    high: float | None = None
    tone: str = "plain"
    start: float | None = None


@dataclass(frozen=True)
class Strip:
    """One row of a strip chart: a value per round, in the order of the rounds."""

    label: str
    text: str
    values: Sequence[float | None]
    tone: str = "plain"


@dataclass(frozen=True)
class Curve:
    """One line of a line chart: [x, y] points in the order of x."""

    label: str
    points: Sequence[Sequence[float | None]]
    tone: str = "plain"


@dataclass(frozen=True)
class Stack:
    """One row of a stack chart: named parts of a whole, each always in the same colour."""

    label: str
    text: str
    parts: dict[str, float | None] = field(default_factory=dict)


def bar_chart(
    title: str,
    bars: Sequence[Bar],
    width: int,
    origin: float,
    formatter: Words,
    floor: float | None = None,
) -> str:
    """Draws horizontal bars from `origin` with error bars; `formatter` formats the ticks.

    A band marks the range within `floor` of the origin: such changes are noise.
    """
    frame = Frame(width, len(bars), mark=14)
    ends = [x for bar in bars for x in (origin, bar.value, bar.low, bar.high, bar.start)]
    ends += [origin - floor, origin + floor] if floor else []
    x, body = frame.axis(finite(ends), formatter)
    if floor and finite([floor]):
        left_x, right_x = x(origin - floor), x(origin + floor)
        body.insert(0, rect("band", left_x, frame.top, right_x - left_x, frame.bottom - frame.top))
    for row, bar in enumerate(bars):
        body += _bar(bar, x, origin, frame.middle(row))
    body.append(line("origin", x(origin), frame.top, x(origin), frame.bottom))
    body += [frame.row_text(row, bar.label, bar.text) for row, bar in enumerate(bars)]
    account = [f"{bar.label}: {bar.text}" for bar in bars]
    return svg(title, account, (width, frame.bottom + 22), body)


def stack_chart(title: str, stacks: Sequence[Stack], width: int, formatter: Words) -> str:
    """Draws horizontal stacks from zero; part i of all rows has the CSS class s{i}, from 1."""
    frame = Frame(width, len(stacks), mark=26)
    sums = [sum(max(0.0, v) for v in finite(stack.parts.values())) for stack in stacks]
    x, body = frame.axis([0.0, *sums], formatter)
    for row, stack in enumerate(stacks):
        end = 0.0
        for number, (name, value) in enumerate(stack.parts.items(), start=1):
            for extent in (v for v in finite([value]) if v > 0):
                left_x, right_x = x(end), x(end + extent)
                tooltip, top = f"{name}: {formatter(extent)}", frame.middle(row) - 13
                body.append(rect(f"part s{number}", left_x, top, right_x - left_x, 26, tooltip))
                if right_x - left_x > LETTER * len(name) + EDGE:
                    middle, y = (left_x + right_x) / 2, frame.middle(row) + 4.5
                    body.append(svg_text("inside middle", middle, y, name))
                end += extent
        body.append(frame.row_text(row, stack.label, stack.text))
    account = [
        f"{stack.label}, {name}: "
        f"{formatter(finite([value])[0]) if finite([value]) else NOT_MEASURED}"
        for stack in stacks
        for name, value in stack.parts.items()
    ]
    return svg(title, account, (width, frame.bottom + 22), body)


def strip_chart(title: str, strips: Sequence[Strip], width: int, levels: bool = False) -> str:
    """Draws each row's values in turn, all rows on one scale.

    Values are drawn relative to the row's own median, or with `levels` as they are, from zero up.
    """
    frame = Frame(width, len(strips), mark=26)
    rows = []
    for strip in strips:
        values = finite(strip.values)
        if not levels:  # flat if the median is zero, or so small that quotients overflow
            middle = statistics.median(values) if values else 0.0
            deviations = finite(value / middle - 1 for value in values) if middle else []
            values = deviations if len(deviations) == len(values) else [0.0] * len(values)
        rows.append([y for _, y in thin(list(enumerate(values)), 120)])
    dots = sum(map(len, rows)) <= _DOTTED and max(map(len, rows), default=0) <= _DOTTED / 4
    reach = max((abs(value) for row in rows for value in row), default=0) or 1
    body = []
    for row, (strip, values) in enumerate(zip(strips, rows, strict=True)):
        x = linear((0, max(1, len(values) - 1)), (frame.left + EDGE, frame.right - EDGE))
        middle = frame.middle(row)
        y = linear((0 if levels else -reach, reach), (middle + 13, middle - 13))
        body.append(line("grid", frame.left, y(0), frame.right, y(0)))
        body.append(frame.row_text(row, strip.label, strip.text))
        body += path([(x(i), y(value)) for i, value in enumerate(values)], strip.tone, dots)
    account = [f"{strip.label}: {strip.text}" for strip in strips]
    return svg(title, account, (width, frame.bottom + 2), body)


def line_chart(title: str, curves: Sequence[Curve], size: tuple[int, int], formatter: Words) -> str:
    """Draws curves over two linear axes; `size` is (width, height), `formatter` formats x's ticks.

    Earlier curves lie on top. A long curve is drawn as the means of equal stretches (`thin`).
    """
    most = 120 if len(curves) <= 12 else 40  # keeps forty curves small
    drawn = [(curve, thin(curve.points, most)) for curve in curves]
    xs = sorted(point[0] for _, points in drawn for point in points) or [0.0, 1.0]
    ticks = nice_ticks((point[1] for _, points in drawn for point in points), 5)
    # Enough decimals for different labels; extreme values in short form.
    places = max(0, -math.floor(math.log10(ticks[1] - ticks[0]) + 1e-6))
    is_plain = places <= 8 and max(map(abs, ticks)) < 1e9
    names = [f"{value:.{places}f}" if is_plain else f"{value:.3g}" for value in ticks]
    left_x = 14 + LETTER * max(map(len, names))
    x = linear((xs[0], xs[-1]), (left_x + EDGE, size[0] - 2 * EDGE))
    y = linear((ticks[0], ticks[-1]), (size[1] - 28, 10))
    body = [line("grid", left_x, y(value), size[0], y(value)) for value in ticks]
    body += [
        svg_text("tick end", left_x - 6, y(v) + 4, name)
        for v, name in zip(ticks, names, strict=True)
    ]
    within = [value for value in nice_ticks(xs, 4) if xs[0] <= value <= xs[-1]]
    body += [svg_text("tick middle", x(value), size[1] - 8, formatter(value)) for value in within]
    account, dotted = [], 24 if len(curves) <= 4 else 8
    for curve, points in reversed(drawn):
        body += path([(x(a), y(b)) for a, b in points], curve.tone, dots=len(points) <= dotted)
        ends = [f"{b:.4g} at {formatter(a)}" for a, b in (points[:1] + points[-1:])]
        account.append(f"{curve.label}: {' to '.join(ends) or NOT_MEASURED}")
    return svg(title, reversed(account), size, body)


def _bar(bar: Bar, x: Scale, origin: float, y: float) -> list[str]:
    value, low, high = (finite([v]) for v in (bar.value, bar.low, bar.high))
    marks = []
    if value:
        start = origin if bar.start is None else bar.start
        left_x, right_x = sorted((x(start), x(value[0])))
        marks.append(rect(f"bar {bar.tone}", left_x, y - 7, right_x - left_x, 14))
    if value and low and high:
        a, b = x(low[0]), x(high[0])
        ends = [(a, y, b, y), (a, y - 4, a, y + 4), (b, y - 4, b, y + 4)]
        marks += [line("whisker", *end) for end in ends]
    return marks


# The report's drawings by name: the variants, colours and words of each.
#
# Drawings with a row per variant exist twice, for wide and for narrow screens. The variants decide
# the drawings of speed: a waterfall for a cumulative, pairs of bars (single, and with all others)
# for separately measured techniques, and plain bars for all other variants.

WIDTHS = (800, 324)  # pixels of a drawing for wide and for narrow screens
_CURVES = (390, 250)  # pixels, width and height
_HUES = {"helped": "gain", "hurt": "harm"}
Drawings = dict[str, list[str]]
Draw = Callable[[int], str]  # width -> drawing


def drawings(report: Mapping[str, Any]) -> Drawings:
    """Returns every drawing for which this report has data."""
    variants = report["variants"]
    draws: dict[str, Draw] = {
        **_speeds(report),
        **_ledgers(variants),
        "memory": _memory(variants),
        "rounds": _rounds(variants),
        **_loads(variants),
    }
    charts = {name: [draw(width) for width in WIDTHS] for name, draw in draws.items()}
    shown = [variant for variant in variants if variant["kind"] != "again"]
    shown.sort(key=lambda a: (a is not variants[0], a is not result_of(variants)))
    for name, title, key in (
        ("eval_data", "Eval loss", "eval_curve"),
        ("training", "Training loss", "loss_curve"),
    ):
        if any(len(variant[key]) > 1 for variant in variants):
            curves = [Curve(a["name"], a[key], _tone(a, variants)) for a in shown]
            charts[name] = [line_chart(title, curves, _CURVES, UNITS["tokens"])]
    return charts


def _speeds(report: Mapping[str, Any]) -> dict[str, Draw]:
    """Returns the waterfall, the pairs, and bars for the remaining variants."""
    variants, floor = report["variants"], report["noise"]["floor"]
    cumulative, gains = cumulative_of(variants), switches(variants)
    pairs = _pairs(gains, report) if any(switch.with_others for switch in gains) else []
    shown = {variant["name"] for variant in cumulative}
    if pairs:
        shown |= {switch.alone["name"] for switch in gains if switch.alone}
        shown |= {variant["name"] for variant in variants if variant["kind"] == "leave-one-out"}
    others = [a for a in variants if a["name"] not in shown and a["kind"] != "again"]
    charts: dict[str, Draw] = {}
    if cumulative:
        # Each step's bar begins at the end of the last known one, in the colour of its effect.
        steps, height = [_speed(cumulative[0], report)], cumulative[0]["ratio"]["median"]
        for variant in cumulative[1:]:
            bar, tone = _speed(variant, report), _tone_of(variant, verdict_word(variant["verdict"]))
            steps.append(replace(bar, tone=tone, start=height))
            height = height if bar.value is None else bar.value
        charts["waterfall"] = _bars("Speed against the baseline, one more at a time", steps, floor)
    if pairs:
        charts["pairs"] = _bars("What each switch gains, alone and with the others", pairs, floor)
    if any(variant is not variants[0] for variant in others) or not charts:
        bars = [_speed(variant, report) for variant in others]
        charts["ratio"] = _bars("Speed against the baseline", bars, floor)
    return charts


def _bars(title: str, bars: Sequence[Bar], floor: float | None) -> Draw:
    def tick(ratio: float) -> str:
        return "baseline" if math.isclose(ratio, 1) else f"{ratio:.3g}×"

    return lambda width: bar_chart(title, bars, width, 1, tick, floor)


def _speed(variant: Row, report: Mapping[str, Any]) -> Bar:
    tone = _tone_of(variant, on_the_whole(variant, report))
    ratio = variant["ratio"]
    text = span(ratio, "times")
    return Bar(variant["name"], text, ratio["median"], ratio["low"], ratio["high"], tone)


def _tone_of(variant: Row, word: str) -> str:
    return "harm" if verdict_word(variant["quality"]) == "worse" else _HUES.get(word, "other")


def _pairs(gains: Sequence[SwitchGain], report: Mapping[str, Any]) -> list[Bar]:
    """Draws two rows per technique: a full bar for it alone, a hollow one with all others."""
    bars = []
    for switch in gains:
        if switch.alone:
            alone = _speed(switch.alone, report)
            bars.append(replace(alone, label=switch.technique))
        label = "with the others" if switch.alone else switch.technique
        ratio = switch.with_others
        summary = ratio.summary() if ratio else dict.fromkeys(("median", "low", "high"))
        ends = summary["median"], summary["low"], summary["high"]
        word = "undecided" if ratio is None else word_of(ratio, report["noise"]["floor"])
        tone = f"{_HUES.get(word, 'other')} hollow"
        bars.append(Bar(f"↳ {label}", gain_text(ratio), *ends, tone))
    return bars


def _memory(variants: Sequence[Row]) -> Draw:
    unit, sign = _byte_unit([variant["peak_memory_bytes"] for variant in variants])
    bars, before = [], variants[0]["peak_memory_bytes"]
    for variant in variants:
        used, tone = variant["peak_memory_bytes"], _tone(variant, variants)
        text = number_text(used, "memory")
        if variant is not variants[0] and used is not None and before:
            text += f" ({number_text(used / before - 1, 'change')})"
        if variant["kind"] != "again":
            value = None if used is None else used / unit
            bars.append(Bar(variant["name"], text, value, tone=tone))
    return lambda width: bar_chart("Peak memory", bars, width, 0, lambda v: f"{v:g} {sign}")


def _byte_unit(values: Sequence[float | None]) -> tuple[float, str]:
    return (1e9, "GB") if max((v or 0 for v in values), default=0) >= 1e9 else (1e6, "MB")


def _rounds(variants: Sequence[Row]) -> Draw:
    strips = []
    for variant in variants:
        speeds, text = [value for value in variant["rounds"] if value], NOT_MEASURED
        if speeds and (middle := statistics.median(speeds)):  # distance from the median
            ends = (min(speeds), max(speeds))
            text = " to ".join(number_text(end / middle - 1, "change") for end in ends)
        strips.append(Strip(variant["name"], text, variant["rounds"], _tone(variant, variants)))
    return lambda width: strip_chart("Speed in each round", strips, width)


def _loads(variants: Sequence[Row]) -> dict[str, Draw]:
    strips = []
    for variant in variants:
        if loads := [value for value in variant["foreign_load"] if value is not None]:
            text = f"most {number_text(max(loads), 'percent')}"
            strips.append(Strip(variant["name"], text, loads, _tone(variant, variants)))
    title = "Processor time used by others in each round"
    return {"load": lambda width: strip_chart(title, strips, width, True)} if strips else {}


def _ledgers(variants: Sequence[Row]) -> dict[str, Draw]:
    ends = [variants[0]] if len(variants) == 1 else [variants[0], result_of(variants)]
    charts: dict[str, Draw] = {}
    for name, part, title in (
        ("step_stack", "step", "Where a step's time goes"),
        ("memory_stack", "memory", "What memory holds"),
    ):
        if any(any_known(variant["ledger"][part]) for variant in ends):
            charts[name] = _stacks(title, ends, part)
    return charts


def _stacks(title: str, variants: Sequence[Row], part: str) -> Draw:
    """Draws the parts of some variants in the unit that suits the largest."""
    values = [variant["ledger"][part].values() for variant in variants]
    sums = [sum(value for value in some if value is not None) for some in values]
    seconds = (1.0, "s") if max(sums, default=0) >= 1 else (1e-3, "ms")
    unit, sign = _byte_unit(sums) if part == "memory" else seconds
    stacks = []
    for variant, total in zip(variants, sums, strict=True):
        terms = variant["ledger"][part].items()
        parts = {term_name(n): None if value is None else value / unit for n, value in terms}
        text = number_text(total, "memory" if part == "memory" else "seconds")
        stacks.append(Stack(variant["name"], text if any_known(parts) else NOT_MEASURED, parts))
    return lambda width: stack_chart(title, stacks, width, lambda v: f"{v:.3g} {sign}")


def _tone(variant: Row, variants: Sequence[Row]) -> str:
    if variant is variants[0]:
        return "base"
    return "final" if variant is result_of(variants) else "other"
