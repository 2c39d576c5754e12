"""Real tunings of one job, repeated, and their winners against each other in one interleaved run.

    python benchmarks/bench_tuner.py real --budget 8m --repeats 5 --json OUT

  1. the recipe without a plan is tuned ``--repeats`` times, each time with another seed, in a
     folder of its own, so that no study learns from an earlier one
  2. on the same budget, as DeepSpeed's autotuner goes: the micro-batch is doubled, each size in a
     fresh start whose steps 3 to 5 are timed once (https://www.deepspeed.ai/tutorials/autotuning);
     the global batch stays as it is by accumulation, and ZeRO has nothing to decide on one rank
  3. the recipe without a plan, a copy of it, every winner and that of 2 take turns (``--compare``)
  4. the winners alone take turns, with a copy of the first (``--apart``): many short rounds, of
     which each two winners' ratio is taken, and the copy's says how far it is noise

It takes at most (repeats + 1) x budget + compare + apart. What is finished stays in ``--folder``,
and a second start goes on from there; a study that was killed gets its whole budget again
(``starts``).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hasten.core.plan import Plan
from hasten.core.slot import Slot
from hasten.machine import host
from hasten.machine.files import write_atomic
from hasten.measure.ablation import AGAIN, BASELINE, Design, Variant
from hasten.measure.recipe_experiment import ExperimentSubject, measured, prepared, recipe_worker
from hasten.measure.workers import Worker, WorkerError, WorkerPool
from hasten.progress import SilentProgress
from hasten.recipe.build import batch_of, requested_plan
from hasten.recipe.schema import Recipe, load_recipe, recipe_from
from hasten.recipe.yaml_reader import read_duration
from hasten.report.judgement import floor_of, ratio_between
from hasten.techniques.batch import GradientAccumulation
from hasten.tune.api import StudyResult, TuneOptions, tune
from hasten.tune.report import final_rows

WITHIN = 0.03  # of each other: what repeated winners are wanted to be
PROFILED = slice(2, 5)  # steps 3 to 5, as DeepSpeed's start_profile_step and end_profile_step
DOUBLING = "doubling"
LOAD = 0.35


@dataclass
class Told(SilentProgress):
    """Prints what stays, with the time since the start; progress is nobody's."""

    began: float = field(default_factory=time.monotonic)

    def tell(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:7.0f} s  {text}", flush=True)


def main(arguments: Sequence[str]) -> None:
    asked = _parser().parse_args(arguments)
    told = Told()
    values = load_recipe(asked.recipe, asked.overrides).model_dump(mode="json")
    if not asked.keep_plan:
        values["plan"] = []
    found: dict[str, Any] = {
        "command": " ".join(["python benchmarks/bench_tuner.py real", *arguments]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": host.hardware().short,
        "recipe": str(asked.recipe),
        "budget_seconds": read_duration(asked.budget),
        "repeats": [],
    }
    plans: dict[str, Plan] = {}
    for number in range(1, asked.repeats + 1):
        told.tell(f"study {number} of {asked.repeats}, budget {asked.budget}")
        row, plans[f"winner {number}"] = _tuned(values, asked, number, told)
        found["repeats"].append(row)
        _keep(asked.json, found)
    subject = prepared(_recipe(values, asked.folder / "compare"), told)
    if asked.doubling:
        kept = asked.folder / "doubling.json"
        if not kept.is_file():
            told.tell("doubling the micro-batch")
            _keep(kept, _doubled(subject, read_duration(asked.budget), told))
        found[DOUBLING] = json.loads(kept.read_text())
        # First, since what a short --compare leaves out is never the last variant.
        plans = {DOUBLING: _cut(subject, found[DOUBLING]["micro_batch"]), **plans}
        _keep(asked.json, found)
    told.tell(f"{len(plans)} winners side by side, {asked.compare} at most")
    found["comparison"] = _compared(subject, plans, read_duration(asked.compare), told)
    _keep(asked.json, found)
    told.tell(f"the winners alone, {asked.apart} at most")
    found["apart"] = _apart(subject, plans, read_duration(asked.apart), told)
    found["seconds"] = round(time.monotonic() - told.began, 1)
    _keep(asked.json, found)
    print(table(found))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench_tuner.py real")
    parser.add_argument("--budget", default="8m", help="of each study, and of the doubling")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compare", default="12m", help="of the winners' run side by side")
    parser.add_argument("--apart", default="12m", help="of the winners' run without the defaults")
    parser.add_argument("--recipe", type=Path, default=Path("examples/stdlib_tiny.yaml"))
    parser.add_argument("--keep-plan", action="store_true", help="start from the recipe's plan")
    parser.add_argument("--no-doubling", dest="doubling", action="store_false")
    parser.add_argument("--only", default="", help="as of hasten tune")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench_tuner"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", help="key=value of the recipe")
    return parser


