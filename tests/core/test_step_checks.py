"""StepChecks: what isn't finite moves nothing and is written down; replicas that differ are
named.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fault_kit import PlantedLoss
from hasten.core.health import (
    NotFiniteError,
    ReplicasDifferError,
    StepChecks,
    check_comparable,
    compare_replicas,
    fingerprints,
)
from hasten.core.job import GlobalBatch, ShuffledOrder
from hasten.errors import InputError
from hasten.machine.environment import World
from ranks import once_on_ranks
from tiny import examples, language_job, run, session_of
from told import json_lines
from verify_rank_jobs import verified


@pytest.mark.parametrize("planted", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_moves_nothing_even_where_gradients_are(
    tmp_path: Path, planted: float
) -> None:
    """A constant has no gradient: the gradients of this step are finite, the loss isn't."""
    data = examples(24)
    job = language_job(steps=5, data=data, loss=lambda m: PlantedLoss(m, {2: planted}))
    session = session_of(job)
    session.setup.step_checks = StepChecks(quarantine=tmp_path / "quarantined.jsonl")
    found = run(session)
    assert [m.skipped for m in found] == [False, True, False, False, False]
    assert math.isfinite(found[1].grad_norm)
    (line,) = json_lines(tmp_path / "quarantined.jsonl")
    steps = list(ShuffledOrder([r.length for r in data], GlobalBatch(8), job.seed).steps(0))
    assert line["examples"] == steps[1]
    assert (line["step"], line["epoch"], line["own_loss_finite"]) == (2, 0, False)


def test_steps_in_a_row_end_the_run_and_every_one_is_written_down(tmp_path: Path) -> None:
    planted = dict.fromkeys(range(3, 99), math.nan)
    session = session_of(language_job(steps=50, loss=lambda m: PlantedLoss(m, planted)))
    session.setup.step_checks = StepChecks(4, tmp_path / "quarantined.jsonl")
    with pytest.raises(
        NotFiniteError, match=r"4 steps in a row, up to step 6.*quarantined"
    ) as told:
        run(session)
    assert told.value.code == 3
    assert [line["step"] for line in json_lines(tmp_path / "quarantined.jsonl")] == [3, 4, 5, 6]
    assert [line["epoch"] for line in json_lines(tmp_path / "quarantined.jsonl")] == [0, 1, 1, 1]


def test_gradients_that_are_not_finite_move_no_weight_and_end_the_run_after_ten_steps() -> None:
    session = session_of(language_job(steps=50))
    model: Any = session.model
    model.lm_head.weight.register_hook(lambda gradient: gradient * math.nan)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(NotFiniteError, match="10 steps in a row"):
        run(session)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_a_finite_step_between_them_begins_the_count_anew() -> None:
    planted = dict.fromkeys((1, 2, 4, 5, 7, 8), math.nan)
    session = session_of(language_job(steps=9, loss=lambda m: PlantedLoss(m, planted)))
    session.setup.step_checks = StepChecks(3)
    assert sum(m.skipped for m in run(session)) == 6


def test_a_quarantine_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    session = session_of(language_job(steps=3, loss=lambda m: PlantedLoss(m, {2: math.nan})))
    session.setup.step_checks = StepChecks(
        quarantine=tmp_path / "no such folder" / "quarantined.jsonl"
    )
    assert [m.skipped for m in run(session)] == [False, True, False]


@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int8]),
    st.integers(1, 300),
    st.data(),
)
def test_one_flipped_bit_changes_the_fingerprint(dtype: Any, size: int, data: Any) -> None:
    torch.manual_seed(size)
    tensor = (torch.randn(size) * 100).to(dtype)
    before = fingerprints([tensor])
    raw = tensor.view(torch.uint8)
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= 1 << data.draw(st.integers(0, 7))
    assert fingerprints([tensor]) != before


def test_a_fingerprint_is_of_bits_and_not_of_their_place_in_memory() -> None:
    matrix = torch.randn(5, 7)
    assert fingerprints([matrix.T]) == fingerprints([matrix.T.contiguous()])
    assert fingerprints([torch.tensor([math.nan])]) == fingerprints([torch.tensor([math.nan])])


def test_one_rank_has_nothing_to_compare_with() -> None:
    session = session_of(language_job(steps=3))
    session.setup.step_checks = StepChecks(replicas_every=1)
    assert len(run(session)) == 3
    check_comparable(session, 1)


def test_ranks_that_train_apart_are_not_compared() -> None:
    class Apart:
        class setup:  # noqa: N801
            class rank_sync:  # noqa: N801
                diverged = True

    session: Any = Apart()
    check_comparable(session, 0)
    with pytest.raises(InputError, match="train apart"):
        check_comparable(session, 5)


planted = once_on_ranks(verified)


def test_nan_on_one_rank_skips_the_step_on_all_and_names_that_rank(planted: list[Any]) -> None:
    for found in planted:
        assert found["skipped"] == [False, False, True, False, False, False]
        assert found["finite"]
    assert planted[0]["weights"] == planted[1]["weights"]
    of_rank = {line["rank"]: line for line in planted[0]["quarantined"]}
    assert {rank: line["own_loss_finite"] for rank, line in of_rank.items()} == {0: True, 1: False}
    assert {line["step"] for line in of_rank.values()} == {3}
    together = sorted(of_rank[0]["examples"] + of_rank[1]["examples"])
    assert together == planted[0]["step three"]


def test_replicas_that_differ_are_told_on_every_rank_with_the_weight(planted: list[Any]) -> None:
    for found in planted:
        assert "rank 0 and rank 1 differ from each other" in found["flipped"]
        assert "after step 4, first in" in found["flipped"]
        assert "lm_head.weight" in found["flipped"]
        assert "equal after step 2" in found["flipped"]


class Three:
    """A layout of three replicas; rank 0 is real, 1 holds the same, 2 differs in one weight."""

    size = 3

    def all_reduce_world(self, values: Tensor) -> Tensor:
        rows = values.reshape(3, -1, 4)
        rows[1:] = rows[0]
        rows[2, -1, 0] += 1
        return rows.flatten()


def test_of_three_replicas_the_one_that_differs_is_named() -> None:
    session = session_of(language_job(steps=1))
    session.setup.layout = Three()  # type: ignore[assignment]
    session.setup.context = replace(session.setup.context, world=World(0, 0, 3))
    session.progress.step = 8
    with pytest.raises(ReplicasDifferError, match=r"of rank 2 differ .*step 8, first in") as told:
        compare_replicas(session, compared_at=4)
    assert told.value.code == 6
    assert "not newer than step 4" in str(told.value)
