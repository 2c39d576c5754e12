"""Ended and gone on with: the same bits on as many ranks, each example once on another number.

sampler x packing x reading ahead, and streams x workers x packing, on one rank and on two.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hasten.machine.environment import World
from ranks import on_ranks
from techniques.resume_cells import AT, CELLS, EPOCHS, NAMES, SAMPLERS, Cell, resumed

ONE = [cell for cell in CELLS if cell.layout == "one"]
TWO = [cell for cell in CELLS if cell.layout != "one"]
MOVED = [cell for cell in TWO if cell.source in SAMPLERS and cell.layout == "ddp"]
EACH = Counter(dict.fromkeys(NAMES, EPOCHS))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What both ranks found of every cell of theirs."""
    return on_ranks("techniques.resume_cells:on_two", tmp_path_factory.mktemp("ranks"))


def check_same_bits(found: dict[str, Any]) -> None:
    whole = found["whole"]["losses"]
    assert len(set(whole)) == len(whole) > AT + 1
    assert found["begun"]["losses"] == whole[: AT + 1]
    assert found["rest"]["losses"] == whole[AT:]


def test_there_are_as_many_cells_as_promised() -> None:
    assert len(set(map(str, CELLS))) == len(CELLS) >= 24


@pytest.mark.parametrize("cell", ONE, ids=str)
def test_one_rank_goes_on_with_the_same_bits(cell: Cell, tmp_path: Path) -> None:
    found = resumed(cell, World(), tmp_path)
    check_same_bits(found)
    assert Counter(found["whole"]["names"]) == EACH
    assert Counter(found["begun"]["names"] + found["rest"]["names"]) == EACH


@pytest.mark.slow
@pytest.mark.parametrize("cell", TWO, ids=str)
def test_two_ranks_go_on_with_the_same_bits(cell: Cell, ranks: list[Any]) -> None:
    for rank in ranks:
        check_same_bits(rank[str(cell)])
    if cell.layout != "fsdp2":
        assert Counter(names(ranks, cell, "begun") + names(ranks, cell, "rest")) == EACH


@pytest.mark.parametrize("cell", MOVED, ids=str)
def test_another_number_of_ranks_trains_each_record_once(cell: Cell, ranks: list[Any]) -> None:
    fewer = names(ranks, cell, "begun") + names(ranks[:1], cell, "to one")
    assert Counter(fewer) == EACH
    more = names(ranks[:1], cell, "one") + names(ranks, cell, "from one")
    assert Counter(more) == EACH


def names(ranks: list[Any], cell: Cell, part: str) -> list[int]:
    """What these ranks trained, together."""
    return [name for rank in ranks for name in rank[str(cell)][part]["names"]]
