"""Whole sessions with experts shared out over ranks, beside the same in one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hasten.core.loop import evaluate
from hasten.core.setup import Session
from hasten.core.step import training
from hasten.core.technique import Technique
from hasten.machine.environment import World
from hasten.parts.nn.router_balance import routers
from hasten.techniques.activation_checkpointing import ActivationCheckpointing
from hasten.techniques.adapter import LoRA
from hasten.techniques.average import WeightAverage
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.collate import Packed
from hasten.techniques.communication.compress import Half
from hasten.techniques.compile import Compiled
from hasten.techniques.experts import ExpertsImplementation
from hasten.techniques.layout.experts import ExpertParallel
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.optimizer import FusedAdamW, Muon
from hasten.techniques.precision import Autocast, BF16MasterWeights
from hasten.techniques.routing import BalancedRouting
from tiny import compiled_in, examples, language_job, session_of, tiny_model
from whole import whole_weights

STEPS = 3
NORM = 0.05  # below every step's norm, so that clipping acts


@dataclass(frozen=True)
class Case:
    """A plan for both, the layout's own settings, and how far the two may be apart."""

    architecture: str
    plan: tuple[Technique, ...] = ()
    dtype: Any = torch.float32
    within: float = 2e-4
    lr: float = 1e-3
    part: str = ""  # the only one that is compiled; empty: all
    steps: int = STEPS

    def build(self) -> nn.Module:
        model = tiny_model(self.architecture, dtype=self.dtype)
        return compiled_in(self.part, model) if self.part else model


ACCUMULATED = GradientAccumulation(micro_batch_size=1)
CASES: dict[str, Case] = {
    "v3, float64": Case("deepseek_v3", (ACCUMULATED,), torch.float64, 1e-9),
    "v2, float64": Case("deepseek_v2", (ACCUMULATED,), torch.float64, 1e-9),
    "balanced, packed, fused": Case(
        "deepseek_v3",
        (
            BalancedRouting(speed=0.01, sequence_loss=0.05),
            Packed(),
            LabelledTokenLoss(),
            GradientAccumulation(micro_batch_tokens=48),
            ExpertsImplementation(kind="fused"),
            FusedAdamW(),
        ),
    ),
    "recomputed, averaged, muon": Case(
        "deepseek_v2", (ActivationCheckpointing(), WeightAverage(), ACCUMULATED, Muon())
    ),
    "lora": Case("deepseek_v3", (LoRA(),)),
    "bf16 masters": Case("deepseek_v3", (BF16MasterWeights(), ACCUMULATED), within=0.05),
    "autocast": Case("deepseek_v3", (Autocast(), ACCUMULATED), within=0.01),
    "half communication": Case("deepseek_v3", (Half(),), within=0.02),
}

# Micro-batches of one row: each shape is another graph to trace, for seconds.
ONE_SHAPE = Compiled(bucket=64, share=1.0, backend="aot_eager")
COMPILED = {"compiled": Case("deepseek_v3", (ONE_SHAPE, ACCUMULATED), part="mlp", steps=1)}
ALL_COMPILED = {"compiled": Case("deepseek_v3", (ONE_SHAPE, ACCUMULATED))}
ON_FOUR = ("v2, float64", "balanced, packed, fused")


def session_on(world: World, case: Case, size: int) -> Session:
    """Eleven examples in fives: ranks have unequal shares, and most have none of the last one."""
    job = language_job(
        case.build,
        data=examples(11),
        batch=5,
        steps=case.steps,
        lr=case.lr,
        max_grad_norm=NORM,
    )
    plan = case.plan
    if world.size == 1:  # the plain one
        plan = tuple(t for t in plan if not isinstance(t, Half | Compiled))
    layout = (ExpertParallel(size=size),) if world.size > 1 else ()
    return session_of(job, *plan, *layout, architecture=case.architecture, world=world)


def trained(session: Session) -> dict[str, Any]:
    """What a run did, with the whole of its weights on the first rank."""
    steps = list(training(session))
    eval_data = evaluate(session).eval_loss
    session.finish()
    names = {name for name, _ in session.model.named_parameters()}
    weights = {name: w for name, w in whole_weights(session).items() if name in names}
    return {
        "losses": [m.loss for m in steps] + [eval_data],
        "norms": [m.grad_norm for m in steps],
        "counts": [[m.tokens, m.trained_tokens, m.examples] for m in steps],
        "biases": biases(session.model),
        "weights": weights,
    }


def biases(model: nn.Module) -> list[list[float]]:
    """What balanced routing moves."""
    found = [getattr(router, "e_score_correction_bias", None) for router in routers(model)]
    return [bias.tolist() for bias in found if bias is not None]


def differences(here: dict[str, Any], alone: dict[str, Any]) -> dict[str, float]:
    """Largest relative difference of losses and norms, and difference of a weight."""

    def apart(name: str) -> float:
        return max(abs(a - b) / abs(b) for a, b in zip(here[name], alone[name], strict=True))

    assert here["counts"] == alone["counts"]
    assert here["weights"].keys() == alone["weights"].keys()
    return {
        "losses": apart("losses"),
        "norms": apart("norms"),
        "biases": float(here["biases"] != alone["biases"]),
        "weights": max(
            float((w - alone["weights"][n]).abs().max()) for n, w in here["weights"].items()
        ),
    }


def on_two(world: World) -> dict[str, Any]:
    return compared(world, CASES)


def on_four(world: World) -> dict[str, Any]:
    return compared(world, {name: CASES[name] for name in ON_FOUR})


def compiled(world: World) -> dict[str, Any]:
    return compared(world, COMPILED)


def all_compiled(world: World) -> dict[str, Any]:
    return compared(world, ALL_COMPILED)


def compared(world: World, cases: dict[str, Case]) -> dict[str, Any]:
    """Every case in groups of two, and of all ranks, beside one process on the first rank."""
    found: dict[str, Any] = {}
    for name, case in cases.items():
        alone = trained(session_on(World(), case, 1)) if world.is_main else {}
        for size in sorted({2, world.size}):
            session = session_on(world, case, size)
            here = trained(session)
            proof = ExpertParallel(size=size).check_effect(session)
            found[f"{name}, groups of {size}"] = {
                **(differences(here, alone) if world.is_main else {}),
                "effective": proof.effective,
                "evidence": proof.evidence,
                "within": case.within,
                "clipped": min(here["norms"]) > NORM,
                "norms_here": here["norms"],
            }
    return found
