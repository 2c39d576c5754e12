"""State of a session as named tensors and JSON, complete enough to resume exactly.

The state of each slot is saved automatically. Every object in a field of the setup that
has ``state_dict`` and ``load_state_dict`` is saved under the field's name. Its state is
nested dicts, lists, tensors and JSON values.

| name of a tensor | saved by |
|---|---|
| ``model/WEIGHT``, ``master/WEIGHT``, ``optimizer/WEIGHT/KEY`` | ranks with a chunk of it |
| ``mean/WEIGHT`` | the same ranks, in a run with a running average |
| ``slot/FIELD/...`` | the first rank: the state is the same on all |
| ``rank/R/optimizer/...``, ``rank/R/slot/...`` | rank R, if values differ between ranks |

WEIGHT is the name in the full model. Names don't depend on the layout, and neither do the
contents of DTensors. Any layout can resume from them. ``state_of`` runs on every
rank, because a ``state_dict`` may exchange something; it gathers no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Adam

from hasten.core.layout import KeepsState, SplitsModel, local_state
from hasten.core.resume_check import changes_since, resume_check
from hasten.core.setup import Progress, Session, Setup
from hasten.errors import InputError
from hasten.machine.lazy_torch import is_dtensor
from hasten.parts.checkpoint.chunks import (
    CheckpointTensors,
    Form,
    is_part,
    local_part,
    place_like,
)
from hasten.parts.checkpoint.format import (
    DamagedCheckpointError,
    json_without_tensors,
    tensors_from_json,
)
from hasten.parts.checkpoint.state import (
    check_moments,
    kind_of,
    of_all_ranks,
    random_state,
    set_random_state,
)
from hasten.parts.optim.master_weights import load_optimizer

MODEL, MASTER, OPTIMIZER, SLOT, MEAN = "model", "master", "optimizer", "slot", "mean"
# Prefixes of tensors of which each rank may have a chunk.
CHUNKED = (f"{MODEL}/", f"{MASTER}/", f"{OPTIMIZER}/", f"{MEAN}/")
UNIFORM = "hasten.parts.optim."  # optimizers with equal state keys for all weights of a group

# Names of a rank's weights, and their form: a DTensor if the rank has a part of the weight.


class _Weights:
    """This rank's weights by their names in a checkpoint.

    Args:
        saved_name: for each name in the module: that in a checkpoint. A copy has the name of its
            original on another rank.
        optimized: (name, weight) of each weight in the optimizer's order.
    """

    def __init__(self, session: Session) -> None:
        layout = session.setup.layout
        self._layout = layout if isinstance(layout, SplitsModel | KeepsState) else None
        self.keeper = layout if isinstance(layout, KeepsState) else None
        self._copies = layout.copies if isinstance(layout, SplitsModel) else {}
        self.tensors = session.loss_module.state_dict(keep_vars=True)
        weights = [p for group in session.optimizer.param_groups for p in group["params"]]
        if self.keeper is not None:  # the optimizer holds shards of many weights at once
            weights = [self.tensors[name] for name in session.weight_names]
        self.optimized = list(zip(session.weight_names, weights, strict=True))
        self.masters: dict[str, Tensor] = {}
        pieces = isinstance(layout, SplitsModel) and layout.pieces
        if not pieces and self.keeper is None:
            module_ids = {id(p) for p in session.loss_module.parameters()}
            masters = {id(p) for p in session.setup.precision.parameters()} - module_ids
            self.masters = {name: p for name, p in self.optimized if id(p) in masters}

    def is_copy(self, name: str) -> bool:
        """Returns True if another rank saves the weight."""
        return name in self._copies

    def saved_name(self, name: str) -> str:
        return self._copies.get(name, name)

    def placed(self, weight: Tensor, tensor: Tensor | None = None) -> Tensor:
        """Returns a weight or one of its moments, as DTensor if this rank has a part of it."""
        if tensor is None:  # detaching a DTensor is an operation of its own
            tensor = weight if is_dtensor(weight) else weight.detach()
        return tensor if self._layout is None else self._layout.placed(weight, tensor)

    def tensor_names(self) -> set[str]:
        """Returns the names of the tensors that belong to this rank, without moments' keys."""
        names = {f"{MODEL}/{self.saved_name(name)}" for name in self.tensors}
        names |= {f"{MASTER}/{self.saved_name(name)}" for name in self.masters}
        kinds = (OPTIMIZER, MEAN)
        return names | {f"{k}/{self.saved_name(name)}" for name, _ in self.optimized for k in kinds}


