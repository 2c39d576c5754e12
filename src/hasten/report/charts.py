"""The report's drawings: small functions from numbers to one accessible inline SVG each.

Every drawing takes its width in CSS pixels, so that the page can hold a wide and a narrow one and
text keeps its size on a telephone. A value that wasn't measured (None, NaN, infinite) leaves a gap,
never a zero. charts_svg.py has what they are made of.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from hasten.formatting import NOT_MEASURED
from hasten.report.charts_svg import (
    EDGE,
    LETTER,
    Frame,
    Scale,
    Words,
    finite,
    line,
    linear,
    nice_ticks,
    path,
    rect,
    svg,
    svg_text,
    thin,
    visible,
)

__all__ = [
    "NOT_MEASURED",
    "Bar",
    "Curve",
    "Stack",
    "Strip",
    "bar_chart",
    "line_chart",
    "nice_ticks",
    "stack_chart",
    "strip_chart",
    "thin",
    "visible",
]
_DOTTED = 160  # points; a strip chart with more of them draws lines alone, which weigh a fifth


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
    words: Words,
    floor: float | None = None,
) -> str:
    """Horizontal bars from `origin` with error bars, over an axis whose ticks `words` names.

    A band marks what lies within `floor` of the origin: changes that are noise.
    """
    frame = Frame(width, len(bars), mark=14)
    ends = [x for bar in bars for x in (origin, bar.value, bar.low, bar.high, bar.start)]
    ends += [origin - floor, origin + floor] if floor else []
    x, body = frame.axis(finite(ends), words)
    if floor and finite([floor]):
        left, right = x(origin - floor), x(origin + floor)
        body.insert(0, rect("band", left, frame.top, right - left, frame.bottom - frame.top))
    for row, bar in enumerate(bars):
        body += _bar(bar, x, origin, frame.middle(row))
    body.append(line("origin", x(origin), frame.top, x(origin), frame.bottom))
    body += [frame.words(row, bar.label, bar.text) for row, bar in enumerate(bars)]
    account = [f"{bar.label}: {bar.text}" for bar in bars]
    return svg(title, account, (width, frame.bottom + 22), body)


def stack_chart(title: str, stacks: Sequence[Stack], width: int, words: Words) -> str:
    """Horizontal stacks from zero; part i of all rows has the CSS class s{i}, counted from 1."""
    frame = Frame(width, len(stacks), mark=26)
    sums = [sum(max(0.0, v) for v in finite(stack.parts.values())) for stack in stacks]
    x, body = frame.axis([0.0, *sums], words)
    for row, stack in enumerate(stacks):
        end = 0.0
        for number, (name, value) in enumerate(stack.parts.items(), start=1):
            for known in (v for v in finite([value]) if v > 0):
                left, right = x(end), x(end + known)
                said, top = f"{name}: {words(known)}", frame.middle(row) - 13
                body.append(rect(f"part s{number}", left, top, right - left, 26, said))
                if right - left > LETTER * len(name) + EDGE:
                    middle, y = (left + right) / 2, frame.middle(row) + 4.5
                    body.append(svg_text("inside middle", middle, y, name))
                end += known
        body.append(frame.words(row, stack.label, stack.text))
    account = [
        f"{stack.label}, {name}: {words(finite([value])[0]) if finite([value]) else NOT_MEASURED}"
        for stack in stacks
        for name, value in stack.parts.items()
    ]
    return svg(title, account, (width, frame.bottom + 22), body)


def strip_chart(title: str, strips: Sequence[Strip], width: int, levels: bool = False) -> str:
    """Each row's values in turn, all rows on one scale.

    Values are drawn relative to the row's own median, or with `levels` as they are, from zero up.
    """
    frame = Frame(width, len(strips), mark=26)
    rows = [
        _stretches(finite(s.values) if levels else _deviations(finite(s.values))) for s in strips
    ]
    dots = sum(map(len, rows)) <= _DOTTED and max(map(len, rows), default=0) <= _DOTTED / 4
    reach = max((abs(value) for row in rows for value in row), default=0) or 1
    body = []
    for row, (strip, values) in enumerate(zip(strips, rows, strict=True)):
        x = linear((0, max(1, len(values) - 1)), (frame.left + EDGE, frame.right - EDGE))
        y = linear(
            (0 if levels else -reach, reach), (frame.middle(row) + 13, frame.middle(row) - 13)
        )
        body.append(line("grid", frame.left, y(0), frame.right, y(0)))
        body.append(frame.words(row, strip.label, strip.text))
        body += path([(x(i), y(value)) for i, value in enumerate(values)], strip.tone, dots)
    account = [f"{strip.label}: {strip.text}" for strip in strips]
    return svg(title, account, (width, frame.bottom + 2), body)


def line_chart(title: str, curves: Sequence[Curve], size: tuple[int, int], words: Words) -> str:
    """Curves over two linear axes; `size` is (width, height), `words` names the ticks of x.

    Earlier curves lie on top. A long curve is drawn as the means of equal stretches (`thin`).
    """
    most = 120 if len(curves) <= 12 else 40  # so that forty curves stay light
    drawn = [(curve, thin(curve.points, most)) for curve in curves]
    xs = sorted(point[0] for _, points in drawn for point in points) or [0.0, 1.0]
    ticks = nice_ticks((point[1] for _, points in drawn for point in points), 5)
    names = _tick_names(ticks)
    left = 14 + LETTER * max(map(len, names))
    x = linear((xs[0], xs[-1]), (left + EDGE, size[0] - 2 * EDGE))
    y = linear((ticks[0], ticks[-1]), (size[1] - 28, 10))
    body = [line("grid", left, y(value), size[0], y(value)) for value in ticks]
    body += [
        svg_text("tick end", left - 6, y(v) + 4, name) for v, name in zip(ticks, names, strict=True)
    ]
    within = [value for value in nice_ticks(xs, 4) if xs[0] <= value <= xs[-1]]
    body += [svg_text("tick middle", x(value), size[1] - 8, words(value)) for value in within]
    account, dotted = [], 24 if len(curves) <= 4 else 8
    for curve, points in reversed(drawn):
        body += path([(x(a), y(b)) for a, b in points], curve.tone, dots=len(points) <= dotted)
        ends = [f"{b:.4g} at {words(a)}" for a, b in (points[:1] + points[-1:])]
        account.append(f"{curve.label}: {' to '.join(ends) or NOT_MEASURED}")
    return svg(title, reversed(account), size, body)


def _bar(bar: Bar, x: Scale, origin: float, y: float) -> list[str]:
    value, low, high = (finite([v]) for v in (bar.value, bar.low, bar.high))
    marks = []
    if value:
        start = origin if bar.start is None else bar.start
        left, right = sorted((x(start), x(value[0])))
        marks.append(rect(f"bar {bar.tone}", left, y - 7, right - left, 14))
    if value and low and high:
        a, b = x(low[0]), x(high[0])
        ends = [(a, y, b, y), (a, y - 4, a, y + 4), (b, y - 4, b, y + 4)]
        marks += [line("whisker", *end) for end in ends]
    return marks


def _tick_names(ticks: Sequence[float]) -> list[str]:
    """Numbers with as many decimals as tell them apart; the very large and small in short."""
    places = max(0, -math.floor(math.log10(ticks[1] - ticks[0]) + 1e-6))
    plain = places <= 8 and max(map(abs, ticks)) < 1e9
    return [f"{value:.{places}f}" if plain else f"{value:.3g}" for value in ticks]


def _stretches(values: Sequence[float]) -> list[float]:
    """A long row as the means of 120 equal stretches."""
    return [y for _, y in thin(list(enumerate(values)), 120)]


def _deviations(values: Sequence[float]) -> list[float]:
    """Relative to the median; flat where it is zero, or so small that quotients overflow."""
    middle = statistics.median(values) if values else 0.0
    found = [value / middle - 1 for value in values] if middle else []
    return found if found and len(finite(found)) == len(values) else [0.0] * len(values)
