"""PRECISION: in which number format the step runs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hasten.core.facts import Facts
from hasten.core.session import Session
from hasten.core.setup import AsGiven, Setup
from hasten.core.slot import Slot
from hasten.core.technique import Claim, Fidelity, Forecast, Proof, Technique
from hasten.parts.master_weights import MasterWeights

CLAIMS = (
    Claim("tokens_per_second", 1.15, "the articles' mixed precision: +15 % speed"),
    Claim("peak_memory_bytes", 0.70, "the articles' mixed precision: -30 % memory"),
)


def _slow_bf16(facts: Facts) -> tuple[str, ...]:
    old = [g for g in facts.hardware.accelerators if int(g.capability.split(".")[0]) < 8]
    if facts.on_gpu and old:
        return (f"{old[0].name} has no bf16 units (compute capability below 8.0)",)
    return ()


@dataclass(frozen=True)
class BF16MasterWeights(Technique):
    """bf16 weights, activations and gradients; the optimizer moves float32 masters."""

    slot = Slot.PRECISION

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.ROUNDING

    @property
    def claims(self) -> tuple[Claim, ...]:
        return CLAIMS

    def apply(self, setup: Setup) -> None:
        setup.precision = MasterWeights(torch.bfloat16)

    def obstacles(self, facts: Facts) -> tuple[str, ...]:
        return _slow_bf16(facts)

    def forecast(self, facts: Facts) -> Forecast:
        return Forecast(bytes=0.5, resident_bytes=2.0 * facts.model.parameters)

    def probe(self, session: Session) -> Proof:
        working = {p.dtype for p in session.module.parameters() if p.requires_grad}
        masters = {p.dtype for p in session.setup.precision.parameters()}
        return Proof(
            acted=working == {torch.bfloat16} and masters == {torch.float32},
            evidence=f"weights {_names(working)}, masters {_names(masters)}",
        )


@dataclass(frozen=True)
class Autocast(Technique):
    """float32 weights, with matrix products in bf16 as ``torch.autocast`` chooses them."""

    slot = Slot.PRECISION

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.ROUNDING

    @property
    def claims(self) -> tuple[Claim, ...]:
        return CLAIMS

    def apply(self, setup: Setup) -> None:
        setup.precision = AutocastRegion(torch.device(setup.job.device).type)

    def obstacles(self, facts: Facts) -> tuple[str, ...]:
        return _slow_bf16(facts)

    def forecast(self, facts: Facts) -> Forecast:
        return Forecast(bytes=0.6)

    def probe(self, session: Session) -> Proof:
        found = session.setup.precision
        seen = found.seen if isinstance(found, AutocastRegion) else set()
        return Proof(torch.bfloat16 in seen, f"layers returned {_names(seen) or 'nothing yet'}")


class AutocastRegion:
    """The model as it was given, its forward pass under ``torch.autocast``."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._plain = AsGiven()
        self.seen: set[torch.dtype] = set()  # formats that linear layers were seen to return

    def prepare(self, module: nn.Module) -> None:
        linear = next((m for m in module.modules() if isinstance(m, nn.Linear | nn.Conv2d)), None)
        if linear is not None:
            linear.register_forward_hook(lambda m, args, out: self.seen.add(out.dtype))

    def region(self) -> AbstractContextManager[Any]:
        region: AbstractContextManager[Any] = torch.autocast(self._device_type, torch.bfloat16)
        return region

    def own(self, optimizer: Optimizer) -> None:
        self._plain.own(optimizer)

    def before_backward(self, reduces: bool) -> None:
        return None

    def collect(self) -> None:
        return None

    def parameters(self) -> list[Tensor]:
        return self._plain.parameters()

    def publish(self) -> None:
        return None

    def finish(self, module: nn.Module) -> None:
        return None


def _names(dtypes: set[torch.dtype]) -> str:
    return ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