def _of_ranks(session: Session, local_object: Any) -> list[Any]:
    """Returns the object of each rank; all of them call it."""
    # A session of one process may run inside a process that belongs to a larger group.
    alone = session.setup.context.world.size == 1
    return [local_object] if alone else of_all_ranks(local_object)


# Saves and restores the state of a session.


@runtime_checkable
class Stateful(Protocol):
    """An object in a slot that keeps state between steps.

    With an attribute ``each_rank`` that is true, ranks have states of their own. On loading
    such an object gets the states of all saved ranks, each read when it is requested.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


def _of_each_rank(component: Stateful) -> bool:
    return bool(getattr(component, "each_rank", False))


def state_of(session: Session) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns this rank's weights, optimizer state and states of slots; the rest as JSON.

    ``ranks`` in the JSON has one entry, that of this rank alone.
    """
    session.synchronize()
    with torch.no_grad():  # else each DTensor that is made is an operation of autograd
        return _state_of(session)


def _state_of(session: Session) -> tuple[dict[str, Tensor], dict[str, Any]]:
    rank = session.setup.context.world.rank
    rank_state: dict[str, Any] = {"random": {"draws_as": _draws_as(session), **random_state()}}
    weights = _Weights(session)
    saved = {name: t for name, t in weights.tensors.items() if not weights.is_copy(name)}
    parts = local_state(session.setup.layout, session.loss_module) if weights.keeper else None
    base = _base_of(session, weights.tensors if parts is None else parts)
    if base is not None and session.frozen is not None:
        saved = {n: t for n, t in saved.items() if n not in session.frozen.names}
    tensors = {f"{MODEL}/{n}": weights.placed(t) for n, t in _unshared(saved).items()}
    masters = {n: t for n, t in weights.masters.items() if not weights.is_copy(n)}
    tensors |= {f"{MASTER}/{n}": weights.placed(t) for n, t in masters.items()}
    prefix = f"rank/{rank}/" if session.setup.rank_sync.diverged else ""
    if session.setup.average is not None:
        means = session.setup.average.means_by_name()
        tensors |= {f"{MEAN}/{n}": mean for n, mean in means.items() if not weights.is_copy(n)}
    moments, rank_state["optimizer"] = _moments(session, weights)
    tensors |= {f"{prefix}{name}": tensor for name, tensor in moments.items()}
    remembered: dict[str, Tensor] = {}
    slots, rank_state["slots"] = {}, {}
    for name, component in _stateful(session.setup).items():
        separate = _of_each_rank(component)
        key_path = f"rank/{rank}/{SLOT}/{name}" if separate else f"{SLOT}/{name}"
        collected: dict[str, Tensor] = {}
        state = json_without_tensors(component.state_dict(), key_path, collected)
        if separate:
            rank_state["slots"][name] = state
        slots[name] = {"kind": type(component).__name__, "state": None if separate else state}
        if separate or not rank:
            remembered |= collected
    # Copied, because values of a state may share memory with each other or with the model.
    tensors |= {name: tensor.to("cpu", copy=True) for name, tensor in remembered.items()}
    meta = {
        "progress": asdict(session.progress),
        "job": resume_check(session.setup),
        "base": base,
        "optimizer_kind": kind_of(session.optimizer),
        "slots": slots,
        "ranks": [rank_state],
    }
    return tensors, meta


def _moments(session: Session, weights: _Weights) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the optimizer's state by weight name: its tensors, and what is no tensor."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    keeper, optimized = weights.keeper, [weight for _, weight in weights.optimized]
    state = keeper.moments(optimized) if keeper else session.optimizer.state_dict()["state"]
    for index, values in state.items():
        name, weight = weights.optimized[index]
        if weights.is_copy(name):
            continue
        for key, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{OPTIMIZER}/{name}/{key}"] = weights.placed(weight, value)
            else:
                numbers[f"{name}/{key}"] = value
    return tensors, numbers


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


