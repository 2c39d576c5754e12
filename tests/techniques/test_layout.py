"""What every layout owes: a sum over ranks is a new tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from hasten.machine.environment import World
from hasten.parts.comm import groups
from hasten.techniques.layout.ddp import Replicas
from hasten.techniques.layout.experts import ExpertsInDDP

TWO = World(0, 0, 2)


@pytest.mark.parametrize("layout", [Replicas(TWO, 25, "cpu"), ExpertsInDDP(TWO, 2, 25, "cpu")])
def test_a_sum_over_ranks_leaves_what_was_given(
    layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.mul_(2))  # as if of two ranks
    monkeypatch.setattr(groups, "reaches_host", lambda group=None: True)
    given = torch.tensor([1.0, 3.0], dtype=torch.float64)
    assert (
        layout.all_reduce_data(given).tolist()
        == layout.all_reduce_world(given).tolist()
        == [2.0, 6.0]
    )
    assert given.tolist() == [1.0, 3.0]
