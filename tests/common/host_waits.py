"""Where the host would wait for a GPU, found on a processor.

A device's tensors are those that come of what ``on_device`` names, through whatever operators. The
host waits when it reads one of them: ``.item()``, ``bool()``, ``tolist()``, a copy to the host, and
operators whose result is as long as the numbers say.
"""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hasten

PACKAGE = Path(hasten.__file__).parent  # the checkout's folder may be called hasten, too
READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2"}
COPIES = {Tensor.tolist, Tensor.numpy, Tensor.cpu}


class HostWaits(TorchDispatchMode):
    """Inside, ``places`` grows by a line of hasten's code for each wait."""

    def __init__(self, on_device: Iterable[Tensor]) -> None:
        super().__init__()
        self.places: list[str] = []
        self._known = {id(t): weakref.ref(t) for t in on_device}
        self._functions = _Copies(self)

    def __enter__(self) -> HostWaits:
        super().__enter__()
        self._functions.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._functions.__exit__(*error)
        super().__exit__(*error)

    def knows(self, tensor: Any) -> bool:
        """Whether a tensor would be the device's."""
        known = self._known.get(id(tensor))
        return known is not None and known() is tensor

    def note(self) -> None:
        """A wait, at the innermost line of the package."""
        stack = traceback.extract_stack()
        lines = [f for f in stack if Path(f.filename).is_relative_to(PACKAGE)]
        if lines:
            place = Path(lines[-1].filename).relative_to(PACKAGE).as_posix()
            self.places.append(f"{place}: {lines[-1].line}")
        else:
            self.places.append(f"{stack[0].filename}: {stack[0].line}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        from_device = any(self.knows(t) for t in given)
        name = func.name().partition(".")[0]
        by_mask = name == "aten::index" and any(t.dtype == torch.bool for t in given[1:])
        if from_device and (name in READS or by_mask):
            self.note()
        found = func(*args, **(kwargs or {}))
        if from_device and name != "aten::_local_scalar_dense":
            for tensor in tree_leaves(found):
                if isinstance(tensor, Tensor):
                    self._known[id(tensor)] = weakref.ref(tensor)
        return found


class _Copies(TorchFunctionMode):
    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in COPIES and self.waits.knows(args[0]):
            self.waits.note()
        return func(*args, **(kwargs or {}))