def restore(session: Session, tensors: CheckpointTensors, meta: dict[str, Any]) -> None:
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


def _restore(session: Session, tensors: CheckpointTensors, meta: dict[str, Any]) -> None:
    progress = _progress_of(meta)
    ranks = meta["ranks"]
    weights, rank = _Weights(session), session.setup.context.world.rank
    saved = _SavedState(tensors, ranks, rank)
    random = _random_state_of(session, [entry["random"] for entry in ranks])
    state, slots = _parts_that_fit(session, weights, saved, meta)
    values = _weights_of(weights, saved)
    if weights.keeper is None:
        _load(session, weights, saved, values, state)
    else:
        named = [(weights.tensors[name], value) for name, value in values.items()]
        weights.keeper.load(named, [(weights.optimized[i][1], m) for i, m in state.items()])
    for component, slot_state in slots:
        try:
            component.load_state_dict(slot_state())
        except Exception as error:  # state of a slot, read from an untrusted file
            reason = str(error).split("\n")[0] or type(error).__name__
            raise _damaged(f"it holds no state of {type(component).__name__} ({reason})") from error
    if random is not None:  # a rank that the saved run didn't have keeps its initial random state
        set_random_state(random)
    session.progress = progress


def _load(
    session: Session, weights: _Weights, saved: _SavedState, values: dict[str, Tensor], state: State
) -> None:
    """Loads weights, masters, the optimizer's state and means."""
    session.loss_module.load_state_dict(values, strict=False)
    for name, master in weights.masters.items():
        stored = saved.like(f"{MASTER}/{weights.saved_name(name)}", weights.placed(master))
        master.data.copy_(stored)
    session.setup.precision.update_model_weights()
    groups = session.optimizer.state_dict()["param_groups"]
    load_optimizer(session.optimizer, {"state": state, "param_groups": groups})
    average = session.setup.average
    means = [(f"{MEAN}/{weights.saved_name(n)}", w) for n, w in weights.optimized]
    if average is not None and any(name in saved.forms for name, _ in means):
        average.load_means([saved.like(name, weights.placed(w)) for name, w in means])


class _SavedState:
    """A saved state as this rank uses it.

    A rank reads the values that the same rank of the saved run had for itself. If the saved run
    had fewer ranks, it reads those of the first rank.
    """

    def __init__(
        self, tensors: CheckpointTensors, ranks: Sequence[Mapping[str, Any]], rank: int
    ) -> None:
        self.tensors, self.ranks = tensors, ranks
        all_forms = tensors.forms
        self._sources: dict[str, str] = {}  # name in the file, by name
        for prefix in ("rank/0/", "", f"rank/{rank}/"):
            for name in all_forms:
                if name.startswith(tuple(prefix + kind for kind in CHUNKED)):
                    self._sources[name.removeprefix(prefix)] = name
        self.forms: dict[str, Form] = {n: all_forms[file] for n, file in self._sources.items()}
        self.numbers: dict[str, Any] = {}
        for entry in (*reversed(ranks), *ranks[rank : rank + 1]):
            self.numbers |= entry["optimizer"]

    def like(self, name: str, like: Tensor) -> Tensor:
        """Returns this rank's part of a tensor: of the form that ``like`` has, or as a whole."""
        is_full = not is_part(like) or self.forms[name].shape != tuple(like.shape)
        source = self._sources[name]
        return self.tensors[source] if is_full else self.tensors.like(source, like)

    def owners(self) -> dict[str, list[str]]:
        """Returns the names of a weight's tensors, by name of the weight with its kind."""
        owners: dict[str, list[str]] = {}
        for name in (*self.forms, *(f"{OPTIMIZER}/{name}" for name in self.numbers)):
            moment = name.startswith(f"{OPTIMIZER}/")
            owners.setdefault(name.rpartition("/")[0] if moment else name, []).append(name)
        return owners