def _recipe(values: Mapping[str, Any], output: Path) -> Recipe:
    return recipe_from({**values, "output": str(output)}, "the recipe")


def _tuned(
    values: Mapping[str, Any], asked: argparse.Namespace, number: int, told: Told
) -> tuple[dict[str, Any], Plan]:
    """One study's row, and the plan of the recipe that it writes."""
    output = asked.folder / f"study-{number}"
    only = tuple(name for name in asked.only.split(",") if name)
    options = TuneOptions(seed=number, only=only)
    result = tune(_recipe(values, output), asked.budget, options, audience=told)
    path = output / "tuned.yaml"
    write_atomic(path, result.text)
    told.tell(str(result))
    return _row(result, number), requested_plan(load_recipe(path))


def _row(result: StudyResult, seed: int) -> dict[str, Any]:
    report = result.report
    winner = report["winner"]
    states = [t["state"] for t in report["trials"]]
    record = (result.folder / "record.jsonl").read_text()
    return {
        "seed": seed,
        "changes": winner["changes"] if winner else {},
        "idle": winner["idle"] if winner else [],
        "ratio": winner["ratio"] if winner else None,
        "said": str(result),
        "trials": len(states),
        "out_of_memory": states.count("out of memory"),
        "failed": states.count("failed"),
        "noise": report["noise"],
        "seconds": report["seconds"],
        "starts": record.count('"event": "run"'),
    }


def _doubled(subject: ExperimentSubject, budget: float, told: Told) -> dict[str, Any]:
    """Micro-batches of 1, 2, 4 ... records until the step is one, the time is up, or one fails."""
    recipe = subject.recipe
    whole = batch_of(recipe).examples
    if whole is None:
        raise SystemExit("give the recipe a global_batch_size: the doubling cuts it by examples")
    began = time.monotonic()
    path = Path(recipe.output) / "doubling.yaml"
    path.write_text(recipe.model_copy(update={"max_steps": 1000}).to_yaml())
    rows: list[dict[str, Any]] = []
    size = 1
    while (left := budget - (time.monotonic() - began)) > 0:
        plan = _cut(subject, size)
        with WorkerPool(path.parent, subject.context.device) as pool:
            worker = pool.start(recipe_worker(subject, path, plan), f"doubling-{size}")
            speed, why = _profiled(worker, left)
        rows.append({"micro_batch": min(size, whole), "tokens_per_second": speed, "why": why})
        told.tell(f"micro-batch {size}: {speed or why}")
        if size >= whole or speed is None:
            break
        size *= 2
    best = max(rows, key=lambda r: r["tokens_per_second"] or 0.0)
    return {
        "trials": rows,
        "seconds": round(time.monotonic() - began, 1),
        "micro_batch": best["micro_batch"] if best["tokens_per_second"] else None,
    }


def _cut(subject: ExperimentSubject, size: int | None) -> Plan:
    """The plan with micro-batches of so many examples; None, or the whole step: uncut."""
    whole = batch_of(subject.recipe).examples or 0
    own = [] if size is None or size >= whole else [GradientAccumulation(micro_batch_size=size)]
    return Plan([*(t for t in subject.plan if t.slot is not Slot.BATCH), *own])


def _profiled(worker: Worker, seconds: float) -> tuple[float | None, str | None]:
    """Tokens per second of steps 3 to 5, or why there are none."""
    try:
        worker.ready(seconds)
        steps = worker.request("steps", seconds, count=PROFILED.stop)["steps"][PROFILED]
    except WorkerError as error:
        worker.close(kill=True)
        return None, str(error)
    worker.close()
    tokens, took = (sum(step[key] for step in steps) for key in ("tokens", "step_seconds"))
    return round(tokens / took, 1), None


def _compared(
    subject: ExperimentSubject, winners: Mapping[str, Plan], seconds: float, told: Told
) -> dict[str, Any]:
    """All plans in one interleaved run; a plan that several found has one variant."""
    base = subject.plan
    plans: dict[str, Plan] = {BASELINE: base, AGAIN: base}
    variant_of = _joined(plans, winners)
    kinds: dict[str, Any] = {BASELINE: "baseline", AGAIN: "again"}
    design = _design(40, seconds)
    kinds |= dict.fromkeys([n for n in plans if n not in kinds], "other")
    found = measured(subject, plans, kinds, design, False, told)
    return {
        **final_rows(found.variants),
        "design": found.design,
        "variant_of": variant_of,
        "plans": {name: plan.to_list() for name, plan in plans.items()},
    }


def _design(rounds: int, seconds: float) -> Design:
    return Design(
        rounds=rounds,
        steps=1,  # a machine's speed changes within a second
        warmup=2,
        longest_warmup=8,
        evaluations=1,
        noise=True,
        foreign_load=LOAD,
        budget_seconds=seconds,
    )


