"""A recipe as a subject: its plan's decisions are the settings, its own job is what is measured."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from hasten.core import processes
from hasten.core.plan import Plan
from hasten.core.technique import Fidelity, Technique
from hasten.errors import InputError
from hasten.evidence.ablation import AGAIN, BASELINE, Design
from hasten.evidence.grouping import SHARE
from hasten.experiment import Audience, Subject, measured
from hasten.recipe.build import batch_of, catalogue
from hasten.recipe.schema import Recipe
from hasten.search.tuner.bench import Runner
from hasten.search.tuner.duel import judged
from hasten.search.tuner.plans import plan_space
from hasten.search.tuner.proposers import Beforehand
from hasten.search.tuner.runners import PlanRunner
from hasten.search.tuner.space import Point
from hasten.tuning.subject import Wishes

Prove = Callable[[Subject, Plan], Sequence[str]]
ENDLESS = 1_000_000  # steps: a study ends by its budget
FINISH = 0.9  # of the time that is left goes into the duel; the rest is for its end
LOAD = 0.35  # share of the machine that others may take in a round of the duel


class RecipeSubject:
    """A recipe whose data is ready.

    Args:
        given: the recipe and what is known of it.
        wishes: how.
        audience: is told how it goes on.
        prove: finds what the guard has against a plan.
    """

    unit = "tokens/s"

    def __init__(
        self, given: Subject, wishes: Wishes, audience: Audience, prove: Prove | None = None
    ) -> None:
        recipe, known = given.recipe, given.known
        if wishes.objective == "money" and recipe.price is None:
            raise InputError("objective: money needs a price; give price in the recipe")
        self._given, self._wishes, self._audience = given, wishes, audience
        self._prove, self._device = prove, known.device
        self._plans = plan_space(
            catalogue(), given.plan, known, _bounds(recipe), wishes.lossy, wishes.only
        )
        self.space = self._plans.space
        self.folder = Path(recipe.output) / "studies"
        self.title = f"Tuning of {recipe.model}"
        self.about = {
            "architecture": known.model.architecture,
            "device": known.device,
            "objective": wishes.objective,
        }
        self._path = self.folder / "recipe.yaml"

    def key(self) -> dict[str, Any]:
        given = self._given
        return {
            "recipe": given.recipe.model_dump(mode="json", exclude={"price", "output"}),
            "data": given.data_key,
            "space": [(d.name, [str(v) for v in d.values]) for d in self.space.dimensions],
            "hardware": {**asdict(given.known.hardware), "device": self._device},
            "versions": dict(given.known.versions),
        }

    def open(self, folder: Path) -> None:
        steps = {"max_steps": ENDLESS, "epochs": None, "max_tokens": None}
        self._path = folder / "recipe.yaml"
        self._path.write_text(self._given.recipe.model_copy(update=steps).to_yaml())

    def known(self, noise: float, memory: float | None) -> Beforehand:
        """Forecasts of the techniques; the memory that is left beside the start's process."""
        hardware = self._given.known.hardware
        free = processes.available_bytes(hardware.memory_limit_bytes)
        if not self._device.startswith("cpu"):
            free = min((g.memory_bytes for g in hardware.accelerators), default=free)
            free -= int(memory or 0)
        limit = SHARE * free
        if memory is None:
            return Beforehand(self._plans.gain, limit=limit, noise=noise)
        first = self._plans.resident(self.space.start)

        def peak(point: Point) -> float:
            return max(memory + self._plans.resident(point) - first, 0.1 * memory)

        return Beforehand(self._plans.gain, peak, limit, noise)

    def start(self, point: Point) -> Runner:
        plan = self._plans.plan(point)
        log = self._path.parent / f"trial-{plan.key}.log"
        return PlanRunner(self._path, plan, self._environ(plan), log)

    def duel(
        self, leaders: Sequence[Point], seconds: float, tell: Callable[[str], None]
    ) -> dict[str, Any]:
        """As `hasten speedup` measures: held-out losses, proofs of what acted, a record."""
        base = self._plans.plan(self.space.start)
        choices = {f"choice {n}": self._plans.plan(p) for n, p in enumerate(leaders, start=1)}
        # The budget drops the second baseline last, and never the last arm, which is the result.
        ordered = dict(reversed(choices.items()))
        plans: dict[str, Plan] = {BASELINE: base, AGAIN: base, **ordered}
        kinds: dict[str, Any] = {BASELINE: "baseline", AGAIN: "again"}
        kinds |= dict.fromkeys(choices, "other")
        design = Design(
            rounds=20,
            steps=self._wishes.steps,
            warmup=2,
            longest_warmup=8,
            evaluations=1,
            seed=self._wishes.seed,
            noise=True,
            foreign_load=LOAD,
            budget_seconds=max(FINISH * seconds, 1.0),
        )
        try:
            found = measured(
                self._given,
                plans,
                kinds,
                design,
                self._wishes.fresh,
                _Quietly(self._audience, tell),
            )
        except InputError as error:  # the budget left no room for two rounds
            reason = f"no duel: {error}"
            names = [BASELINE, AGAIN, *choices]
            return {"noise_floor": None, "arms": [_unmeasured(name, reason) for name in names]}
        rows = judged(found.arms)
        by_name = {row["name"]: row for row in rows["arms"]}
        every = [by_name.get(n) or _unmeasured(n) for n in (BASELINE, AGAIN, *choices)]
        return {**rows, "arms": every, "design": found.design}

    def refusal(self, point: Point) -> str | None:
        """What the guard has against a plan with lossy techniques that the recipe hadn't."""
        plan = self._plans.plan(point)
        own = set(self._given.plan)
        new = [t for t in plan if t.fidelity is Fidelity.LOSSY and t not in own]
        if not new:
            return None
        if self._prove is None:
            return f"{new[0]} is other mathematics, and nobody was asked to prove its quality"
        return next(iter(self._prove(self._given, plan)), None)

    def text(self, point: Point, words: Sequence[str]) -> str:
        """The recipe with a point's plan; every line of it that isn't a default."""
        recipe = self._given.recipe
        values = {
            name: value
            for name, value in recipe.model_dump(mode="json").items()
            if name in recipe.model_fields_set and name not in ("plan", "checkpoint_every")
        }
        plan = [_entry(t) for t in self._plans.plan(point)]
        head = [line for text in words for line in textwrap.wrap(text, 97)]
        comment = "".join(f"# {line}\n" for line in head)
        body = yaml.safe_dump({**values, "plan": plan}, sort_keys=False, width=100)
        return f"{comment}{body}"

    def _environ(self, plan: Plan) -> Mapping[str, str]:
        """Waiting threads sleep, since processes share the cores; then what techniques want."""
        recipe: Recipe = self._given.recipe
        passive = {"OMP_WAIT_POLICY": "PASSIVE"}
        return {**passive, **plan.environ(self._given.known), **recipe.transport}


