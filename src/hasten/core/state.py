"""A session's state as named tensors and JSON, enough to go on as if it had never stopped.

What a slot remembers goes along by itself: every object in a field of the setup that has
``state_dict`` and ``load_state_dict`` is saved under the field's name. Its state is nested dicts,
lists, tensors and what JSON can say; ``state_of`` runs on every rank, so that a ``state_dict`` may
gather what differs between them, and every rank is given the same state back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from hasten.core.job import OptimizerFactory
from hasten.core.layout import SplitsState, SplitsWeights
from hasten.core.resume_check import changes_since, resume_check
from hasten.core.session import Progress, Session
from hasten.core.setup import Setup
from hasten.errors import InputError
from hasten.parts.checkpoint.format import json_without_tensors, tensors_from_json
from hasten.parts.checkpoint.state import check_moments, of_all_ranks, set_random_state

# The state of ranks that hold different weights, each whole: under the numbers of one process.
#
# In a state weights have names, and masters and optimizer state numbers: their places in the
# optimizer's order. A rank that holds some weights counts those alone. Here its numbers become
# those of one process with the whole model, whose optimizer is asked for its order with weights
# that take no memory. So a state that was put together can be read under any layout.

Numbers = dict[str, Any]  # what an optimizer keeps beside tensors, as ``number/key``
MODEL, MASTER, OPTIMIZER = "model", "master", "optimizer"


def order_of(factory: OptimizerFactory, named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """The names of weights in the order in which an optimizer that is built of them counts them.

    Raises:
        InputError: the factory hands over an optimizer that exists.
    """
    stand_ins = {
        name: nn.Parameter(torch.zeros((), dtype=like.dtype).expand(like.shape))
        for name, like in named
    }
    names = {id(weight): name for name, weight in stand_ins.items()}
    optimizer = factory(iter(stand_ins.items()))
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    if not set(held) <= set(names):
        raise InputError(
            "checkpoints: a state that lies on several ranks is put together in the optimizer's "
            "order, and this job brings an optimizer that exists; give a function that builds one"
        )
    return [names[weight] for weight in held]


def own_masters(session: Session) -> list[Tensor]:
    """True weights that are not the module's own parameters, nor pieces of them."""
    layout = session.setup.layout
    if isinstance(layout, SplitsState) and layout.pieces:
        return []
    own = {id(p) for p in session.loss_module.parameters()}
    return [p for p in session.setup.precision.parameters() if id(p) not in own]


def put_together(
    session: Session, tensors: dict[str, Tensor], numbers: Numbers
) -> tuple[dict[str, Tensor], Numbers]:
    """On the first rank the state of all; every rank calls it with its own."""
    layout = session.setup.layout
    if not isinstance(layout, SplitsWeights):
        return tensors, numbers
    places = _Places(session, layout)
    mine = {places.there(n): t for n, t in tensors.items() if _split(n)[0] in places.known}
    rest = {n: t for n, t in tensors.items() if _split(n)[0] not in places.known}
    own = {places.there(f"{OPTIMIZER}/{key}"): value for key, value in numbers.items()}
    whole: Numbers = {}
    for said in layout.all_gather_object(_without_prefix(own)):
        whole |= said
    found = layout.gather_to_rank0({n: t for n, t in mine.items() if n is not None})
    return rest | found, whole


def own_part(
    session: Session, tensors: dict[str, Tensor], numbers: Numbers
) -> tuple[dict[str, Tensor], Numbers]:
    """What of a whole state belongs to this rank, under its own numbers; every rank calls it.

    What isn't known anywhere keeps its name, for those who compare states with models.
    """
    layout = session.setup.layout
    if not isinstance(layout, SplitsWeights):
        return tensors, numbers
    places = _Places(session, layout)
    mine = {places.here(name): tensor for name, tensor in tensors.items()}
    own = {places.here(f"{OPTIMIZER}/{key}"): value for key, value in numbers.items()}
    return {n: t for n, t in mine.items() if n is not None}, _without_prefix(own)


