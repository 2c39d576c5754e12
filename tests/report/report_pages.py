"""What tests of the page share: the full example, large and random reports, a reader of HTML."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from hasten.report.schema import REPORT

Report = dict[str, Any]
DATA = Path(__file__).parent / "data"
VOID = ("meta", "br", "wbr")


class Page(HTMLParser):
    """What a browser would see: elements with their attributes, texts, and the script's content."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.data, self.stack = "", "", [""]
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag
        self.text += " " if tag in ("dt", "dd", "th", "td", "li", "caption") else ""

    def handle_data(self, data: str) -> None:
        if self.stack[-1] == "script":
            self.data += data
        elif self.stack[-1] != "style":
            self.text += data

    def words(self) -> str:
        return " ".join(self.text.replace("\xa0", " ").split())

    def sections(self) -> list[str | None]:
        return [attributes.get("id") for tag, attributes in self.elements if tag == "h2"]


def full_report() -> Report:
    """The example with every key of the format; its numbers are invented."""
    result: Report = json.loads((DATA / "report_full.json").read_text(encoding="utf-8"))
    return result


def large_report(variants: int, rounds: int) -> Report:
    """The full example with so many variants of so many rounds; the first and the last stay."""
    report = full_report()
    first, *others, last = report["variants"]
    many = [first]
    for number in range(variants - 2):
        variant = others[number % len(others)]
        many.append(variant | {"name": f"{variant['name']} {number}"})
    report["variants"] = [
        variant
        | {
            "rounds": [variant["rounds"][i % 8] * (1 + i / 1e4) for i in range(rounds)],
            "foreign_load": [0.01 + i / 7e4 for i in range(rounds)],
        }
        for variant in [*many, last]
    ]
    return report


def reports() -> st.SearchStrategy[Report]:
    """Any report that the shapes allow, small in its numbers of entries."""
    fixed = {"schema": st.just(2), "created": st.just("2026-11-21T09:30:00+00:00")}
    variants = st.lists(
        _of(REPORT["variants"][0]), min_size=1, max_size=4, unique_by=lambda a: a["name"]
    )
    others = {k: v for k, v in REPORT.items() if k not in ("schema", "created", "variants")}
    return st.builds(
        lambda free, fixed: free | fixed,
        _of(others),
        st.fixed_dictionaries(fixed | {"variants": variants}),
    )


WORDS = [
    "",
    "held",
    "harmed: x",
    "hurt",
    "worse: x",
    "all",
    "cumulative",
    "single",
    "leave-one-out",
    "again",
]
TEXTS = st.text(st.characters(codec=None), max_size=12) | st.sampled_from(
    [*WORDS, "a", "b", "</script>"]
)
NUMBERS = st.none() | st.integers() | st.floats() | st.floats(0, 2) | st.just(10**400)


def _of(shape: Any) -> st.SearchStrategy[Any]:
    if isinstance(shape, dict):
        required = {k: _of(v) for k, v in shape.items() if not k.endswith("?")}
        optional = {k[:-1]: st.none() | _of(v) for k, v in shape.items() if k.endswith("?")}
        return st.fixed_dictionaries(required, optional=optional)
    if isinstance(shape, list):
        if len(shape) == 2:
            return st.tuples(_of(shape[0]), _of(shape[1])).map(list)
        return st.lists(_of(shape[0]), max_size=3)
    if shape is dict:
        leaves = TEXTS | NUMBERS | st.booleans()
        return st.dictionaries(TEXTS, leaves | st.lists(leaves, max_size=2), max_size=3)
    leaves_of = {float: NUMBERS, int: st.integers(-(10**9), 10**9), str: TEXTS}
    leaves_of |= {bool: st.none() | st.booleans(), object: TEXTS | NUMBERS | st.booleans()}
    return leaves_of[shape]
