"""Running mean of the weights, float32 on the host; parameter groups by weight decay.

The mean is in a flatter region of the loss than the weights of any single step. DeepSeek-V3
keeps such a mean in host memory. The mean's loss estimates early the loss after the learning
rate has decayed (arXiv:2412.19437, section 3.2.2).

The first update copies the weights. After a later update n, mean <- d mean + (1 - d) weights
with d = min(decay, (1 + n) / (10 + n)). At first d is small. So the first weights are soon
forgotten.

    average = WeightAverage(0.999)
    optimizer.step(); average.after_update(weights)
    with average.swapped(weights): evaluate(model)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hasten.machine import host


class WeightAverage:
    """Exponential mean of a list of tensors, which is always passed in the same order.

    Weights on a device are copied to the host without waiting. They are added to the mean
    when it is read or the next ones arrive.

    Raises:
        ValueError: ``decay`` isn't between 0 and 1.
    """

    def __init__(self, decay: float = 0.999) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"decay is {decay}; give a number between 0 and 1, such as 0.999")
        self.decay = decay
        self.updates = 0
        self._means: list[Tensor] = []
        self._staging: list[Tensor] = []  # host memory for copies of a device's weights
        self._arrivals: list[torch.Event] = []  # copies that aren't in the mean yet
        self.named: Mapping[str, Tensor] = {}

    def name_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Stores names of the weights, in their order: means are then saved apart, by name."""
        self.named = weights

    @property
    def means(self) -> list[Tensor]:
        """Returns the means, float32 on the host; none before the first update."""
        self._average_weights()
        return self._means

    @torch.no_grad()
    def after_update(self, parameters: Sequence[Tensor]) -> None:
        """Adds the present weights to the mean."""
        self._average_weights()  # complete: the device has updated its weights since
        self._check(parameters)
        self.updates += 1
        devices = _devices(parameters)
        if not devices:
            self._take([p.detach().to(torch.float32) for p in parameters])
            return
        if not self._staging:
            self._staging = [  # pinned if the device supports it, so copies need no wait
                torch.empty(p.shape, dtype=torch.float32, pin_memory=host.pins_for(p.device))
                for p in parameters
            ]
        for memory, parameter in zip(self._staging, parameters, strict=True):
            memory.copy_(parameter.detach(), non_blocking=True)
        # Copies and later updates are in one stream, so weights don't change before the copy.
        for device in devices:
            self._arrivals.append(torch.Event(device))
            self._arrivals[-1].record()

    def _average_weights(self) -> None:
        """Waits for copies in progress and adds them to the mean."""
        if self._arrivals:
            for event in self._arrivals:
                event.synchronize()
            self._arrivals = []
            self._take(self._staging)

    @torch.no_grad()
    def _take(self, now: Sequence[Tensor]) -> None:
        if not self._means:
            self._means = [value.clone() for value in now]
            return
        weight = min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(self._means, list(now), 1 - weight)

    @contextmanager
    def swapped(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Sets the weights to their mean inside; restores them bit for bit afterwards.

        Raises:
            ValueError: there is no mean yet.
        """
        if not self.means:
            raise ValueError("there is no average before the first update")
        self._check(parameters)
        before = [p.detach().to("cpu", copy=True) for p in parameters]
        try:
            _put(parameters, self.means)
            yield
        finally:
            _put(parameters, before)

    @property
    def state_bytes(self) -> int:
        """Returns the host memory of the mean."""
        return sum(mean.nbytes for mean in self.means)

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of updates, and the means unless their weights have names."""
        return {"updates": self.updates, "means": [] if self.named else list(self.means)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues with a saved mean; the decay is this object's."""
        self.updates, self._arrivals = state["updates"], []
        if not self.named:
            self.load_means(state["means"])

    def load_means(self, means: Iterable[Tensor]) -> None:
        """Continues with saved means, which are copied."""
        self._means = [mean.to("cpu", torch.float32, copy=True) for mean in means]

    def _check(self, parameters: Sequence[Tensor]) -> None:
        if self._means and [m.shape for m in self._means] != [p.shape for p in parameters]:
            raise ValueError(
                f"the average is of {len(self._means)} tensors and other ones were given; keep one "
                "average per model, with its weights always in the same order"
            )


@torch.no_grad()
def _put(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


# Usual parameter groups: weight decay on matrices, none on norms and biases.
#
# Embeddings and head are matrices and decay, as in nanoGPT, which decays every tensor of two or
# more dimensions. Decay of a norm's scale or a bias moves an output's size or offset towards 0,
# which doesn't regularise.


def decayed_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float
) -> list[dict[str, Any]]:
    """Returns two groups: matrices and stacks of them decay; vectors and biases don't.

    A stack of biases (one row per expert) has two dimensions and is known by its name.
    """
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in named_parameters:
        decays = parameter.ndim >= 2 and not name.endswith("bias")
        (matrices if decays else others).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _devices(parameters: Sequence[Tensor]) -> set[torch.device]:
    """Returns devices other than the CPU; their copies arrive while the host does other work."""
    return {p.device for p in parameters if p.device.type != "cpu"}
