"""Multi-token prediction and the running mean in layouts that split the model, in float64.

The reference is a plain loop over examples and positions (``tokens_ahead``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hasten.core.job import Job
from hasten.core.setup import Session
from hasten.core.step import training
from hasten.core.technique import Technique
from hasten.machine.environment import World
from hasten.techniques.average import WeightAverage
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.layout.experts import ExpertParallel
from hasten.techniques.layout.fsdp import FSDP2
from hasten.techniques.layout.hybrid import Hybrid
from hasten.techniques.layout.pipeline import Pipeline
from hasten.techniques.layout.tensor import TensorParallel
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.objective import MultiTokenPrediction
from pipeline_rank_jobs import language_model
from ranks import on_ranks
from techniques.expert_checkpoint_jobs import ALL, FIRST, Make, going_on, resumed
from tiny import examples, language_job, session_of
from tokens_ahead import plain_training
from whole import whole_weights

STEPS, DECAY = 5, 0.8
AHEAD = MultiTokenPrediction(depth=2, weight=0.3)
EACH, LABELLED = GradientAccumulation(micro_batch_size=1), LabelledTokenLoss(chunk=16)
# A router's scores are float32.
WITHIN = {"llama": 1e-12, "deepseek_v3": 1e-6}


@dataclass(frozen=True)
class Built:
    architecture: str
    tied: bool = False
    layers: int = 3

    def __call__(self) -> nn.Module:
        model: nn.Module = language_model(self.architecture, self.tied, self.layers)
        return model

    def skeleton(self) -> nn.Module:
        with torch.device("meta"):
            return self()


TIED, UNTIED, EXPERTS = Built("llama", True), Built("llama"), Built("deepseek_v3")
Case = tuple[Built, Technique, tuple[Technique, ...]]
ON_TWO: dict[str, Case] = {
    "fsdp2, tied": (TIED, FSDP2(), (EACH,)),
    "fsdp2, experts": (EXPERTS, FSDP2(), (LABELLED,)),
    "experts on ranks": (EXPERTS, ExpertParallel(), (EACH,)),
    "stages": (UNTIED, Pipeline(schedule="zero_bubble"), (LABELLED,)),
    "stages, tied": (TIED, Pipeline(checkpoint="always"), ()),
    "stages in a v, experts": (Built("deepseek_v3", layers=5), Pipeline(schedule="zbv"), ()),
    "cut layers": (UNTIED, TensorParallel(), ()),
    "cut layers, experts": (EXPERTS, TensorParallel(sequence=False), (LABELLED,)),
}
# Other cases have what these are made of.
LONG = ("fsdp2, tied", "stages in a v, experts", "cut layers, experts")
ON_FOUR: dict[str, Case] = {
    "fsdp2": (UNTIED, FSDP2(), ()),
    "experts and shards": (EXPERTS, Hybrid(shard=4, ep=2), ()),
    "stages in shards": (UNTIED, Hybrid(pp=2, shard=2), ()),
    "copies of stages": (EXPERTS, Pipeline(stages=2), ()),
    "stages of cut layers": (TIED, Hybrid(pp=2, tp=2), ()),
    "shards of cut layers": (EXPERTS, Hybrid(shard=2, tp=2), ()),
}


def job_of(build: Built) -> Job:
    """Seven examples in fours: an epoch ends with three, and the last step is of a third epoch."""
    data = examples(7, longest=16)
    return language_job(build, data=data, batch=4, steps=STEPS, max_grad_norm=0.5)


def outcome(world: World, case: Case) -> dict[str, Any]:
    build, layout, others = case
    plan = (*others, AHEAD, WeightAverage(DECAY), layout)
    session = session_of(job_of(build), *plan, architecture=build.architecture, world=world)
    steps = list(training(session))
    techniques = (AHEAD, WeightAverage(DECAY), layout)
    proofs = [technique.check_effect(session).effective for technique in techniques]
    average: Any = session.setup.average
    full = {name: _full(mean) for name, mean in average.means_by_name().items()}
    return {
        "losses": [m.loss for m in steps],
        "norms": [m.grad_norm for m in steps],
        "proofs": proofs,
        "means": {name: _digest(mean) for name, mean in full.items()},
        "weights": versions(session),
    }


def versions(session: Session) -> dict[str, Any]:
    """What would be saved, by the end of the folder's name."""
    session.finish()
    found = {}
    for suffix in session.versions():
        full = whole_weights(session)
        trained = {n: w for n, w in full.items() if "correction_bias" not in n}
        found[suffix] = {f"model.{n}": _digest(w) for n, w in trained.items()}
    return found


