"""The report's drawings: small functions from numbers to one accessible inline SVG each.

Every drawing takes its width in CSS pixels, so that the page can hold a wide and a narrow one and
text keeps its size on a telephone. Colours are CSS classes that the page defines, for light, dark
and paper. A value that wasn't measured (None, NaN, infinite) leaves a gap, never a zero.
"""

import math
import statistics
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

NOT_MEASURED = "not measured"
NARROW = 500  # pixels; below, a row's label stands above its mark
_EDGE = 8  # pixels kept free left and right, so that marks and tick labels aren't cut
_LETTER = 7.2  # pixels, generous mean width of a letter of the page's 13 pixel labels

Point = tuple[float, float]
Scale = Callable[[float], float]  # data to pixels
Words = Callable[[float], str]  # data to the label of a tick


@dataclass(frozen=True)
class Bar:
    """One row of a bar chart; `text` is printed at its end, `tone` is a CSS class."""

    label: str
    text: str
    value: float | None
    low: float | None = None
    high: float | None = None
    tone: str = "plain"


@dataclass(frozen=True)
class Strip:
    """One row of a stability strip: a value per round, in the order of the rounds."""

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


def bar_chart(title: str, bars: Sequence[Bar], width: int, origin: float, words: Words) -> str:
    """Horizontal bars from `origin` with error bars, over an axis whose ticks `words` names."""
    frame = _Frame(width, len(bars), mark=14)
    ends = _finite(x for bar in bars for x in (origin, bar.value, bar.low, bar.high))
    ticks = nice_ticks(ends, 3 if frame.narrow else 5)
    x = _scale((ticks[0], ticks[-1]), (frame.left, frame.right))
    body = [_line("grid", x(v), frame.top, x(v), frame.bottom) for v in ticks]
    body += [_text("tick middle", x(v), frame.bottom + 16, words(v)) for v in ticks]
    for row, bar in enumerate(bars):
        body += _bar(bar, x, origin, frame.middle(row))
    body.append(_line("origin", x(origin), frame.top, x(origin), frame.bottom))
    body += [frame.words(row, bar.label, bar.text) for row, bar in enumerate(bars)]
    account = [f"{bar.label}: {bar.text}" for bar in bars]
    return _svg(title, account, (width, frame.bottom + 22), body)


def strip_chart(title: str, strips: Sequence[Strip], width: int) -> str:
    """Each row's values in turn, relative to the row's own median, all rows on one scale."""
    frame = _Frame(width, len(strips), mark=26)
    rows = [_deviations(_finite(strip.values)) for strip in strips]
    reach = max((abs(value) for row in rows for value in row), default=0) or 1
    body = []
    for row, (strip, values) in enumerate(zip(strips, rows, strict=True)):
        x = _scale((0, max(1, len(values) - 1)), (frame.left + _EDGE, frame.right - _EDGE))
        y = _scale((-reach, reach), (frame.middle(row) + 13, frame.middle(row) - 13))
        body.append(_line("grid", frame.left, y(0), frame.right, y(0)))
        body.append(frame.words(row, strip.label, strip.text))
        body += _path([(x(i), y(value)) for i, value in enumerate(values)], strip.tone, dots=True)
    account = [f"{strip.label}: {strip.text}" for strip in strips]
    return _svg(title, account, (width, frame.bottom + 2), body)


def line_chart(title: str, curves: Sequence[Curve], size: tuple[int, int], words: Words) -> str:
    """Curves over two linear axes; `size` is (width, height), `words` names the ticks of x.

    Earlier curves lie on top. A long curve is drawn as the means of equal stretches (`thin`).
    """
    drawn = [(curve, thin(curve.points, 120)) for curve in curves]
    xs = sorted(point[0] for _, points in drawn for point in points) or [0.0, 1.0]
    ticks = nice_ticks((point[1] for _, points in drawn for point in points), 5)
    places = max(0, -math.floor(math.log10(ticks[1] - ticks[0]) + 1e-6))  # decimals that differ
    left = 14 + _LETTER * max(len(f"{value:.{places}f}") for value in ticks)
    x = _scale((xs[0], xs[-1]), (left + _EDGE, size[0] - 2 * _EDGE))
    y = _scale((ticks[0], ticks[-1]), (size[1] - 28, 10))
    body = [_line("grid", left, y(value), size[0], y(value)) for value in ticks]
    body += [_text("tick end", left - 6, y(v) + 4, f"{v:.{places}f}") for v in ticks]
    within = [value for value in nice_ticks(xs, 4) if xs[0] <= value <= xs[-1]]
    body += [_text("tick middle", x(value), size[1] - 8, words(value)) for value in within]
    account = []
    for curve, points in reversed(drawn):
        body += _path([(x(a), y(b)) for a, b in points], curve.tone, dots=len(points) <= 24)
        ends = [f"{b:.4g} at {words(a)}" for a, b in (points[:1] + points[-1:])]
        account.append(f"{curve.label}: {' to '.join(ends) or NOT_MEASURED}")
    return _svg(title, reversed(account), size, body)


def nice_ticks(values: Iterable[float], count: int) -> list[float]:
    """About `count` + 1 round numbers (1, 2 or 5 times a power of ten) that enclose `values`."""
    finite = list(values) or [0.0, 1.0]
    low, high = min(finite), max(finite)
    if high - low <= max(1e-12, 1e-9 * max(abs(low), abs(high))):  # all alike: give them room
        margin = max(abs(low), abs(high)) * 0.05 or 1.0
        low, high = low - margin, high + margin
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(m for m in (1, 2, 5, 10) if m * power >= rough * 0.8)
    first, last = math.floor(low / step + 1e-6), math.ceil(high / step - 1e-6)
    return [i * step for i in range(first, last + 1)]


