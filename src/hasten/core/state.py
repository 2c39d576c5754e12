"""State of a session as named tensors and JSON, complete enough to resume exactly.

The state of each slot is saved automatically. Every object in a field of the setup that
has ``state_dict`` and ``load_state_dict`` is saved under the field's name. Its state is
nested dicts, lists, tensors and JSON values.

``state_of`` runs on every rank. A ``state_dict`` may therefore gather what differs
between ranks. Every rank gets the same state back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Adam

from hasten.core.job import OptimizerFactory
from hasten.core.layout import SplitsState, SplitsWeights
from hasten.core.resume_check import changes_since, resume_check
from hasten.core.setup import Progress, Session, Setup
from hasten.errors import InputError
from hasten.parts.checkpoint.format import json_without_tensors, tensors_from_json
from hasten.parts.checkpoint.state import (
    check_moments,
    kind_of,
    of_all_ranks,
    random_state,
    set_random_state,
)
from hasten.parts.optim.master_weights import load_optimizer

# The joined state of ranks that hold different, complete weights.
#
# Weights are stored by name; masters and optimizer state by number, which is the weight's position
# in the optimizer's order. A rank counts only its own weights. Here its numbers are converted into
# those of one process with the full model. That order comes from an optimizer built over weights
# without memory. So a joined state can be read under any layout.

Numbers = dict[str, Any]  # optimizer state that is no tensor, as ``number/key``
MODEL, MASTER, OPTIMIZER = "model", "master", "optimizer"
UNIFORM = "hasten.parts.optim."  # optimizers with equal state keys for all weights of a group


def order_of(factory: OptimizerFactory, named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Returns the names of weights in the order of an optimizer that is built from them.

    Raises:
        InputError: the factory hands over an optimizer that exists.
    """
    stand_ins = {
        name: nn.Parameter(torch.zeros((), dtype=like.dtype).expand(like.shape))
        for name, like in named
    }
    names = {id(weight): name for name, weight in stand_ins.items()}
    optimizer = factory(iter(stand_ins.items()))
    weight_ids = [id(p) for group in optimizer.param_groups for p in group["params"]]
    if not set(weight_ids) <= set(names):
        raise InputError(
            "checkpoints: the state of several ranks is joined in the optimizer's order, and this "
            "job's optimizer is already built; give a function that builds one"
        )
    return [names[weight] for weight in weight_ids]


def separate_masters(session: Session) -> list[Tensor]:
    """Returns the true weights that are neither the module's own parameters nor shards of them."""
    layout = session.setup.layout
    if isinstance(layout, SplitsState) and layout.pieces:
        return []
    module_ids = {id(p) for p in session.loss_module.parameters()}
    return [p for p in session.setup.precision.parameters() if id(p) not in module_ids]


def join_state(
    session: Session, tensors: dict[str, Tensor], numbers: Numbers
) -> tuple[dict[str, Tensor], Numbers]:
    """Joins the states of all ranks on the first rank; every rank calls it with its own."""
    layout = session.setup.layout
    if not isinstance(layout, SplitsWeights):
        return tensors, numbers
    state_names = _StateNames(session, layout)
    local_tensors = {
        state_names.full_name(n): t
        for n, t in tensors.items()
        if _split(n)[0] in state_names.local_names
    }
    other_tensors = {
        n: t for n, t in tensors.items() if _split(n)[0] not in state_names.local_names
    }
    local_numbers = {
        state_names.full_name(f"{OPTIMIZER}/{key}"): value for key, value in numbers.items()
    }
    merged: Numbers = {}
    for rank_numbers in layout.all_gather_object(_without_prefix(local_numbers)):
        merged |= rank_numbers
    gathered = layout.gather_to_rank0({n: t for n, t in local_tensors.items() if n is not None})
    return other_tensors | gathered, merged


def local_state(
    session: Session, tensors: dict[str, Tensor], numbers: Numbers
) -> tuple[dict[str, Tensor], Numbers]:
    """Returns this rank's part of a full state, under its own numbers. All ranks call it.

    A name that no rank uses stays as it is, for code that compares states with models.
    """
    layout = session.setup.layout
    if not isinstance(layout, SplitsWeights):
        return tensors, numbers
    state_names = _StateNames(session, layout)
    local_tensors = {state_names.local_name(name): tensor for name, tensor in tensors.items()}
    local_numbers = {
        state_names.local_name(f"{OPTIMIZER}/{key}"): value for key, value in numbers.items()
    }
    return {n: t for n, t in local_tensors.items() if n is not None}, _without_prefix(local_numbers)


