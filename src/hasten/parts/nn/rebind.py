"""Binds code to the forward of one module instance, so that copies keep it.

``module.forward = function`` on an instance stores a closure over that instance. A deep
copy then runs the original, and a pickle fails. Here the instance gets a subclass of
its class. The subclass's ``forward`` calls the function with the called module. So:

- ``copy.deepcopy``, ``pickle`` and ``torch.save`` make modules with their own forward,
  in another process too (if hasten is installed there).
- ``isinstance`` holds, and name, module and signature are those of the base class.
  transformers, accelerate and PEFT read them. Examples are ``architectures`` in a saved
  config, the classes that FSDP wraps, and the data set columns that a Trainer keeps.
- Parameters, buffers, hooks and the state dict aren't changed, and neither are other
  instances.

The function must be at module level, because a pickle stores its name. It is called as
``function(module, usual, *args, **kwargs)``; ``usual`` is the base forward. Further
data is in its ``state``, which is stored in the module and copied with it. A module
made from the class alone (``type(model)(config)``) has no state. A function that needs
one then runs ``usual``.

Several functions can be bound to one module; the last one is called first. If a
function has an attribute ``unpickled``, it is called when such a module is unpickled.
"""

from __future__ import annotations

import copyreg
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

from torch import nn

Forward = Callable[..., Any]
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_STATES = "_hasten_states"  # attribute of a module with the states of its functions
_BELOW = "_hasten_forwards"  # attribute of a module with replaced forwards of the instance


def bind(module: nn.Module, function: Forward, state: Any = None) -> None:
    """Sends calls of ``module`` to ``function``; if it is bound already, only sets its state.

    Raises:
        ValueError: the function isn't one of a module.
    """
    holder: Any = sys.modules.get(getattr(function, "__module__", ""))
    if getattr(holder, getattr(function, "__qualname__", ""), None) is not function:
        raise ValueError(f"{function} isn't a function of a module, so that no copy would find it")
    if state is not None:
        _put(module, _STATES, function, state)
    if is_bound(module, function):
        return
    wrapper = module.__dict__.pop("forward", None)
    if wrapper is not None:  # another library's wrapper around this instance stays below
        _put(module, _BELOW, function, wrapper)
    module.__class__ = _class_of(type(module), function, wrapper is not None)


def unbind(module: nn.Module, function: Forward) -> None:
    """Removes ``function``; functions bound before and after it stay.

    Raises:
        ValueError: another library has changed the module's class since.
    """
    remaining, plain = [], plain_class(module)
    if _bound_by(type(module)) is None and is_bound(module, function):
        raise ValueError(
            f"{type(module).__name__} was wrapped after {function.__qualname__} was bound to it"
        )
    for one, covers in _stack(type(module)):
        if one is not function:
            remaining.append((one, covers))
        elif covers and remaining:
            raise ValueError(f"take off what was bound to {plain.__name__} later first")
        elif covers:
            module.__dict__["forward"] = module.__dict__[_BELOW][function]
    if state_of(module, function) is not None:
        _put(module, _STATES, function, None)
    made = plain
    for one, covers in reversed(remaining):
        made = _class_of(made, one, covers)
    if made is not type(module):
        module.__class__ = made


def is_bound(module: nn.Module, function: Forward | None = None) -> bool:
    """Returns True if ``function``, or by default any, is bound to the module."""
    functions = bound(module)
    return bool(functions) if function is None else any(f is function for f in functions)


def bound(module: nn.Module) -> tuple[Forward, ...]:
    """Returns the functions bound to the module, the last one first."""
    return tuple(function for function, _ in _stack(type(module)))


def has_own_forward(module: nn.Module) -> bool:
    """Returns True if its forward isn't its class's: bound here, or set by other code."""
    return is_bound(module) or "forward" in vars(module)


def has_hooks(module: nn.Module) -> bool:
    """Returns True if a hook is registered on the module itself."""
    return any(getattr(module, name, None) for name in HOOKS)


def state_of(module: nn.Module, function: Forward) -> Any:
    """Returns the state that ``function`` was bound with; None without."""
    return getattr(module, _STATES, {}).get(function)


def usual_of(module: nn.Module, function: Forward) -> Forward:
    """Returns the module's forward below ``function``, which is bound to it."""
    kind = next(k for k in type(module).__mro__ if (b := _bound_by(k)) and b[0] is function)
    covers = kind.__dict__["_hasten_bound"][1]
    if covers:
        wrapper: Forward = module.__dict__[_BELOW][function]
        return wrapper
    base: Any = kind.__mro__[1]
    return types.MethodType(base.forward, module)


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Returns the module's class without bound functions."""
    plain = type(module)
    for kind in plain.__mro__:
        if _bound_by(kind) is not None:
            plain = kind.__mro__[1]
    return plain


def _put(module: nn.Module, attribute: str, key: Forward, value: Any) -> None:
    """Sets an entry in a new dict, because a shallow copy of the module shares the former one."""
    module.__dict__[attribute] = {**module.__dict__.get(attribute, {}), key: value}


def _bound_by(kind: type) -> tuple[Forward, bool] | None:
    binding: tuple[Forward, bool] | None = kind.__dict__.get("_hasten_bound")
    return binding


def _stack(kind: type) -> list[tuple[Forward, bool]]:
    return [binding for one in kind.__mro__ if (binding := _bound_by(one)) is not None]


def _class_of(base: type[Any], function: Forward, covers: bool) -> type[Any]:
    """Returns the subclass of ``base``, made once, with ``function`` as its forward.

    ``covers``: the usual forward is one that was set on the instance, not the base's.
    """
    for kind in base.__subclasses__():  # held weakly: a class without instances may be freed
        if _bound_by(kind) == (function, covers):
            return kind

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        usual = functools.partial(base.forward, self)
        if covers:
            usual = getattr(self, _BELOW)[function]
        return function(self, usual, *args, **kwargs)

    members = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "forward": forward,
        "_hasten_bound": (function, covers),
    }
    kind_of: Any = _kind_of
    made: type[Any] = kind_of(type(base))(base.__name__, (base,), members)
    return made


class _BoundClass(type):
    """Metaclass of classes made here: a pickle stores their construction, not the name."""

    def __instancecheck__(cls, instance: Any) -> bool:
        """Checks against the base class too, which code that looks for a model's blocks has."""
        base = cls.__mro__[1] if _bound_by(cls) is not None else None
        return super().__instancecheck__(instance) or (
            base is not None and isinstance(instance, base)
        )


@functools.cache
def _kind_of(kind: type[type]) -> type[type]:
    """Returns the metaclass for subclasses of a class with the metaclass ``kind``."""
    if issubclass(kind, _BoundClass):
        return kind
    made = _BoundClass if kind is type else type(kind.__name__, (_BoundClass, kind), {})
    copyreg.pickle(made, _reduced)
    return made


def _reduced(kind: type) -> Any:
    binding = _bound_by(kind)
    if binding is None:  # a subclass by another library
        return kind.__qualname__
    return _restored, (kind.__mro__[1], *binding)


def _restored(base: type[Any], function: Forward, covers: bool) -> type[Any]:
    prepare = getattr(function, "unpickled", None)
    if prepare is not None:
        prepare()
    return _class_of(base, function, covers)
