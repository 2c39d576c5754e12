"""Frozen weights: checkpoints hold a hash of them and leave the weights out.

The process that resumes reads or draws the same frozen weights again. A module may change
weights that get no gradient, as a momentum encoder does. Then ``unchanged`` is False, and
checkpoints hold all weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import xxhash
from torch import Tensor, nn

from hasten.machine.lazy_torch import is_dtensor
from hasten.parts.checkpoint.format import BLOCK, DTYPES, bytes_of, on_host
from hasten.parts.nn.quantised import QuantisedLinear

SAMPLED = 64  # numbers of a weight that are compared later; a step of training changes each


class FrozenWeights:
    """The weights of a module that don't learn, as they are now.

    A module of which nothing learns, as a copy with averaged weights, has none: its weights
    are changed by other code.

    Args:
        prefix: of the module's names in the state that is saved.

    Attributes:
        names: names in that state, those of tied weights included.
        hash: of names in the module, dtypes, shapes and contents; empty without frozen weights,
            and on ranks that have no memory for them.
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


def hash_of(weights: Mapping[str, Tensor]) -> str:
    """A hash of named tensors, in any order; of tied ones the first in it counts."""
    hashes: dict[str, str] = {}
    seen: set[int] = set()
    for name, tensor in weights.items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        content = xxhash.xxh3_128(f"{name} {DTYPES.get(tensor.dtype)} {[*tensor.shape]}".encode())
        block = bytes_of(on_host(name, tensor))
        for start in range(0, len(block), BLOCK):
            content.update(block[start : start + BLOCK])
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
    own = weight.to_local() if is_dtensor(weight) else weight
    numbers = own.detach().reshape(-1)
    return bytes(bytes_of(numbers[:: max(1, len(numbers) // SAMPLED)].cpu().contiguous()))
