"""Edits of a model that are applied for a training pass and undone after it.

A technique edits modules: another ``forward``, another class, another head, another
attention in the config. In a user's trainer these edits hold for training passes alone.
Evaluation, generation, copies and saved files are those of the model itself:

    1. Capture: the technique edits the model once, and the differences are recorded.
    2. Undo: the model is plain again.
    3. Active: the recorded edits are set for one training pass, and undone at its end.

If other code changes the same attribute in between (a resized head, another
``forward``), the recorded edit no longer fits. Then :attr:`ModuleEdits.fits` is False:
capture it again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

from torch import nn

_MISSING = object()
_VOLATILE = {"training"}  # changes from pass to pass without any edit


@dataclass(frozen=True)
class Edit:
    """One attribute of a module or config, without and with the technique."""

    owner: Any
    namespace: MutableMapping[str, Any] | None  # None: the owner's class
    key: str
    before: Any
    after: Any

    def current(self) -> Any:
        if self.namespace is None:
            return type(self.owner)
        return self.namespace.get(self.key, _MISSING)

    def set(self, value: Any) -> None:
        if self.namespace is None:
            self.owner.__class__ = value
        elif value is _MISSING:
            self.namespace.pop(self.key, None)
        else:
            self.namespace[self.key] = value


class ModuleEdits:
    """The changes of ``edit`` to ``model``; the model is plain afterwards.

    Args:
        edit: called once with the model.
    """

    def __init__(self, model: nn.Module, edit: Callable[[nn.Module], None]) -> None:
        # (owner, class, mapping, copy of the mapping) for all that an edit may change.
        places: list[tuple[Any, Any, MutableMapping[str, Any] | None, Any]] = []
        configs: dict[int, Any] = {}
        for module in model.modules():
            attributes = vars(module)
            places.append((module, type(module), None, None))
            places.append((module, None, attributes, dict(attributes)))
            places += [
                (module, None, registry, dict(registry))
                for registry in attributes.values()
                if isinstance(registry, dict)
            ]
            for config in configs_of(attributes.get("config")):
                configs[id(config)] = config
        places += [(config, None, vars(config), dict(vars(config))) for config in configs.values()]
        try:
            edit(model)
        finally:
            self.edits = tuple(_differences(places))
            self._undo()
        # A forward of the instance would cover that of another class.
        self._forwards = [
            (e.owner, vars(e.owner).get("forward")) for e in self.edits if e.namespace is None
        ]

    @property
    def fits(self) -> bool:
        """False if a place holds another value than the one that the edits replaced."""
        covered = any(
            vars(owner).get("forward") is not forward for owner, forward in self._forwards
        )
        return not covered and all(edit.current() is edit.before for edit in self.edits)

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that are edited, each once."""
        owners = {id(e.owner): e.owner for e in self.edits if isinstance(e.owner, nn.Module)}
        return list(owners.values())

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """The edits hold inside."""
        for edit in self.edits:
            edit.set(edit.after)
        try:
            yield
        finally:
            self._undo()

    def _undo(self) -> None:
        for edit in reversed(self.edits):
            edit.set(edit.before)


def configs_of(config: Any) -> Iterator[Any]:
    """Yields a Hugging Face config and those inside it (for example of a text model)."""
    if not hasattr(config, "to_dict") or not hasattr(config, "__dict__"):
        return
    yield config
    for inner in vars(config).values():
        yield from configs_of(inner)


def _differences(
    before: list[tuple[Any, Any, MutableMapping[str, Any] | None, Any]],
) -> Iterator[Edit]:
    for owner, kind, mapping, copy in before:
        if mapping is None:
            if type(owner) is not kind:
                yield Edit(owner, None, "__class__", kind, type(owner))
            continue
        for key in [*copy, *(key for key in mapping if key not in copy)]:
            old, new = copy.get(key, _MISSING), mapping.get(key, _MISSING)
            if old is not new and key not in _VOLATILE:
                yield Edit(owner, mapping, key, old, new)
