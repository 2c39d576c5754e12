"""The READMEs as programs: their code runs, their recipes are recipes, their tables agree."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from hasten.cli.main import app
from hasten.core.plan import Plan
from hasten.recipe.schema import read_yaml, recipe_from
from hasten.techniques import CATALOGUE

ROOT = Path(__file__).parents[2]
READMES = ("README.md", "README.zh-CN.md")
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
)
TABLES = (*READMES, "docs/measurements.md")  # pages that show the demo's table


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


def demo_table(page: str) -> str:
    source = (ROOT / page).read_text(encoding="utf-8")
    return source.split("<!-- demo table -->\n")[1].split("<!-- /demo table -->")[0]


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
def test_a_readme_links_every_page(page: str) -> None:
    """But for the Chinese quick start, which the English README leaves to the Chinese one."""
    source = (ROOT / page).read_text(encoding="utf-8")
    names = {path.name for path in (ROOT / "docs").glob("*.md")} - {"quickstart.zh-CN.md"}
    assert sorted(name for name in names if f"](docs/{name}" not in source) == []


@pytest.mark.parametrize("page", PAGES)
def test_every_command_that_is_named_exists(page: str) -> None:
    commands = {c.name or c.callback.__name__ for c in app.registered_commands if c.callback}
    commands |= {str(group.name) for group in app.registered_groups}
    source = (ROOT / page).read_text(encoding="utf-8")
    started = "".join(block.text for block in blocks(page, "bash"))
    named = {*re.findall(r"`hasten ([a-z]+)", source)}
    named |= {*re.findall(r"^(?:.* -m )?hasten ([a-z]+)", started, re.MULTILINE)}
    assert named <= commands


@pytest.mark.parametrize("readme", READMES)
def test_a_readme_lists_every_command_and_every_card(readme: str) -> None:
    source = (ROOT / readme).read_text(encoding="utf-8")
    for command in app.registered_commands:
        assert command.callback
        assert f"| `hasten {command.name or command.callback.__name__}" in source
    for group in app.registered_groups:
        assert group.typer_instance
        for command in group.typer_instance.registered_commands:
            assert f"| `hasten {group.name} {command.name}" in source
    for kind in CATALOGUE:
        assert f"(docs/cards/{kind.name()}.md)" in source


def test_both_readmes_show_the_same_code() -> None:
    ours, theirs = ([_without_comments(b) for b in blocks(r, "python")] for r in READMES)
    assert len(ours) >= 2
    assert ours == theirs
    ours, theirs = ([_without_comments(b) for b in blocks(r, "yaml")] for r in READMES)
    assert ours == theirs


def test_the_demo_table_is_the_same_wherever_it_stands() -> None:
    tables = {demo_table(page) for page in TABLES}
    assert len(tables) == 1


def test_the_demo_table_says_its_command_date_and_machine() -> None:
    table = demo_table("README.md")
    assert re.search(r"^`hasten demo`, \d{4}-\d\d-\d\d, \d+ cores .*torch \d", table, re.MULTILINE)
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


def _without_comments(block: Block) -> str:
    return re.sub(r" +#.*$", "", block.text, flags=re.MULTILINE)


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings as code hosts make them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
