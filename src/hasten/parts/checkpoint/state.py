"""Contents of a checkpoint: objects with a state, by name, and random state per rank.

Frozen weights are left out, and a hash of them is stored. The process that resumes reads or
draws the same frozen weights again. A module may change weights that get no gradient, as a
momentum encoder does. Then ``unchanged`` is False, and checkpoints hold all weights."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer

from hasten.machine.lazy_torch import is_dtensor
from hasten.parts.checkpoint.chunks import local_part
from hasten.parts.checkpoint.format import (
    DTYPES,
    bytes_of,
    json_without_tensors,
    on_host,
    tensors_from_json,
)
from hasten.parts.nn.late_weights import values_of
from hasten.parts.nn.quantised import QuantisedLinear
from hasten.parts.optim.master_weights import load_optimizer


class CheckpointedState:
    """The objects that a checkpoint contains, by name."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self._frozen: dict[str, FrozenWeights] = {}

    def add(self, objects: Mapping[str, Any], trained: bool = False) -> None:
        """Add objects by name.

        Args:
            trained: training has begun. Then all weights are saved, as those that are frozen
                may not be as they were loaded.

        Raises:
            ValueError: one has no ``state_dict`` and ``load_state_dict``, or is sharded.
        """
        for name, stateful in objects.items():
            lacks = [f for f in ("state_dict", "load_state_dict") if not hasattr(stateful, f)]
            if lacks:
                raise ValueError(
                    f"{name} is a {type(stateful).__name__} without {lacks[0]}; protect objects "
                    "with state_dict and load_state_dict"
                )
            if isinstance(stateful, nn.Module) and any(
                is_dtensor(tensor) for tensor in (*stateful.parameters(), *stateful.buffers())
            ):
                raise ValueError(
                    f"{name} is sharded over ranks, which is not supported here; save it with "
                    "torch.distributed.checkpoint"
                )
            if isinstance(stateful, nn.Module) and not trained:
                self._frozen[name] = FrozenWeights(stateful)
                self._frozen[name].watch(stateful.state_dict())
        self.objects |= objects

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors by place; by object its kind and its other state as JSON, or TypeError."""
        tensors: dict[str, Tensor] = {}
        states: dict[str, dict[str, Any]] = {}
        for name, stateful in self.objects.items():
            state, frozen = stateful.state_dict(), self._frozen.get(name)
            states[name] = {"kind": kind_of(stateful)}
            if frozen is not None and frozen.hash and frozen.unchanged(state):
                states[name]["base"], state = frozen.hash, frozen.absent_from(state)
            states[name]["state"] = json_without_tensors(state, name, tensors)
        return tensors, states

    def load(self, tensors: Mapping[str, Tensor], saved: Any, path: Path) -> None:
        """Give every object its state back.

        Raises:
            ValueError: the checkpoint is of other objects or another model; nothing was changed.
        """
        if not isinstance(saved, dict) or saved.keys() != self.objects.keys():
            saved_names = ", ".join(sorted(saved)) if isinstance(saved, dict) else "none"
            raise ValueError(
                f"{path} holds {saved_names} and {', '.join(sorted(self.objects)) or 'nothing'} is "
                "protected; protect the same objects by the same names, or use another folder"
            )
        try:
            found = {
                name: (entry["kind"], tensors_from_json(entry["state"], tensors), entry.get("base"))
                for name, entry in saved.items()
            }
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} holds no state that can be read: {error!r}") from error
        for name, (kind, state, base) in found.items():
            frozen = self._frozen.get(name) if base else None
            if base and (frozen is None or frozen.hash != base):
                raise ValueError(
                    f"{path} is of another base model: the frozen weights of {name}, which it "
                    "doesn't hold, differ from those of the protected one; load the weights that "
                    "training began with before protect(), or use another folder"
                )
            problem = _difference(self.objects[name], kind, state, frozen)
            if problem:
                raise ValueError(
                    f"{path} is of another {name}: {problem}; restore the one that was saved, or "
                    "use another folder"
                )
        for name, (_, state, base) in found.items():
            if isinstance(self.objects[name], Optimizer):
                load_optimizer(self.objects[name], state)
            else:  # the base is there
                self.objects[name].load_state_dict(state, **({"strict": False} if base else {}))

    def expected_bytes(self) -> int:
        """About what a checkpoint will take, before the optimizer has made its moments."""
        optimizers = (one for one in self.objects.values() if isinstance(one, Optimizer))
        present = sum(int(tensor.nbytes) for tensor in self.state()[0].values())
        return present + sum(map(moments_to_come, optimizers))


def moments_to_come(
    optimizer: Optimizer, size: Callable[[Tensor], int] = lambda weight: int(weight.nbytes)
) -> int:
    """Bytes of state that an optimizer makes at its first step; ``size``: bytes of a weight."""
    if optimizer.state:
        return 0
    return sum(
        (2 if "betas" in group else int(bool(group.get("momentum"))))
        * sum(map(size, group["params"]))
        for group in optimizer.param_groups
    )


def kind_of(stateful: Any) -> str:
    """The class of an object; of torch's, hasten's and a script's own without the package.

    Of an optimizer that another one wraps, as accelerate's does, it is the one inside.
    """
    while isinstance(stateful, Optimizer) and isinstance(
        inner := getattr(stateful, "optimizer", None), Optimizer
    ):
        stateful = inner
    kind = type(stateful)
    package = kind.__module__.partition(".")[0]
    plain = package in ("torch", "hasten", "__main__")
    return kind.__qualname__ if plain else f"{package}.{kind.__qualname__}"


def _difference(stateful: Any, kind: Any, state: Any, frozen: FrozenWeights | None) -> str | None:
    """Returns how a saved state is of another kind, or has tensors of other shapes or formats."""
    if isinstance(stateful, nn.Module):
        present = stateful.state_dict()
        ours = _forms(present if frozen is None else frozen.absent_from(present))
        theirs = _forms(state if isinstance(state, dict) else {})
        wrong = sorted({name for name, *_ in ours ^ theirs})
        return f"{wrong[0]} differs ({len(wrong)} in all)" if wrong else None
    if kind != kind_of(stateful):
        return f"it holds the state of {kind}, and this one is {kind_of(stateful)}"
    return _other_weights(stateful, state) if isinstance(stateful, Optimizer) else None


def _forms(state: Mapping[str, Any]) -> set[tuple[Any, ...]]:
    return {(k, getattr(v, "shape", None), getattr(v, "dtype", None)) for k, v in state.items()}


def _other_weights(optimizer: Optimizer, state: Any) -> str | None:
    """Returns how the state of an optimizer's kind is of other weights than its own."""
    ours, theirs = _group_sizes(optimizer.state_dict()), _group_sizes(state)
    if ours != theirs:
        return f"groups of {theirs} weights, not {ours}" if theirs else "no optimizer's"
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    our_weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    weights = dict(zip(numbers, our_weights, strict=True))
    for number, values in state["state"].items():
        known = number in weights and isinstance(values, dict)
        problem = check_moments(weights[number], values) if known else "is of no weight"
        if problem:
            return f"the state of weight {number} {problem}"
    return None


