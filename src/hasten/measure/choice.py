"""Choices of ``plan: auto``: what a choice contains, and the stored ones.

A choice is stored for jobs of the same model, data, settings, machine and versions. Training
doesn't need the stored ones.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from hasten.core.context import ExampleStats, JobContext
from hasten.core.plan import name_of
from hasten.machine import cache
from hasten.measure.recipe_experiment import ExperimentSubject, conditions
from hasten.recipe.schema import AutoPlan

FOLDER = Path("~/.cache/hasten/choices")  # of this user
Source = Literal["measured", "forecast", "remembered"]


@dataclass(frozen=True)
class ChoiceRow:
    """One technique, or one plan of a comparison.

    ``ratio`` is its speed over the first plan's: median, low and high.
    """

    name: str
    decision: str
    why: str
    ratio: dict[str, float | None] | None = None


@dataclass(frozen=True)
class Choice:
    """The plan that a job trains with, and how it was selected.

    Args:
        entries: the plan's techniques as a recipe writes them. They include the techniques
            that the recipe requires by other keys.
        source: method of the selection.
        why: one sentence.
        rows: every candidate, with the reason why it is in the plan or not.
        gain: speed relative to the same job without techniques: median, low, high; None:
            not measured.
        tokens_per_second: speed of the plan in the comparison.
        next_best: the second-best plan, as entries, if one was compared.
        seconds: duration of the search.
    """

    entries: list[Any]
    source: Source
    why: str
    rows: list[ChoiceRow] = field(default_factory=list)
    gain: dict[str, float | None] | None = None
    tokens_per_second: float | None = None
    next_best: list[Any] | None = None
    seconds: float = 0.0

    @property
    def sentence(self) -> str:
        """One sentence: the plan that was selected, the reason, and its gain."""
        names = [*map(name_of, self.entries)]
        gained = ""
        if self.gain is not None:
            low, high = self.gain["low"], self.gain["high"]
            between = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
            gained = f"; {self.gain['median']:.2f}×{between} the speed without techniques"
        return f"plan: auto chose {', '.join(names) or 'no technique'}: {self.why}{gained}"

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Choice:
        """Read one back. Raises TypeError, KeyError or ValueError for anything else."""
        rows = [ChoiceRow(**row) for row in record["rows"]]
        choice = cls(**{**record, "rows": rows})
        if not isinstance(choice.entries, list) or not isinstance(choice.why, str):
            raise ValueError("not a choice")
        return choice


@dataclass(frozen=True)
class KeptChoice:
    """A stored choice, with its date, its file and the examples that it was measured on."""

    choice: Choice
    date: str
    path: Path
    examples: ExampleStats


def kept_choices(context: JobContext, folder: Path | None = None) -> list[KeptChoice]:
    """The choices for a model on this machine with these versions, the newest first.

    Their techniques keep the mathematics. A file that can't be read is left out with a warning.

    Args:
        context: the model, the device and the machine; its examples don't matter.
        folder: where choices are kept; in the user's cache if left out.
    """
    about = {**_about_job(context), "examples": None}

    def build(path: Path, entry: Any) -> KeptChoice | None:
        saved_job = entry["about"]
        if entry["fidelity"] == "lossy" or {**saved_job, "examples": None} != about:
            return None
        choice, examples = Choice.from_dict(entry["choice"]), ExampleStats(**saved_job["examples"])
        return KeptChoice(choice, str(entry["date"]), path, examples)

    paths = sorted(cache.at_home(folder or FOLDER).glob("*.json"))
    read = [cache.read(path, partial(build, path), "it isn't used") for path in paths]
    choices = [entry for entry in read if entry is not None]
    return sorted(choices, key=lambda entry: entry.date, reverse=True)


def choice_path(subject: ExperimentSubject, settings: AutoPlan, folder: Path | None) -> Path:
    """The file of a job's choice: another model, data, setting, machine or version has another."""
    recipe, context = subject.recipe, subject.context
    about = ("price", "output", "auto_budget", "max_steps", "epochs", "max_tokens", "seed")
    parts = {
        "recipe": recipe.model_dump(mode="json", exclude={*about, "dataset", "resume"}),
        "asked": settings.model_dump(),
        "examples": asdict(context.examples),
        "model": asdict(context.model),
        "ranks": context.world.size,
        **conditions(context),
    }
    return cache.path_of(folder or FOLDER, parts)


def _about_job(context: JobContext) -> dict[str, Any]:
    """The facts that another job must share to use a choice, normalised through JSON."""
    model = asdict(context.model)
    for key in ("attention", "head_reason"):  # of one instance, which another program builds anew
        del model[key]
    description = {
        "model": model,
        "examples": asdict(context.examples),
        "hardware": {**asdict(context.hardware), "device": context.device},
        "ranks": context.world.size,
        "versions": dict(context.versions),
    }
    return dict(json.loads(json.dumps(description)))


def stored_choice(path: Path) -> Choice | None:
    def build(entry: Any) -> Choice:
        choice = Choice.from_dict(entry["choice"])
        why = f"{choice.why}, on {entry['date']} ({path}; --fresh compares again)"
        return replace(choice, source="remembered", why=why)

    return cache.read(path, build, "plans are compared again")


def store_choice(path: Path, choice: Choice, context: JobContext, settings: AutoPlan) -> None:
    entry = {
        "date": time.strftime("%Y-%m-%d"),
        "choice": asdict(choice),
        "fidelity": settings.fidelity,
        "about": _about_job(context),
    }
    cache.write(path, entry)
