"""Records the model's calls in a pass of the user's own code, and repeats these calls alone.

A loss that a user wrote may read a second data stream, follow a teacher, draw from a
generator of its own, or log. The check of the first step must not call it again:

    1. The user's code runs once, without techniques, as the training's own first pass. Each
       call of the model is recorded: inputs, autocast, mode, and sums of the outputs that
       the user's code reads. The backward pass adds the gradients of these outputs.
    2. Each call runs again as it was, with its random state. If its outputs differ, the calls
       can't be repeated (:class:`CannotReplayError`).
    3. The calls run without techniques and with them. The recorded gradients go backward
       through the outputs. Sums of the outputs and the gradients of the parameters are
       compared by :mod:`hasten.measure.quality.first_step`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hasten.core.technique import Technique

SAME, SAME_NARROW = 2e-5, 1e-2  # of an output's norm, if the same code runs again
Layout = Callable[[Mapping[str, Any]], Any]


class CannotReplayError(Exception):
    """Why the recorded calls can't be repeated."""


@dataclass
class Outputs:
    """Results of a pass: what goes backward with which gradients, and sums to be compared.

    ``sums`` has for each name a number and its scale; relative differences refer to it.
    """

    tensors: list[Tensor]
    gradients: list[Tensor | None]
    sums: dict[str, tuple[float, float]]


@dataclass
class TrainedPass:
    """Results of the training's own pass: sums of its outputs, and its gradients by name."""

    sums: dict[str, tuple[float, float]]
    gradients: dict[str, Tensor | None]


class OwnPass:
    """Gradients of the training's own pass, as the difference to those before it.

    Args:
        room: bytes for a copy of the gradients; without them there are none.
    """

    def __init__(self, model: nn.Module, room: float) -> None:
        self._trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        gradients = {n: p.grad for n, p in self._trained.items() if p.grad is not None}
        size = sum(g.numel() * g.element_size() for g in gradients.values())
        ranks = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._is_possible = not ranks and 2 * size <= room  # DDP's gradients are all ranks' mean
        self._before = {n: g.detach().clone() for n, g in gradients.items() if self._is_possible}

    def ended(self, sums: dict[str, tuple[float, float]]) -> TrainedPass | None:
        """Returns what the pass computed, after its backward pass; None if it isn't known."""
        if not self._is_possible:
            return None
        gradients: dict[str, Tensor | None] = {}
        for name, parameter in self._trained.items():
            gradient, before = parameter.grad, self._before.get(name)
            added = gradient is not None and before is not None
            gradients[name] = gradient - before if added else gradient
        return TrainedPass(sums, gradients)


@dataclass
class Call:
    """One call of a model, and what the user's code made of its result."""

    module: nn.Module
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    modes: list[bool]
    has_gradients: bool
    autocast: list[tuple[str, bool, torch.dtype]]
    random_state: tuple[Tensor, list[Tensor]]
    sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    outputs: set[int] = field(default_factory=set)  # of tensors; user code may set other fields

    @property
    def tokens(self) -> int:
        """Positions of the inputs."""
        ids = self.inputs.get("input_ids")
        return ids.numel() if isinstance(ids, Tensor) else 0

    @property
    def inputs(self) -> dict[str, Any]:
        """All inputs by name; a first one without a name is ``input_ids``."""
        return dict(zip(("input_ids",), self.arguments, strict=False)) | self.named

    @property
    def is_finite(self) -> bool:
        """False if an output that is read is not, as the loss of a batch without labels."""
        return all(math.isfinite(total) for total, _ in self.sums.values())

    def read(self, name: str, tensor: Tensor) -> None:
        """Records that the user's code reads this output."""
        is_new = name not in self.sums and id(tensor) in self.outputs
        if is_new and tensor.is_floating_point():
            self.sums[name], self.shapes[name] = signed_sum(tensor), tensor.shape

    def add_gradient(self, name: str, gradient: Tensor | None) -> None:
        """Adds what the backward pass found for this output."""
        if gradient is None:
            return
        gradient, former = gradient.detach().cpu(), self.gradients.get(name)
        self.gradients[name] = gradient if former is None else former + gradient


