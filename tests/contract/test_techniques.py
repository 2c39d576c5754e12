"""The contract of every technique of the catalogue, on every architecture."""

from __future__ import annotations

import dataclasses
import functools
import gc
import inspect
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from hasten.core.context import JobContext, ModelFacts
from hasten.core.job import Job
from hasten.core.plan import Plan
from hasten.core.setup import Session
from hasten.core.slot import Slot
from hasten.core.technique import Claim, EffectCheck, Fidelity, Forecast, Technique
from hasten.parts.kernels import rowwise
from hasten.techniques import CATALOGUE
from hasten.techniques.activation_checkpointing import ActivationCheckpointing
from hasten.techniques.adapter import LoRA
from hasten.techniques.allocator import Allocator
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.average import WeightAverage
from hasten.techniques.batch import AdaptiveBatch, GradientAccumulation
from hasten.techniques.checkpoint import Checkpoints
from hasten.techniques.collate import Packed
from hasten.techniques.communication.compress import Half, PowerSGD, Quantised, TopK
from hasten.techniques.communication.local import LocalSteps, Stream
from hasten.techniques.communication.topology import Hierarchical
from hasten.techniques.compile import Compiled
from hasten.techniques.experts import ExpertsImplementation
from hasten.techniques.feed import Prefetched
from hasten.techniques.indexer import IndexerLoss
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.layout.deepspeed import DeepSpeed
from hasten.techniques.layout.experts import ExpertParallel
from hasten.techniques.layout.fsdp import FSDP2
from hasten.techniques.layout.hybrid import Hybrid
from hasten.techniques.layout.pipeline import Pipeline
from hasten.techniques.layout.tensor import TensorParallel
from hasten.techniques.optimizer import CompactAdamW, Muon
from hasten.techniques.precision import Autocast, BF16MasterWeights, Float8
from hasten.techniques.routing import BalancedRouting
from hasten.techniques.sampler import LengthGrouped, PackedEpoch
from tiny import (
    ARCHITECTURES,
    NEWER,
    examples,
    job_context,
    language_job,
    run,
    session_of,
    tiny_model,
)

# Instances tested beside the defaults, where a setting takes another path through the code.
MORE: tuple[Technique, ...] = (
    GradientAccumulation(micro_batch_size=3),
    GradientAccumulation(micro_batch_tokens=60),
    PackedEpoch(row_tokens=64),
    ActivationCheckpointing(segments=2),
    ActivationCheckpointing(budget=0.5),
    CompactAdamW(moments="int8"),
    WeightAverage(save="average"),
    BalancedRouting(speed=0.0, sequence_loss=0.003),
    BalancedRouting(speed=0.0, sequence_loss=0.0),
    ExpertsImplementation(kind="batched_mm"),
    Float8(recipe="blockwise", emulate=True),
    Float8(emulate=True, keep_weights=True),
    LoRA(rslora=True, base="int8"),
    LoRA(base="nf4"),
    LoRA(dora=True),
)
# What needs special hardware, or minutes of a compiler, is tested as it can be anywhere; what
# would leave so small a job as it is, as it acts there.
ANYWHERE: dict[type[Technique], Technique] = {
    AdaptiveBatch: AdaptiveBatch(initial_size=2),
    Checkpoints: Checkpoints(interval=1),
    GradientAccumulation: GradientAccumulation(micro_batch_size=4),
    LengthGrouped: LengthGrouped(window=8),
    Autocast: Autocast(emulate=True),
    BF16MasterWeights: BF16MasterWeights(emulate=True),
    Float8: Float8(emulate=True),
    Compiled: Compiled(bucket=64, share=1.0, backend="aot_eager"),
}
INSTANCES = (*(ANYWHERE.get(kind) or kind() for kind in CATALOGUE), *MORE)
# A technique that shows nothing alone is tested on top of another one.
ON_TOP_OF = {
    DocumentAttention: (Packed(),),
    IndexerLoss: (Packed(), DocumentAttention()),
}
# To be ahead, or to group what is alike, takes an epoch of several steps.
SIZES = {"prefetched": {"batch": 1, "steps": 8}, "length_grouped": {"batch": 2, "steps": 12}}
# What is for models with experts says so of the others, and is tested where it can work.
HOME: dict[type[Technique], str] = dict.fromkeys(
    (BalancedRouting, ExpertsImplementation, ExpertParallel), "deepseek_v3"
)
HOME[IndexerLoss] = "deepseek_v32"
HOME[DeepSpeed] = "llama"  # at home there, where it is installed
# What needs several ranks to act has tests of its own, on several ranks.
RANKS = (Slot.LAYOUT, Slot.COMMUNICATION)
# Relative error of one step's gradient against float64: number formats of 8 bits, and of 24.
BF16_BOUND, FLOAT32_BOUND = 4e-2, 2e-5