# Moments that torch's optimizers and those of this package keep for every element of a weight.
_OF_EACH_ELEMENT = frozenset(
    (
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum", "momentum_buffer"),
        *("square_avg", "acc_delta", "grad_avg", "sum", "prev", "step_size"),
    )
)


def check_moments(weight: Tensor, values: Mapping[str, Any]) -> str | None:
    """Compares the shapes of a weight's optimizer state with the weight's.

    A state of the wrong shape may broadcast, or multiply another element, without any error.

    Returns:
        What is wrong, as the rest of a sentence; None if nothing is.
    """
    for key, value in values.items():
        if not isinstance(value, Tensor):
            if key in _OF_EACH_ELEMENT and value is not None:
                return f"has {key} as {type(value).__name__}, not as a tensor"
            continue
        # Codes of quantised moments are flat, and factored ones have fewer elements.
        reshaped = value.ndim > 1 and value.numel() == weight.numel()
        if (key in _OF_EACH_ELEMENT or reshaped) and value.shape != weight.shape:
            return f"has {key} of shape {[*value.shape]}, and the weight has {[*weight.shape]}"
        kinds = (weight.dtype, torch.float32)
        if key in _OF_EACH_ELEMENT and value.dtype not in kinds:
            return f"has {key} in {value.dtype}, and the weight has {weight.dtype}"
        if key == "step" and (value.numel() != 1 or not value.dtype.is_floating_point):
            return f"has {value.numel()} steps in {value.dtype}, expected one real number"
        if key == "step" and not 0 <= float(value) < math.inf:
            return f"has the step {float(value)}, expected a count"
    return None


