"""``hasten import``: converts another trainer's configuration, and lists the use of each key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hasten.cli.arguments import Overrides, output_option, writable
from hasten.cli.output import say, show_table
from hasten.errors import InputError
from hasten.formatting import shown
from hasten.machine.files import write_result

if TYPE_CHECKING:
    from hasten.recipe.importers import ImportedRecipe
    from hasten.recipe.schema import Recipe

ORDER = {"contradicts": 0, "unmapped": 1, "mapped": 2, "needless": 3}
TITLES = {
    "contradicts": "contradicts",
    "unmapped": "not taken over",
    "mapped": "taken over",
    "needless": "not needed",
}


def import_(
    config: Annotated[Path, typer.Argument(help="YAML or JSON of another trainer")],
    overrides: Overrides = None,
    output: Annotated[Path | None, output_option("the recipe; default: it is printed")] = None,
) -> None:
    """Convert another trainer's configuration into a recipe.

    Supported: LLaMA-Factory, axolotl, ms-swift, TRL, accelerate and DeepSpeed. The global batch is
    passes x examples x processes: give nproc=N if the file was written for N processes.
    """
    from hasten.recipe.importers import read
    from hasten.recipe.yaml_reader import read_overrides

    writable("--output", output)
    if output is not None and output.exists():
        raise InputError(f"{output} exists; name a file that doesn't")
    changes = read_overrides(overrides or [])
    nproc = changes.get("nproc", 1)
    if not isinstance(nproc, int) or isinstance(nproc, bool) or nproc < 1:
        raise InputError(f"nproc={nproc}: give a number of processes from 1 on")
    imported = read(config, nproc)
    imported.values.update(changes)
    recipe = imported.check(f"the recipe from {config}")
    text = imported.to_yaml(config.name)
    show(imported, config)
    if output is not None:
        write_result(output, text)
        say(f"saved: {output}")
    else:
        say(f"\n{text}", end="")
    tell_format(recipe)
    if imported.missing:
        say(f"to be filled in before it trains: {', '.join(imported.missing)}")
    say(faster(imported, output))


def faster(imported: ImportedRecipe, output: Path | None) -> str:
    """Returns a sentence on how to train the recipe faster.

    An import has only the techniques that its file requires.
    """
    sentence = (
        f"faster: `hasten train {output or 'RECIPE'} plan=auto` chooses techniques by measuring"
    )
    return f"{sentence} them" + (", instead of this plan" if imported.values.get("plan") else "")


def tell_format(recipe: Recipe) -> None:
    """Prints a line on the recipe's 16-bit format if it is left out or may gain nothing here."""
    from hasten.core import context as facts
    from hasten.recipe.build import requested_plan, skip_sentence
    from hasten.techniques.precision import Autocast, BF16MasterWeights, why_no_gain

    context = facts.seen_at_start()
    if recipe.device == "cpu":
        context = replace(context, device="cpu")
    for technique in requested_plan(recipe):
        if not isinstance(technique, Autocast | BF16MasterWeights):
            continue
        is_bf16 = isinstance(technique, BF16MasterWeights) or technique.dtype == "bf16"
        if skipped := skip_sentence(recipe, technique, context):
            say(f"on this machine: {skipped}")
        elif is_bf16 and (reason := why_no_gain(context)):
            sentence = "bf16 is kept, since the file requests it; hasten wouldn't choose it here"
            say(f"{sentence}: {reason}")


def show(imported: ImportedRecipe, path: Path) -> None:
    """Prints a row for each key; keys that need the user's attention come first."""
    columns = ("", "key", "value", "use")
    rows = [
        (TITLES[row.fate], *map(shown, (row.key, row.value, row.explanation)))
        for row in sorted(imported.rows, key=lambda row: ORDER[row.fate])
    ]
    show_table(columns, rows, shown(f"{path}: {imported.format}"), unbroken=("key",))
