"""A session's state as named tensors and JSON, enough to go on as if it had never stopped."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from hasten.core.session import Progress, Session
from hasten.errors import InputError


def state_of(session: Session) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights, optimizer state, random state; progress and plan."""
    tensors = {"random/cpu": torch.get_rng_state()}
    tensors |= _unshared("model", dict(session.loss_module.state_dict()))
    masters = {str(i): p for i, p in enumerate(_own_masters(session))}
    tensors |= {f"master/{name}": t.detach() for name, t in masters.items()}
    numbers: dict[str, Any] = {}
    for index, values in session.optimizer.state_dict()["state"].items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{index}/{key}"] = value
            else:
                numbers[f"{index}/{key}"] = value
    meta = {
        "progress": asdict(session.progress),
        "plan": session.setup.plan.to_list(),
        "optimizer": numbers,
    }
    return tensors, meta


def restore(session: Session, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Bring a freshly assembled session of the same job and plan to a saved state.

    Raises:
        InputError: the state belongs to another model, and nothing was changed.
    """
    saved = {k.removeprefix("model/"): v for k, v in tensors.items() if k.startswith("model/")}
    _check_same_model(session, saved)
    session.loss_module.load_state_dict(saved, strict=False)
    for index, master in enumerate(_own_masters(session)):
        master.data.copy_(tensors[f"master/{index}"])
    session.setup.precision.publish()
    _restore_optimizer(session, tensors, meta["optimizer"])
    torch.set_rng_state(tensors["random/cpu"])
    session.progress = Progress(**meta["progress"])


def _own_masters(session: Session) -> list[Tensor]:
    """True weights that are not the module's own parameters."""
    own = {id(p) for p in session.loss_module.parameters()}
    return [p for p in session.setup.precision.parameters() if id(p) not in own]


def _unshared(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """One name per memory: tied weights are stored once and tied again by the model itself."""
    seen: set[int] = set()
    kept = {}
    for name, tensor in state.items():
        if tensor.data_ptr() not in seen or not tensor.numel():
            kept[f"{prefix}/{name}"] = tensor
            seen.add(tensor.data_ptr())
    return kept


def _check_same_model(session: Session, saved: dict[str, Tensor]) -> None:
    here = session.loss_module.state_dict()
    strange = [n for n, t in saved.items() if n not in here or here[n].shape != t.shape]
    missing = set(_unshared("", dict(here))) - {f"/{name}" for name in saved}
    if strange or missing:
        names = sorted(strange) or sorted(n.removeprefix("/") for n in missing)
        raise InputError(
            f"the checkpoint is of another model: {names[0]} differs ({len(names)} in all); "
            "resume with the recipe that wrote it, or choose another folder"
        )


def _restore_optimizer(
    session: Session, tensors: dict[str, Tensor], numbers: dict[str, Any]
) -> None:
    state: dict[int, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer/"):
            _, index, key = name.split("/", 2)
            state.setdefault(int(index), {})[key] = tensor
    for name, number in numbers.items():
        index, key = name.split("/", 1)
        state.setdefault(int(index), {})[key] = number
    groups = session.optimizer.state_dict()["param_groups"]
    session.optimizer.load_state_dict({"state": state, "param_groups": groups})