Losses = list[float]
kinds = pytest.mark.parametrize("kind", CATALOGUE, ids=lambda k: k.name())
instances = pytest.mark.parametrize("technique", INSTANCES, ids=str)
# Techniques of these slots look into the model; others see parameters, and one dense architecture
# and one of experts stand for all, as they do for layouts, which do nothing on one rank.
INSIDE = {
    *(Slot.ADAPTER, Slot.ROUTING, Slot.ATTENTION, Slot.LAYERS, Slot.EXPERTS, Slot.LOSS),
    *(Slot.OBJECTIVE, Slot.INDEXER, Slot.ACTIVATION_CHECKPOINTING),
}
# These see examples, or the machine, and compiling takes seconds: test_regional_compile has others.
ON_ONE = {
    *(Slot.SAMPLER, Slot.FEED, Slot.CHECKPOINT, Slot.ALLOCATOR, Slot.COMPILE),
}
DENSE_OR_EXPERTS = ("llama", "deepseek_v3")


def with_architectures(techniques: Sequence[Technique]) -> pytest.MarkDecorator:
    """Each technique with the architectures that it may treat differently; all in long runs."""

    def row(technique: Technique, architecture: str) -> Any:
        if technique in MORE:  # further settings, each on one
            at_home = HOME.get(type(technique))
            stands = architecture == (at_home or DENSE_OR_EXPERTS[MORE.index(technique) % 2])
        elif technique.slot in INSIDE:
            stands = architecture != "deepseek_v4"  # it is slow
        elif technique.slot in ON_ONE:
            stands = architecture == "llama"
        else:
            stands = architecture in DENSE_OR_EXPERTS
        name = f"{technique}-{architecture}"
        return pytest.param(
            technique, architecture, id=name, marks=[] if stands else pytest.mark.long
        )

    every = (*ARCHITECTURES, *NEWER)
    rows_of = [row(t, architecture) for architecture in every for t in techniques]
    return pytest.mark.parametrize(("technique", "architecture"), rows_of)


@pytest.fixture(autouse=True)
def _garbage_is_collected() -> Iterator[None]:
    """A run with its own way of it has it until its optimizer is gone, which may be garbage."""
    yield
    gc.enable()
    gc.unfreeze()


class GradientOnly(torch.optim.SGD):
    """Keeps the gradients it is given and moves nothing."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen = [p.grad.clone() for g in self.param_groups for p in g["params"]]


def job(architecture: str, dtype: Any = torch.float32, **changes: Any) -> Job:
    return language_job(lambda: tiny_model(architecture, dtype=dtype), data=examples(8), **changes)


def leave_out_what_cannot_run_here(technique: Technique, architecture: str) -> None:
    """Experts where there are none, kernels on a machine without a compiler, V4's own attention."""
    reasons = technique.unsupported_reasons(job_context(job(architecture), architecture))
    if architecture == "deepseek_v4" and isinstance(technique, LoRA) and technique != LoRA():
        pytest.skip("V4's grouped projection takes an adapter on its bare weight alone")
    away = type(technique) in HOME or architecture == "deepseek_v4"
    if reasons and (away or reasons[0] == rowwise.library().reason):
        pytest.skip(reasons[0])


def seen_by(session: Session) -> Tensor:
    """The gradient of the first step as one float64 vector."""
    optimizer: Any = session.optimizer
    return torch.cat([g.double().flatten() for g in optimizer.seen])


@functools.cache
def reference(architecture: str) -> Tensor:
    """The same step without any technique, in float64."""
    plain = job(architecture, torch.float64, steps=1, optimizer=GradientOnly, max_grad_norm=None)
    session = session_of(plain, architecture=architecture)
    run(session)
    return seen_by(session)


