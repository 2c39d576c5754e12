"""``hasten speedup``: the recipe's techniques against the baseline, on the recipe's own job."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hasten.cli.arguments import WriteBack, copied, writable
from hasten.cli.guard import beforehand
from hasten.cli.terminal import print_table
from hasten.cli.train import warn_of_idle
from hasten.core.plan import name_of
from hasten.errors import FAILED, InputError
from hasten.formatting import duration
from hasten.measure.ablation import Design, Grouping
from hasten.progress import Display
from hasten.recipe.schema import Recipe, load_recipe
from hasten.recipe.write_back import plain_entry
from hasten.recipe.yaml_reader import read_duration
from hasten.report.bundle import pack
from hasten.report.gains import fastest_of_equal_quality
from hasten.report.page import recipe_plan, write_report
from hasten.report.schema import read_report
from hasten.report.speedup import Order, ablate, gradual_optimize
from hasten.report.verdicts import GUILTY

Arms = Literal["plan", "ladder", "alone", "left-out", "all", "climb"]
NOISE_FROM = 4  # rounds from which a second baseline tells something of the noise
TWO_BUILDS_FROM = 8  # rounds: then each build of an arm has four, and they can be compared
MORE_WARMUP = 8  # steps by which a warm-up may grow
GUARD_SHARE = 1 / 3  # of a budget: what the proofs of equal quality may take of it
MOST_ROUNDS = 30  # with a budget alone: more change an interval little


@dataclass(frozen=True)
class SpeedupOptions:
    """The command's options, as they were given."""

    arms: Arms
    only: str | None
    order: Order
    rounds: int | None
    steps: int
    warmup: int
    budget: str | None
    builds: int | None
    noise: bool | None
    max_load: float
    grouping: Grouping
    fresh: bool
    guard: bool = True
    seeds: int = 0

    def design(self, seed: int) -> Design:
        budget = read_duration(self.budget) if self.budget is not None else None
        rounds = self.rounds or (MOST_ROUNDS if budget is not None else 8)
        return Design(
            rounds=rounds,
            steps=self.steps,
            warmup=self.warmup,
            longest_warmup=self.warmup + MORE_WARMUP,
            seed=seed,
            builds=self.builds or (2 if rounds >= TWO_BUILDS_FROM else 1),
            noise=rounds >= NOISE_FROM if self.noise is None else self.noise,
            foreign_load=self.max_load if self.max_load < 1 else None,
            budget_seconds=budget,
            grouping=self.grouping,
        )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(n.strip() for n in (self.only or "").split(",") if n.strip())


def speedup(
    path: Path,
    overrides: Sequence[str],
    options: SpeedupOptions,
    json_out: Path | None,
    bundle: Path | None = None,
    back: WriteBack | None = None,
) -> int:
    """Measure, print the table, write the report; the exit code."""
    writable("--json", json_out)
    writable("--bundle", bundle)
    if back is not None and (back.asked or back.target):
        back.check()
    recipe = load_recipe(path, overrides)
    design = options.design(recipe.seed)
    if options.arms == "climb" and options.only is not None:
        raise InputError("only: a climb tries every technique of the plan; shorten the plan")
    if options.arms != "climb" and options.order != "slots":
        raise InputError("order: only a climb tries techniques in an order; say --arms climb")
    if options.seeds and not options.guard:
        raise InputError("seeds: the guard trains in pairs; leave --no-guard out")
    command = "hasten " + " ".join(shlex.quote(word) for word in sys.argv[1:])
    with Display() as display:
        report = _measure(recipe, options, design, path.stem, command, display)
    if report is None:
        print("nothing paid, so there is no plan to report on: no report was written")
        return 0
    page = write_report(report, Path(recipe.output))
    copied(page.with_name("report.json"), json_out)
    if bundle is not None:
        pack(Path(recipe.output), bundle)
    print_table(report)
    print(design_line(report["design"]))
    print(f"report: {page}")
    if back is not None:
        _settle(report, command, back)
    idle = warn_of_idle({a["technique"]: a for a in report["arms"][-1]["acted"]})
    unproven = any(row["verdict"] in GUILTY for row in report["guard"] or ())
    if unproven:
        print("a proof of equal quality failed: see the guard's table in the report")
    return FAILED if unproven or (idle and recipe.require_effect) else 0


def _settle(report: dict[str, Any], command: str, back: WriteBack) -> None:
    """Put the fastest plan of equal quality into the recipe, or say how, where it is another."""
    read = read_report(report)
    arm = fastest_of_equal_quality(read)
    asked = read["recipe"].get("plan") or []
    kept = None if arm is None else recipe_plan(arm, read)
    if kept is None or not asked:
        print("nothing is put into the recipe: no plan was shown to be faster at equal quality")
        return
    if kept != asked or back.asked or back.target:
        print(f"the fastest plan of equal quality: {', '.join(map(name_of, kept)) or 'none'}")
        back.settle({"plan": [plain_entry(entry) for entry in kept]}, command)


def _measure(
    recipe: Recipe,
    options: SpeedupOptions,
    design: Design,
    name: str,
    command: str,
    display: Display,
) -> dict[str, Any] | None:
    budget = design.budget_seconds
    share = None if budget is None else GUARD_SHARE * budget
    also = beforehand(options.guard, options.seeds, options.fresh, display, share)
    if options.arms != "climb":
        return ablate(
            recipe,
            options.arms,
            only=options.names,
            design=design,
            title=f"What the plan gains: {name}",
            command=command,
            fresh=options.fresh,
            audience=display,
            also=also,
        )
    climbed = gradual_optimize(
        recipe,
        order=options.order,
        design=design,
        title=f"What gradual optimisation keeps: {name}",
        command=command,
        fresh=options.fresh,
        audience=display,
        also=also,
    )
    print(f"{climbed}\n")
    return climbed.report


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def design_line(design: dict[str, Any]) -> str:
    """How it was measured, in a line."""
    words = [
        f"{_counted(design['rounds'], 'round')} of {_counted(design['steps'], 'step')} in "
        f"{duration(design['seconds'])}",
        design["grouping"],
    ]
    if design.get("ranks"):
        words.append(f"{design['ranks']} ranks in each arm")
    if design["builds"] > 1:
        words.append(f"{design['builds']} builds of each arm")
    if design["redone_rounds"]:
        words.append(f"{design['redone_rounds']} rounds done again for foreign load")
    if design["resumed"]:
        words.append("resumed: arms trained again from their seed")
    if design["dropped"]:
        words.append("left out: " + "; ".join(design["dropped"]))
    return "measured: " + "; ".join(words)
