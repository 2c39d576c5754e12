"""A hook of mkdocs: the site has the pages that lie outside ``docs/``, and every card and page.

The same Markdown is read on a code host, where links go up from ``docs/`` to the README, and on the
site, where nothing lies above it. Links are rewritten for the site; one to a file that the site
doesn't have (sources, tests) becomes its name. Source: mkdocs' "Hooks" and "Plugins" pages.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = ("README.md", "README.zh-CN.md", "CONTRIBUTING.md", "CHANGELOG.md")
LINK = re.compile(r"\[([^\]\[]*)\]\(([^)\s]+)\)")


def published(root: Path = ROOT) -> dict[str, str]:
    """Path in the repository -> path on the site, of every file that the site has."""
    found = {name: name for name in OUTSIDE if (root / name).is_file()}
    for path in sorted((root / "docs").rglob("*")):
        if path.is_file():
            found[path.relative_to(root).as_posix()] = path.relative_to(root / "docs").as_posix()
    found |= {f"examples/{p.name}": f"examples/{p.name}" for p in (root / "examples").glob("*.*")}
    notes = (root / "notebooks").glob("*.ipynb")
    return found | {f"notebooks/{p.name}": f"notebooks/{p.name}" for p in notes}


def rewritten(text: str, place: str, pages: dict[str, str]) -> str:
    """The Markdown of the repository's file ``place`` with the site's links."""

    def link(found: re.Match[str]) -> str:
        words, target = found[1], found[2]
        path, hash_, anchor = target.partition("#")
        if not path or ":" in path:
            return found[0]
        goal = posixpath.normpath(posixpath.join(posixpath.dirname(place), path))
        if goal == "docs/cards":
            goal = "docs/how-it-works.md"
            hash_, anchor = "#", "techniques-and-slots"
        if goal not in pages:
            return words if words.startswith("`") else f"{words} (`{goal}`)"
        here = posixpath.dirname(pages[place]) or "."
        return f"[{words}]({posixpath.relpath(pages[goal], here)}{hash_}{anchor})"

    return LINK.sub(link, text)


def nav_with_cards(nav: list[Any], cards: list[str], rest: list[str]) -> list[Any]:
    """The nav with the cards in the place of the word ``cards``, and pages it forgot at the end."""
    filled = [
        {key: [f"cards/{name}.md" for name in cards] if value == "cards" else value}
        for entry in nav
        for key, value in entry.items()
    ]
    return [*filled, *([{"More": rest}] if rest else [])]


def card_order(root: Path = ROOT) -> list[str]:
    """The cards in the order of the README's table, which is that of the slots."""
    readme = (root / "README.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| \[\w+\]\(docs/cards/(\w+)\.md\)", readme, re.MULTILINE)
    there = {path.stem for path in (root / "docs" / "cards").glob("*.md")}
    return [*(name for name in told if name in there), *sorted(there - set(told))]


def listed(nav: list[Any]) -> set[str]:
    """Every page that a nav names."""
    found: set[str] = set()
    for entry in nav:
        for value in entry.values():
            found |= {value} if isinstance(value, str) else listed_in(value)
    return found


def listed_in(entries: list[Any]) -> set[str]:
    """The pages of a section."""
    found: set[str] = set()
    for entry in entries:
        found |= {entry} if isinstance(entry, str) else listed([entry])
    return found


def on_config(config: Any) -> Any:
    """Fill the nav before the files are looked for."""
    names = {site for site in published().values() if site.endswith(".md")}
    rest = sorted(n for n in names - listed(config["nav"]) if not n.startswith("cards/"))
    config["nav"] = nav_with_cards(config["nav"], card_order(), rest)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the files from outside ``docs/``."""
    from mkdocs.structure.files import File

    for name, site in published().items():
        if not name.startswith("docs/"):
            content = (ROOT / name).read_bytes()
            files.append(File.generated(config, site, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite a page's links."""
    pages = published()
    by_site = {site: name for name, site in pages.items()}
    return rewritten(markdown, by_site[page.file.src_uri], pages)