def _weights_of(weights: _Weights, saved: _SavedState) -> dict[str, Tensor]:
    """Returns the saved weights of this rank under its own names."""
    values = {}
    for name, tensor in weights.tensors.items():
        saved_name = f"{MODEL}/{weights.saved_name(name)}"
        if saved_name not in saved.forms:
            continue
        value = saved.like(saved_name, weights.placed(tensor))
        if is_dtensor(tensor):
            value = place_like(value.to(local_part(tensor).device), tensor)
        values[name] = value
    return values


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


State = dict[int, dict[str, Any]]  # an optimizer's, by weight number


def _parts_that_fit(
    session: Session, weights: _Weights, saved: _SavedState, meta: dict[str, Any]
) -> tuple[State, list[tuple[Stateful, Callable[[], Any]]]]:
    """Returns optimizer and slots of a sound state; every rank raises one rank's problem."""
    complaint, changes = "", []
    state: State = {}
    slots: list[tuple[Stateful, Callable[[], Any]]] = []
    owners = saved.owners()
    try:
        changes = changes_since(meta, session.setup)
        _check_same_model(session, weights, saved, has_base=meta.get("base") is None)
        _check_same_format(session, weights, saved, meta)
        state = _optimizer_state(weights, saved, owners)
        _check_same_update(session, weights, state)
        slots = _slots_of(session.setup, meta.get("slots", {}), saved)
    except (InputError, DamagedCheckpointError) as error:
        complaint = str(error)
    # Each rank knows its own weights only.
    unknown = set(owners) - weights.tensor_names()
    reports = _of_ranks(session, (complaint, unknown))
    for problem, _ in reports:
        if problem:
            raise InputError(problem)
    strange = sorted(set.intersection(*(names for _, names in reports)))
    if strange:
        raise _strange(strange)
    _check_same_base(session, meta.get("base"))
    session.changes = changes
    return state, slots


def _strange(names: Sequence[str]) -> InputError:
    """Returns the error for saved tensors of weights that no rank has."""
    kind, _, name = names[0].partition("/")
    if kind == OPTIMIZER:
        return _damaged(f"the optimizer's state of {name} is of no weight")
    return _of_another_model(names)


def _of_another_model(names: Sequence[str]) -> InputError:
    name = names[0].partition("/")[2]
    return InputError(
        f"the checkpoint is of another model: {name} differs ({len(names)} in all); "
        "resume with the recipe that wrote it, or choose another folder"
    )


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


def _slots_of(
    setup: Setup, slots: Mapping[str, Any], saved: _SavedState
) -> list[tuple[Stateful, Callable[[], Any]]]:
    """Pairs each object of the setup that has a saved state with a function that reads it."""
    pairs: list[tuple[Stateful, Callable[[], Any]]] = []
    for name, component in _stateful(setup).items():
        if name not in slots:
            continue
        new_kind, saved_kind = type(component).__name__, slots[name]["kind"]
        if new_kind != saved_kind:
            raise _of_another_plan(
                f"the state of {saved_kind} for {name} and the plan has {new_kind}"
            )
        if _of_each_rank(component):
            pairs.append((component, partial(_StatesOfRanks, saved, name)))
        else:
            read = partial(tensors_from_json, slots[name]["state"], saved.tensors)
            pairs.append((component, read))
    return pairs


class _StatesOfRanks(Sequence[Any]):
    """The states that all ranks saved for an object, each read when it is requested."""

    def __init__(self, saved: _SavedState, name: str) -> None:
        self._saved, self._name = saved, name

    def __len__(self) -> int:
        return len(self._saved.ranks)

    def __getitem__(self, rank: Any) -> Any:
        state = self._saved.ranks[rank]["slots"][self._name]
        return tensors_from_json(state, self._saved.tensors)


