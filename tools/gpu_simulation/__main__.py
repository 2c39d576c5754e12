"""Counts a step of a recipe on a simulated GPU.

python tools/gpu_simulation recipe.yaml --device h100
python tools/gpu_simulation recipe.yaml --device h200 nproc=8
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu_simulation.request import traces
from gpu_simulation.table import table
from hasten.errors import InputError
from hasten.recipe.schema import load_recipe


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the counts of a recipe's step."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="keys of the recipe")
    parser.add_argument("--device", default="h100", help="as hasten estimate --gpu spells it")
    options = parser.parse_args(arguments)
    try:
        recipe = load_recipe(options.recipe, options.changes)
        trace = traces([recipe], options.device)[0]
    except InputError as error:
        parser.error(str(error))
    if isinstance(trace, InputError):
        parser.error(str(trace))
    print(table(trace, str(options.recipe), recipe.cutoff_len))


if __name__ == "__main__":
    main()
