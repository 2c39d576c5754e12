"""The settings of a gradient compressor, checked, and the way that each method name stands for."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from hasten.parts.codecs import codec
from hasten.parts.compression.powersgd import PowerSGDMean
from hasten.parts.compression.quantised_reduce import QuantisedMean
from hasten.parts.compression.topk import TopKMean
from hasten.parts.compression.ways import Dense, Way

METHODS = ("none", "half", "bf16", "int8", "int4", "topk", "powersgd")
ELSEWHERE = {
    "diloco": "sends weights in the place of gradients: hasten.parts.local_steps",
    "stream": "sends weights in the place of gradients: hasten.parts.stream",
    "auto": "is a choice between techniques: name a method here",
}


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

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(_unknown(self.method))
        if self.dense_steps < 0 or self.minimum < 0:
            raise ValueError(
                f"dense_steps and minimum can't be negative: {self.dense_steps}, {self.minimum}"
            )
        if self.momentum and self.method != "topk":
            raise ValueError(f"momentum corrects topk; {self.method} takes none")
        self.way(self.momentum)  # refuses its own impossible numbers

    def way(self, momentum: float = 0.0) -> Way:
        """A fresh one, with nothing remembered."""
        TopKMean(self.ratio, momentum)  # a ratio that makes no sense is told with any method
        if self.method == "none":
            return Dense()
        if self.method == "topk":
            return TopKMean(self.ratio, momentum)
        if self.method == "powersgd":
            return PowerSGDMean(self.rank)
        return QuantisedMean(codec(self.method), feedback=self.method in ("int8", "int4"))


def _unknown(method: str) -> str:
    if method in ELSEWHERE:
        return f"sparsity_method {method!r} {ELSEWHERE[method]}"
    near = difflib.get_close_matches(str(method), METHODS, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"no sparsity_method is called {method!r}{hint}; there are {', '.join(METHODS)}"
