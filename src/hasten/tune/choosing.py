"""Which proposer a name stands for, and what is taken instead where its library isn't there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from hasten.core.plan import did_you_mean
from hasten.errors import InputError
from hasten.tune.blind import Bandit, Shuffled
from hasten.tune.optuna_proposers import OptunaProposer, missing
from hasten.tune.proposers import Beforehand, Own, Proposer
from hasten.tune.space import Space

Sampler = Literal["auto", "tpe", "gp", "random", "genetic", "cmaes", "bandit"]


def check_sampler(name: str) -> None:
    """Refuse a sampler that nobody knows.

    Raises:
        InputError: with the nearest known one.
    """
    known = get_args(Sampler)
    if name not in known:
        raise InputError(
            f"sampler: there is no {name!r}{did_you_mean(name, known)}; there are "
            f"{', '.join(known)}"
        )


def proposer_of(
    name: str,
    space: Space,
    known: Beforehand,
    seed: int = 0,
    tell: Callable[[str], None] = lambda text: None,
) -> Proposer:
    """The proposer of a name; TPE, with a word, where its library is missing."""
    check_sampler(name)
    if name == "auto":
        return Own(space, known, seed)
    if name == "random":
        return Shuffled(space, seed)
    if name == "bandit":
        return Bandit(space, seed)
    library = missing(name)
    if library is not None:
        tell(f"sampler: {name} needs {library}, which isn't installed; going on with tpe")
        name = "tpe"
    return OptunaProposer(name, space, seed)