def _unshared(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Keeps one name per memory: tied weights are stored once, and the model ties them again."""
    addresses: set[int] = set()
    unique = {}
    for name, tensor in state.items():
        plain = type(tensor) in (Tensor, nn.Parameter)  # other tensor types don't own memory
        memory = (tensor.data_ptr() if plain else 0) or id(tensor)
        if memory not in addresses:
            unique[name] = tensor
            addresses.add(memory)
    return unique


def _check_same_model(
    session: Session, weights: _Weights, saved: _SavedState, has_base: bool
) -> None:
    shapes = {
        f"{MODEL}/{weights.saved_name(name)}": tuple(weights.placed(tensor).shape)
        for name, tensor in weights.tensors.items()
    }
    strange = [
        n for n, shape in shapes.items() if n in saved.forms and saved.forms[n].shape != shape
    ]
    absent = session.frozen.names if session.frozen and not has_base else ()
    needed = {name: tensor for name, tensor in weights.tensors.items() if name not in absent}
    names = {f"{MODEL}/{weights.saved_name(name)}" for name in _unshared(needed)}
    problems = sorted(strange) or sorted(names - saved.forms.keys())
    if problems:
        raise _of_another_model(problems)


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


def _check_same_format(
    session: Session, weights: _Weights, saved: _SavedState, meta: Mapping[str, Any]
) -> None:
    """Raises InputError if the optimizer, or the format of weights or masters differs."""
    new_kind = kind_of(session.optimizer)
    saved_kind = meta.get("optimizer_kind", new_kind)
    if new_kind != saved_kind:
        raise _of_another_plan(f"the state of {saved_kind} and this run's optimizer is {new_kind}")
    names = {f"{MASTER}/{weights.saved_name(name)}" for name, _ in weights.optimized}
    saved_masters = names & saved.forms.keys()
    masters = {f"{MASTER}/{weights.saved_name(n)}": t for n, t in weights.masters.items()}
    if len(masters) != len(saved_masters):
        raise _of_another_plan(
            f"{len(saved_masters)} master weights and the plan's precision keeps {len(masters)}"
        )
    for name, master in masters.items():
        if saved.forms.get(name) != Form(tuple(weights.placed(master).shape), master.dtype):
            raise _damaged(f"{name} isn't the plan's master weight")
    for name, weight in weights.tensors.items():
        form = saved.forms.get(f"{MODEL}/{weights.saved_name(name)}")
        dtype = weights.placed(weight).dtype
        if form is not None and form.dtype != dtype:
            saved_type, new_type = (str(d).removeprefix("torch.") for d in (form.dtype, dtype))
            raise _of_another_plan(
                f"{name} in {saved_type} and this run's model has it in {new_type}"
            )


def _optimizer_state(
    weights: _Weights, saved: _SavedState, owners: Mapping[str, Sequence[str]]
) -> State:
    """Returns this rank's part of the optimizer's state; its tensors are read."""
    state: State = {}
    for index, (name, weight) in enumerate(weights.optimized):
        like = weights.placed(weight)
        values: dict[str, Any] = {}
        for full_name in owners.get(f"{OPTIMIZER}/{weights.saved_name(name)}", ()):
            key = full_name.rpartition("/")[2]
            if full_name in saved.forms:
                values[key] = saved.like(full_name, like)
            else:
                values[key] = saved.numbers[full_name.removeprefix(f"{OPTIMIZER}/")]
        if values:
            state[index] = values
    return state


def _check_same_update(session: Session, weights: _Weights, state: State) -> None:
    """Raises InputError if a weight's moments don't fit it."""
    for index, values in state.items():
        name, weight = weights.optimized[index]
        problem = check_moments(local_part(weights.placed(weight)), values)
        if problem:
            raise _damaged(f"the optimizer's state of {name} {problem}")
    kinds = type(session.optimizer).__mro__
    if weights.keeper is not None:
        weights.keeper.check_moments([(weights.optimized[i][1], m) for i, m in state.items()])
    elif any(kind is Adam or kind.__module__.startswith(UNIFORM) for kind in kinds):
        _check_same_keys(session.optimizer.state_dict()["param_groups"], weights, state)


def _check_same_keys(
    groups: Sequence[Mapping[str, Any]], weights: _Weights, state: Mapping[int, Any]
) -> None:
    """Raises InputError if the states of a group's weights have different keys."""
    for group in groups:
        stored = [(index, {*state[index]}) for index in group["params"] if index in state]
        for index, keys in stored:
            if keys != stored[0][1]:
                name, other = (weights.optimized[i][0] for i in (index, stored[0][0]))
                raise _damaged(
                    f"the optimizer's state of {name} has {', '.join(sorted(keys))}, and that of "
                    f"{other} has {', '.join(sorted(stored[0][1]))}"
                )