@functools.cache
def without(architecture: str, changes: tuple[tuple[str, int], ...]) -> tuple[Session, Losses]:
    """A run without any technique, at its end, and its losses."""
    session = session_of(job(architecture, **dict(changes)), architecture=architecture)
    return session, [m.loss for m in run(session)]


def test_every_slot_has_a_decision_and_every_name_is_its_own() -> None:
    assert all(isinstance(kind.slot, Slot) for kind in CATALOGUE)
    assert len({kind.name() for kind in CATALOGUE}) == len(CATALOGUE)


@kinds
def test_a_technique_is_a_final_frozen_dataclass(kind: type[Technique]) -> None:
    assert dataclasses.is_dataclass(kind)
    assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert issubclass(kind, Technique)
    assert not any(dataclasses.is_dataclass(base) for base in kind.__mro__[1:])
    assert not kind.__subclasses__()
    assert inspect.getdoc(kind)


@kinds
def test_every_setting_is_documented_where_it_is_declared(kind: type[Technique]) -> None:
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        assert field.metadata.get("doc"), f"{kind.name()}.{field.name}"
        assert field.default is not dataclasses.MISSING


IMPOSSIBLE: dict[type[Technique], dict[str, Any]] = {
    PackedEpoch: {"row_tokens": 0},
    LengthGrouped: {"window": -5},
    GradientAccumulation: {"micro_batch_size": -1, "micro_batch_tokens": -1},
    LoRA: {"rank": 0, "alpha": 0, "base": "fp4"},
    ExpertsImplementation: {"kind": "fast"},
    IndexerLoss: {"stage": "dense", "weight": -1, "clip": -1},
    Compiled: {"bucket": 0, "shapes": 0, "mode": "fastest", "backend": "onnx"},
    Autocast: {"dtype": "fp8"},
    Float8: {"recipe": "mx"},
    DDP: {"bucket_cap_mb": -1},
    FSDP2: {"replicas": 0},
    TensorParallel: {"size": 0},
    Hybrid: {"pp": 0, "ep": 0},
    Pipeline: {"stages": -1, "micro_batch_size": -1},
    ExpertParallel: {"size": -1, "bucket_cap_mb": 0},
    DeepSpeed: {"stage": 0, "dtype": "fp8"},
    Half: {"dtype": "fp8", "check_every": -1},
    Quantised: {"bits": 2, "check_every": -1},
    TopK: {"check_every": -1},
    PowerSGD: {"check_every": -1},
    LocalSteps: {"timeout_seconds": 0},
    Stream: {"timeout_seconds": 0},
    Hierarchical: {"within": "int3", "between": "int3", "check_every": -1},
    CompactAdamW: {"moments": "fp8"},
    WeightAverage: {"save": "all"},
    Checkpoints: {"max_checkpoints": 0},
    Allocator: {"kind": "mimalloc"},
}


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [(kind, name, value) for kind, wrong in IMPOSSIBLE.items() for name, value in wrong.items()],
    ids=str,
)
def test_a_value_that_a_setting_does_not_permit_is_refused_with_those_that_it_does(
    kind: type[Technique], name: str, value: Any
) -> None:
    with pytest.raises(ValueError, match=f"^{name} is {value!r}; it (is one of|must be at least) "):
        kind(**{name: value})


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (ActivationCheckpointing, {"segments": 2, "budget": 0.5}),
        (Allocator, {"kind": "expandable", "huge_pages": True}),
        (Autocast, {"initial_scale": 0}),
        (BalancedRouting, {"speed": -0.1}),
        (BalancedRouting, {"sequence_loss": float("nan")}),
        (Checkpoints, {"interval": 0}),
        (Checkpoints, {"interval": "often"}),
        (Compiled, {"share": 0.0}),
        (Compiled, {"dynamic": True, "mode": "reduce-overhead"}),
        (IndexerLoss, {"learning_rate": 0}),
        (IndexerLoss, {"weight": float("inf")}),
        (Hierarchical, {"topology": "ethernett"}),
        (Hierarchical, {"timeout": -1.0}),
        (LocalSteps, {"codec": "int3"}),
        (Hybrid, {"ep": 4, "dp": 2, "tp": 2}),
        (Hybrid, {"ep": 2, "dp": 3}),
        (Muon, {"momentum": 1.0}),
        (Prefetched, {"lookahead": 40}),
        (Pipeline, {"schedule": "gypipe"}),
        (PowerSGD, {"rank": 0}),
        (Quantised, {"dense_share": 1.5}),
        (Stream, {"fragments": 65}),
        (TopK, {"ratio": 0.0}),
        (WeightAverage, {"decay": 1.0}),
    ],
)
def test_a_technique_refuses_what_its_part_refuses(kind: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r".+") as refused:
        kind(**wrong)
    assert ". " not in str(refused.value), "one sentence"