def gather_objects(session: Session, local_object: Any) -> list[Any]:
    """Returns the objects of ranks that hold other weights of the model; all call it."""
    layout = session.setup.layout
    return (
        layout.all_gather_object(local_object)
        if isinstance(layout, SplitsWeights)
        else [local_object]
    )


class _StateNames:
    """Converts names between this rank's state and the full state.

    A name is ``model/NAME``, ``master/NUMBER`` or ``optimizer/NUMBER``. An optimizer's tensor also
    has a key behind its number.
    """

    def __init__(self, session: Session, layout: SplitsWeights) -> None:
        assert session.setup.optimizer is not None  # set before the session was built
        self._copies = layout.copies
        trained = [(n, p) for n, p in session.module.named_parameters() if p.requires_grad]
        local_names, full_names = order_of(session.setup.optimizer, trained), layout.ordered()
        weights = [p for group in session.optimizer.param_groups for p in group["params"]]
        master_ids = {id(master) for master in separate_masters(session)}
        mastered = [n for n, p in zip(local_names, weights, strict=True) if id(p) in master_ids]
        anywhere = {name for names in layout.all_gather_object(mastered) for name in names}
        all_masters = [name for name in full_names if name in anywhere]

        # None: a copy, whose original is stored by another rank
        self._checkpoint_names: dict[str, str | None] = {}
        self._model_names: dict[str, str] = {}
        for name in session.loss_module.state_dict():
            self._add(name, f"{MODEL}/{name}", f"{MODEL}/{self._copies.get(name, name)}")
        self._count(OPTIMIZER, local_names, full_names)
        self._count(MASTER, mastered, all_masters)
        self._elsewhere = {f"{MODEL}/{name}" for name in layout.names}
        for kind, names in ((OPTIMIZER, full_names), (MASTER, all_masters)):
            self._elsewhere |= {f"{kind}/{number}" for number in range(len(names))}

    @property
    def local_names(self) -> Collection[str]:
        """The names of this rank's state."""
        return self._checkpoint_names

    def full_name(self, name: str) -> str | None:
        """Returns the name in the full state; None if another rank stores it."""
        prefix, key = _split(name)
        full_name = self._checkpoint_names.get(prefix, prefix)
        return None if full_name is None else f"{full_name}{key}"

    def local_name(self, name: str) -> str | None:
        """Returns the local name of ``name`` in the full state; None if another rank holds it."""
        prefix, key = _split(name)
        if prefix in self._model_names:
            return f"{self._model_names[prefix]}{key}"
        return None if prefix in self._elsewhere else name

    def _count(self, kind: str, local_names: Sequence[str], full_names: Sequence[str]) -> None:
        numbers = {name: number for number, name in enumerate(full_names)}
        for number, name in enumerate(local_names):
            original = numbers[self._copies.get(name, name)]
            self._add(name, f"{kind}/{number}", f"{kind}/{original}")

    def _add(self, name: str, local_name: str, full_name: str) -> None:
        self._checkpoint_names[local_name] = None if name in self._copies else full_name
        self._model_names[full_name] = local_name


def _split(name: str) -> tuple[str, str]:
    """Splits a tensor's name into the name of its weight and the key behind it."""
    if not name.startswith(f"{OPTIMIZER}/"):
        return name, ""
    prefix, slash, key = name.rpartition("/")
    return prefix, slash + key


def _without_prefix(state_names: Mapping[str | None, Any]) -> Numbers:
    return {k.removeprefix(f"{OPTIMIZER}/"): v for k, v in state_names.items() if k is not None}


# Saves and restores the state of a session.


