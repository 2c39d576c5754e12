"""A checkpoint of a model in pieces is that of one process, whatever the mesh it was written on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ranks import on_ranks
from techniques.layout_state_jobs import CASES, ON_FOUR

WITHIN = 5e-6  # float32, a step of AdamW after three


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks("techniques.layout_state_jobs:on_two", tmp_path_factory.mktemp("pieces"))


def check(resumed: dict[str, Any], names: Any) -> None:
    for name in names:
        for way in ("ranks to ranks", "one to ranks", "ranks to one"):
            case = resumed[f"{name}: {way}"]
            assert case["weights"] < WITHIN, (name, way)
            assert case["losses"] < WITHIN, (name, way)


@pytest.mark.slow
def test_a_run_goes_on_with_pieces_and_without(found: list[Any]) -> None:
    """A vocabulary of 97 on two ranks: pieces aren't of equal size."""
    check(found[0]["resumed"], CASES)


@pytest.mark.slow
def test_a_run_goes_on_in_copies_of_pieces_and_pieces_of_pieces(tmp_path: Path) -> None:
    check(on_ranks("techniques.layout_state_jobs:on_four", tmp_path, 4)[0]["resumed"], ON_FOUR)


def test_what_does_not_fit_together_is_refused_on_every_rank(found: list[Any]) -> None:
    for rank in found:
        moments, masters = rank["refused"]
        assert moments.startswith("checkpoints: compact_adamw keeps moments in blocks of its own")
        assert "21 master weights and the plan's precision keeps 0" in masters