def told(session: Session, mine: Any) -> list[Any]:
    """What ranks say that hold other weights of the same model; all call it."""
    layout = session.setup.layout
    return layout.all_gather_object(mine) if isinstance(layout, SplitsWeights) else [mine]


class _Places:
    """Where this rank's things are in a whole state, and where a whole state's are here.

    A place is ``model/NAME``, ``master/NUMBER`` or ``optimizer/NUMBER``, the last with a key behind
    it in the name of a tensor.
    """

    def __init__(self, session: Session, layout: SplitsWeights) -> None:
        assert session.setup.optimizer is not None  # the session was built with it
        self._copies = layout.copies
        trained = [(n, p) for n, p in session.module.named_parameters() if p.requires_grad]
        mine, whole = order_of(session.setup.optimizer, trained), layout.ordered()
        held = [p for group in session.optimizer.param_groups for p in group["params"]]
        beside = {id(master) for master in own_masters(session)}
        mastered = [n for n, p in zip(mine, held, strict=True) if id(p) in beside]
        anywhere = {name for names in layout.all_gather_object(mastered) for name in names}
        all_masters = [name for name in whole if name in anywhere]

        self._there: dict[str, str | None] = {}  # None: a copy, which its original stands for
        self._here: dict[str, str] = {}
        for name in session.loss_module.state_dict():
            self._add(name, f"{MODEL}/{name}", f"{MODEL}/{self._copies.get(name, name)}")
        self._count(OPTIMIZER, mine, whole)
        self._count(MASTER, mastered, all_masters)
        self._elsewhere = {f"{MODEL}/{name}" for name in layout.names}
        for kind, names in ((OPTIMIZER, whole), (MASTER, all_masters)):
            self._elsewhere |= {f"{kind}/{number}" for number in range(len(names))}

    @property
    def known(self) -> Collection[str]:
        """This rank's places."""
        return self._there

    def there(self, name: str) -> str | None:
        """The name in a whole state; None for what another rank brings."""
        place, key = _split(name)
        found = self._there.get(place, place)
        return None if found is None else f"{found}{key}"

    def here(self, name: str) -> str | None:
        """The name here of what has ``name`` in a whole state; None for what is elsewhere."""
        place, key = _split(name)
        if place in self._here:
            return f"{self._here[place]}{key}"
        return None if place in self._elsewhere else name

    def _count(self, kind: str, mine: Sequence[str], whole: Sequence[str]) -> None:
        numbers = {name: number for number, name in enumerate(whole)}
        for number, name in enumerate(mine):
            original = numbers[self._copies.get(name, name)]
            self._add(name, f"{kind}/{number}", f"{kind}/{original}")

    def _add(self, name: str, here: str, there: str) -> None:
        self._there[here] = None if name in self._copies else there
        self._here[there] = here


def _split(name: str) -> tuple[str, str]:
    """A tensor's place in a state, and the rest of its name."""
    if not name.startswith(f"{OPTIMIZER}/"):
        return name, ""
    place, slash, key = name.rpartition("/")
    return place, slash + key


def _without_prefix(places: Mapping[str | None, Any]) -> Numbers:
    return {k.removeprefix(f"{OPTIMIZER}/"): v for k, v in places.items() if k is not None}


# A session's state: taken, and given back.


