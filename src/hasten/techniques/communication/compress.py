"""COMMUNICATION: compressed gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hasten.core.context import JobContext
from hasten.core.technique import Fidelity, Forecast, Technique, knob, setting
from hasten.errors import InputError
from hasten.parts.comm.gradient_compressor import GradientCompressor
from hasten.techniques.communication.compressed import CompressesGradients, memory
from hasten.techniques.communication.local import LocalSteps, Stream

DENSE = "share of the run's steps at the start in which gradients travel in full"
SMALL = "buckets of fewer numbers travel in full"
CHECK = "steps between two comparisons of all ranks' weights; 0: never"
SCOPE = "all ranks exchange them so, or hosts: within a host they travel in full"
RING_BYTES = 8.0  # bytes that a ring of many ranks sends per float32 number


@dataclass(frozen=True)
class Half(CompressesGradients):
    """Sends gradients in 16 bits and averages them in float32."""

    auto = "try"
    fidelity = Fidelity.ROUNDING
    dtype: str = knob("bf16", "format of a number that travels", only=("bf16", "fp16"))
    minimum: int = setting(4096, SMALL)
    check_every: int = setting(100, CHECK, least=0)
    scope: str = setting("all", SCOPE)

    @property
    def method(self) -> dict[str, Any]:
        return {"sparsity_method": "half" if self.dtype == "fp16" else "bf16"}

    def forecast(self, context: JobContext) -> Forecast:
        return Forecast(comm_bytes=0.5)


@dataclass(frozen=True)
class Quantised(CompressesGradients):
    """Sends gradients in 8 or 4 bits; the rounding error is added in the next step."""

    auto = "try"
    bits: int = knob(8, "of a number that travels", only=(8, 4))
    dense_share: float = setting(0.0, DENSE)
    minimum: int = setting(4096, SMALL)
    check_every: int = setting(100, CHECK, least=0)
    scope: str = setting("all", SCOPE)

    @property
    def method(self) -> dict[str, Any]:
        return {"sparsity_method": f"int{self.bits}"}

    def forecast(self, context: JobContext) -> Forecast:
        share = (self.bits / 8 + 2 / 256) / 4  # codes, and a bf16 scale for each 256
        return Forecast(comm_bytes=share, resident_bytes=memory(context))


@dataclass(frozen=True)
class TopK(CompressesGradients):
    """Sends only the largest gradients; the others add up until they are large enough."""

    ratio: float = knob(0.05, "share of the numbers that travels", low=0.01, high=0.5, log=True)
    momentum: float = setting(0.0, "Deep Gradient Compression's correction, for plain SGD; 0: none")
    dense_share: float = setting(0.1, DENSE)
    minimum: int = setting(4096, SMALL)
    check_every: int = setting(100, CHECK, least=0)
    scope: str = setting("all", SCOPE)

    @property
    def method(self) -> dict[str, Any]:
        settings = {"compression_ratio": self.ratio, "momentum": self.momentum}
        return {"sparsity_method": "topk", **settings}

    def forecast(self, context: JobContext) -> Forecast:
        # Three bytes for each sent number, from every rank to every other.
        share = 3 * self.ratio * context.world.size / RING_BYTES
        return Forecast(comm_bytes=share, resident_bytes=memory(context))


@dataclass(frozen=True)
class PowerSGD(CompressesGradients):
    """Sends a matrix of gradients as two thin factors; the rest is added in the next step."""

    auto = "try"
    rank: int = knob(16, "columns of a factor", low=1, high=128, log=True)
    dense_share: float = setting(0.1, DENSE)
    minimum: int = setting(4096, SMALL)
    check_every: int = setting(100, CHECK, least=0)
    scope: str = setting("all", SCOPE)

    @property
    def method(self) -> dict[str, Any]:
        return {"sparsity_method": "powersgd", "rank": self.rank}

    def forecast(self, context: JobContext) -> Forecast:
        # For a square matrix of the model's width: 2 factors of 2 bytes instead of 4 bytes per
        # number.
        share = min(1.0, self.rank / max(context.model.hidden_size, 1))
        return Forecast(comm_bytes=share, resident_bytes=memory(context))


def technique_of(compressor: GradientCompressor) -> Technique:
    """Returns the technique with a compressor's settings; each run builds its own compressor."""
    settings = compressor.settings()
    method, minimum, scope = settings["method"], settings["minimum"], settings["scope"]
    if settings["dense_steps"]:
        raise InputError(
            "a trainer counts its dense start as a share of the run; give a technique with "
            "dense_share instead of a compressor with dense_steps"
        )
    if method == "none":
        raise InputError("a compressor with sparsity_method 'none' compresses nothing: give False")
    techniques: dict[str, Technique] = {
        "half": Half("fp16", minimum, scope=scope),
        "bf16": Half("bf16", minimum, scope=scope),
        "int8": Quantised(8, 0.0, minimum, scope=scope),
        "int4": Quantised(4, 0.0, minimum, scope=scope),
        "topk": TopK(settings["ratio"], settings["momentum"], 0.0, minimum, scope=scope),
        "powersgd": PowerSGD(settings["rank"], 0.0, minimum, scope=scope),
        "diloco": LocalSteps(settings["every"]),
        "stream": Stream(),
    }
    return techniques[method]