@instances
def test_it_round_trips_and_compares(technique: Technique) -> None:
    plan = Plan([technique])
    for text, read in ((json.dumps, json.loads), (yaml.safe_dump, yaml.safe_load)):
        again = Plan.from_list(read(text(plan.to_list())), CATALOGUE)  # type: ignore[operator]
        assert again == plan
        assert hash(again) == hash(plan)
    assert dataclasses.replace(technique) == technique  # type: ignore[type-var]


@instances
def test_what_it_says_of_itself_has_the_agreed_form(technique: Technique) -> None:
    home = HOME.get(type(technique), "llama")
    leave_out_what_cannot_run_here(technique, home)
    context = job_context(job("llama"), home)
    assert isinstance(technique.fidelity, Fidelity)
    assert isinstance(technique.forecast(context), Forecast)
    assert all(isinstance(c, Claim) and c.source and c.ratio > 0 for c in technique.claims)
    assert technique.unsupported_reasons(context) == ()
    assert all(isinstance(v, str) for v in technique.environment(context).values())


@instances
def test_what_stands_in_its_way_is_a_sentence(technique: Technique) -> None:
    hardware = job_context(job("llama")).hardware
    strange = JobContext(hardware, model=ModelFacts("resnet", 1000))
    for reason in set(technique.unsupported_reasons(strange)) - {rowwise.library().reason}:
        assert len(reason.split()) > 4
        assert "resnet" in reason


@with_architectures(INSTANCES)
def test_it_proves_its_fidelity_and_its_effect_and_names_stay(
    technique: Technique, architecture: str, tmp_path: Any
) -> None:
    leave_out_what_cannot_run_here(technique, architecture)
    size: dict[str, Any] = SIZES.get(technique.name(), {})
    is_optimizer = technique.slot is Slot.OPTIMIZER
    if technique.fidelity is Fidelity.ROUNDING and not is_optimizer:
        size = {"steps": 1, "optimizer": GradientOnly, "max_grad_norm": None}
    elif technique.fidelity is not Fidelity.EXACT:
        size = {"steps": 4, **size}
    plan = (technique, *ON_TOP_OF.get(type(technique), ()))
    with_it = job(architecture, **size)
    session = session_of(with_it, *plan, architecture=architecture, folder=tmp_path)
    losses = [m.loss for m in run(session)]
    if technique.fidelity is Fidelity.EXACT:
        assert losses == without(architecture, tuple(size.items()))[1]
    elif technique.fidelity is Fidelity.ROUNDING and is_optimizer:
        # It moves the weights by the same rule: the losses of a run are those of the plain one.
        plain = without(architecture, tuple(size.items()))[1]
        assert losses == pytest.approx(plain, rel=2e-4)
        assert losses != [plain[0]] * 4
    elif technique.fidelity is Fidelity.ROUNDING:
        found, expected = seen_by(session), reference(architecture)
        error = float((found - expected).norm() / expected.norm())
        assert error < (BF16_BOUND if technique.slot is Slot.PRECISION else FLOAT32_BOUND)
    else:
        assert losses[-1] < losses[0]
    if technique.slot not in RANKS:
        proof = technique.check_effect(session)
        assert isinstance(proof, EffectCheck)
        assert proof.effective, proof.evidence
        plain_size = tuple(SIZES.get(technique.name(), {}).items())
        assert not technique.check_effect(without(architecture, plain_size)[0]).effective
    names_stay(session, technique, architecture)


@functools.cache
def plain_names(architecture: str) -> frozenset[str]:
    return frozenset(tiny_model(architecture).state_dict())


def names_stay(session: Session, technique: Technique, architecture: str) -> None:
    """The model at the end has the weights of one without the technique, in float32."""
    names = set(session.finish().state_dict())
    if technique.slot is not Slot.ADAPTER:
        assert names == plain_names(architecture)
    dtypes = {p.dtype for p in session.model.parameters() if p.requires_grad}
    assert dtypes == {torch.float32}