class Recorder:
    """Records calls of a model while it is active; nested calls belong to the outer one.

    Args:
        modules: the model, and others that user code may call instead.
        replicas: DDP around the model; its calls are recorded as the model's.
    """

    def __init__(self, modules: Sequence[nn.Module], replicas: nn.Module | None = None) -> None:
        self.calls: list[Call] = []
        self._modules, self._replicas, self._depth = modules, replicas, 0

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        self.calls, self._depth = [], 0
        every = (*self._modules, self._replicas)
        unique = {id(module): module for module in every if module is not None}.values()
        handles = [m.register_forward_pre_hook(self._enter, with_kwargs=True) for m in unique]
        handles += [m.register_forward_hook(self._leave, always_call=True) for m in unique]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        device = next(module.parameters()).device
        kinds = dict.fromkeys(("cpu", device.type))
        is_cpu = device.type == "cpu"
        draws = [] if is_cpu else [torch.get_device_module(device).get_rng_state(device)]
        self.calls.append(
            Call(
                module,
                arguments,
                dict(named),
                [m.training for m in module.modules()],
                torch.is_grad_enabled(),
                [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds],
                (torch.get_rng_state(), draws),
            )
        )

    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> Any:
        self._depth -= 1
        if self._depth:
            return None
        call = self.calls[-1]
        handed_out = _handed_out(output, call, "")
        call.outputs = {id(tensor) for tensor in tensors_of(handed_out).values()}
        if isinstance(output, dict) and hasattr(output, "to_tuple"):  # transformers' ModelOutput
            handed_out.__class__ = _tracked(type(output))
            object.__setattr__(handed_out, _CALL, call)
        else:
            for name, tensor in tensors_of(handed_out).items():
                call.read(name, tensor)
        return handed_out


def recorded_gradient(tensor: Tensor, record: Callable[[Tensor | None], None]) -> Tensor:
    """The same tensor; ``record`` gets its gradient in the backward pass."""
    made: Tensor = _Tap.apply(tensor, record)
    return made