@runtime_checkable
class Stateful(Protocol):
    """An object in a slot that remembers something from step to step."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


def state_of(session: Session) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights, optimizer state, random state, what the slots remember; progress and job."""
    session.synchronize()
    ranks = of_all_ranks()
    tensors = _unshared("model", session.loss_module.state_dict(keep_vars=True))
    masters = {str(i): p for i, p in enumerate(own_masters(session))}
    tensors |= {f"master/{name}": t.detach() for name, t in masters.items()}
    numbers: dict[str, Any] = {}
    for index, values in session.optimizer.state_dict()["state"].items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{index}/{key}"] = value
            else:
                numbers[f"{index}/{key}"] = value
    tensors = _dealt(session, tensors, gather=True)
    tensors, numbers = put_together(session, tensors, numbers)
    moments = {name: t for name, t in tensors.items() if name.startswith("optimizer/")}
    for rank, state in enumerate(session.setup.rank_sync.gather_states(moments), start=1):
        tensors |= {f"rank/{rank}/{name}": t for name, t in state.items()}
    remembered: dict[str, Tensor] = {}
    slots = {}
    for name, held in _stateful(session.setup).items():
        state = json_without_tensors(held.state_dict(), f"slot/{name}", remembered)
        slots[name] = {"kind": type(held).__name__, "state": state}
    # Copies: values of a state may share memory with each other or with the model.
    tensors |= {name: tensor.to("cpu", copy=True) for name, tensor in remembered.items()}
    meta = {
        "progress": asdict(session.progress),
        "job": resume_check(session.setup),
        "random": ranks,
        "optimizer": numbers,
        "optimizer_kind": type(session.optimizer).__name__,
        "slots": slots,
    }
    return tensors, meta


