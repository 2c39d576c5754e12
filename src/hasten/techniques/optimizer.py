"""OPTIMIZER: the update rule and the format of its state.

Learning rate, betas, weight decay and groups stay those of the job's AdamW. It is built
as usual and its settings are read. It has no state before its first step, so none is
lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import AdamW, Optimizer

from hasten.core.context import JobContext
from hasten.core.job import NamedParameters, OptimizerFactory
from hasten.core.setup import CLIP_APART, Session, Setup
from hasten.core.slot import Slot
from hasten.core.technique import EffectCheck, Fidelity, Forecast, Technique, knob
from hasten.errors import InputError
from hasten.machine.gain import Gain
from hasten.parts.kernels import registry
from hasten.parts.nn import kernel_variants
from hasten.parts.optim import fused_adamw
from hasten.parts.optim.compact_adamw import FORMATS
from hasten.parts.optim.compact_adamw import CompactAdamW as CompactAdamWPart
from hasten.parts.optim.fused_adamw import FusedAdamW as FusedAdamWPart
from hasten.parts.optim.muon import MuonAdamW, muon_groups

BYTES = {"bf16": 4.0, "int8": 2.0 + 8 / 256}  # bytes of both moments, per weight
ADAMW_BYTES = 8.0
SETTINGS = ("lr", "betas", "eps", "weight_decay")
Named = list[tuple[str, Any]]


@dataclass(frozen=True)
class FusedAdamW(Technique):
    """AdamW with clipping, update and the rounded copy of the weights in one pass over memory."""

    slot = Slot.OPTIMIZER
    fidelity = Fidelity.ROUNDING
    auto = "usual"

    def apply(self, setup: Setup) -> None:
        def build(adamw: AdamW, named: Named) -> Optimizer:
            return FusedAdamWPart(_groups(adamw))

        setup.optimizer = _in_place_of_adamw(setup.optimizer, self.name(), build)

    def unsupported_reasons(self, context: JobContext) -> tuple[str, ...]:
        reason = fused_adamw.why_not(context.device)
        faults = (reason,) if reason else registry.faults(context.device, kernel_variants.UPDATES)
        return (*context.model.why_not_float32(), *faults)

    def forecast(self, context: JobContext) -> Forecast:
        return Forecast(resident_bytes=-2.0 * context.model.parameters)

    def gain(self, context: JobContext) -> Gain | None:
        """Returns only a loss: the update is a small part of a step; its gain isn't the step's."""
        update_gain = kernel_variants.update_gain(context.device)
        return update_gain if update_gain is not None and update_gain.lost else None

    def check_effect(self, session: Session) -> EffectCheck:
        optimizer = session.optimizer
        moved = len(optimizer.state) if isinstance(optimizer, FusedAdamWPart) else 0
        return EffectCheck(moved > 0, f"{moved} tensors moved by {type(optimizer).__name__}")


@dataclass(frozen=True)
class CompactAdamW(Technique):
    """AdamW with moments that are stored in bf16 or 8 bits between steps."""

    slot = Slot.OPTIMIZER
    fidelity = Fidelity.LOSSY  # moments are rounded at every step, which leads to other weights
    moments: str = knob("bf16", "format of both moments of matrices", only=FORMATS)

    def apply(self, setup: Setup) -> None:
        seed = setup.job.seed

        def build(adamw: AdamW, named: Named) -> Optimizer:
            return CompactAdamWPart(_groups(adamw), moments=self.moments, seed=seed)

        setup.optimizer = _in_place_of_adamw(setup.optimizer, self.name(), build)

    def forecast(self, context: JobContext) -> Forecast:
        saved = ADAMW_BYTES - BYTES[self.moments]
        return Forecast(resident_bytes=-saved * context.model.parameters)

    def check_effect(self, session: Session) -> EffectCheck:
        optimizer = session.optimizer
        stored, plain = state_bytes(optimizer)
        effective = isinstance(optimizer, CompactAdamWPart) and 0 < stored < plain
        return EffectCheck(effective, _memory(stored, plain))


@dataclass(frozen=True)
class Muon(Technique):
    """Muon for hidden matrices, AdamW for embeddings, head, norms and biases."""

    slot = Slot.OPTIMIZER
    fidelity = Fidelity.LOSSY  # another update rule
    momentum: float = knob(0.95, "of Muon, in Nesterov's form", choices=(0.9, 0.95, 0.98))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum is {self.momentum}; it must be in [0, 1)")

    def apply(self, setup: Setup) -> None:
        def build(adamw: AdamW, named: Named) -> Optimizer:
            groups = _groups(adamw)
            ids = {id(p) for group in groups if group.get(CLIP_APART) for p in group["params"]}
            groups = muon_groups(groups, [(n, p) for n, p in named if id(p) not in ids])
            if not any(group["muon"] for group in groups):
                raise InputError(
                    "muon: the model has no hidden matrix that learns, so there is nothing for "
                    "Muon to do; leave it out of the plan"
                )
            return MuonAdamW(groups, momentum=self.momentum)

        setup.optimizer = _in_place_of_adamw(setup.optimizer, self.name(), build)

    def forecast(self, context: JobContext) -> Forecast:
        outer = context.model.vocabulary * context.model.hidden_size
        outer *= 1 if context.model.tied_head else 2
        return Forecast(resident_bytes=-4.0 * max(context.model.parameters - outer, 0))

    def check_effect(self, session: Session) -> EffectCheck:
        optimizer = session.optimizer
        if not isinstance(optimizer, MuonAdamW):
            return EffectCheck(False, f"the optimizer is {type(optimizer).__name__}")
        turned = sum("momentum" in state for state in optimizer.state.values())
        return EffectCheck(
            turned > 0,
            f"{turned} of {len(optimizer.state)} tensors by Muon; "
            + _memory(*state_bytes(optimizer)),
        )


def state_bytes(optimizer: Optimizer) -> tuple[int, int]:
    """Returns the bytes of the optimizer's state, and of AdamW's state for the same weights."""
    stored = plain = 0
    for parameter, state in optimizer.state.items():
        stored += sum(v.nbytes for v in state.values() if isinstance(v, Tensor) and v.ndim)
        plain += int(ADAMW_BYTES) * parameter.numel() if state else 0
    return stored, plain


def _memory(stored: int, plain: int) -> str:
    return f"state of {stored / 1e6:.2f} MB where AdamW's is {plain / 1e6:.2f} MB"


def _groups(adamw: AdamW) -> list[dict[str, Any]]:
    keys = ("params", *SETTINGS, CLIP_APART)
    return [{k: group[k] for k in keys if k in group} for group in adamw.param_groups]


def _in_place_of_adamw(
    job_factory: OptimizerFactory | None, name: str, build: Callable[[AdamW, Named], Optimizer]
) -> OptimizerFactory:
    """Returns a factory that builds ``name`` with the settings of the job's AdamW.

    Raises (the factory does):
        InputError: the job's optimizer isn't AdamW, or has run already.
    """

    def factory(named: NamedParameters) -> Optimizer:
        pairs = list(named)
        assert job_factory is not None  # set by prepare()
        adamw = job_factory(pairs)
        if not isinstance(adamw, AdamW):
            raise InputError(
                f"{name} takes the settings of an AdamW, and this job's optimizer is "
                f"{type(adamw).__name__}; give it AdamW, or leave {name} out of the plan"
            )
        if adamw.state:
            raise InputError(
                f"{name} would lose what this AdamW remembers of earlier steps; give one that "
                f"hasn't been stepped, or leave {name} out of the plan"
            )
        if any(group["amsgrad"] or group["maximize"] for group in adamw.param_groups):
            raise InputError(
                f"{name} supports neither amsgrad nor maximize; give AdamW without them"
            )
        return build(adamw, pairs)

    return factory
