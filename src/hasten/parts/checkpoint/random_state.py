"""The random state of every rank: torch's, Python's, NumPy's and the accelerator's.

Dropout, shuffles and augmentation go on after a resume as if nothing had been only if each rank
gets its own back.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def random_state() -> dict[str, Any]:
    """This process's state, as JSON can say it."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    found: dict[str, Any] = {
        "torch": _text(torch.get_rng_state()),
        "python": [version, list(words), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
    }
    if torch.accelerator.is_available():
        found["accelerator"] = _text(_module().get_rng_state())
    return found


def set_random_state(state: dict[str, Any]) -> None:
    """Go on from what ``random_state`` found.

    Raises:
        ValueError: it isn't such a state.
    """
    try:
        torch.set_rng_state(_state(state["torch"]))
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, np.asarray(keys, np.uint32), *rest))
        if "accelerator" in state and torch.accelerator.is_available():
            _module().set_rng_state(_state(state["accelerator"]))
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"the random state of the checkpoint can't be used: {error}") from error


def of_all_ranks(found: Callable[[], dict[str, Any]] = random_state) -> list[dict[str, Any]]:
    """Every rank's state, in the order of ranks, on every rank."""
    mine = found()
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [mine]
    text = json.dumps(mine).encode()
    device = torch.device("cpu")
    if dist.get_backend() == "nccl":
        device = torch.device(torch.accelerator.current_accelerator() or "cpu")
    length = torch.tensor(len(text), device=device)
    dist.all_reduce(length, op=dist.ReduceOp.MAX)
    padded = torch.frombuffer(bytearray(text.ljust(int(length))), dtype=torch.uint8).to(device)
    rows = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, padded)
    return [json.loads(bytes(row.cpu().tolist())) for row in rows]


def _module() -> Any:
    return torch.get_device_module(torch.accelerator.current_accelerator())


def _text(state: torch.Tensor) -> str:
    return bytes(state.tolist()).hex()


def _state(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
