"""FSDP2: the same losses, norms and weights as one process, in a fraction of its memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hasten.machine.environment import World
from hasten.parts.comm import groups
from hasten.techniques.layout.fsdp import FSDP2
from hasten.techniques.layout.ranks import RanksLayout
from ranks import on_ranks, once_on_ranks
from techniques.sharded_rank_jobs import (
    CASES,
    DROPPING,
    Case,
    by_hand,
    check_same,
    held_bytes,
    outcome,
    sharded,
)
from tiny import job_context

# Of float32 and less; elsewhere all is float64, save for what a router computes in float32.
TOLERANCE = {
    "half a format": 2e-2,
    "recomputed, averaged": 2e-5,
    "adapters, own kernels": 2e-5,
    "adapters of experts": 1e-7,
}


ranks = once_on_ranks(sharded)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_with_pieces_come_to_what_one_process_comes_to(
    ranks: list[Any], name: str, tmp_path: Path
) -> None:
    found, close = ranks[0][name], TOLERANCE.get(name, 1e-7 if "whole" in name else 1e-12)
    alone = outcome(CASES[name].session(World()), None if "adapters" in name else tmp_path)
    check_same(found, alone, close)
    assert found["norms"][0] > CASES[name].job().max_grad_norm  # type: ignore[operator]
    assert all(found["proofs"].values())


def test_the_eval_loss_of_averaged_pieces_is_that_of_averaged_weights(
    ranks: list[Any],
) -> None:
    alone = outcome(CASES["recomputed, averaged"].session(World()))["average"]
    said = ranks[0]["recomputed, averaged"]["average"]
    assert "eval loss" in alone
    assert said.split("; ")[1] == alone.split("; ")[1]


@pytest.mark.parametrize("name", CASES)
def test_ranks_agree_and_each_holds_a_part(ranks: list[Any], name: str) -> None:
    first, second = (r[name] for r in ranks)
    assert first["losses"] == second["losses"]
    assert first["norms"] == second["norms"]
    alone = CASES[name].session(World())
    learns = sum(p.numel() for p in alone.model.parameters() if p.requires_grad)
    assert first["pieces"] + second["pieces"] == learns


def test_every_rank_decides_by_the_metrics_that_the_first_measured(ranks: list[Any]) -> None:
    """Or one of them would save or stop alone, and wait for the others forever."""
    for found in (rank["chosen"] for rank in ranks):
        assert found["metrics"] == [{"quality": value} for value in (1.0, 2.0, 0.0)]
        assert found["best"] == [1, 2]


def test_what_cannot_work_on_pieces_is_refused_on_every_rank(ranks: list[Any]) -> None:
    for found in ranks:
        assert "needs whole matrices" in found["matrices"]


def test_four_ranks_hold_a_quarter_and_two_copies_a_half(tmp_path: Path) -> None:
    for found in on_ranks(held_bytes, tmp_path, 4):
        whole = found["ddp"]["bytes"]
        assert found["fsdp2"]["bytes"] <= 0.35 * whole
        assert found["copies"]["bytes"] <= 0.6 * whole
        assert "dp 2 x shard 2 " in found["copies"]["proof"]
        for name in ("fsdp2", "copies"):
            assert found[name]["losses"] == pytest.approx(found["ddp"]["losses"], rel=1e-5)


def test_what_is_offloaded_takes_nothing_of_the_device() -> None:
    context = job_context(Case(FSDP2()).job(), world=World(size=2))
    whole = 16 * context.model.parameters
    on_gpu = replace(context, device="cuda")
    assert FSDP2().forecast(on_gpu).resident_bytes == -whole / 2
    assert FSDP2(offload=True).forecast(on_gpu).resident_bytes == -whole


def test_one_rank_needs_no_pieces() -> None:
    session = Case(FSDP2()).session(World())
    assert not FSDP2().check_effect(session).effective
    assert FSDP2().forecast(session.setup.context).comm_bytes == 1.0


@pytest.mark.parametrize("name", DROPPING)
def test_dropout_falls_where_each_rank_s_seed_says(ranks: list[Any], name: str) -> None:
    loss, norm = by_hand(DROPPING[name], 2)
    for found in (rank["dropped"][name] for rank in ranks):
        assert found["loss"] == pytest.approx(loss, rel=1e-12)
        assert found["norm"] == pytest.approx(norm, rel=1e-12)
        assert found["again"] == found["loss"]
    alike, _ = by_hand(DROPPING[name], 1)  # the same examples, other masks
    assert loss != pytest.approx(alike, rel=1e-9)


def test_a_sum_over_ranks_leaves_what_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = RanksLayout(World(0, 0, 2))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.mul_(2))  # as if of two ranks
    monkeypatch.setattr(groups, "reaches_host", lambda group=None: True)
    given = torch.tensor([1.0, 3.0], dtype=torch.float64)
    assert (
        layout.all_reduce_data(given).tolist()
        == layout.all_reduce_world(given).tolist()
        == [2.0, 6.0]
    )
    assert given.tolist() == [1.0, 3.0]
