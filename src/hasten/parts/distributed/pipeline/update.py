"""The optimizer step of a pipeline: by the user's optimizer, or by the pipeline's own.

A loop that partitions a model and only calls ``step`` would train nothing. So the pipeline creates
an optimizer, unless one exists or the stages were asked for their parameters: a loop may update
these itself. If gradients are left to the user and no optimizer uses them, a message is printed.
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

from hasten.parts.comm.groups import gathered_objects
from hasten.parts.optim.master_weights import load_optimizer

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


class Update:
    """The optimizer step after the passes of a step.

    Args:
        build: creates the optimizer; None: AdamW if no other one exists; False: gradients
            are only computed.
    """

    def __init__(
        self, build: OptimizerFactory | Literal[False] | None, learning_rate: float
    ) -> None:
        self._build, self._rate = build, learning_rate
        self.optimizer: Optimizer | None = None
        self._parameters: list[nn.Parameter] = []
        self._marks: list[Any] = []  # versions of weights and gradients after the last step
        self._state: Mapping[str, Any] | None = None  # loaded before the optimizer exists
        self._said: set[str] = set()

    def before(
        self, stages: nn.Module, parameters_taken: bool, group: dist.ProcessGroup | None
    ) -> None:
        """Prepares the update before a step's passes; every rank of the pipeline calls it.

        ``parameters_taken``: this rank's parameters were read by other code.
        """
        trainable = [p for p in stages.parameters() if p.requires_grad]
        if [*map(id, trainable)] != [*map(id, self._parameters)]:
            self._parameters, self._marks = trainable, []
            self._commit_update(parameters_taken or _has_optimizer(trainable), group)
        elif (
            self._marks
            and self._marks == _marks(trainable)
            and any(p.grad is not None for p in trainable)
        ):
            self.say("gradients of two steps add up and no optimizer has moved a weight")
        if self.optimizer is not None:
            self.optimizer.zero_grad()  # cleared here, so gradients can be read after a step

    def after(self) -> None:
        """After a step's passes: updates the weights if the optimizer is the pipeline's own."""
        if self.optimizer is not None:
            self.optimizer.step()
        else:
            self._marks = _marks(self._parameters)

    def say(self, message: str) -> None:
        """Warns the caller of ``AsyncPipeline.step``, once."""
        if message not in self._said:
            self._said.add(message)
            warnings.warn(message, stacklevel=4)

    def state_dict(self) -> dict[str, Any]:
        """Returns the own optimizer's state; None without one."""
        return {"optimizer": self.optimizer.state_dict() if self.optimizer else self._state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a state; before the first step the optimizer receives it when it is created."""
        self._state = state["optimizer"]
        if self.optimizer is not None and self._state is not None:
            load_optimizer(self.optimizer, dict(self._state))

    def _commit_update(self, taken: bool, group: dist.ProcessGroup | None) -> None:
        if group is not None:  # all ranks must do the same
            taken = any(gathered_objects(taken, group))
        self.optimizer = None
        if self._build is False or (self._build is None and taken) or not self._parameters:
            return
        if self._build is None:
            self.say(
                "AsyncPipeline: no optimizer was built over model.parameters(), so "
                f"AdamW(lr={self._rate:g}) is used; give optimizer= for another"
            )
        build = self._build or (lambda parameters: torch.optim.AdamW(parameters, lr=self._rate))
        self.optimizer = build(self._parameters)
        if self._state is not None:
            load_optimizer(self.optimizer, dict(self._state))


def _has_optimizer(parameters: list[nn.Parameter]) -> bool:
    """Returns True if an optimizer of this process has one, perhaps from before the split."""
    parameter_ids = {*map(id, parameters)}
    optimizers = (one for one in gc.get_objects() if issubclass(type(one), Optimizer))
    return any(
        id(p) in parameter_ids for one in optimizers for g in one.param_groups for p in g["params"]
    )


def _marks(parameters: list[nn.Parameter]) -> list[Any]:
    """Returns torch's version counters: equal ones mean unchanged weights and gradients."""
    return [
        (p._version, None if p.grad is None else (id(p.grad), p.grad._version)) for p in parameters
    ]