class _Tap(torch.autograd.Function):
    """The same numbers in the same memory; records the gradient on its way back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, record: Callable[[Tensor | None], None]) -> Tensor:
        ctx.record = record
        ctx.set_materialize_grads(False)
        return tensor.data  # no view: the user's code may change it in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        ctx.record(gradient)
        return gradient, None


def _handed_out(output: Any, call: Call, name: str) -> Any:
    """The output; each tensor's gradient is recorded, that of the user's code alone."""
    if isinstance(output, Tensor):
        if not output.requires_grad:
            return output
        return recorded_gradient(output, functools.partial(call.add_gradient, name))
    if isinstance(output, dict):
        changed = copy.copy(output)
        for key, part in output.items():
            changed[key] = _handed_out(part, call, _joined(name, key))
        return changed
    if isinstance(output, list | tuple):
        parts = [_handed_out(part, call, _joined(name, i)) for i, part in enumerate(output)]
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
    return output


def _joined(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def tensors_of(output: Any, name: str = "") -> dict[str, Tensor]:
    """The tensors in an output, by name."""
    if isinstance(output, Tensor):
        return {name: output}
    parts: Any = ()
    if isinstance(output, dict):
        parts = list(dict.items(output))
    elif isinstance(output, list | tuple):
        parts = enumerate(output)
    tensors: dict[str, Tensor] = {}
    for key, part in parts:
        tensors |= tensors_of(part, _joined(name, key))
    return tensors


_CALL = "_hasten_call"


@functools.cache
def _tracked(kind: Any) -> Any:
    """A class like ``kind``; its instances record which of their fields are read."""

    class Tracked(kind):
        def __getattribute__(self, name: str) -> Any:
            part: Any = super().__getattribute__(name)
            if isinstance(part, Tensor | tuple | list) and not name.startswith("__"):
                _note(self, name, part)
            return part

        def __getitem__(self, key: Any) -> Any:
            if isinstance(key, str):
                part: Any = dict.__getitem__(self, key)
                _note(self, key, part)
                return part
            names: Any = list(dict.keys(self))[key]
            return tuple(self[n] for n in names) if isinstance(names, list) else self[names]

        def get(self, key: Any, default: Any = None) -> Any:
            return self[key] if dict.__contains__(self, key) else default

        def items(self) -> Any:
            return {name: self[name] for name in self.keys()}.items()

        def values(self) -> Any:
            return {name: self[name] for name in self.keys()}.values()

    Tracked.__name__, Tracked.__qualname__ = kind.__name__, kind.__qualname__
    Tracked.__module__ = kind.__module__
    return Tracked


def _note(output: Any, name: str, part: Any) -> None:
    call = object.__getattribute__(output, "__dict__").get(_CALL)
    if call is not None:
        for path, tensor in tensors_of(part, name).items():
            call.read(path, tensor)


def signed_sum(tensor: Tensor) -> tuple[float, float]:
    """A sum of all elements with signs that are fixed but look random, and their norm."""
    flat = tensor.detach()
    flat = flat.reshape(-1, flat.shape[-1]) if flat.dim() else flat.reshape(1, 1)
    draw = torch.Generator().manual_seed(flat.shape[-1])
    signs = torch.randint(0, 2, (flat.shape[-1],), generator=draw).to(flat.device) * 2.0 - 1
    total, squares = 0.0, 0.0
    for number, rows in enumerate(flat.split(1024)):
        wide = rows.float()
        row_signs = 1.0 - 2 * ((torch.arange(len(rows), device=flat.device) * 7 + number) % 3 % 2)
        total += float((wide @ signs) @ row_signs)
        squares += float(wide.square().sum())
    return total, math.sqrt(squares)


class ReplayPasses:
    """The recorded calls as passes for the check; ``hosted`` has the model and its techniques.

    Args:
        hosted: edits the model for techniques, as ``HostedTechniques`` does.
        lay_out: the inputs of a call as a COLLATE technique lays them out; a text if it can't.
        packs: True if one of the techniques is of that kind.
        plain: inside, the host's own autocast around the model is off.
        is_mixed: the host has such an autocast.
    """

    def __init__(
        self,
        hosted: Any,
        lay_out: Layout,
        packs: Callable[[Sequence[Technique]], bool],
        plain: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        is_mixed: bool = False,
    ) -> None:
        self._hosted, self._lay_out, self._packs, self._plain = hosted, lay_out, packs, plain
        self._is_float32 = False
        self.is_mixed = is_mixed

    @property
    def model(self) -> nn.Module:
        model: nn.Module = self._hosted.model
        return model

    @property
    def models(self) -> list[nn.Module]:
        return [self.model]

    def active(self, techniques: Sequence[Technique]) -> AbstractContextManager[Any]:
        """The techniques' edits of the model hold inside."""
        edits: AbstractContextManager[Any] = self._hosted.active(techniques)
        return edits

    def batch(self, host_batch: Sequence[Call], techniques: Sequence[Technique]) -> list[Call]:
        """The calls as the techniques lay out their inputs."""
        return [self._laid_out(c) for c in host_batch] if self._packs(techniques) else [*host_batch]

    def _laid_out(self, call: Call) -> Call:
        packed = self._lay_out(call.inputs)
        if isinstance(packed, str):
            return call
        changed = copy.copy(call)
        changed.arguments, changed.named = (), packed
        return changed

    @contextlib.contextmanager
    def in_float32(self) -> Iterator[None]:
        self._is_float32 = True
        try:
            with self._plain():
                yield
        finally:
            self._is_float32 = False

    def loss(self, batch: Sequence[Call]) -> Outputs:
        """Runs the calls; sums and gradients are those of the outputs that were read.

        Raises:
            ValueError: an output that the user's code reads is missing or has another shape.
        """
        outputs = Outputs([], [], {})
        for number, call in enumerate(batch):
            tensors = tensors_of(self._called(call))
            for name, shape in call.shapes.items():
                tensor = tensors.get(name)
                if tensor is None or tensor.shape != shape:
                    has = "no" if tensor is None else "another shape of"
                    raise ValueError(f"its output has {has} {name or 'tensor'}, which is read")
                outputs.sums[_sum_name(name, number)] = signed_sum(tensor)
                gradient = call.gradients.get(name)
                if gradient is not None:
                    outputs.tensors.append(tensor)
                    outputs.gradients.append(gradient.to(tensor))
        return outputs

    def recorded_sums(self, batch: Sequence[Call]) -> dict[str, tuple[float, float]]:
        """The sums of :meth:`loss`, as the training's own pass had them."""
        return {
            _sum_name(name, number): call.sums[name]
            for number, call in enumerate(batch)
            for name in call.sums
        }

    def require_recorded(self, batch: Sequence[Call]) -> None:
        """Checks that there is something to compare.

        Raises:
            CannotReplayError: no call of the model, or none through which it learns.
        """
        if not batch:
            raise CannotReplayError("the loss doesn't call the model")
        if not any(c.gradients for c in batch) and all(c.is_finite for c in batch):
            raise CannotReplayError("no gradient of the loss reaches an output of the model")
        self.is_mixed = self.is_mixed or any(on for call in batch for _, on, _ in call.autocast)

    def require_repeatable(self, batch: Sequence[Call]) -> None:
        """Runs each call again as it was recorded.

        Raises:
            CannotReplayError: another output, or an error.
        """
        is_narrow = self.is_mixed or any(p.dtype.itemsize < 4 for p in self.model.parameters())
        for call in batch:
            torch.set_rng_state(call.random_state[0])
            for state in call.random_state[1]:
                device = next(call.module.parameters()).device
                torch.get_device_module(device).set_rng_state(state, device)
            try:
                with torch.no_grad():
                    tensors = tensors_of(self._called(call))
            except Exception as error:
                text = f"a call of the model can't be repeated ({type(error).__name__}: {error})"
                raise CannotReplayError(text.partition("\n")[0]) from error
            for name, (total, scale) in call.sums.items():
                again = signed_sum(tensors[name])[0] if name in tensors else math.inf
                bound = SAME_NARROW if is_narrow else SAME
                if math.isfinite(total) and not abs(again - total) <= bound * scale:
                    raise CannotReplayError(
                        "a call of the model has another output when it is repeated"
                    )

    def _called(self, call: Call) -> Any:
        modules = list(call.module.modules())
        before = [m.training for m in modules]
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                torch.set_grad_enabled(torch.is_grad_enabled() and call.has_gradients)
            )
            for kind, is_on, dtype in call.autocast:
                on = is_on and not self._is_float32
                stack.enter_context(torch.autocast(kind, dtype=dtype if on else None, enabled=on))
            try:
                for module, mode in zip(modules, call.modes, strict=True):
                    module.training = mode
                arguments, named = detached(call.arguments), detached(call.named)
                return call.module(*arguments, **named)
            finally:
                for module, mode in zip(modules, before, strict=True):
                    module.training = mode


def _sum_name(name: str, number: int) -> str:
    return f"{name or 'the output'} of the model's call {number + 1}"


def detached(argument: Any) -> Any:
    """Inputs without the graph of the user's code, which its backward pass has freed."""
    if isinstance(argument, Tensor):
        return argument.detach().requires_grad_(argument.requires_grad)
    if type(argument) in (list, tuple):
        return type(argument)(map(detached, argument))
    if isinstance(argument, MutableMapping):
        changed = copy.copy(argument)
        for key, part in argument.items():
            changed[key] = detached(part)
        return changed
    return argument