def _group_sizes(state: Any) -> list[int] | None:
    """How many weights each group of an optimizer's state has; None where it is no such state."""
    try:
        sizes = [len(group["params"]) for group in state["param_groups"]]
        return sizes if isinstance(state["state"], dict) else None
    except (KeyError, TypeError):
        return None


# The random state of every rank: torch's, Python's, NumPy's and the accelerator's.
#
# Dropout, shuffles and augmentation go on after a resume as if nothing had been only if each rank
# gets its own back.


def random_state() -> dict[str, Any]:
    """Returns this process's random state as JSON values."""
    version, internal_state, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "python": [version, list(internal_state), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
    }
    if torch.accelerator.is_available():
        state["accelerator"] = torch.get_device_module().get_rng_state().numpy().tobytes().hex()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restores what ``random_state`` returned; ValueError if it isn't such a state."""
    try:
        torch.set_rng_state(_state(state["torch"]))
        version, internal_state, gauss = state["python"]
        random.setstate((version, tuple(internal_state), gauss))
        kind, keys, *fields = state["numpy"]
        np.random.set_state((kind, np.asarray(keys, np.uint32), *fields))
        if "accelerator" in state and torch.accelerator.is_available():
            torch.get_device_module().set_rng_state(_state(state["accelerator"]))
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"the random state of the checkpoint can't be used: {error}") from error


def of_all_ranks(local_object: Any) -> list[Any]:
    """Every rank's object, in the order of ranks, on every rank."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [local_object]
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, local_object)  # on the host where the group reaches it
    return rows


def _state(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


SAMPLED = 64  # numbers of a weight that are compared later; a step of training changes each


class FrozenWeights:
    """The weights of a module that don't learn, as they are now.

    A module of which nothing learns, as a copy with averaged weights, has none: its weights
    are changed by other code.

    ``names`` are those in the saved state, which begin with ``prefix``.

    ``hash`` is empty without frozen weights, and on ranks that have no memory for them.
    """

    def __init__(self, module: nn.Module, prefix: str = "") -> None:
        weights = dict(_frozen(module))
        self.names = frozenset(f"{prefix}{name}" for name in weights)
        self.hash = "" if any(t.is_meta for t in weights.values()) else hash_of(weights)
        self._marks: dict[str, bytes] = {}

    def watch(self, state: Mapping[str, Tensor]) -> None:
        """Stores a sample of each frozen weight in a module's state, for ``unchanged``."""
        self._marks = {name: _mark(state[name]) for name in self.names & state.keys()}

    def unchanged(self, state: Mapping[str, Tensor]) -> bool:
        """Returns True if the samples are those of ``watch``."""
        return all(_mark(state[name]) == mark for name, mark in self._marks.items())

    def absent_from(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a module's state without these weights."""
        return {name: tensor for name, tensor in state.items() if name not in self.names}


def hash_of(weights: Mapping[str, Tensor]) -> str:
    """A hash of named tensors, in any order; of tied ones the first in it counts.

    Late weights are read one after the other.
    """
    hashes: dict[str, str] = {}
    seen: set[int] = set()
    for name, weight in weights.items():
        if id(weight) in seen:
            continue
        seen.add(id(weight))
        tensor = values_of(weight)
        content = xxhash.xxh3_128(f"{name} {DTYPES.get(tensor.dtype)} {[*tensor.shape]}".encode())
        content.update(bytes_of(on_host({name: tensor})[name]))
        hashes[name] = content.hexdigest()
    text = "\n".join(f"{name} {hashes[name]}" for name in sorted(hashes))
    return xxhash.xxh3_128_hexdigest(text.encode()) if hashes else ""


def _frozen(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Frozen parameters, and the buffers that a quantised layer keeps instead of them."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    if not any(p.requires_grad for p in parameters.values()):
        return
    yield from ((name, p) for name, p in parameters.items() if not p.requires_grad)
    for prefix, part in module.named_modules():
        if isinstance(part, QuantisedLinear):
            yield from ((f"{prefix}.{name}", tensor) for name, tensor in part.state_dict().items())


def _mark(weight: Tensor) -> bytes:
    numbers = local_part(weight).detach().reshape(-1)
    return bytes(bytes_of(numbers[:: max(1, len(numbers) // SAMPLED)].cpu().contiguous()))
