"""What the report's drawings are made of: the frame of rows, marks, ticks, and inert text.

Every drawing is one accessible inline SVG with a name and its numbers in words. Colours are CSS
classes that the page defines, for light, dark and paper.
"""

import math
import re
import statistics
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import pairwise

NARROW = 500  # pixels; below, a row's label stands above its mark
EDGE = 8  # pixels kept free left and right, so that marks and tick labels aren't cut
LETTER = 7.2  # pixels, generous mean width of a letter of the page's 13 pixel labels
LARGEST = 1e150  # nothing measured is larger, and squares and differences of it are still finite
_HARMLESS = re.compile(r"[ -~\n\t]*")

Point = tuple[float, float]
Scale = Callable[[float], float]  # data to pixels
Words = Callable[[float], str]  # data to the label of a tick


class Frame:
    """Where the rows of a chart stand: label, mark and text side by side, or the mark below."""

    def __init__(self, width: int, rows: int, mark: int) -> None:
        self.narrow = width < NARROW
        self.label = width * 0.6 if self.narrow else width * 0.28  # its width in pixels
        self.left = 2.5 * EDGE if self.narrow else self.label + EDGE
        self.right = width - 2.5 * EDGE - (0 if self.narrow else width * 0.23)
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
        short = fit(label, int(self.label / LETTER))
        return svg_text("label", 0, y, short) + svg_text("value end", self.width, y, text)

    def axis(self, ends: Sequence[float], words: Words) -> tuple[Scale, list[str]]:
        """The scale that encloses `ends`, and its grid with the names of its ticks."""
        ticks = nice_ticks(ends, 3 if self.narrow else 5)
        x = linear((ticks[0], ticks[-1]), (self.left, self.right))
        grid = [line("grid", x(v), self.top, x(v), self.bottom) for v in ticks]
        return x, grid + [svg_text("tick middle", x(v), self.bottom + 16, words(v)) for v in ticks]


def nice_ticks(values: Iterable[float], count: int) -> list[float]:
    """About `count` + 1 round numbers (1, 2 or 5 times a power of ten) that enclose `values`."""
    known = list(values) or [0.0, 1.0]
    low, high = min(known), max(known)
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
    pairs = (finite(point) for point in points)
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

    if _HARMLESS.fullmatch(text):  # nearly every text, and a long one in no time
        return text
    return "".join(map(shown, text.replace("\r\n", "\n")))


def finite(values: Iterable[float | None]) -> list[float]:
    """The values that were measured and can be drawn."""
    return [v for v in values if v is not None and math.isfinite(v) and abs(v) < LARGEST]


def linear(data: Point, pixels: Point) -> Scale:
    """The linear map of an interval of data to one of pixels."""
    span = data[1] - data[0] or 1.0
    return lambda value: pixels[0] + (value - data[0]) / span * (pixels[1] - pixels[0])


def path(points: Sequence[Point], tone: str, dots: bool) -> list[str]:
    """Points joined by straight lines."""
    joined = " ".join(f"{px(x)},{px(y)}" for x, y in points)
    marks = [f'<polyline class="curve {tone}" points="{joined}"/>']
    if dots:
        circles = (f'cx="{px(x)}" cy="{px(y)}" r="3"' for x, y in points)
        marks += [f'<circle class="dot {tone}" {circle}/>' for circle in circles]
    return marks


def rect(css: str, left: float, top: float, width: float, height: float, said: str = "") -> str:
    """A box; what is `said` of it appears under the mouse."""
    box = f'x="{px(left)}" y="{px(top)}" width="{px(width)}" height="{px(height)}"'
    inner = f"><title>{_safe(said)}</title></rect>" if said else "/>"
    return f'<rect class="{css}" {box} rx="2"{inner}'


def line(css: str, x1: float, y1: float, x2: float, y2: float) -> str:
    ends = f'x1="{px(x1)}" y1="{px(y1)}" x2="{px(x2)}" y2="{px(y2)}"'
    return f'<line class="{css}" {ends}/>'


def svg_text(css: str, x: float, y: float, text: str) -> str:
    return f'<text class="{css}" x="{px(x)}" y="{px(y)}">{_safe(text)}</text>'


def svg(title: str, account: Iterable[str], size: tuple[int, float], body: Iterable[str]) -> str:
    """The drawing with its name and its account in words, which assistive software reads out."""
    width, height = map(px, size)
    head = f"<title>{_safe(title)}</title><desc>{_safe('; '.join(account))}.</desc>"
    box = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {box}>{head}{"".join(body)}</svg>'


def px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def fit(text: str, letters: int) -> str:
    """The text cut to a number of Latin letters; Chinese and other wide ones count as two."""
    room = letters
    for i, character in enumerate(text):
        room -= 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if room < 0:
            return text[: i - 1] + "…"
    return text


def _safe(text: str) -> str:
    return escape(visible(text), quote=True)
