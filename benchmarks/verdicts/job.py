"""The real job of some milliseconds a step that verdicts are tested on: sums, spelt out."""

from __future__ import annotations

import json
from pathlib import Path

from hasten.recipe.build import prepare_run
from hasten.recipe.schema import Recipe

STEPS_OF_A_TURN, WARM_UP = 2, 12


def resolved_recipe(folder: Path, steps: int) -> Path:
    """A resolved recipe of so many steps with its tokens ready, as an experiment needs it."""
    records = [
        {"instruction": f"Add {a} and {b}.", "output": f"{a + b}" + " indeed" * (a % 5)}
        for a in range(24)
        for b in range(20)
    ]
    data = folder / "sums.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    recipe = Recipe(
        model="deepseek-llm-tiny",
        dataset=str(data),
        eval_data=32,
        vocabulary=300,
        cutoff_len=64,
        global_batch_size=4,
        max_steps=steps,
        device="cpu",
        output=str(folder / "out"),
    )
    prepare_run(recipe, lambda text: None)
    resolved = folder / "out" / "data" / "variants.yaml"
    resolved.write_text(recipe.to_yaml())
    return resolved
