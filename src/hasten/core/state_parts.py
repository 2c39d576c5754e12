"""The state of ranks that hold different weights, each whole: under the numbers of one process.

In a state weights have names, and masters and optimizer state numbers: their places in the
optimizer's order. A rank that holds some weights counts those alone. Here its numbers become those
of one process with the whole model, whose optimizer is asked for its order with weights that take
no memory. So a state that was put together can be read under any layout.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hasten.core.job import OptimizerFactory
from hasten.core.layout import DealsState, DealsWeights
from hasten.core.session import Session
from hasten.errors import InputError

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
    if isinstance(layout, DealsState) and layout.pieces:
        return []
    own = {id(p) for p in session.loss_module.parameters()}
    return [p for p in session.setup.precision.parameters() if id(p) not in own]


def put_together(
    session: Session, tensors: dict[str, Tensor], numbers: Numbers
) -> tuple[dict[str, Tensor], Numbers]:
    """On the first rank the state of all; every rank calls it with its own."""
    layout = session.setup.layout
    if not isinstance(layout, DealsWeights):
        return tensors, numbers
    places = _Places(session, layout)
    mine = {places.there(n): t for n, t in tensors.items() if _split(n)[0] in places.known}
    rest = {n: t for n, t in tensors.items() if _split(n)[0] not in places.known}
    own = {places.there(f"{OPTIMIZER}/{key}"): value for key, value in numbers.items()}
    whole: Numbers = {}
    for said in layout.told(_without_prefix(own)):
        whole |= said
    found = layout.brought({n: t for n, t in mine.items() if n is not None})
    return rest | found, whole


def own_part(
    session: Session, tensors: dict[str, Tensor], numbers: Numbers
) -> tuple[dict[str, Tensor], Numbers]:
    """What of a whole state belongs to this rank, under its own numbers; every rank calls it.

    What isn't known anywhere keeps its name, for those who compare states with models.
    """
    layout = session.setup.layout
    if not isinstance(layout, DealsWeights):
        return tensors, numbers
    places = _Places(session, layout)
    mine = {places.here(name): tensor for name, tensor in tensors.items()}
    own = {places.here(f"{OPTIMIZER}/{key}"): value for key, value in numbers.items()}
    return {n: t for n, t in mine.items() if n is not None}, _without_prefix(own)


def told(session: Session, mine: Any) -> list[Any]:
    """What ranks say that hold other weights of the same model; all call it."""
    layout = session.setup.layout
    return layout.told(mine) if isinstance(layout, DealsWeights) else [mine]


class _Places:
    """Where this rank's things are in a whole state, and where a whole state's are here.

    A place is ``model/NAME``, ``master/NUMBER`` or ``optimizer/NUMBER``, the last with a key behind
    it in the name of a tensor.
    """

    def __init__(self, session: Session, layout: DealsWeights) -> None:
        assert session.setup.optimizer is not None  # the session was built with it
        self._copies = layout.copies
        trained = [(n, p) for n, p in session.module.named_parameters() if p.requires_grad]
        mine, whole = order_of(session.setup.optimizer, trained), layout.ordered()
        held = [p for group in session.optimizer.param_groups for p in group["params"]]
        beside = {id(master) for master in own_masters(session)}
        mastered = [n for n, p in zip(mine, held, strict=True) if id(p) in beside]
        anywhere = {name for names in layout.told(mastered) for name in names}
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
