"""bf16 working weights with float32 masters: half the bytes per product; loss scale; state.

A bf16 number has 8 bits of mantissa, so an update smaller than 1/256 of a weight would
vanish. So the optimizer moves float32 masters, and the model computes with their bf16
copies. The method is from Micikevicius et al., Mixed Precision Training,
arXiv:1710.03740, with bf16 instead of fp16, so no loss scaling is needed. Gradients of
several micro-batches are summed in float32.

    masters = MasterWeights()
    masters.prepare(model)            # trainable and frozen weights become bf16, buffers stay

    optimizer = AdamW(model.parameters())
    masters.attach_optimizer(optimizer)
    loss(model).backward()
    masters.accumulate_gradients()
    optimizer.step()
    masters.update_model_weights()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hasten.parts.kernels import rowwise

Pair = tuple[Tensor, Tensor]  # (working weight, master)
_ANY_FORMAT = hasattr(Tensor, "grad_dtype")  # gradients in another format, since torch 2.10


@runtime_checkable
class WritesCopies(Protocol):
    """An optimizer that may read gradients in the working format and write rounded weights."""

    def write_copies(self, pairs: Sequence[Pair]) -> bool:
        """Makes each later step write the new masters into the working weights too.

        False: it doesn't, and wants gradients in float32.
        """

    def register_step_post_hook(self, hook: Any) -> Any:
        """Registers ``hook`` to be called after each step, like every optimizer of torch."""


class MasterWeights:
    """Holds the float32 masters of a module's weights while the module works in ``dtype``."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self.dtype = dtype
        self._masters: dict[int, Tensor] = {}  # by id of the working parameter
        self._pairs: list[Pair] = []  # what the optimizer updates
        self._cast_tensors: list[tuple[Tensor, torch.dtype]] = []  # (tensor, its format before)
        self._hooks: list[RemovableHandle] = []
        self._optimizer: Optimizer | None = None
        self._half_gradients = False  # the optimizer reads gradients in the working format
        self._written = False  # the optimizer's last step wrote the working weights

    def prepare(self, module: nn.Module) -> None:
        """Casts floating parameters to the working format; buffers (rotary tables) don't.

        Floating inputs are cast too, and output tensors are widened to float32. So a model with
        image inputs works too. If the module is a loss around a ``model``, only that model is
        prepared. Targets keep their digits, and the loss is computed in float32.
        """
        for parameter in module.parameters():
            if not parameter.is_floating_point():
                continue
            if parameter.requires_grad:
                self._masters[id(parameter)] = parameter.detach().to(torch.float32, copy=True)
            self._cast_tensors.append((parameter, parameter.dtype))
            parameter.data = parameter.data.to(self.dtype)
        inner = getattr(module, "model", None)
        model = inner if isinstance(inner, nn.Module) else module
        self._hooks.append(model.register_forward_pre_hook(self._cast_inputs, with_kwargs=True))
        self._hooks.append(model.register_forward_hook(_widen))

    def region(self) -> AbstractContextManager[Any]:
        """Returns an empty context: the weights have the working format already."""
        return nullcontext()

    def attach_optimizer(self, optimizer: Optimizer) -> None:
        """Replaces the optimizer's working weights by the masters, and moves their state.

        Frozen weights stay in the optimizer. ``finish`` undoes the replacement.

        Raises:
            ValueError: a trainable weight of the optimizer was missing or frozen in ``prepare``.
        """
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        if any(p.requires_grad and id(p) not in self._masters for p in weights):
            raise ValueError(
                "the optimizer holds a weight that isn't in the prepared module, or was frozen "
                "when prepare() saw it"
            )
        for group in optimizer.param_groups:
            group["params"] = [self._adopt(p) if p.requires_grad else p for p in group["params"]]
        _move_state(optimizer, self._pairs)
        self._optimizer = optimizer
        if isinstance(optimizer, WritesCopies) and optimizer.write_copies(self._pairs):
            optimizer.register_step_post_hook(self._note_copies)
            self._half_gradients = _ANY_FORMAT

    def _adopt(self, working: Tensor) -> Tensor:
        master = self._masters[id(working)].to(working.device).requires_grad_()
        vars(master).update(vars(working))  # copies a weight's marks, such as that it is a shard
        if _ANY_FORMAT:
            master.grad_dtype = None  # a gradient may stay in the working format
        self._masters[id(working)] = master
        self._pairs.append((working, master))
        return master

    def before_backward(self, reduces: bool) -> None:
        """Moves summed gradients from masters to working weights, if ``reduces``.

        ``reduces``: this backward pass reduces gradients over ranks, which the earlier
        micro-batches' sum must be part of. It is rounded to the working format once.
        """
        if not reduces:
            return
        for working, master in self._pairs:
            if master.grad is not None:
                working.grad = master.grad.to(self.dtype)
                master.grad = None

    def accumulate_gradients(self) -> None:
        """Adds the working weights' gradients to the masters', in float32, and frees them.

        For an optimizer that reads the working format, the first gradient stays in that format.
        So a step of one micro-batch has no float32 gradients.
        """
        for working, master in self._pairs:
            if working.grad is None:
                continue
            if master.grad is None:
                master.grad = working.grad if self._half_gradients else working.grad.float()
            else:
                master.grad = _sum(master.grad, working.grad)
            working.grad = None

    def parameters(self) -> list[Tensor]:
        """Returns the masters, in the optimizer's order."""
        return [master for _, master in self._pairs]

    @torch.no_grad()
    def update_model_weights(self) -> None:
        """Copies the rounded masters into the working weights, unless the optimizer did."""
        written, self._written = self._written, False
        if self._pairs and not written:
            working, masters = zip(*self._pairs, strict=True)
            torch._foreach_copy_(working, masters)

    def _note_copies(self, *step: Any) -> None:
        self._written = True

    @torch.no_grad()
    def finish(self, module: nn.Module) -> None:
        """Gives the module its float32 weights back and stops casting its inputs.

        Frozen weights are cast back to their former format, and stay rounded.
        """
        for hook in self._hooks:
            hook.remove()
        for working, dtype in self._cast_tensors:
            master = self._masters.get(id(working))
            if master is None:
                working.data = working.data.to(dtype)
            else:
                working.data = master.detach().to(working.device, copy=True)
        if self._optimizer is not None:
            back = {id(master): working for working, master in self._pairs}
            for group in self._optimizer.param_groups:
                group["params"] = [back.get(id(p), p) for p in group["params"]]
            _move_state(self._optimizer, [(master, working) for working, master in self._pairs])

    def _cast_inputs(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(self._cast(a) for a in args), {k: self._cast(v) for k, v in kwargs.items()}

    def _cast(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.to(self.dtype)
        if isinstance(value, tuple | list):
            return type(value)(self._cast(item) for item in value)
        if isinstance(value, dict):
            return {key: self._cast(item) for key, item in value.items()}
        return value


def _sum(total: Tensor, more: Tensor) -> Tensor:
    """Adds in float32, and in place if the first is float32."""
    if rowwise.sum_fits(total, more):
        return rowwise.float32_sum(total, more)
    return total.float().add_(more)


def _widen(module: nn.Module, args: Any, output: Any) -> Any:
    if not isinstance(output, Tensor) or not output.is_floating_point():
        return output
    return output.to(torch.promote_types(output.dtype, torch.float32))


def _move_state(optimizer: Optimizer, pairs: list[Pair]) -> None:
    """Moves the optimizer's state from the first tensor of each pair to the second."""
    for old, new in pairs:
        if old in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(old)


# Loss scale: the factor of the loss that keeps fp16 gradients above zero.
#
# fp16 has 5 bits of exponent: values below 6e-8 become zero, and small gradients are. A scaled loss
# gives scaled gradients (Micikevicius et al., arXiv:1710.03740, section 3.2), which are divided by
# the scale before their norm is computed. The scale starts high. A step with overflowing gradients
# is skipped and halves the scale. After a number of successive good steps it is doubled.
#
#     scale = LossScale()
#     (loss * scale.value).backward()
#     scale.unscale(gradients)
#     finite = bool(torch.isfinite(norm_of(gradients)))
#     scale.judge(finite)                # the same answer on every rank, or scales drift apart
#     if finite: optimizer.step()


class LossScale:
    """A dynamic loss scale; ``searching``: a skipped step is caused by the scale."""

    def __init__(
        self,
        initial: float = 65536.0,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
    ) -> None:
        if not initial >= 1 or not growth > 1 or not 0 < backoff < 1 or interval < 1:
            raise ValueError(
                "a loss scale needs initial >= 1, growth > 1, 0 < backoff < 1 and interval >= 1, "
                f"not initial {initial}, growth {growth}, backoff {backoff}, interval {interval}"
            )
        self.value = float(initial)
        self.growth, self.backoff, self.interval = growth, backoff, interval
        self.searching = False  # True if the last step overflowed and a lower scale may help
        self.skipped = 0  # number of skipped steps
        self._good = 0  # successive finite steps since the last change

    def unscale(self, gradients: Sequence[Tensor]) -> None:
        """Divides the gradients in place; an infinite one stays infinite."""
        if gradients and self.value != 1.0:
            torch._foreach_mul_(list(gradients), 1.0 / self.value)

    def judge(self, finite: bool) -> None:
        """Adapts the scale after a step; ``finite``: its gradients were finite on all ranks."""
        if finite:
            self.searching = False
            self._good += 1
            if self._good >= self.interval:  # a resumed run may have a shorter interval
                # Beyond float32's range the scaled loss couldn't be finite.
                self.value, self._good = min(self.value * self.growth, 2.0**120), 0
            return
        # At a scale of 1 a lower scale can't help.
        self.searching = self.value > 1.0
        self.value, self._good = max(self.value * self.backoff, 1.0), 0
        self.skipped += 1

    def state_dict(self) -> dict[str, Any]:
        """Returns scale and progress; the settings are the plan's."""
        return {"value": self.value, "good": self._good, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = float(state["value"])
        self._good, self.skipped = int(state["good"]), int(state["skipped"])


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Loads an optimizer's state as its ``load_state_dict`` does, without any rounding.

    torch's own casts all state but ``step`` to the format of the weight. Many optimizers keep
    float32 state with bf16 weights: factors, masters, products of momenta, counts.
    """
    optimizer.load_state_dict(state)
    put_formats_back(optimizer, state)


def put_formats_back(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Replaces tensors that were cast when ``state`` was loaded by the saved tensors."""
    numbers = chain.from_iterable(group["params"] for group in state["param_groups"])
    weights = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, weight in zip(numbers, weights, strict=True):
        saved = state["state"].get(number, {})
        loaded = optimizer.state.get(weight, {})
        for key in saved.keys() & loaded.keys() - {"step"}:  # torch doesn't cast the step
            loaded[key] = _as_saved(saved[key], loaded[key], weight.device)


def _as_saved(saved: Any, loaded: Any, device: torch.device) -> Any:
    if isinstance(saved, Tensor):
        same = isinstance(loaded, Tensor) and loaded.dtype == saved.dtype
        return loaded if same else saved.to(device, copy=True)
    if isinstance(saved, dict):
        return {key: _as_saved(value, loaded[key], device) for key, value in saved.items()}
    if isinstance(saved, list | tuple):
        pairs = zip(saved, loaded, strict=True)
        return type(saved)(_as_saved(value, other, device) for value, other in pairs)
    return loaded if isinstance(loaded, Tensor) else saved  # torch may turn a string into a list
