"""Who moves the weights of a pipeline: its user's optimizer, or one of the pipeline's own.

A loop that partitions a model and calls ``step`` alone would train nothing. So the pipeline takes
an optimizer of its own unless one is there already, or the stages were asked for their parameters
(a loop may move them by hand). Where gradients are left to the user and nobody takes them, that is
said.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import distributed as dist
from torch import nn
from torch.optim import Optimizer

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


class Update:
    """What follows the passes of a step.

    Args:
        build: makes the optimizer; None: AdamW if nobody else has one; False: gradients are left.
    """

    def __init__(
        self, build: OptimizerFactory | Literal[False] | None, learning_rate: float
    ) -> None:
        self._build, self._rate = build, learning_rate
        self.optimizer: Optimizer | None = None
        self._parameters: list[nn.Parameter] = []
        self._marks: list[Any] = []  # of weights and gradients after the last step
        self._state: Mapping[str, Any] | None = None  # for an optimizer that isn't there yet
        self._said: set[str] = set()

    def before(self, stages: nn.Module, asked: bool, group: dist.ProcessGroup | None) -> None:
        """Before a step's passes; every rank of the pipeline calls it.

        ``asked``: somebody has this rank's parameters.
        """
        found = [p for p in stages.parameters() if p.requires_grad]
        if [*map(id, found)] != [*map(id, self._parameters)]:
            self._parameters, self._marks = found, []
            self._settle(asked or _has_optimizer(found), group)
        elif (
            self._marks and self._marks == _marks(found) and any(p.grad is not None for p in found)
        ):
            self.say("gradients of two steps add up and no optimizer has moved a weight")
        if self.optimizer is not None:
            self.optimizer.zero_grad()  # here: after a step they can be looked at

    def after(self) -> None:
        """After a step's passes: the own optimizer moves the weights."""
        if self.optimizer is not None:
            self.optimizer.step()
        else:
            self._marks = _marks(self._parameters)

    def say(self, words: str) -> None:
        """Warn the caller of ``AsyncPipeline.step``, once."""
        if words not in self._said:
            self._said.add(words)
            warnings.warn(words, stacklevel=4)

    def state_dict(self) -> dict[str, Any]:
        """The own optimizer's state; None without one."""
        return {"optimizer": self.optimizer.state_dict() if self.optimizer else self._state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; before the first step the optimizer takes it when it is made."""
        self._state = state["optimizer"]
        if self.optimizer is not None and self._state is not None:
            self.optimizer.load_state_dict(dict(self._state))

    def _settle(self, taken: bool, group: dist.ProcessGroup | None) -> None:
        if group is not None:  # all ranks do the same
            told: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(told, taken, group=group)
            taken = any(told)
        self.optimizer = None
        if self._build is False or (self._build is None and taken) or not self._parameters:
            return
        if self._build is None:
            self.say(
                "AsyncPipeline: no optimizer was built over model.parameters(), so "
                f"AdamW(lr={self._rate:g}) is used; give optimizer= for another"
            )
        build = self._build or (lambda found: torch.optim.AdamW(found, lr=self._rate))
        self.optimizer = build(self._parameters)
        if self._state is not None:
            self.optimizer.load_state_dict(dict(self._state))


def _has_optimizer(parameters: list[nn.Parameter]) -> bool:
    """Whether any optimizer of this process has one of them; the model was maybe whole then."""
    mine = {*map(id, parameters)}
    there = (one for one in gc.get_objects() if issubclass(type(one), Optimizer))
    return any(id(p) in mine for one in there for g in one.param_groups for p in g["params"])


def _marks(parameters: list[nn.Parameter]) -> list[Any]:
    """Torch counts changes in place: equal marks are untouched weights and gradients."""
    return [
        (p._version, None if p.grad is None else (id(p.grad), p.grad._version)) for p in parameters
    ]
