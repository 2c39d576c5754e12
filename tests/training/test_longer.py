"""A run of some epochs goes on to more of them, whatever its schedule; all else is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hasten.errors import InputError
from hasten.recipe.schema import Recipe
from hasten.training.run import train
from sample_data import small


def test_a_finished_run_continues_to_more_epochs(tmp_path: Path) -> None:
    keys = {**small(tmp_path, max_steps=None, epochs=1, max_examples=32, eval_data=4)}
    keys |= {"checkpoint_every": 2, "warmup_steps": 0.25}
    first = train(Recipe(**keys), tell=lambda text: None)
    lines: list[str] = []

    def longer(**changes: Any) -> dict[str, Any]:
        return train(Recipe(**keys | {"resume": "auto", "epochs": 2} | changes), tell=lines.append)

    with pytest.raises(InputError, match=r"learning_rate was 0\.003"):
        longer(learning_rate=1e-3)
    with pytest.raises(InputError, match="has reached 0"):
        longer(extend="constant")
    second = longer()
    assert second["steps"] == 2 * first["steps"]
    (resumed,) = [line for line in lines if line.startswith("resuming from")]
    assert "epochs was 1 and is 2 now" in resumed
    assert "of the peak learning rate" in resumed
    third = longer(epochs=3, min_lr_ratio=0.0)
    assert third["steps"] == 3 * first["steps"]