def thin(points: Sequence[Sequence[float | None]], most: int) -> list[Point]:
    """The measured points, or where there are more than `most` the means of `most` stretches."""
    pairs = (_finite(point) for point in points)
    known = [(pair[0], pair[1]) for pair in pairs if len(pair) == 2]
    if len(known) <= most:
        return known
    cuts = [round(i * len(known) / most) for i in range(most + 1)]
    stretches = (zip(*known[a:b], strict=True) for a, b in pairwise(cuts))
    return [(statistics.fmean(xs), statistics.fmean(ys)) for xs, ys in stretches]


def visible(text: str) -> str:
    """The text with everything made visible that could corrupt or disguise a page.

    Control characters other than newline and tab, lone surrogates, and the invisible marks that
    reorder text (Unicode's Cc, Cs and Cf) become their code in brackets.
    """

    def shown(character: str) -> str:
        harmless = character in "\n\t\u200c\u200d"  # joiners belong to scripts and emoji
        if harmless or unicodedata.category(character) not in ("Cc", "Cs", "Cf"):
            return character
        return f"[U+{ord(character):04X}]"

    return "".join(map(shown, text.replace("\r\n", "\n")))


class _Frame:
    """Where the rows of a chart stand: label, mark and text side by side, or the mark below."""

    def __init__(self, width: int, rows: int, mark: int) -> None:
        self.narrow = width < NARROW
        self.label = width * 0.6 if self.narrow else width * 0.28  # its width in pixels
        self.left = 2.5 * _EDGE if self.narrow else self.label + _EDGE
        self.right = width - 2.5 * _EDGE - (0 if self.narrow else width * 0.23)
        self.pitch, self.mark = mark + (32 if self.narrow else 14), mark
        self.width, self.top = width, 2
        self.bottom = self.top + rows * self.pitch

    def middle(self, row: int) -> float:
        """The height at which a row's mark is centred."""
        below = self.mark / 2 + (5 if self.narrow else 7)
        return self.top + (row + 1) * self.pitch - below

    def words(self, row: int, label: str, text: str) -> str:
        """A row's label, at the left, and its text, at the right."""
        y = self.middle(row) + (-self.mark / 2 - 8 if self.narrow else 4.5)
        short = _fit(label, int(self.label / _LETTER))
        return _text("label", 0, y, short) + _text("value end", self.width, y, text)


def _bar(bar: Bar, x: Scale, origin: float, y: float) -> list[str]:
    value, low, high = (_finite([v]) for v in (bar.value, bar.low, bar.high))
    marks = []
    if value:
        left, right = sorted((x(origin), x(value[0])))
        box = f'x="{_px(left)}" y="{_px(y - 7)}" width="{_px(right - left)}" height="14"'
        marks.append(f'<rect class="bar {bar.tone}" {box} rx="2"/>')
    if value and low and high:
        a, b = x(low[0]), x(high[0])
        ends = [(a, y, b, y), (a, y - 4, a, y + 4), (b, y - 4, b, y + 4)]
        marks += [_line("whisker", *end) for end in ends]
    return marks


def _path(points: Sequence[Point], tone: str, dots: bool) -> list[str]:
    joined = " ".join(f"{_px(x)},{_px(y)}" for x, y in points)
    marks = [f'<polyline class="curve {tone}" points="{joined}"/>']
    if dots:
        circles = (f'cx="{_px(x)}" cy="{_px(y)}" r="3"' for x, y in points)
        marks += [f'<circle class="dot {tone}" {circle}/>' for circle in circles]
    return marks


def _svg(title: str, account: Iterable[str], size: tuple[int, float], body: Iterable[str]) -> str:
    """The drawing with its name and its account in words, which assistive software reads out."""
    width, height = map(_px, size)
    head = f"<title>{_safe(title)}</title><desc>{_safe('; '.join(account))}.</desc>"
    box = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {box}>{head}{"".join(body)}</svg>'


def _line(css: str, x1: float, y1: float, x2: float, y2: float) -> str:
    ends = f'x1="{_px(x1)}" y1="{_px(y1)}" x2="{_px(x2)}" y2="{_px(y2)}"'
    return f'<line class="{css}" {ends}/>'


def _text(css: str, x: float, y: float, text: str) -> str:
    return f'<text class="{css}" x="{_px(x)}" y="{_px(y)}">{_safe(text)}</text>'


def _safe(text: str) -> str:
    return escape(visible(text), quote=True)


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _scale(data: tuple[float, float], pixels: tuple[float, float]) -> Scale:
    span = data[1] - data[0] or 1.0
    return lambda value: pixels[0] + (value - data[0]) / span * (pixels[1] - pixels[0])


def _fit(text: str, letters: int) -> str:
    """The text cut to a number of Latin letters; Chinese and other wide ones count as two."""
    room = letters
    for i, character in enumerate(text):
        room -= 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if room < 0:
            return text[: i - 1] + "…"
    return text


def _finite(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _deviations(values: Sequence[float]) -> list[float]:
    """Relative to the median; flat where it is zero, or so small that quotients overflow."""
    middle = statistics.median(values) if values else 0.0
    found = [value / middle - 1 for value in values] if middle else []
    return found if found and all(map(math.isfinite, found)) else [0.0] * len(values)
