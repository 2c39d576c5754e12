"""Pages as programs: their code runs, their recipes are recipes, their links lead somewhere."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from hasten.core.plan import Plan
from hasten.recipe.schema import read_yaml, recipe_from
from hasten.techniques import CATALOGUE

ROOT = Path(__file__).parents[2]
READMES = ("README.md", "README.zh-CN.md")
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
)
MOST_WORDS = 1600  # of a README, tables and code included


class Block(NamedTuple):
    """A fenced block: ``place`` is file:line of its first line."""

    language: str
    text: str
    place: str


def blocks(page: str, language: str) -> Iterator[Block]:
    """The page's fenced blocks of a language, padded so that tracebacks show the page's lines."""
    source = (ROOT / page).read_text(encoding="utf-8")
    for found in re.finditer(r"^```(\w+)\n(.*?)^```$", source, re.DOTALL | re.MULTILINE):
        if found[1] == language:
            line = source[: found.start(2)].count("\n")
            yield Block(found[1], found[2], f"{page}:{line + 1}")


def every(language: str) -> list[Block]:
    return [block for page in PAGES for block in blocks(page, language)]


def linked(page: str) -> set[str]:
    """The Markdown files of the repository that a page links."""
    source = (ROOT / page).read_text(encoding="utf-8")
    targets = (t.partition("#")[0] for t in re.findall(r"\]\(([^)\s]+)\)", source))
    folder = posixpath.dirname(page)
    goals = {posixpath.normpath(posixpath.join(folder, t)) for t in targets if t.endswith(".md")}
    return {goal for goal in goals if (ROOT / goal).is_file()}


@pytest.mark.parametrize("block", every("python"), ids=lambda b: b.place)
def test_python_blocks_run_as_they_stand(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page, line = block.place.split(":")
    lines = "\n" * (int(line) - 1)
    exec(compile(lines + block.text, str(ROOT / page), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("block", every("yaml"), ids=lambda b: b.place)
def test_yaml_blocks_are_recipes(block: Block) -> None:
    shown = read_yaml(block.text, block.place)  # a whole recipe, or the keys that are talked about
    rest = {"model": "deepseek-llm-tiny", "dataset": "stdlib", "max_steps": 1}
    recipe = recipe_from({**rest, **shown}, block.place)
    assert len(Plan.from_list(recipe.plan, CATALOGUE)) == len(recipe.plan)


@pytest.mark.parametrize("page", READMES)
def test_all_pages_are_at_most_two_links_from_a_readme(page: str) -> None:
    seen, front = {page}, {page}
    for _ in range(2):
        front = {goal for origin in front for goal in linked(origin)} - seen
        seen |= front
    pages = {p for p in PAGES if p.startswith("docs/")}
    if page == "README.md":  # which leaves Chinese pages to the Chinese one
        pages = {p for p in pages if not p.endswith(".zh-CN.md")}
    assert sorted(pages - seen) == []


@pytest.mark.parametrize("readme", READMES)
def test_a_readme_has_its_status_on_top_and_is_short(readme: str) -> None:
    source = (ROOT / readme).read_text(encoding="utf-8")
    top = " ".join(" ".join(source.splitlines()[:10]).split())
    assert ("most results are from CPUs" if readme == "README.md" else "大部分结果来自 CPU") in top
    assert len(re.sub(r"<!--.*?-->", "", source, flags=re.DOTALL).split()) <= MOST_WORDS


def test_the_demo_table_has_its_command_date_and_machine() -> None:
    source = (ROOT / "docs/explanation/results.md").read_text(encoding="utf-8")
    table = source.split("<!-- demo table -->\n")[1].split("<!-- /demo table -->")[0]
    assert re.search(r"^`hasten demo`, \d{4}-\d\d-\d\d, machine [ABC]$", table, re.MULTILINE)
    assert "| baseline" in table


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    source = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", source):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        goal = ((ROOT / page).parent / path) if path else ROOT / page
        assert goal.exists(), f"{page}: {target}"
        if anchor:
            assert anchor in _anchors(goal), f"{page}: {target}"


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings as code hosts make them, and those written in HTML."""
    text = page.read_text(encoding="utf-8")
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    written = set(re.findall(r'<a id="([^"]+)">', text))
    return written | {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
