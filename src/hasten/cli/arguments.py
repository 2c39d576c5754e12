"""Arguments that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RecipePath = Annotated[Path, typer.Argument(help="the recipe, a YAML file", metavar="RECIPE")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="changes to the recipe", metavar="[KEY=VALUE]...")
]
