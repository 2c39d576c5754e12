"""The reference pages and the README's picture against the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hasten.core.technique import Technique
from hasten.techniques import CATALOGUE
from script_modules import load

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TECHNIQUES = DOCS / "reference" / "techniques"
SECTIONS = ["Use it when", "Avoid it when", "Needs", "Example"]
MOST_WORDS = 260  # of a technique's page without its generated part
kinds = pytest.mark.parametrize("kind", CATALOGUE, ids=lambda k: k.name())


docs = load("write_docs")
PARTS: dict[Path, dict[str, str]] = docs.parts()


def by_hand(text: str) -> str:
    """A page without its generated parts and code."""
    text = re.sub(r"<!-- generated: (.*?) -->.*?<!-- end: \1 -->", "", text, flags=re.DOTALL)
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("path", PARTS, ids=lambda p: p.stem)
def test_generated_parts_are_those_of_the_code(path: Path) -> None:
    """`python scripts/write_docs.py` writes them."""
    text = path.read_text(encoding="utf-8")
    assert docs.filled(text, PARTS[path], path.name) == text


def test_a_changed_part_and_a_missing_marker_are_noticed() -> None:
    text = "a\n<!-- generated: x -->\nold\n<!-- end: x -->\nb\n"
    assert docs.filled(text, {"x": "new"}, "p") == text.replace("old", "new")
    with pytest.raises(SystemExit, match="p: markers"):
        docs.filled(text, {"y": "new"}, "p")
    with pytest.raises(SystemExit, match="is missing"):
        docs.filled(text.replace("end: x", "end: z"), {"x": "new"}, "p")


def test_a_cell_with_a_pipe_stays_one_cell() -> None:
    assert docs.table(["a"], [["x | y"]]).splitlines()[-1] == "| x \\| y |"


@kinds
def test_every_technique_has_a_page_with_all_its_sections(kind: type[Technique]) -> None:
    text = (TECHNIQUES / f"{kind.name()}.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {kind.name()}\n")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == SECTIONS
    assert "Source: " in text
    assert len(by_hand(text).split()) <= MOST_WORDS
    example = text.split("## Example")[1]
    assert re.search(rf"^```yaml\n.*\b{kind.name()}\b.*?^```$", example, re.DOTALL | re.MULTILINE)


def test_every_page_belongs_to_a_technique() -> None:
    pages = {path.stem for path in TECHNIQUES.glob("*.md")} - {"index"}
    assert pages == {kind.name() for kind in CATALOGUE}


@pytest.mark.parametrize("path", sorted((DOCS / "explanation").glob("*.md")), ids=lambda p: p.stem)
def test_links_to_results_lead_to_a_table(path: Path) -> None:
    names = re.findall(r"benchmarks/results/(\w+)\.md\)", path.read_text(encoding="utf-8"))
    assert [n for n in names if not (ROOT / f"benchmarks/results/{n}.md").is_file()] == []


def test_the_picture_is_that_of_the_tables() -> None:
    gains_picture = load("gains_picture")
    drawn = gains_picture.drawing_of(gains_picture.charts())
    assert gains_picture.PICTURE.read_text(encoding="utf-8") == drawn


def test_every_chart_of_the_picture_names_its_processor() -> None:
    headings = [chart.heading for chart in load("gains_picture").charts()]
    processors = ["H200", r"H200; AMD EPYC \(AVX2\), 2 cores", "2 cores Intel Xeon with AMX"]
    for heading, processor in zip(headings, processors, strict=True):
        assert re.search(processor, heading)


def test_bars_of_a_gpu_have_the_values_of_its_table() -> None:
    gains_picture = load("gains_picture")
    rows = [
        f"| {name} | 27 | {1000 * at:,} [{900 * at:,}, 1,{at}00,000] | the Trainer: 4 [3, 7.2] |"
        for at, name in enumerate(gains_picture.GPU_ROWS, start=1)
    ]
    page = "\n".join([*rows, "", "| lora-v2-lite, tokens/s | 1 | 2 |"])  # of another table
    bars = gains_picture.gpu_bars(page)
    assert [(bar.value, bar.low) for bar in bars] == [(1e3 * at, 9e2 * at) for at in range(1, 7)]
    assert bars[0].high == 1_100_000
    speed_up = "\n".join(
        f"| {name} | 2.5 [2.25, 3] | 1e-6 |" for name in gains_picture.TRAINER_ROWS
    )
    ratios = gains_picture.trainer_bars(page, speed_up)
    assert [(bar.value, bar.low, bar.high) for bar in ratios] == [(4, 3, 7.2)] + [
        (2.5, 2.25, 3)
    ] * 3


def test_a_bar_begins_where_the_one_above_ends() -> None:
    rows = ["| + a | 2.00× [1.5, 2.5] | helped | 2.00× [1.50, 2.50] | 1 |"]
    rows += ["| + b | 0.95× [0.9, 1.1] | undecided | 1.90× [1.40, 2.40] | 1 |"]
    bars = load("gains_picture").demo_bars(
        "\n".join(["<!-- demo table -->", *rows, "<!-- /demo table -->"])
    )
    assert [bar.start for bar in bars] == [None, 1.0, 2.0]
    assert [bar.tone for bar in bars] == ["base", "gain", "other"]
    assert (bars[2].value, bars[2].low, bars[2].high) == (1.9, 1.4, 2.4)
