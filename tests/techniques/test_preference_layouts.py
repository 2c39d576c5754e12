"""Preference training in layouts that split the model, against a plain loop in float64."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hasten.core.loop import evaluate
from hasten.core.step import training
from hasten.core.technique import Technique
from hasten.machine.environment import World
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.checkpoint import Checkpoints
from hasten.techniques.collate import Packed
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.layout.experts import ExpertParallel
from hasten.techniques.layout.fsdp import FSDP2
from hasten.techniques.layout.tensor import TensorParallel
from hasten.techniques.loss import LabelledTokenLoss
from preference_jobs import Pairs, pair_job, plain_steps, some_pairs
from ranks import on_ranks
from techniques.expert_checkpoint_jobs import shared_folder
from techniques.test_objective_layouts import EXPERTS, TIED, UNTIED, WITHIN, Built
from tiny import session_of

STEPS = 4
PACKED = (Packed(), DocumentAttention(), LabelledTokenLoss(chunk=16))
Case = tuple[Built, Technique, tuple[Technique, ...]]
ON_TWO: dict[str, Case] = {
    "ddp": (UNTIED, DDP(), (GradientAccumulation(micro_batch_size=1),)),
    "ddp, packed": (TIED, DDP(), PACKED),
    "fsdp2": (TIED, FSDP2(), ()),
    "fsdp2, packed, experts": (EXPERTS, FSDP2(), PACKED),
    "experts on ranks": (EXPERTS, ExpertParallel(), PACKED),
    "cut layers": (UNTIED, TensorParallel(), ()),
    "cut layers, packed": (UNTIED, TensorParallel(), PACKED),
}


def pairs() -> Pairs:
    """Seven pairs in fours: an epoch ends with three, so a rank has one pair less."""
    return some_pairs(7)


def two_layouts(world: World) -> dict[str, Any]:
    outcomes = {}
    for name, (build, layout, others) in ON_TWO.items():
        job = pair_job(build, pairs(), some_pairs(3, seed=1), STEPS)
        plan = (*others, layout)
        session = session_of(job, *plan, architecture=build.architecture, world=world)
        steps = list(training(session))
        metrics = evaluate(session).metrics
        outcomes[name] = {
            "losses": [m.loss for m in steps],
            "accuracy": [m.reward_accuracy for m in steps],
            "metrics": metrics,
        }
    return outcomes


def resumed_on_shards(world: World) -> list[float]:
    """Losses of the last two steps of four, after a resume that the reference's passes precede."""
    folder, losses = shared_folder(), list[float]()
    for steps in (2, STEPS):
        job = pair_job(TIED, pairs(), None, steps)
        plan = (Checkpoints(interval=2, compression=False), FSDP2())
        session = session_of(job, *plan, folder=folder, world=world)
        assert job.reference is not None
        job.reference.prepare(session, folder / "sums", lambda text: None)
        session.resume()
        losses = [m.loss for m in training(session)]
        dist.barrier()
    return losses


def test_weights_that_a_resume_loads_are_those_of_the_next_pass(tmp_path: Path) -> None:
    expected = plain_steps(pair_job(TIED, pairs(), None, STEPS), pairs(), STEPS)
    for losses in on_ranks(resumed_on_shards, tmp_path):
        assert losses == pytest.approx(expected[2:], rel=1e-12)


@cache
def of_one_process(build: Built) -> tuple[list[float], dict[str, float]]:
    job = pair_job(build, pairs(), some_pairs(3, seed=1), STEPS)
    session = session_of(job, architecture=build.architecture)
    list(training(session))
    return plain_steps(job, pairs(), STEPS), evaluate(session).metrics


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(two_layouts, Path(tmp_path_factory.mktemp("ranks")))


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_TWO)
def test_losses_and_rewards_are_those_of_a_loop(name: str, outcomes: list[dict[str, Any]]) -> None:
    build = ON_TWO[name][0]
    losses, metrics = of_one_process(build)
    for outcome in outcomes:
        found = outcome[name]
        # A token that both answers share has one gradient, rounded to float32 by the norms.
        shared = 1e-7 if ON_TWO[name][2] == PACKED else 0.0
        within = max(10 * WITHIN[build.architecture], shared)
        assert found["losses"] == pytest.approx(losses, rel=within)
        assert found["metrics"] == pytest.approx(metrics, rel=1e-5, abs=1e-9)
        assert found["accuracy"][0] in (0.0, None)