def _full(value: Any) -> torch.Tensor:
    full: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full


def _digest(tensor: torch.Tensor) -> list[float]:
    """Each fifth or so of the numbers."""
    return tensor.detach().double().flatten()[::7].tolist()


def maker(case: Case) -> Make:
    build, layout, others = case

    def make(world: World, steps: int, folder: Path | None, other: Technique | None) -> Session:
        job = language_job(build, data=examples(24, longest=16), batch=4, steps=steps, lr=1e-3)
        plan = (*others, AHEAD, WeightAverage(DECAY), other or layout)
        return going_on(world, job, plan, folder, build.architecture)

    return make


def resumed_on_two(world: World) -> dict[str, Any]:
    return resumed(world, {"stages": maker(ON_TWO["stages"])}, World(), FSDP2())


def resumed_on_two_long(world: World) -> dict[str, Any]:
    return resumed(world, {name: maker(ON_TWO[name]) for name in ON_TWO}, World())


def on_two(world: World) -> dict[str, Any]:
    return {name: outcome(world, case) for name, case in ON_TWO.items() if name not in LONG}


def on_two_long(world: World) -> dict[str, Any]:
    return {name: outcome(world, ON_TWO[name]) for name in LONG}


def on_four(world: World) -> dict[str, Any]:
    return {name: outcome(world, case) for name, case in ON_FOUR.items()}


@cache
def reference(build: Built) -> dict[str, Any]:
    return plain_training(build, job_of(build), AHEAD.depth, AHEAD.weight, DECAY, STEPS)


def apart(found: Iterable[float], expected: Iterable[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def check(ranks: list[dict[str, Any]], cases: dict[str, Case]) -> None:
    for name in ranks[0]:
        build, _, _ = cases[name]
        expected, within = reference(build), WITHIN[build.architecture]
        means: dict[str, Any] = {}
        for rank in ranks:
            case = rank[name]
            assert apart(case["losses"], expected["losses"]) < within, name
            assert apart(case["norms"], expected["norms"]) < within, name
            assert all(case["proofs"]), name
            means |= case["means"]
        for suffix, kind in (("", "weights"), ("_average", "mean")):
            close(ranks[0][name]["weights"][suffix], expected[kind], "model.", name)
        close(means, expected["mean"], "", name)


def close(found: dict[str, list[float]], expected: dict[str, Any], start: str, name: str) -> None:
    """Means are float32."""
    assert found.keys() == {n for n in expected if n.startswith(start)}, name
    for weight, numbers in found.items():
        wanted = _digest(expected[weight])
        assert numbers == pytest.approx(wanted, rel=1e-6, abs=1e-6), (name, weight)


@pytest.mark.slow
def test_two_ranks_train_as_the_papers_equations_say(tmp_path: Path) -> None:
    check(on_ranks(on_two, tmp_path), ON_TWO)


@pytest.mark.long
def test_two_ranks_train_so_in_other_cases_too(tmp_path: Path) -> None:
    check(on_ranks(on_two_long, tmp_path), ON_TWO)


@pytest.mark.parametrize(
    "job", [resumed_on_two, pytest.param(resumed_on_two_long, marks=pytest.mark.long)]
)
def test_a_checkpoint_has_the_modules_for_any_layout(job: Any, tmp_path: Path) -> None:
    for way, case in on_ranks(job, tmp_path)[0].items():
        assert case["steps"] == ALL - FIRST, way
        assert case["losses"] < 1e-6, way
        assert case["weights"] < 1e-5, way


@pytest.mark.long
def test_four_ranks_train_as_the_papers_equations_say(tmp_path: Path) -> None:
    check(on_ranks(on_four, tmp_path, 4), ON_FOUR)