class _Quietly:
    """Hands a duel's progress on without its own share, which is that of another budget."""

    def __init__(self, audience: Audience, tell: Callable[[str], None]) -> None:
        self._audience, self._tell = audience, tell

    def tell(self, text: str) -> None:
        self._audience.tell(text)

    def begin(self) -> None:
        pass

    def show(self, text: str, share: float) -> None:
        self._tell(f"duel: {text}")


def _bounds(recipe: Recipe) -> dict[str, tuple[float, float]]:
    """What follows from the job: a micro-batch is no larger than a step; cut by records alone."""
    batch = batch_of(recipe)
    most = max((batch.records or 64) // 2, 1)
    return {
        "accumulate.micro_batch_size": (1, most),
        "accumulate.micro_batch_tokens": (1, 0),  # the same cut in another unit
    }


def _entry(technique: Technique) -> Any:
    """A technique as people write it: its name, and what differs from its defaults."""
    fields = dataclasses.fields(technique)  # type: ignore[arg-type]  # every technique is one
    plain = technique.settings()
    changed = {f.name: plain[f.name] for f in fields if getattr(technique, f.name) != f.default}
    return {technique.name(): changed} if changed else technique.name()


def _unmeasured(name: str, why: str = "no time for it") -> dict[str, Any]:
    return {
        "name": name,
        "verdict": f"inconclusive: {why}",
        "p_value": None,
        "ratio": {"median": None, "low": None, "high": None},
        "rounds": [],
        "peak_memory_bytes": None,
        "failed": None,
    }
