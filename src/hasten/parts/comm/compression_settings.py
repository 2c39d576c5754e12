"""Settings of a gradient compressor, checked, and the averaging method of each name."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch

from hasten.errors import require_real, require_whole
from hasten.formatting import did_you_mean
from hasten.machine.host import has_cuda
from hasten.parts.comm.codecs import codec
from hasten.parts.comm.methods import AveragingMethod, Dense, PowerSGDMean, QuantisedMean, TopKMean

METHODS = ("none", "half", "bf16", "int8", "int4", "topk", "powersgd")
WHOLE = {  # methods that take a model and not a gradient, and their effect
    "diloco": "sends weights instead of gradients",
    "stream": "sends weights instead of gradients",
}
SCOPES = ("all", "hosts")
BACKENDS = ("nccl", "gloo", None)


@dataclass(frozen=True)
class CompressionSettings:
    """Settings that must be equal on all ranks.

    Raises:
        ValueError: an unknown method, or a number that makes no sense.
    """

    method: str = "topk"
    ratio: float = 0.05
    rank: int = 16
    momentum: float = 0.0
    dense_steps: int = 0
    minimum: int = 4096
    scope: str = "all"
    every: int = 20

    def __post_init__(self) -> None:
        names = (*METHODS, *WHOLE)
        if self.method not in names:
            hint = did_you_mean(self.method, names)
            raise ValueError(
                f"no sparsity_method is called {self.method!r}{hint}; there are {', '.join(names)}"
            )
        if self.scope not in SCOPES:
            raise ValueError(f"scope is {self.scope!r}; it is {' or '.join(SCOPES)}")
        if self.scope != "all" and self.method in WHOLE:
            raise ValueError(
                f"scope={self.scope!r} is for gradients, and {self.method} {WHOLE[self.method]}"
            )
        require_whole(
            rank=self.rank, dense_steps=self.dense_steps, minimum=self.minimum, every=self.every
        )
        require_real(compression_ratio=self.ratio, momentum=self.momentum)
        if self.every < 1:
            raise ValueError(f"every is {self.every}; ranks average after at least 1 step")
        if self.dense_steps < 0 or self.minimum < 0:
            raise ValueError(
                f"dense_steps and minimum can't be negative: {self.dense_steps}, {self.minimum}"
            )
        if self.momentum and self.method != "topk":
            raise ValueError(f"momentum corrects topk; {self.method} takes none")
        self.way(self.momentum)  # raises ValueError for impossible numbers

    def takes_gradients(self, what: str, alone: bool = False) -> None:
        """Raises ValueError for a call that this method doesn't support."""
        if self.method in WHOLE:
            raise ValueError(
                f"{what} has no meaning for {self.method!r}, which {WHOLE[self.method]}: call "
                "attach(model) once instead"
            )
        if alone and self.scope != "all":
            raise ValueError(
                f"{what} makes one rank's gradient small, and scope={self.scope!r} the mean of a "
                "host's: call synchronize_gradients(model) alone"
            )

    def takes_format(self, dtype: torch.dtype) -> None:
        """Raises ValueError for a number format that a message can't represent fully."""
        if self.method != "none" and not dtype.is_floating_point:
            raise ValueError(
                f"{self.method} compresses real numbers, and these are {dtype}; take "
                "sparsity_method='none', or parameters of torch.view_as_real"
            )

    def way(self, momentum: float = 0.0) -> AveragingMethod:
        """Returns a new averaging method with empty memory."""
        TopKMean(self.ratio, momentum)  # checks the ratio with any method
        if self.method == "none" or self.method in WHOLE:
            return Dense()
        if self.method == "topk":
            return TopKMean(self.ratio, momentum)
        if self.method == "powersgd":
            return PowerSGDMean(self.rank)
        return QuantisedMean(codec(self.method), feedback=self.method in ("int8", "int4"))


def backend_of(backend: str | None) -> str | None:
    """Returns the backend that a requested name means on this machine.

    Raises:
        ValueError: there is none of that name.
    """
    if backend not in BACKENDS:
        raise ValueError(f"communication_backend is {backend!r}; it is 'nccl', 'gloo' or None")
    if backend == "nccl" and not has_cuda():
        warnings.warn(
            "communication_backend='nccl' needs a GPU and there is none: gloo is used", stacklevel=3
        )
        return "gloo"
    return backend
