"""Run twenty small experiments and keep their records, with what this code makes of them.

    python tests/contract/make_recorded.py tests/contract/recorded

The files were made on 2026-11-24, before the measuring engines were replaced;
tests/contract/test_golden.py asks for the same numbers from the same examples.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from contract.make_golden import _examples, _model
from hasten.measure.ablation import Design, plans_of, with_second_baseline
from hasten.measure.recipe_experiment import measured, prepared
from hasten.recipe.schema import recipe_from
from hasten.report.judgement import floor_of, noise_of, ratio_to
from told import json_lines

RECIPE: dict[str, Any] = {
    "model": "model",
    "dataset": "records.jsonl",
    "eval_data": 4,
    "cutoff_len": 64,
    "max_steps": 4,
    "global_batch_size": 4,
    "learning_rate": 3e-3,
}
ONE: dict[str, Any] = {"rounds": 5, "steps": 2, "warmup": 1, "evaluations": 2}
EXPERIMENTS: list[tuple[list[Any], str, dict[str, Any], dict[str, Any]]] = [
    # the plan, which variants, of the recipe, of the design
    (["packed"], "plan", {}, {}),
    (["packed"], "plan", {"seed": 1}, {"seed": 1}),
    (["packed"], "plan", {"global_batch_size": 2}, {"steps": 3}),
    (["packed"], "plan", {"global_batch_size": None, "global_batch_tokens": 128}, {}),
    (["length_grouped"], "plan", {}, {}),
    (["document_attention"], "plan", {}, {}),
    (["labelled_token_loss"], "plan", {}, {}),
    (["fused_adamw"], "plan", {}, {"longest_warmup": 4}),
    ([{"gradient_accumulation": {"micro_batch_size": 2}}], "plan", {}, {}),
    (["activation_checkpointing"], "plan", {}, {"evaluations": 1}),
    ([{"checkpoints": {"interval": 2}}], "plan", {}, {}),
    (["packed"], "plan", {}, {"builds": 2}),
    (["packed"], "plan", {}, {"noise": True}),
    (["packed"], "plan", {}, {"foreign_load": 0.5}),
    (["packed"], "plan", {}, {"grouping": "fresh", "rounds": 3}),
    (["packed", "fused_adamw"], "cumulative", {}, {"rounds": 3}),
    (["packed", "fused_adamw"], "alone", {}, {"rounds": 3, "noise": True, "builds": 2}),
    (["packed", "labelled_token_loss"], "leave-one-out", {}, {"rounds": 3}),
    ([{"half": {"minimum": 0}}], "plan", {"nproc": 2}, {"rounds": 3}),
]


class Silent:
    """Is told how it goes, and says nothing."""

    def tell(self, text: str) -> None: ...

    def show(self, text: str, share: float) -> None: ...

    def begin(self, after: float = 0.0) -> None: ...


def numbers(variants: list[Any]) -> dict[str, Any]:
    """What the code that is imported makes of an experiment's variants; floats as they are."""
    rows = []
    for variant in variants:
        ratio = ratio_to(variant, variants[0]) if variant.rounds else None
        rows.append(
            {
                "name": variant.name,
                "rounds": variant.rounds,
                "beside": variant.baseline_rounds,
                "builds": variant.builds,
                "losses": variant.losses,
                "eval_data": variant.eval_data,
                "warmup": variant.warmup,
                "foreign_load": variant.foreign_load,
                "peak_memory_bytes": variant.peak_memory_bytes,
                "joules_per_token": variant.joules_per_token,
                "failed": variant.failed,
                "process_variance": None
                if variant.process_variance is None
                else asdict(variant.process_variance),
                "ratio": None if ratio is None else asdict(ratio),
            }
        )
    told: dict[str, Any] = {"variants": rows}
    if all(variant.rounds for variant in variants):
        told |= {"floor": floor_of(variants), "noise": noise_of(variants)}
    return json.loads(json.dumps(told))  # type: ignore[no-any-return]


def main(target: Path, wanted: list[int]) -> None:
    """Make the files of these numbers, all if there are none."""
    target.mkdir(parents=True, exist_ok=True)
    target = target.resolve()
    for number, (plan, which, changes, designed) in enumerate(EXPERIMENTS):
        if wanted and number not in wanted:
            continue
        with tempfile.TemporaryDirectory() as name:
            here = Path(name)
            _examples(here / "records.jsonl")
            _model(here / "model")
            given = {**RECIPE, **changes, "plan": plan, "output": str(here / "out")}
            given |= {name: str(here / str(given[name])) for name in ("model", "dataset")}
            recipe = recipe_from({k: v for k, v in given.items() if v is not None}, "test")
            silent: Any = Silent()
            subject = prepared(recipe, silent, ranks=True)
            plans, kinds = plans_of(subject.plan, which)
            design = Design(**{**ONE, **designed})
            if design.noise:
                plans, kinds = with_second_baseline(plans, kinds)
            variants = measured(subject, plans, kinds, design, True, silent).variants
            [record] = (here / "out").glob("experiments/*/record.jsonl")
            head, *events = json_lines(record)
            for event in events:
                event.pop("ledger", None)
                event.pop("samples", None)
                if event["event"] == "finish":
                    event |= {"samples": [], "effective": []}
            kept = {
                "version": head["record"],
                "design": asdict(design),
                "kinds": kinds,
                "plans": {name: plan.to_list() for name, plan in plans.items()},
                "expected": numbers(variants),
                "events": events,
            }
            path = target / f"{number:02}.json"
            lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in kept.items() if k != "events"]
            rows = ",\n".join(json.dumps(event) for event in events)
            path.write_text("{" + ",\n".join(lines) + ',\n"events": [\n' + rows + "\n]}\n")
            print(path.name, which, plan, [variant.failed for variant in variants], flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(word) for word in sys.argv[2:]])
