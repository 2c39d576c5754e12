"""The documentation site without mkdocs: its pages, its links, and the commands that pages show."""

from __future__ import annotations

import functools
import pydoc
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from docs.test_readme import PAGES, ROOT, Block, every
from hasten.cli.main import app
from hasten.recipe.schema import Recipe
from script_modules import load

site = load("site_pages")
USAGE_ERROR = typer.BadParameter.__mro__[1]  # of all errors of a command line; typer has no name


def nav() -> list[Any]:
    found: list[Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    return found


def test_the_nav_has_every_page_and_no_other() -> None:
    full = site.full_nav(nav(), site.technique_pages())
    assert site.unlisted(full) == []
    assert site.listed(full) <= set(site.published().values())


def test_a_page_outside_the_nav_ends_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "published", lambda root=ROOT: {"docs/new.md": "new.md"})
    with pytest.raises(ValueError, match="nav lacks new"):
        site.on_config({"nav": nav()})


def test_technique_pages_have_the_order_of_the_index(tmp_path: Path) -> None:
    folder = tmp_path / "docs/reference/techniques"
    folder.mkdir(parents=True)
    for name in ("one", "two"):
        (folder / f"{name}.md").write_text("")
    (folder / "index.md").write_text("| [two](two.md), [one](one.md) |\n")
    names = [path.rpartition("/")[2] for path in site.technique_pages(tmp_path)]
    assert names == ["index.md", "two.md", "one.md"]
    (folder / "three.md").write_text("")
    with pytest.raises(ValueError, match="lacks three"):
        site.technique_pages(tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere_on_the_site_too(page: str) -> None:
    pages = site.published()
    if page not in pages:
        pytest.skip("not a page of the site")
    text = site.rewritten((ROOT / page).read_text(encoding="utf-8"), page, pages)
    here = (Path("/") / pages[page]).parent
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        path = target.partition("#")[0]
        if path and ":" not in path:
            goal = Path("/", *_normal(here / path)).relative_to("/").as_posix()
            assert goal in pages.values(), f"{page}: {target}"


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("[a](../../README.md#b)", "[a](../README.md#b)"),
        ("[a](../reference/techniques/packed.md)", "[a](../reference/techniques/packed.md)"),
        ("[a](https://x.org/y)", "[a](https://x.org/y)"),
        ("[a](#here)", "[a](#here)"),
        ("[a](../../src/hasten/training/run.py)", "a (`src/hasten/training/run.py`)"),
        ("[`a`](../../src/hasten/training/run.py)", "`a`"),
    ],
)
def test_links_are_rewritten_for_the_site(link: str, expected: str) -> None:
    assert site.rewritten(link, "docs/explanation/why.md", site.published()) == expected


def called(block: str) -> Iterator[list[str]]:
    """Words of each ``hasten ...`` of a block: what is shown, up to a pipe or another program."""
    for line in block.replace("\\\n", " ").splitlines():
        line = re.sub(r"^.* (-m|--module) (?=hasten )", "", line)
        if not re.match(r"^(\w+=\$\()?hasten ", line):
            continue
        words = shlex.split(line.removesuffix(")").partition("$(")[2] or line, comments=True)
        ends = [i for i, word in enumerate(words) if word in ("|", "--", "&&", ">", "&")]
        yield words[1 : min(ends, default=len(words))]


@functools.cache
def top_command() -> Any:
    """The command line; to build it takes a tenth of a second."""
    return typer.main.get_command(app)


def parse(words: Sequence[str], complete: bool) -> None:
    """Parses a command as ``hasten`` does; raises an error for what it would refuse.

    Args:
        words: behind ``hasten``.
        complete: required arguments are there, and values are those of the options.
    """
    command, rest = top_command(), list(words)
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest.pop(0)]
    if rest == ["--help"] or hasattr(command, "commands"):
        options = {option for each in command.params for option in each.opts}
        assert {*rest} <= {*options, "--help", "-h"}, rest
        return
    with command.make_context(command.name, rest, resilient_parsing=not complete) as context:
        changes = context.params.get("overrides") or []
        assert {change.partition("=")[0] for change in changes} <= {*Recipe.model_fields}


@pytest.mark.parametrize("block", every("bash"), ids=lambda b: b.place)
def test_commands_that_are_shown_parse_and_change_keys_that_exist(block: Block) -> None:
    """It isn't run: it would train for minutes, want data of the reader's, or a cluster."""
    # <words> in angle brackets stand for what the reader fills in.
    shown = re.sub(r"<[a-z][^>\n]*>", "FILLED_IN", block.text)
    parsed = subprocess.run(["bash", "-n"], input=shown, text=True, capture_output=True)
    assert parsed.returncode == 0, parsed.stderr
    for words in called(shown):
        parse(words, complete=True)


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_files_in_sentences_exist(page: str) -> None:
    source = (ROOT / page).read_text(encoding="utf-8")
    for command in re.findall(r"`hasten ([a-z-][^`]*)`", source):
        parse(shlex.split(command), complete=False)
    folders = "src|tests|tools|benchmarks|scripts|deploy"
    for path in {*re.findall(rf"`((?:{folders})/[\w./-]+)`", source)}:
        assert "NAME" in path or (ROOT / path).exists(), path


@pytest.mark.slow  # imports Lightning
def test_python_names_in_sentences_exist() -> None:
    pages = "".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    names = {*re.findall(r"\bhasten(?:\.[a-z]\w*)+", pages)}
    assert {name for name in names if pydoc.locate(name) is None} == set()


@pytest.mark.parametrize("wrong", ["nothing", "train", "train r.yaml --budget 1h", "keys --json=3"])
def test_a_wrong_command_is_noticed(wrong: str) -> None:
    with pytest.raises((AssertionError, USAGE_ERROR)):
        parse(wrong.split(), complete=True)
    with pytest.raises(AssertionError):
        parse(["train", "r.yaml", "batch=3"], complete=True)


def test_the_docs_extra_is_pinned() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r"^docs = \[(.*)\]$", text, re.MULTILINE)
    assert found
    assert all("==" in requirement for requirement in found[1].split(","))


def _normal(path: Path) -> list[str]:
    parts: list[str] = []
    for part in path.parts[1:]:
        if part == "..":
            parts.pop()
        elif part != ".":
            parts.append(part)
    return parts
