"""Reference log-probabilities of preference pairs, and training with them."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from hasten.core.job import Job
from hasten.core.loop import evaluate
from hasten.core.setup import Session
from hasten.core.step import training
from hasten.techniques.batch import GradientAccumulation
from preference_jobs import BETA, Pairs, log_ratio, pair_job, plain_steps, some_pairs
from tiny import session_of, tiny_model


def build() -> nn.Module:
    return tiny_model(dtype=torch.float64)


def job_of(pairs: Pairs, eval_pairs: Pairs, steps: int = 4) -> Job:
    return pair_job(build, pairs, eval_pairs, steps)


def run(session: Session) -> list[float]:
    return [metrics.loss for metrics in training(session)]


@pytest.mark.parametrize("is_prepared", [True, False])
def test_steps_are_those_of_a_loop_with_a_frozen_copy(is_prepared: bool, tmp_path: Path) -> None:
    pairs = some_pairs(16)
    job = job_of(pairs, some_pairs(3, seed=1))
    session = session_of(job, GradientAccumulation(micro_batch_size=3))
    if is_prepared:
        job.reference.prepare(session, tmp_path / "sums", lambda text: None)
    losses = run(session)
    assert losses[0] == pytest.approx(math.log(2), abs=1e-14)
    assert losses == pytest.approx(plain_steps(job, pairs, 4), rel=1e-12)


def test_an_evaluation_has_rewards_against_the_initial_weights(tmp_path: Path) -> None:
    pairs, held_out = some_pairs(16), some_pairs(5, seed=1)
    session = session_of(job_of(pairs, held_out))
    before = evaluate(session)
    assert before.eval_loss == pytest.approx(math.log(2), abs=1e-14)
    assert before.metrics["reward_margin"] == 0
    assert before.metrics["log_ratio"] == 0
    start = copy.deepcopy(session.model)
    run(session)
    after = evaluate(session)
    ratios = torch.stack(
        [
            torch.stack([log_ratio(session.model, start, row) for row in pair.rows])
            for pair in held_out
        ]
    ).detach()
    margins = BETA * (ratios[:, 0] - ratios[:, 1])
    tokens = sum(pair.trained_tokens for pair in held_out)
    assert after.metrics["reward_margin"] == pytest.approx(float(margins.mean()), rel=1e-10)
    assert after.metrics["reward_accuracy"] == float((margins > 0).double().mean())
    assert after.metrics["log_ratio"] == pytest.approx(float(ratios.sum()) / tokens, rel=1e-10)


def test_stored_sums_are_used_by_the_same_policy_alone(tmp_path: Path) -> None:
    pairs, file = some_pairs(16), tmp_path / "sums"
    told: list[str] = []
    first = job_of(pairs, Pairs())
    first.reference.prepare(session_of(first), file, told.append)
    assert len(told) == 1
    again = job_of(pairs, Pairs())
    again.reference.prepare(session_of(again), file, told.append)
    assert len(told) == 1
    assert torch.equal(again.reference.sums, first.reference.sums)
    other = replace(job_of(pairs, Pairs()), model=lambda: tiny_model(seed=1, dtype=torch.float64))
    other.reference.prepare(session_of(other), file, told.append)
    assert len(told) == 2
    file.write_bytes(file.read_bytes()[:-5])
    damaged = job_of(pairs, Pairs())
    damaged.reference.prepare(session_of(damaged), file, told.append)
    assert len(told) == 3
    assert not damaged.reference.sums.isnan().any()


def test_only_pairs_of_the_planned_steps_are_computed(tmp_path: Path) -> None:
    job = job_of(some_pairs(40), Pairs(), steps=3)
    session = session_of(job)
    job.reference.prepare(session, tmp_path / "sums", lambda text: None)
    planned = {i for step in list(session.setup.sampler.steps(0))[:3] for i in step}
    known = {i for i in range(40) if not job.reference.sums[i].isnan().any()}
    assert known == planned
