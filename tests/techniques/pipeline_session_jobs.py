"""Runs of the pipeline technique on ranks, and the same runs in one process beside them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from hasten.core.job import Job, Stop
from hasten.core.loop import evaluate
from hasten.core.plan import Plan
from hasten.core.session import Session, assemble
from hasten.core.setup import prepare
from hasten.core.slot import Slot
from hasten.core.step import training
from hasten.core.technique import Technique
from hasten.machine.environment import World
from hasten.techniques.activation_checkpointing import ActivationCheckpointing
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.collate import Packed
from hasten.techniques.communication.compress import Half, Quantised
from hasten.techniques.layout.pipeline import Pipeline
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.precision import Autocast, BF16MasterWeights
from hasten.techniques.routing import BalancedRouting
from pipeline_rank_jobs import language_model
from tiny import examples, job_context, language_job

STEPS = 3
Case = tuple[str, bool, tuple[Technique, ...], dict[str, Any]]  # model, tied, plan, of the pipeline
PACKED = (
    Packed(),
    DocumentAttention(),
    LabelledTokenLoss(chunk=16),
    GradientAccumulation(micro_batch_size=3),
)
BALANCED = BalancedRouting(speed=0.01, sequence_loss=0.05)
CASES: dict[str, Case] = {
    "plain": ("llama", False, (), {"schedule": "gpipe"}),
    "tied, accumulated": (
        *("qwen2", True, (GradientAccumulation(micro_batch_size=3),)),
        {"micro_batch_size": 2, "checkpoint": "always"},
    ),
    "packed, label-only": (
        *("llama", True, PACKED),
        {"micro_batch_size": 0, "schedule": "zero_bubble"},
    ),
    "experts": ("deepseek_v3", False, (), {"schedule": "zbv"}),
    "experts, interleaved": ("deepseek_v2", False, (), {"schedule": "interleaved"}),
    "both ways": ("llama", True, (), {"schedule": "dualpipev"}),
    "bf16 masters": ("llama", True, (BF16MasterWeights(),), {}),
    "autocast": ("llama", False, (Autocast(),), {"schedule": "zero_bubble"}),
    "experts, balanced": (
        *(
            "deepseek_v3",
            False,
            (BALANCED, ActivationCheckpointing(), GradientAccumulation(micro_batch_size=3)),
        ),
        {"micro_batch_size": 2},
    ),
    "experts, balanced, packed": (
        *("deepseek_v3", False, (BALANCED, *PACKED)),
        {"micro_batch_size": 0, "schedule": "zbv"},
    ),
    "experts, a loss on sequences": (
        *("deepseek_v2", False, (BalancedRouting(speed=0.0, sequence_loss=0.3),)),
        {"schedule": "zero_bubble", "micro_batch_size": 2},
    ),
    "recomputed": (
        "llama",
        True,
        (ActivationCheckpointing(budget=0.5),),
        {"schedule": "interleaved"},
    ),
    "half a communication": ("llama", True, (Half(check_every=1),), {}),
    "bytes over the network": (
        *("qwen2", False, (Quantised(check_every=1), BF16MasterWeights())),
        {"schedule": "1f1b"},
    ),
}

# between copies of stages, which two ranks don't have
COMMUNICATIONS = ("half a communication", "bytes over the network")
ON_TWO = tuple(case for case in CASES if case not in COMMUNICATIONS)
TWO_PIPELINES = ("tied, accumulated", "experts", "experts, balanced", "recomputed", *COMMUNICATIONS)
# How far rounding to 8 bits of mantissa, or to 8 bits, takes losses and weights.
ROUGH = {
    "bf16 masters": 1e-2,
    "autocast": 1e-2,
    "half a communication": 1e-2,
    "bytes over the network": 3e-2,
}


def job(case: str) -> Job:
    """Nine examples in fours: a step has four examples or one, fewer than micro-batches are wanted.

    The largest norm is one that acts.
    """
    architecture, tied, *_ = CASES[case]
    dtype = torch.float32 if case in ROUGH else torch.float64
    return language_job(
        lambda: language_model(architecture, tied).to(dtype),
        data=examples(9),
        batch=4,
        stop=Stop(steps=STEPS),
        max_grad_norm=0.5,
        optimizer=torch.optim.SGD,
        lr=0.3,
        metrics={"first": lambda model: float(model.lm_head.weight.double().abs().sum())},
    )


def session_on(world: World, case: str) -> Session:
    architecture, _, plan, settings = CASES[case]
    if world.size > 1:
        plan = (*plan, Pipeline(stages=2, **settings))
    else:
        plan = tuple(t for t in plan if t.slot is not Slot.COMMUNICATION)
    made = job(case)
    return assemble(prepare(made, Plan(plan), job_context(made, architecture, world=world)))


def result(session: Session) -> dict[str, Any]:
    """All that must not depend on the layout."""
    steps = list(training(session))
    found = evaluate(session)
    model: Any = session.finish()
    with session.setup.layout.gather(model) as whole:
        named = [*model.named_parameters(), *model.named_buffers()]  # biases of routers
        weights = {n: p.detach().double().clone() for n, p in named}
        logits = None
        if whole:
            with torch.no_grad():
                logits = model(torch.arange(3, 12)[None]).logits.double().sum().item()
    return {
        "losses": [m.loss for m in steps],
        "norms": [m.grad_norm for m in steps],
        "trained": [m.trained_tokens for m in steps],
        "load_ratios": [m.expert_load_ratio or 0.0 for m in steps],
        "eval_data": found.eval_loss,
        "metrics": found.metrics,
        "weights": weights if whole else {},
        "logits": logits,
        "left": sum(p.numel() for p in model.parameters()),
    }


def train_on_two(world: World) -> dict[str, Any]:
    """Every case as one pipeline."""
    folder = shared_folder()
    return {**train_all(world, folder, ON_TWO), "folder": folder}


def train_on_four(world: World) -> dict[str, Any]:
    """Some cases as two pipelines side by side."""
    folder = shared_folder()
    return {**train_all(world, folder, TWO_PIPELINES), "folder": folder}


def shared_folder() -> str:
    """The folder in which the ranks of this test meet."""
    return str(Path(os.environ["HASTEN_RENDEZVOUS"]).parent)


def train_all(world: World, folder: str, cases: Iterable[str] = CASES) -> dict[str, Any]:
    """Every case on these ranks; the first of them keeps the weights in a file."""
    found = {}
    for case in cases:
        session = session_on(world, case)
        result_of = result(session)
        if world.is_main:
            torch.save(result_of["weights"], Path(folder) / f"{case}.pt")
            if case == "tied, accumulated":
                _saved(session, Path(folder) / "saved")
        elif case == "tied, accumulated":
            _saved(session, None)
        proof = Pipeline().check_effect(session)
        proofs = {t.name(): t.check_effect(session) for t in session.setup.plan}
        found[case] = {
            **{k: v for k, v in result_of.items() if k != "weights"},
            "effective": proof.effective,
            "evidence": proof.evidence,
            "others": {name: [p.effective, p.evidence] for name, p in proofs.items()},
        }
    return found


def _saved(session: Session, folder: Path | None) -> None:
    model: Any = session.model
    with session.setup.layout.gather(model):
        if folder is not None:
            model.save_pretrained(folder)


def loaded(folder: Path) -> Any:
    return hf.AutoModelForCausalLM.from_pretrained(folder)
