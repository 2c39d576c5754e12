"""The indexers' loss on two ranks against one process, and after a resume, in float64."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from hasten.core.setup import Session
from hasten.core.step import training
from hasten.core.technique import Technique
from hasten.machine.environment import World
from hasten.techniques.activation_checkpointing import ActivationCheckpointing
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.collate import Packed
from hasten.techniques.indexer import IndexerLoss
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.layout.experts import ExpertParallel
from hasten.techniques.layout.fsdp import FSDP2
from hasten.techniques.layout.hybrid import Hybrid
from hasten.techniques.layout.pipeline import Pipeline
from hasten.techniques.objective import MultiTokenPrediction
from indexer_reference import wide_model
from ranks import on_ranks
from techniques.expert_checkpoint_jobs import ALL, FIRST, Make, going_on, resumed
from tiny import examples, language_job, session_of
from whole import whole_weights

STEPS = 3
BASE = (Packed(), DocumentAttention())
SPARSE = IndexerLoss(learning_rate=3e-3, clip=0.05)
WARMUP = IndexerLoss(stage="warmup", clip=0.05)
EACH, AHEAD = GradientAccumulation(micro_batch_size=2), MultiTokenPrediction()
Case = tuple[Technique, tuple[Technique, ...]]
CASES: dict[str, Case] = {
    "ddp": (DDP(), (SPARSE, EACH)),
    "fsdp2": (FSDP2(), (SPARSE, EACH, AHEAD)),
    "fsdp2, warm-up": (FSDP2(), (WARMUP, ActivationCheckpointing())),
    "stages": (Pipeline(schedule="zero_bubble"), (SPARSE,)),
    "stages, warm-up": (Pipeline(checkpoint="always"), (WARMUP, AHEAD)),
    "experts": (ExpertParallel(), (SPARSE, ActivationCheckpointing())),
}


ON_FOUR: dict[str, Case] = {
    "stages in shards": (Hybrid(pp=2, shard=2), (SPARSE,)),
    "copies of stages": (Pipeline(stages=2), (WARMUP,)),
    "experts and shards": (Hybrid(shard=4, ep=2), (SPARSE, EACH)),
}


def outcome(world: World, name: str) -> dict[str, Any]:
    """Nine examples in fours: the last step of an epoch has one, on one of two ranks."""
    layout, others = {**CASES, **ON_FOUR}[name]
    job = language_job(
        wide_model, data=examples(9, longest=20), batch=4, steps=STEPS, lr=1e-3, max_grad_norm=0.5
    )
    plan = (*BASE, *others, *((layout,) if world.size > 1 else ()))
    session = session_of(job, *plan, architecture="deepseek_v32", world=world)
    steps = list(training(session))
    technique = next(t for t in others if isinstance(t, IndexerLoss))
    found: dict[str, Any] = {
        "losses": [m.loss for m in steps],
        "norms": [m.grad_norm for m in steps],
        "kl": [m.indexer_kl for m in steps],
        "captured": [m.indexer_captured for m in steps],
        "effect": technique.check_effect(session).evidence,
    }
    session.finish()
    weights = whole_weights(session)
    return {**found, "weights": {n: _digest(w) for n, w in weights.items()}}


def _digest(tensor: torch.Tensor) -> list[float]:
    return tensor.detach().double().flatten()[::5].tolist()


def on_two(world: World) -> dict[str, Any]:
    return {name: outcome(world, name) for name in CASES}


def on_four(world: World) -> dict[str, Any]:
    return {name: outcome(world, name) for name in ON_FOUR}


@cache
def alone(name: str) -> dict[str, Any]:
    return outcome(World(), name)


@pytest.mark.slow
def test_two_ranks_learn_as_one_does(tmp_path: Path) -> None:
    check(on_ranks(on_two, tmp_path))


@pytest.mark.long
def test_four_ranks_learn_as_one_does(tmp_path: Path) -> None:
    check(on_ranks(on_four, tmp_path, 4))


def check(ranks: list[dict[str, Any]]) -> None:
    for name in ranks[0]:
        expected = alone(name)
        for rank in ranks:
            for key in ("losses", "norms", "kl", "captured"):
                assert rank[name][key] == pytest.approx(expected[key], rel=1e-6), (name, key)
        assert ranks[0][name]["effect"] == expected["effect"]
        weights = ranks[0][name]["weights"]
        assert weights.keys() == expected["weights"].keys()
        for weight, numbers in weights.items():
            wanted = expected["weights"][weight]
            assert numbers == pytest.approx(wanted, rel=1e-6, abs=1e-6), (name, weight)


def maker(name: str) -> Make:
    layout, others = CASES[name]

    def make(world: World, steps: int, folder: Path | None, other: Technique | None) -> Session:
        job = language_job(wide_model, data=examples(24, longest=16), batch=4, steps=steps, lr=1e-3)
        plan = (*BASE, *others, other or layout)
        return going_on(world, job, plan, folder, "deepseek_v32")

    return make


def resumed_on_two(world: World) -> dict[str, Any]:
    return resumed(world, {"stages": maker("stages")}, World(), FSDP2())


@pytest.mark.slow
def test_a_checkpoint_has_the_indexers_for_any_layout(tmp_path: Path) -> None:
    for way, case in on_ranks(resumed_on_two, tmp_path)[0].items():
        assert case["steps"] == ALL - FIRST, way
        assert case["losses"] < 1e-6, way
        assert case["weights"] < 1e-5, way
