"""Where hasten's step time goes: torch's profiler over a few steps, its events in nine groups.

A matrix product that contracts over tokens is a weight gradient; of the rest, those that backward
starts are input gradients. Head and loss form their gradients together and are one group. Kernels
without an operator of their own count for the operator or function that calls them. ``outside`` is
the time of the steps that no operator covers: Python, data, dispatch between operators.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from hasten.core.timing import StepMetrics
from step.given import Given

STEPS = 5
GROUPS = (
    *("products, forward", "products, input gradient", "products, weight gradient"),
    *("attention", "head and loss", "fused elementwise", "optimizer", "other", "outside"),
)
_ADDED = ("aten::addmm", "hasten::product_into")  # their first argument is added or written
_PRODUCTS = ("aten::mm", "aten::bmm", "aten::_grouped_mm", "hasten::product", *_ADDED)
_LOSS = ("CrossEntropy", "cross_entropy", "nll_loss", "log_softmax")
_ATTENTION = ("attention", "Attend", "softmax")
_FUSED = ("hasten::rms_norm", "hasten::swiglu", "hasten::rotate", "_RMSNorm", "_SwiGLU", "_Rotate")
_OPTIMIZER = ("Optimizer.", "adamw", "clip_grad", "_foreach_norm", "linalg_vector_norm")


class StepProfile:
    """Profiles the first steps after the warm-up."""

    def __init__(self, given: Given) -> None:
        last = len(given.steps)
        self._first = min(given.settings.warmup, max(last - STEPS, 1))
        self._last = min(self._first + STEPS, last)
        self._profile: Any = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
        self._began = self._seconds = 0.0
        self._weight_sides = _sides(given)

    def step(self, metrics: StepMetrics) -> None:
        """A step is over."""
        if metrics.step == self._first and self._last > self._first:
            self._profile.start()
            self._began = time.perf_counter()
        elif metrics.step == self._last:
            self._seconds = time.perf_counter() - self._began
            self._profile.stop()

    def table(self) -> dict[str, float]:
        """Seconds of each group per step."""
        if not self._seconds:
            return {}
        found = dict.fromkeys(GROUPS, 0.0)
        for event in self._profile.events():
            found[self._group(event)] += event.self_cpu_time_total / 1e6
        found["outside"] = max(0.0, self._seconds - sum(found.values()))
        steps = self._last - self._first
        return {group: seconds / steps for group, seconds in found.items()}

    def _group(self, event: Any) -> str:
        names = list(_lineage(event))
        if _any(names, _LOSS):
            return "head and loss"
        if _any(names, _OPTIMIZER):
            return "optimizer"
        if event.name in _PRODUCTS and not _any(names, _ATTENTION):
            second = _second_matrix(event)
            if second and second[-2] not in self._weight_sides:
                return "products, weight gradient"
            back = any("Backward" in name for name in names)
            return "products, input gradient" if back else "products, forward"
        if _any(names, _ATTENTION):
            return "attention"
        return "fused elementwise" if _any(names, _FUSED) else "other"


def _lineage(event: Any) -> Iterator[str]:
    """Names of the event and of all that called it."""
    while event is not None:
        yield event.name
        event = event.cpu_parent


def _any(names: list[str], parts: tuple[str, ...]) -> bool:
    return any(part in name for name in names for part in parts)


def _second_matrix(event: Any) -> list[int] | None:
    """The shape of what is multiplied with."""
    shapes, place = event.input_shapes or [], 2 if event.name in _ADDED else 1
    return shapes[place] if len(shapes) > place and len(shapes[place]) >= 2 else None


def _sides(given: Given) -> set[int]:
    """Every side of a weight matrix."""
    from safetensors import safe_open

    sides: set[int] = set()
    for file in Path(given.model).glob("*.safetensors"):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118  # it is no dictionary
                shape = weights.get_slice(name).get_shape()
                if len(shape) >= 2:
                    sides.update(shape)
    return sides


def flops_per_token(given: Given) -> float:
    """Model FLOPs per token of these examples, by hasten's convention for MFU."""
    from transformers import AutoConfig

    from hasten.models.flops import config_flops

    flops = config_flops(AutoConfig.from_pretrained(given.model), frozen=given.settings.lora)
    lengths = [int(n) for n in given.train.lengths]
    return flops.of(lengths) / sum(lengths)