@runtime_checkable
class Stateful(Protocol):
    """An object in a slot that keeps state between steps."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


def state_of(session: Session) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns weights, optimizer state, random state, states of slots; progress and job."""
    session.synchronize()
    # A session of one process may run inside a process that belongs to a larger group.
    alone = session.setup.context.world.size == 1
    random = {"draws_as": _draws_as(session), **random_state()}
    ranks = [random] if alone else of_all_ranks(random)
    weights = session.loss_module.state_dict(keep_vars=True)
    base = _base_of(session, weights)
    if base is not None and session.frozen is not None:
        weights = {n: t for n, t in weights.items() if n not in session.frozen.names}
    tensors = _unshared("model", weights)
    masters = {str(i): p for i, p in enumerate(separate_masters(session))}
    tensors |= {f"master/{name}": t.detach() for name, t in masters.items()}
    numbers: dict[str, Any] = {}
    for index, values in session.optimizer.state_dict()["state"].items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{index}/{key}"] = value
            else:
                numbers[f"{index}/{key}"] = value
    tensors = _laid_out(session, tensors, gather=True)
    tensors, numbers = join_state(session, tensors, numbers)
    moments = {name: t for name, t in tensors.items() if name.startswith("optimizer/")}
    for rank, state in enumerate(session.setup.rank_sync.gather_states(moments), start=1):
        tensors |= {f"rank/{rank}/{name}": t for name, t in state.items()}
    remembered: dict[str, Tensor] = {}
    slots = {}
    for name, component in _stateful(session.setup).items():
        state = json_without_tensors(component.state_dict(), f"slot/{name}", remembered)
        slots[name] = {"kind": type(component).__name__, "state": state}
    # Copied, because values of a state may share memory with each other or with the model.
    tensors |= {name: tensor.to("cpu", copy=True) for name, tensor in remembered.items()}
    meta = {
        "progress": asdict(session.progress),
        "job": resume_check(session.setup),
        "base": base,
        "random": ranks,
        "optimizer": numbers,
        "optimizer_kind": kind_of(session.optimizer),
        "slots": slots,
    }
    return tensors, meta