def _joined(plans: dict[str, Plan], more: Mapping[str, Plan]) -> dict[str, str]:
    """Add plans; the variant of each of them, since a plan that several found has one."""
    variant_of: dict[str, str] = {}
    for name, plan in more.items():
        same = next((n for n, p in plans.items() if set(p) == set(plan)), None)
        variant_of[name] = same or name
        plans.setdefault(variant_of[name], plan)
    return variant_of


def _apart(
    subject: ExperimentSubject, winners: Mapping[str, Plan], seconds: float, told: Told
) -> dict[str, Any]:
    """How far the winners are from each other, with a copy of the first as a control."""
    first, *others = [name for name in winners if name != DOUBLING]
    plans = {first: winners[first]}
    variant_of = _joined(plans, {name: winners[name] for name in (first, *others)})
    if len(plans) == 1:
        return {"variant_of": variant_of, "noise_floor": None, "pairs": []}
    plans = {first: plans[first], AGAIN: plans[first], **plans}
    kinds: dict[str, Any] = dict.fromkeys(plans, "other")
    kinds |= {first: "baseline", AGAIN: "again"}
    design = _design(400, seconds)
    found = measured(subject, plans, kinds, design, False, told)
    variants = {variant.name: variant for variant in found.variants}
    return {
        "variant_of": variant_of,
        "design": found.design,
        "noise_floor": floor_of(found.variants),
        "rounds": {name: list(variant.rounds) for name, variant in variants.items()},
        "control": _pairs([variants[n] for n in (AGAIN, first) if n in variants], variants[first]),
        "pairs": _pairs(
            [variant for name, variant in variants.items() if name != AGAIN], variants[first]
        ),
    }


def _pairs(variants: Sequence[Variant], base: Variant) -> list[dict[str, Any]]:
    """Every two winners: the first's speed over the second's, its median."""
    rows = []
    for place, variant in enumerate(variants):
        for other in variants[place + 1 :]:
            found = ratio_between(variant, other, base)
            if found is not None:
                middle = statistics.median(found[1])
                names = [variant.name, other.name]
                rows.append({"variants": names, "ratio": found[0].summary() | {"median": middle}})
    return rows


def table(found: Mapping[str, Any]) -> str:
    """All of it as lines."""
    lines = [f"{found['machine']}, {found['date']}; {found['command']}", ""]
    lines.append(f"{'study':>7}{'seconds':>9}{'trials':>8}{'OOM':>5}  its own final_comparison")
    for row in found["repeats"]:
        numbers = f"{row['seed']:7}{row['seconds']:9.0f}{row['trials']:8}{row['out_of_memory']:5}"
        changed = ", ".join(f"{k}={v}" for k, v in row["changes"].items())
        lines.append(f"{numbers}  {_span(row['ratio'])}  {changed}")
    if DOUBLING in found:
        way = found[DOUBLING]
        speeds = ", ".join(f"{r['micro_batch']}: {r['tokens_per_second']}" for r in way["trials"])
        lines.append(f"doubling, {way['seconds']:.0f} s: {speeds} -> {way['micro_batch']}")
    both = found["comparison"]
    lines += ["", f"side by side, noise floor {both['noise_floor']:.1%}"]
    for row in both["variants"]:
        speed = statistics.median(row["rounds"]) if row["rounds"] else float("nan")
        lines.append(f"{row['name']:16}{speed:10,.0f}/s  {_span(row['ratio'])}  {row['verdict']}")
    apart = found["apart"]
    lines += ["", f"the winners alone: {json.dumps(apart['variant_of'])}"]
    for row in (*apart.get("control", ()), *apart["pairs"]):
        lines.append(f"{' / '.join(row['variants'])}: {_span(row['ratio'])}")
    lines.append(_verdict(apart["pairs"], len(set(apart["variant_of"].values()))))
    return "\n".join(lines)


def _verdict(pairs: Sequence[Mapping[str, Any]], winners: int) -> str:
    """How far winners are apart; ``winners`` counts the different ones."""
    if winners == 1:
        return "all studies have one and the same winner"
    if len(pairs) < winners * (winners - 1) // 2:
        return f"{len(pairs)} pairs of {winners} winners were compared: give --compare more time"
    apart = max(max(r["ratio"]["median"], 1 / r["ratio"]["median"]) - 1 for r in pairs)
    word = "within" if apart <= WITHIN else "NOT within"
    return f"winners at most {apart:.1%} apart (middle of paired rounds): {word} {WITHIN:.0%}"


def _span(ratio: Mapping[str, Any] | None) -> str:
    if ratio is None or ratio["median"] is None:
        return f"{'-':22}"
    text = f"{ratio['median']:.3f}"
    if ratio["low"] is not None:
        text += f" [{ratio['low']:.3f}, {ratio['high']:.3f}]"
    return f"{text:22}"


def _keep(path: Path | None, found: Mapping[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(Path(os.path.abspath(path)), json.dumps(found, indent=1))
