"""Optuna's samplers as proposers: TPE, Gaussian processes, NSGA-II, CMA-ES.

Optuna 5 (Akiba et al. 2019). Every dimension is suggested, whether it matters or not, since the
multivariate samplers want the same parameters in every trial; numbers in rising order are integers,
all others categories (CMA-ES has none: there all are integers). A point that was refused, ran out
of memory or failed is told as worse than all others; one that comes twice is told as before.
"""

from __future__ import annotations

import importlib.util
import warnings
from typing import TYPE_CHECKING, Any

from hasten.tune.blind import Shuffled
from hasten.tune.proposers import Tried
from hasten.tune.space import Point, Space

if TYPE_CHECKING:
    import optuna

NAMES = ("tpe", "gp", "genetic", "cmaes")
POPULATION = 8  # of a generation: Optuna's 50 would be more than a study has trials
PATIENCE = 8  # suggestions that were tried before until one is drawn at random


def missing(name: str) -> str | None:
    """The library that a sampler needs and that isn't installed."""
    needs = {"gp": ("scipy", "torch"), "cmaes": ("cmaes",)}.get(name, ())
    return next((n for n in needs if importlib.util.find_spec(n) is None), None)


class OptunaProposer:
    """One of Optuna's samplers.

    Args:
        name: of `NAMES`.
        space: what may be chosen.
        seed: of the sampler.
    """

    def __init__(self, name: str, space: Space, seed: int = 0) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._optuna, self._space = optuna, space
        self._numbers = name == "cmaes"
        with warnings.catch_warnings():  # "experimental": its effect is in the benchmark
            warnings.simplefilter("ignore")
            self._study = optuna.create_study(direction="maximize", sampler=_sampler(name, seed))
        self._rest = Shuffled(space, seed)
        self._told: dict[Point, Tried] = {}
        self._open: dict[Point, optuna.trial.Trial] = {}

    def ask(self) -> Point | None:
        for _ in range(PATIENCE):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trial = self._study.ask(self._distributions())
            point = self._space.canonical(tuple(trial.params[d.name] for d in self._dimensions))
            if point in self._told:
                self._study.tell(trial, self._value(self._told[point]))
            elif self._space.refuse(point) is not None:
                self._study.tell(trial, self._worst())
            else:
                self._open[point] = trial
                return point
        return self._rest.ask()

    def tell(self, tried: Tried) -> None:
        self._told[tried.point] = tried
        self._rest.tell(tried)
        trial = self._open.pop(tried.point, None)
        if trial is not None:
            self._study.tell(trial, self._value(tried))
            return
        params = {d.name: i for d, i in zip(self._dimensions, tried.point, strict=True)}
        self._study.add_trial(
            self._optuna.trial.create_trial(
                params=params, distributions=self._distributions(), value=self._value(tried)
            )
        )

    @property
    def _dimensions(self) -> Any:
        return self._space.dimensions

    def _distributions(self) -> dict[str, Any]:
        kinds = self._optuna.distributions
        found: dict[str, Any] = {}
        for d in self._dimensions:
            number = d.ordered or self._numbers
            last = len(d.values) - 1
            found[d.name] = (
                kinds.IntDistribution(0, last)
                if number
                else kinds.CategoricalDistribution(tuple(range(last + 1)))
            )
        return found

    def _value(self, tried: Tried) -> float:
        return tried.value if tried.value is not None else self._worst()

    def _worst(self) -> float:
        return min((t.value for t in self._told.values() if t.value is not None), default=0.0) - 0.1


def _sampler(name: str, seed: int) -> optuna.samplers.BaseSampler:
    from optuna import samplers

    if name == "tpe":
        return samplers.TPESampler(multivariate=True, seed=seed)
    if name == "gp":
        return samplers.GPSampler(seed=seed)
    if name == "genetic":
        return samplers.NSGAIISampler(population_size=POPULATION, seed=seed)
    return samplers.CmaEsSampler(seed=seed)