def restore(session: Session, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Bring a freshly assembled session of the same job and plan to a saved state.

    A slot begins afresh where the state says nothing of it. What of the job may have changed, and
    has, is in ``session.changes``.

    Raises:
        InputError: the state belongs to another model, or to another way of filling a slot, and
            nothing was changed.
    """
    tensors, numbers = own_part(session, tensors, meta["optimizer"])
    tensors = _dealt(session, tensors, gather=False)
    saved = {k.removeprefix("model/"): v for k, v in tensors.items() if k.startswith("model/")}
    rank, ranks = session.setup.context.world.rank, meta["random"]
    moments = dict(tensors)
    if session.setup.rank_sync.diverged:  # ranks trained apart, each with moments of its own
        own = f"rank/{rank}/"
        moments |= {n.removeprefix(own): t for n, t in tensors.items() if n.startswith(own)}
    state = _optimizer_state(moments, numbers)
    slots = _slots_that_fit(session, saved, (tensors, state), meta)
    session.loss_module.load_state_dict(saved, strict=False)
    for index, master in enumerate(own_masters(session)):
        master.data.copy_(tensors[f"master/{index}"])
    session.setup.precision.publish()
    groups = session.optimizer.state_dict()["param_groups"]
    session.optimizer.load_state_dict({"state": state, "param_groups": groups})
    for held, state in slots:
        held.load_state_dict(tensors_from_json(state, tensors))
    if rank < len(ranks):  # one that the saved run didn't have keeps the beginning it was given
        set_random_state(ranks[rank])
    session.progress = Progress(**meta["progress"])


def _slots_that_fit(
    session: Session,
    saved: dict[str, Tensor],
    optimized: tuple[dict[str, Tensor], dict[int, dict[str, Any]]],
    meta: dict[str, Any],
) -> list[tuple[Stateful, Any]]:
    """What ``_slots_of`` finds, once the rest is this run's too; a complaint is every rank's."""
    complaint = ""
    found: list[tuple[Stateful, Any]] = []
    changes: list[str] = []
    try:
        changes = changes_since(meta, session.setup)
        _check_same_model(session, saved)
        _check_same_update(session, *optimized, meta)
        found = _slots_of(session.setup, meta.get("slots", {}))
    except InputError as error:
        complaint = str(error)
    for said in told(session, complaint):  # each rank has looked at its own weights
        if said:
            raise InputError(said)
    session.changes = changes
    return found


def _dealt(session: Session, tensors: dict[str, Tensor], gather: bool) -> dict[str, Tensor]:
    """A state's tensors brought together on the first rank, or each rank's own part of them.

    So a state is the same whatever the layout, and any layout can go on from it.
    """
    layout = session.setup.layout
    if not isinstance(layout, SplitsState):
        return tensors
    deal = layout.full_tensor if gather else layout.local_shard
    weights = session.loss_module.state_dict(keep_vars=True)
    owners = {f"model/{name}": weight for name, weight in weights.items()}
    owners |= {f"master/{i}": weight for i, weight in enumerate(own_masters(session))}
    held = [p for group in session.optimizer.param_groups for p in group["params"]]
    owners |= {f"optimizer/{i}": weight for i, weight in enumerate(held)}
    found = {}
    for name, tensor in tensors.items():
        place = name.rpartition("/")[0] if name.startswith("optimizer/") else name
        found[name] = deal(owners[place], tensor) if place in owners else tensor
    return found


def _stateful(setup: Setup) -> dict[str, Stateful]:
    """The objects in the setup's fields that remember something, each once, by field."""
    found: dict[str, Stateful] = {}
    for field in fields(setup):
        value = getattr(setup, field.name)
        # A class has the functions too (``loss`` may be one), but it is a factory, not an object.
        new = not any(value is other for other in found.values())
        if isinstance(value, Stateful) and not isinstance(value, type) and new:
            found[field.name] = value
    return found


def _slots_of(setup: Setup, saved: dict[str, Any]) -> list[tuple[Stateful, Any]]:
    """Each object of the setup that a saved state speaks of, with that state."""
    pairs = []
    for name, held in _stateful(setup).items():
        if name not in saved:
            continue
        here, there = type(held).__name__, saved[name]["kind"]
        if here != there:
            raise InputError(
                f"the checkpoint holds the state of {there} for {name} and the plan has {here}; "
                "resume with the plan that wrote it, or choose another folder"
            )
        pairs.append((held, saved[name]["state"]))
    return pairs


def _unshared(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """One name per memory: tied weights are stored once and tied again by the model itself."""
    seen: set[int] = set()
    kept = {}
    for name, tensor in state.items():
        plain = type(tensor) in (Tensor, nn.Parameter)  # others have no memory of their own
        memory = tensor.data_ptr() if plain else id(tensor)
        if memory not in seen or not tensor.numel():
            kept[f"{prefix}/{name}"] = tensor.detach()
            seen.add(memory)
    return kept


def _check_same_model(session: Session, saved: dict[str, Tensor]) -> None:
    here = session.loss_module.state_dict(keep_vars=True)
    strange = [n for n, t in saved.items() if n not in here or here[n].shape != t.shape]
    missing = set(_unshared("", dict(here))) - {f"/{name}" for name in saved}
    if strange or missing:
        names = sorted(strange) or sorted(n.removeprefix("/") for n in missing)
        raise InputError(
            f"the checkpoint is of another model: {names[0]} differs ({len(names)} in all); "
            "resume with the recipe that wrote it, or choose another folder"
        )


def _check_same_update(
    session: Session,
    tensors: dict[str, Tensor],
    state: dict[int, dict[str, Any]],
    meta: dict[str, Any],
) -> None:
    """Raises InputError if the optimizer, its shapes or the format of true weights differ."""
    here = type(session.optimizer).__name__
    there = meta.get("optimizer_kind", here)
    if here != there:
        raise InputError(
            f"the checkpoint holds the state of {there} and this run's optimizer is {here}; "
            "resume with the plan that wrote it, or choose another folder"
        )
    wanted = len(own_masters(session))
    found = sum(name.startswith("master/") for name in tensors)
    if wanted != found:
        raise InputError(
            f"the checkpoint holds {found} master weights and the plan's precision keeps {wanted}; "
            "resume with the plan that wrote it, or choose another folder"
        )

    held = [p for group in session.optimizer.param_groups for p in group["params"]]
    for index, values in state.items():
        problem = check_moments(held[index], values) if index < len(held) else "is of no weight"
        if problem:
            raise InputError(
                f"the checkpoint is damaged: the optimizer's state of weight {index} {problem}; "
                "resume from an earlier checkpoint"
            )


def _optimizer_state(
    tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]
) -> dict[int, dict[str, Any]]:
    """The optimizer's state by the number of its weight.

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
            raise InputError(
                f"the checkpoint is damaged: {name!r} is no part of an optimizer's state; resume "
                "from an earlier checkpoint"
            )
        state.setdefault(int(index), {})[key] = value
    return state
