"""A hook of mkdocs: the site has pages from outside ``docs/``, and one page per technique.

The same Markdown is read on a code host, where links lead up from ``docs/`` to the README, and on
the site, which has no files above it. Links are rewritten for the site. A link to a file that isn't
part of the site becomes the name of the file. Source: mkdocs' "Hooks" and "Plugins" pages.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = ("README.md", "README.zh-CN.md", "CONTRIBUTING.md", "CHANGELOG.md")
TECHNIQUES = "reference/techniques"  # a folder of the site; the word `techniques` in the nav
LINK = re.compile(r"\[([^\]\[]*)\]\(([^)\s]+)\)")


def published(root: Path = ROOT) -> dict[str, str]:
    """Path in the repository -> path on the site, of every file that the site has."""
    pages = {name: name for name in OUTSIDE if (root / name).is_file()}
    for path in sorted((root / "docs").rglob("*")):
        if path.is_file():
            pages[path.relative_to(root).as_posix()] = path.relative_to(root / "docs").as_posix()
    pages |= {f"examples/{p.name}": f"examples/{p.name}" for p in (root / "examples").glob("*.*")}
    notes = (root / "notebooks").glob("*.ipynb")
    return pages | {f"notebooks/{p.name}": f"notebooks/{p.name}" for p in notes}


def rewritten(text: str, page: str, pages: dict[str, str]) -> str:
    """The Markdown of the repository's file ``page`` with the site's links."""

    def link(match: re.Match[str]) -> str:
        label, target = match[1], match[2]
        path, hash_, anchor = target.partition("#")
        if not path or ":" in path:
            return match[0]
        goal = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
        if goal not in pages:
            return label if label.startswith("`") else f"{label} (`{goal}`)"
        folder = posixpath.dirname(pages[page]) or "."
        return f"[{label}]({posixpath.relpath(pages[goal], folder)}{hash_}{anchor})"

    return LINK.sub(link, text)


def technique_pages(root: Path = ROOT) -> list[str]:
    """The technique pages of the site: the index, then the order of the index's table.

    Raises:
        ValueError: a page is missing in the table.
    """
    folder = root / "docs" / TECHNIQUES
    index = (folder / "index.md").read_text(encoding="utf-8")
    names = ["index", *dict.fromkeys(re.findall(r"\]\((\w+)\.md\)", index))]
    missing = {path.stem for path in folder.glob("*.md")} - set(names)
    if missing:
        raise ValueError(f"{TECHNIQUES}/index.md lacks {', '.join(sorted(missing))}")
    return [f"{TECHNIQUES}/{name}.md" for name in names]


def full_nav(nav: list[Any], techniques: list[str]) -> list[Any]:
    """The nav with the technique pages instead of the word ``techniques``."""
    filled: list[Any] = []
    for entry in nav:
        if isinstance(entry, str):
            filled.append(entry)
            continue
        for key, value in entry.items():
            if isinstance(value, list):
                filled.append({key: full_nav(value, techniques)})
            else:
                filled.append({key: techniques if value == "techniques" else value})
    return filled


def listed(nav: list[Any]) -> set[str]:
    """Every page that a nav names."""
    pages: set[str] = set()
    for entry in nav:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            pages |= {value} if isinstance(value, str) else listed(value)
    return pages


def unlisted(nav: list[Any], root: Path = ROOT) -> list[str]:
    """Pages of the site that a full nav lacks; example pages are reached by links."""
    pages = {site for site in published(root).values() if site.endswith(".md")}
    return sorted(page for page in pages - listed(nav) if not page.startswith("examples/"))


def on_config(config: Any) -> Any:
    """Fill the nav before files are collected.

    Raises:
        ValueError: a page is not part of the nav.
    """
    config["nav"] = full_nav(config["nav"], technique_pages())
    if missing := unlisted(config["nav"]):
        raise ValueError(f"mkdocs.yml: nav lacks {', '.join(missing)}: add each to a section")
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
