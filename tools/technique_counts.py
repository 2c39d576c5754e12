"""Counts of what techniques did in training, by calls of their parts, for tests.

    with counted() as counts:
        hasten.speed_up(trainer).train()
    counts.effective()  # {"labelled_token_loss": 12, "packed": 6, ...}

A technique's message says that it joined. These counts say that its code ran in a training pass:
each entry of `PARTS` is a function of the package which gets a counting wrapper. A wrapper looks at
the arguments where a call alone proves nothing: attention over one document keeps nothing apart.
A part that was renamed raises an error, so that a count can't become zero unnoticed.

    (1) `counted` wraps the parts; models that are edited afterwards bind the wrapped functions.
    (2) A call in training adds one to its technique. Packed rows count where the model gets them.
        The passes of the proof on the first step aren't training: they don't count.
    (3) At the end of the block the parts are as before.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

Arguments = tuple[Any, ...]
Named = Mapping[str, Any]
Predicate = Callable[[Arguments, Named], bool]


def _in_training(arguments: Arguments, named: Named) -> bool:
    """True if the first argument is a module that trains; eval mode alone switches dropout off."""
    return bool(arguments[0].training) or _with_gradient(arguments, named)


def _with_gradient(arguments: Arguments, named: Named) -> bool:
    """True if a backward pass may follow the call."""
    import torch

    return bool(torch.is_grad_enabled())


def _apart(arguments: Arguments, named: Named) -> bool:
    """True if a training pass gives a module more than one document in a row."""
    return _in_training(arguments, named) and len(named.get("document_lengths") or ()) > 1


def _always(arguments: Arguments, named: Named) -> bool:
    return True


@dataclass(frozen=True)
class Part:
    """A function of the package, `module:name` or `module:Class.name`, and when its call counts."""

    technique: str
    place: str
    counts: Predicate = _always


NN, OPTIM = "hasten.parts.nn", "hasten.parts.optim"
FUSED = ("_RMSNorm", "_NormBeside", "_SwiGLU", "_Rotate", "_FusedLinear", "_Joined")
PARTS = (
    Part("packed", "transformers:PreTrainedModel.__call__", _apart),
    Part("document_attention", f"{NN}.attention:attend", _apart),
    Part("labelled_token_loss", f"{NN}.losses:LabelOnlyLoss.cross_entropy", _in_training),
    *(Part("fused_layers", f"{NN}.fused_functions:{name}.forward") for name in FUSED),
    Part("experts_implementation", f"{NN}.fused_experts:run", _with_gradient),
    Part("fused_adamw", f"{OPTIM}.fused_adamw:FusedAdamW.step"),
    Part("compact_adamw", f"{OPTIM}.compact_adamw:CompactAdamW.step"),
    Part("muon", f"{OPTIM}.muon:MuonAdamW.step"),
    Part("activation_checkpointing", f"{NN}.recompute:BlockRecompute._region", _with_gradient),
)
_INHERITED = object()
PROOF = "hasten.measure.quality.first_step:FirstStepProof.check"
COUNTED = tuple(dict.fromkeys(part.technique for part in PARTS))


class TechniqueCounts:
    """Calls of techniques in training since the last `clear`."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._paused = False

    def effective(self) -> dict[str, int]:
        """The calls of each technique that ran."""
        return dict(self._calls)

    def clear(self) -> None:
        self._calls.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within the block nothing is counted."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def pausing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, in which nothing is counted."""

        @functools.wraps(function)
        def uncounted(*arguments: Any, **named: Any) -> Any:
            with self.paused():
                return function(*arguments, **named)

        return uncounted

    def wrapper(self, part: Part, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose calls are counted."""

        @functools.wraps(function)
        def counting(*arguments: Any, **named: Any) -> Any:
            if not self._paused and part.counts(arguments, named):
                self._calls[part.technique] += 1
            return function(*arguments, **named)

        return counting


@contextmanager
def counted(counts: TechniqueCounts | None = None) -> Iterator[TechniqueCounts]:
    """Counts calls of every part in `PARTS` until the block ends.

    Raises:
        AttributeError: a part isn't where `PARTS` says.
    """
    counts = counts or TechniqueCounts()
    wrappers: list[tuple[str, Callable[..., Callable[..., Any]]]] = [
        (part.place, functools.partial(counts.wrapper, part)) for part in PARTS
    ]
    before: list[tuple[Any, str, Any]] = []
    try:
        for place, wrap in [*wrappers, (PROOF, counts.pausing)]:
            owner, name = _owner(place)
            function: Any = inspect.getattr_static(owner, name)
            before.append((owner, name, vars(owner).get(name, _INHERITED)))
            static = isinstance(function, staticmethod)
            wrapped: Any = wrap(function.__func__ if static else function)
            setattr(owner, name, staticmethod(wrapped) if static else wrapped)
        yield counts
    finally:
        for owner, name, function in reversed(before):
            if function is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, function)


def _owner(place: str) -> tuple[Any, str]:
    """The module or class that holds a part, and the part's name in it."""
    module, _, path = place.partition(":")
    *classes, name = path.split(".")
    return functools.reduce(getattr, classes, importlib.import_module(module)), name
