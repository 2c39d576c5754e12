"""``hasten import``: another trainer's configuration as a recipe, with what became of each key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hasten.cli.arguments import writable
from hasten.core import facts
from hasten.errors import InputError
from hasten.recipe.importers import ImportedRecipe, read
from hasten.recipe.yaml_reader import read_overrides
from hasten.techniques.precision import why_no_gain

ORDER = {"contradicts": 0, "unmapped": 1, "mapped": 2, "needless": 3}
TITLES = {
    "contradicts": "contradicts",
    "unmapped": "not taken over",
    "mapped": "taken over",
    "needless": "not needed",
}


def import_(path: Path, overrides: Sequence[str], output: Path | None, nproc: int) -> None:
    """Print the table, write the recipe; a recipe that lacks something is written with the gap.

    Raises:
        InputError: an unusable file, or a recipe that its own keys forbid; nothing is written.
    """
    writable("--output", output)
    if output is not None and output.exists():
        raise InputError(f"{output} exists; name a file that doesn't")
    found = read(path, nproc)
    found.values.update(read_overrides(overrides))
    found.check(f"the recipe from {path}")
    text = found.to_yaml(path.name)
    show(found, path)
    if output is not None:
        output.write_text(text)
        print(f"saved: {output}")
    else:
        print(f"\n{text}", end="")
    tell_format(found.values)
    if found.missing:
        print(f"to be filled in before it trains: {', '.join(found.missing)}")
    print(faster(found, output))


def faster(found: ImportedRecipe, output: Path | None) -> str:
    """How the recipe trains faster: an import has the techniques that its file asks for alone.

    The micro-batch of the file stands in the plan, so it doesn't keep packing from paying either.
    """
    words = f"faster: `hasten train {output or 'RECIPE'} plan=auto` chooses techniques by measuring"
    return words + (" them, in place of this plan" if found.values.get("plan") else " them")


def tell_format(values: Mapping[str, Any]) -> None:
    """A line on bf16, if the file asks for it and no gain is certain on this processor."""
    asked = [{entry: {}} if isinstance(entry, str) else entry for entry in values.get("plan") or []]
    settings = {name: given or {} for entry in asked for name, given in entry.items()}
    autocast = settings.get("autocast", {"dtype": "none"}).get("dtype", "bf16")
    if "bf16_master_weights" not in settings and autocast != "bf16":
        return
    if why := why_no_gain(facts.seen_at_start()):
        print(f"bf16 is kept, since the file asks for it; hasten wouldn't choose it here: {why}")


def show(found: ImportedRecipe, path: Path) -> None:
    """A row for each key, what needs a look first."""
    table = Table(title=f"{path}: {found.format}", title_justify="left", show_edge=False)
    for name in ("", "key", "value", "what becomes of it"):
        table.add_column(name, overflow="fold", no_wrap=name == "key")
    for row in sorted(found.rows, key=lambda row: ORDER[row.fate]):
        table.add_row(TITLES[row.fate], row.key, row.value, row.words)
    console = Console(highlight=False, width=None if Console().is_terminal else 120)
    console.print(table, markup=False)