def _base_of(session: Session, weights: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """Returns what a state holds instead of frozen weights; None if it holds all weights.

    All ranks call it.
    """
    frozen = session.frozen
    if frozen is None or not frozen.names:
        return None
    changed = torch.tensor([float(not frozen.unchanged(weights))], dtype=torch.float64)
    if session.setup.layout.all_reduce_world(changed).item():
        return None
    return {"weights": len(frozen.names), "hash": frozen.hash}


def restore(session: Session, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Loads a saved state into a newly assembled session of the same job and plan.

    A slot without a saved state starts from its initial state. Permitted changes of the job
    are in ``session.changes``.

    Raises:
        InputError: the state belongs to another model, or to another way of filling a slot.
            Nothing was changed.
    """
    try:
        _restore(session, tensors, meta)
    except InputError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputError(
            f"the saved data is not the state of a run ({type(error).__name__}: "
            f"{str(error)[:100]}); continue with the program that wrote it, or choose another "
            "folder"
        ) from error


def _damaged(problem: str) -> InputError:
    return InputError(f"the checkpoint is damaged: {problem}; resume from an earlier checkpoint")


def _of_another_plan(contents: str) -> InputError:
    return InputError(
        f"the checkpoint holds {contents}; resume with the plan that wrote it, or choose another "
        "folder"
    )


def _restore(session: Session, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    progress = _progress_of(meta)
    tensors, numbers = local_state(session, tensors, meta["optimizer"])
    tensors = _laid_out(session, tensors, gather=False)
    saved = {k.removeprefix("model/"): v for k, v in tensors.items() if k.startswith("model/")}
    rank, random = session.setup.context.world.rank, _random_state_of(session, meta["random"])
    moments = dict(tensors)
    if session.setup.rank_sync.diverged:  # ranks had diverged, each with its own moments
        prefix = f"rank/{rank}/"
        moments |= {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    state = _optimizer_state(moments, numbers)
    slots = _slots_that_fit(session, saved, (tensors, state), meta)
    session.loss_module.load_state_dict(saved, strict=False)
    for index, master in enumerate(separate_masters(session)):
        master.data.copy_(tensors[f"master/{index}"])
    session.setup.precision.update_model_weights()
    groups = session.optimizer.state_dict()["param_groups"]
    load_optimizer(session.optimizer, {"state": state, "param_groups": groups})
    for component, state in slots:
        try:
            component.load_state_dict(tensors_from_json(state, tensors))
        except Exception as error:  # state of a slot, read from an untrusted file
            reason = str(error).split("\n")[0] or type(error).__name__
            raise _damaged(f"it holds no state of {type(component).__name__} ({reason})") from error
    if random is not None:  # a rank that the saved run didn't have keeps its initial random state
        set_random_state(random)
    session.progress = progress


def _draws_as(session: Session) -> list[int]:
    """Returns a key that is equal on ranks that draw the same numbers: same examples and layers."""
    return [session.setup.layout.data_rank, session.setup.layout.stage]


def _random_state_of(session: Session, ranks: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns this rank's saved random state, or that of a saved rank with the same numbers."""
    rank, draws_as = session.setup.context.world.rank, _draws_as(session)
    candidates = [*ranks[rank : rank + 1], *ranks]
    return next((state for state in candidates if state["draws_as"] == draws_as), None)


def _progress_of(meta: Mapping[str, Any]) -> Progress:
    """Returns the saved run's progress.

    Raises:
        InputError: its numbers are no counts.
    """
    counts = meta["progress"]
    if not isinstance(counts, dict) or {*counts} != {field.name for field in fields(Progress)}:
        raise _damaged("its progress is no object of counts")
    for name, count in counts.items():
        if type(count) is not int or not 0 <= count < 1 << 63:
            raise _damaged(f"its progress has {name} {str(count)[:40]!r}, which is no count")
    return Progress(**counts)


def _slots_that_fit(
    session: Session,
    saved: dict[str, Tensor],
    optimized: tuple[dict[str, Tensor], dict[int, dict[str, Any]]],
    meta: dict[str, Any],
) -> list[tuple[Stateful, Any]]:
    """Returns the pairs of ``_slots_of`` of a sound state; every rank raises one rank's problem."""
    complaint = ""
    matches: list[tuple[Stateful, Any]] = []
    changes: list[str] = []
    try:
        changes = changes_since(meta, session.setup)
        _check_same_model(session, saved, has_base=meta.get("base") is None)
        _check_same_update(session, *optimized, meta)
        matches = _slots_of(session.setup, meta.get("slots", {}))
    except InputError as error:
        complaint = str(error)
    for problem in gather_objects(session, complaint):  # each rank has checked its own weights only
        if problem:
            raise InputError(problem)
    _check_same_base(session, meta.get("base"))
    session.changes = changes
    return matches


def _laid_out(session: Session, tensors: dict[str, Tensor], gather: bool) -> dict[str, Tensor]:
    """Returns a state's tensors, gathered on the first rank or sharded to each rank.

    A stored state is the same for every layout, so any layout can resume from it.
    """
    layout = session.setup.layout
    if not isinstance(layout, SplitsState):
        return tensors
    deal = layout.full_tensor if gather else layout.local_shard
    weights = session.loss_module.state_dict(keep_vars=True)
    owners = {f"model/{name}": weight for name, weight in weights.items()}
    owners |= {f"master/{i}": weight for i, weight in enumerate(separate_masters(session))}
    parameters = [p for group in session.optimizer.param_groups for p in group["params"]]
    owners |= {f"optimizer/{i}": weight for i, weight in enumerate(parameters)}
    converted = {}
    for name, tensor in tensors.items():
        owner_name = name.rpartition("/")[0] if name.startswith("optimizer/") else name
        converted[name] = deal(owners[owner_name], tensor) if owner_name in owners else tensor
    return converted


def _stateful(setup: Setup) -> dict[str, Stateful]:
    """Returns the objects of the setup that keep state, by field, each object once."""
    components: dict[str, Stateful] = {}
    for field in fields(setup):
        value = getattr(setup, field.name, None)
        # A class has the functions too (``loss`` may be one) but isn't an object with state.
        new = not any(value is other for other in components.values())
        if isinstance(value, Stateful) and not isinstance(value, type) and new:
            components[field.name] = value
    return components


def _slots_of(setup: Setup, saved: dict[str, Any]) -> list[tuple[Stateful, Any]]:
    """Pairs each object of the setup that has a saved state with that state."""
    pairs = []
    for name, component in _stateful(setup).items():
        if name not in saved:
            continue
        new_kind, saved_kind = type(component).__name__, saved[name]["kind"]
        if new_kind != saved_kind:
            raise _of_another_plan(
                f"the state of {saved_kind} for {name} and the plan has {new_kind}"
            )
        pairs.append((component, saved[name]["state"]))
    return pairs


def _unshared(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Keeps one name per memory: tied weights are stored once, and the model ties them again."""
    addresses: set[int] = set()
    unique = {}
    for name, tensor in state.items():
        plain = type(tensor) in (Tensor, nn.Parameter)  # other tensor types don't own memory
        memory = tensor.data_ptr() if plain else id(tensor)
        if memory not in addresses or not tensor.numel():
            unique[f"{prefix}/{name}"] = tensor.detach()
            addresses.add(memory)
    return unique


def _check_same_model(session: Session, saved: dict[str, Tensor], has_base: bool) -> None:
    weights = session.loss_module.state_dict(keep_vars=True)
    strange = [n for n, t in saved.items() if n not in weights or weights[n].shape != t.shape]
    absent = session.frozen.names if session.frozen and not has_base else ()
    needed = {name: tensor for name, tensor in weights.items() if name not in absent}
    missing = set(_unshared("", needed)) - {f"/{name}" for name in saved}
    if strange or missing:
        names = sorted(strange) or sorted(n.removeprefix("/") for n in missing)
        raise InputError(
            f"the checkpoint is of another model: {names[0]} differs ({len(names)} in all); "
            "resume with the recipe that wrote it, or choose another folder"
        )


def _check_same_base(session: Session, base: Mapping[str, Any] | None) -> None:
    """Raises InputError if the state was trained on other frozen weights. All ranks call it.

    The first rank has read all of them; of other ranks some had no memory for them.
    """
    first = session.setup.context.world.is_main
    own_hash = session.frozen.hash if session.frozen else ""
    differs = first and base is not None and base["hash"] != own_hash
    flag = torch.tensor([float(differs)], dtype=torch.float64)
    if base is not None and session.setup.layout.all_reduce_world(flag).item():
        model = session.setup.job.terms.get("model")
        raise InputError(
            f"the checkpoint is of another base model: {base['weights']} frozen weights, which it "
            f"doesn't hold, differ from those {f'of model {model}' if model else 'of the model'} "
            "now; give the model that the run began with, or start a new run in another output"
        )


def _check_same_update(
    session: Session,
    tensors: dict[str, Tensor],
    state: dict[int, dict[str, Any]],
    meta: dict[str, Any],
) -> None:
    """Raises InputError if the optimizer, its shapes or the format of true weights differ."""
    new_kind = kind_of(session.optimizer)
    saved_kind = meta.get("optimizer_kind", new_kind)
    if new_kind != saved_kind:
        raise _of_another_plan(f"the state of {saved_kind} and this run's optimizer is {new_kind}")
    masters = {f"master/{i}": (m.shape, m.dtype) for i, m in enumerate(separate_masters(session))}
    saved_masters = {n: (t.shape, t.dtype) for n, t in tensors.items() if n.startswith("master/")}
    if len(masters) != len(saved_masters):
        raise _of_another_plan(
            f"{len(saved_masters)} master weights and the plan's precision keeps {len(masters)}"
        )
    if masters != saved_masters:
        name = next(n for n in masters if masters[n] != saved_masters.get(n))
        raise _damaged(f"{name} isn't the plan's master weight")
    for name, weight in session.loss_module.state_dict(keep_vars=True).items():
        tensor = tensors.get(f"model/{name}", weight)
        if tensor.dtype != weight.dtype:
            saved_type, new_type = (str(t.dtype).removeprefix("torch.") for t in (tensor, weight))
            raise _of_another_plan(
                f"{name} in {saved_type} and this run's model has it in {new_type}"
            )
    weights = [p for group in session.optimizer.param_groups for p in group["params"]]
    for index, values in state.items():
        problem = (
            check_moments(weights[index], values) if index < len(weights) else "is of no weight"
        )
        if problem:
            raise _damaged(f"the optimizer's state of weight {index} {problem}")
    kinds = type(session.optimizer).__mro__
    if any(kind is Adam or kind.__module__.startswith(UNIFORM) for kind in kinds):
        _check_same_keys(session.optimizer.state_dict()["param_groups"], state)


def _check_same_keys(groups: Sequence[Mapping[str, Any]], state: Mapping[int, Any]) -> None:
    """Raises InputError if the states of a group's weights have different keys."""
    for group in groups:
        stored = [(index, {*state[index]}) for index in group["params"] if index in state]
        for index, keys in stored:
            if keys != stored[0][1]:
                raise _damaged(
                    f"the optimizer's state of weight {index} has {', '.join(sorted(keys))}, and "
                    f"that of weight {stored[0][0]} has {', '.join(sorted(stored[0][1]))}"
                )


def _optimizer_state(
    tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]
) -> dict[int, dict[str, Any]]:
    """Returns the optimizer's state by weight number.

    Raises:
        InputError: a name has no number.
    """
    named = {
        n.removeprefix(f"{OPTIMIZER}/"): t
        for n, t in tensors.items()
        if n.startswith(f"{OPTIMIZER}/")
    }
    state: dict[int, dict[str, Any]] = {}
    for name, value in [*named.items(), *numbers.items()]:
        index, _, key = name.partition("/")
        if not index.isdecimal():
            raise _damaged(f"{name!r} is no part of an optimizer's state")
        state.setdefault(int(index), {})[key] = value
    return state
