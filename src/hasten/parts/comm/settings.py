"""The settings of a gradient compressor, checked, and the way that each method name stands for."""

from __future__ import annotations

import difflib
import warnings
from dataclasses import dataclass

import torch

from hasten.parts.comm.codecs import codec
from hasten.parts.comm.powersgd import PowerSGDMean
from hasten.parts.comm.quantised_reduce import QuantisedMean
from hasten.parts.comm.topk import TopKMean
from hasten.parts.comm.ways import Dense, Way

METHODS = ("none", "half", "bf16", "int8", "int4", "topk", "powersgd")
WHOLE = {  # methods that take a model and not a gradient, and what they do with it
    "diloco": "sends weights in the place of gradients",
    "stream": "sends weights in the place of gradients",
    "auto": "chooses for all of a model's gradients on the link at hand",
}
SCOPES = ("all", "hosts")
BACKENDS = ("nccl", "gloo", None)


@dataclass(frozen=True)
class Settings:
    """What all ranks must have alike.

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
        if self.method not in (*METHODS, *WHOLE):
            raise ValueError(_unknown(self.method))
        if self.scope not in SCOPES:
            raise ValueError(f"scope is {self.scope!r}; it is {' or '.join(SCOPES)}")
        if self.scope != "all" and self.method in WHOLE:
            raise ValueError(
                f"scope={self.scope!r} is for gradients, and {self.method} {WHOLE[self.method]}"
            )
        if self.every < 1:
            raise ValueError(f"every is {self.every}; ranks average after at least 1 step")
        if self.dense_steps < 0 or self.minimum < 0:
            raise ValueError(
                f"dense_steps and minimum can't be negative: {self.dense_steps}, {self.minimum}"
            )
        if self.momentum and self.method != "topk":
            raise ValueError(f"momentum corrects topk; {self.method} takes none")
        self.way(self.momentum)  # refuses its own impossible numbers

    def takes_gradients(self, what: str, alone: bool = False) -> None:
        """Refuse what has no meaning with this method, or for a rank's gradient ``alone``."""
        if self.method in WHOLE:
            raise ValueError(
                f"{what} has no meaning for {self.method!r}, which {WHOLE[self.method]}: call "
                "attach(model) once in its place"
            )
        if alone and self.scope != "all":
            raise ValueError(
                f"{what} makes one rank's gradient small, and scope={self.scope!r} the mean of a "
                "host's: call synchronize_gradients(model) alone"
            )

    def way(self, momentum: float = 0.0) -> Way:
        """A fresh one, with nothing remembered."""
        TopKMean(self.ratio, momentum)  # a ratio that makes no sense is told with any method
        if self.method == "none" or self.method in WHOLE:
            return Dense()
        if self.method == "topk":
            return TopKMean(self.ratio, momentum)
        if self.method == "powersgd":
            return PowerSGDMean(self.rank)
        return QuantisedMean(codec(self.method), feedback=self.method in ("int8", "int4"))


def _unknown(method: str) -> str:
    known = (*METHODS, *WHOLE)
    near = difflib.get_close_matches(str(method), known, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"no sparsity_method is called {method!r}{hint}; there are {', '.join(known)}"


def backend_of(asked: str | None) -> str | None:
    """What a backend that was asked for means here.

    Raises:
        ValueError: there is none of that name.
    """
    if asked not in BACKENDS:
        raise ValueError(f"communication_backend is {asked!r}; it is 'nccl', 'gloo' or None")
    if asked == "nccl" and not torch.cuda.is_available():
        warnings.warn(
            "communication_backend='nccl' needs a GPU and there is none: gloo is used", stacklevel=3
        )
        return "gloo"
    return asked
