"""The life of one training run: folder, data, model, steps, and what it leaves behind.

    output/
      recipe.yaml       the resolved recipe          metrics.jsonl     a line per step
      evaluations.jsonl held-out loss and metrics    summary.json      the whole run in one object
      model/ or adapter/  Hugging Face or PEFT form   data/             tokens, mapped by later runs
      model_average/ or adapter_average/  their running mean, where the plan keeps one
      best/             weights of the lowest held-out loss, where the recipe evaluates on the way
      rejected.jsonl    records left out, and why     checkpoints/      where the plan writes them

An earlier run in the same folder is not overwritten: its results move to ``previous/1`` and so on.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from torch import nn

from hasten.cluster.ranks import process_group
from hasten.core import facts
from hasten.core.clock import clock_on
from hasten.core.evaluate import Evaluation
from hasten.core.facts import Facts
from hasten.core.plan import Plan
from hasten.core.session import Session, assemble
from hasten.core.setup import prepare
from hasten.core.step import StepMetrics
from hasten.core.trainer import Outcome, Watch, fit
from hasten.data.store import inspect
from hasten.errors import InputError
from hasten.evidence.energy import meter_of_run
from hasten.models.adapters import adapted_table, parameter_counts
from hasten.models.save import save_adapter, save_model
from hasten.recipe.build import facts_of, job_of, plan_of
from hasten.recipe.ceiling import meter_of, settle
from hasten.recipe.material import Material, gather, write_rejected
from hasten.recipe.overlap import tell_overlap
from hasten.recipe.price import cost_of
from hasten.recipe.schema import Recipe
from hasten.sample import Sample, write_samples

RESULTS = ("metrics.jsonl", "evaluations.jsonl", "summary.json", "rejected.jsonl", "recipe.yaml")
MODELS = ("model", "adapter", "model_average", "adapter_average", "merged")
SHOWN_CHARACTERS = 500  # of a record, at the start
Tell = Callable[[str], None]
OnStep = Callable[[StepMetrics], None]
OnEvaluation = Callable[[Evaluation], None]


def train(
    recipe: Recipe,
    *,
    import_seconds: float = 0.0,
    tell: Tell = print,
    on_tokens: Callable[[int, int], None] | None = None,
    on_start: Callable[[Session], None] = lambda session: None,
    on_step: OnStep = lambda metrics: None,
    on_evaluation: OnEvaluation = lambda evaluation: None,
) -> dict[str, Any]:
    """Train as the recipe says and return what ``summary.json`` holds.

    Raises:
        InputError: anything of the recipe can't be used; nothing was trained.
    """
    began = time.perf_counter()
    output = Path(recipe.output)
    known, plan, material = ready(recipe, tell, on_tokens)
    if known.world.is_main:
        clear_the_way(output, keep_checkpoints=recipe.resume == "auto")
        (output / "recipe.yaml").write_text(recipe.to_yaml())
        if material.note.rejected:
            write_rejected(material.note, output / "rejected.jsonl")
            tell(f"{len(material.note.rejected)} records left out: {output / 'rejected.jsonl'}")
    seconds = {"imports": import_seconds, "data": time.perf_counter() - began}
    facts.reset_memory_peak(known.device)
    with process_group(known.world, known.device):
        run = _Run(recipe, known, plan, material, output, tell if known.world.is_main else _silent)
        return _train(run, seconds, on_start, on_step, on_evaluation)


@dataclass(frozen=True)
class _Run:
    """What a run starts from."""

    recipe: Recipe
    known: Facts
    plan: Plan
    material: Material
    output: Path
    tell: Tell


def _train(
    run: _Run,
    seconds: dict[str, float],
    on_start: Callable[[Session], None],
    on_step: OnStep,
    on_evaluation: OnEvaluation,
) -> dict[str, Any]:
    recipe, main = run.recipe, run.known.world.is_main
    job = job_of(recipe, run.material, run.known, run.plan)
    session = assemble(prepare(job, run.plan, run.known, run.output / "checkpoints"))
    if recipe.resume == "auto":
        _resume(session, run.tell)
    session.startup_seconds |= seconds
    session.meter = meter_of(recipe, run.known, session.model)
    session.setup.clock = clock_on(run.known.device)
    tell_what_trains(session, run.material, run.tell)
    on_start(session)
    keeper = _Keeper(session, run.material, run.output) if main else None
    watch = Watch(
        every_steps=recipe.eval_every,
        patience=recipe.patience,
        on_step=_both(keeper.step, on_step) if keeper else _silent,
        on_evaluation=_both(keeper.evaluation, on_evaluation) if keeper else _silent,
        on_best=keeper.best if keeper and recipe.eval_every else _silent,
    )
    energy = meter_of_run(run.known) if main else None
    if energy is not None:
        watch = replace(watch, on_step=_both(watch.on_step, energy.note))
    outcome = fit(session, watch)
    used = energy.found() if energy is not None else {}
    proofs = {t.name(): asdict(t.probe(session)) for t in run.plan}
    model = session.finish()
    return _leave(run, session, model, outcome, proofs, used) if main else {}


def ready(
    recipe: Recipe, tell: Tell, on_tokens: Callable[[int, int], None] | None = None
) -> tuple[Facts, Plan, Material]:
    """Everything that can be wrong with a recipe, found out before anything is trained."""
    output = Path(recipe.output)
    plan_of(recipe, facts_of(recipe))  # the cheap part first: names, slots, architecture
    check_folder(output)
    material = gather(recipe, output / "data", tell, on_tokens)
    known = facts_of(recipe, material)
    plan = plan_of(recipe, known, tell)
    job_of(recipe, material, known, plan)
    check_space(output, known)
    settle(recipe, known, tell)
    tell_overlap(material, tell)
    return known, plan, material


def clear_the_way(output: Path, keep_checkpoints: bool) -> None:
    """Move an earlier run's results to ``previous/N``; its prepared data stays."""
    output.mkdir(parents=True, exist_ok=True)
    names = [*RESULTS, *MODELS, "best"]
    if not keep_checkpoints:
        names.append("checkpoints")
    earlier = [output / name for name in names if (output / name).exists()]
    if not earlier:
        return
    number = 1
    while (output / "previous" / str(number)).exists():
        number += 1
    place = output / "previous" / str(number)
    place.mkdir(parents=True)
    for path in earlier:
        path.rename(place / path.name)


def tell_what_trains(session: Session, material: Material, tell: Tell) -> None:
    """Model, machine and plan in a line, what was adapted, and the first record as it is seen."""
    learns, total = parameter_counts(session.model)
    setup = session.setup
    tell(
        f"{setup.facts.model.architecture}, {total / 1e6:.1f} M parameters of which "
        f"{learns / 1e6:.1f} M learn, on {setup.facts.hardware.short}; plan: {setup.plan}"
    )
    for row in adapted_table(session.model):
        tell(f"  adapted {row.modules} x {row.count}, rank {row.rank}, {row.parameters:,} weights")
    tell(first_record(material))


def first_record(material: Material) -> str:
    """The first record decoded, for a look at template and loss mask before hours are spent."""
    text = inspect(material.tokenizer, material.train[0])
    shown = text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " ..."
    return f"the first record, trained parts in [[ ]]:\n{shown}"


class _Keeper:
    """Writes a run's lines as they come."""

    def __init__(self, session: Session, material: Material, output: Path) -> None:
        self._session, self._material, self._output = session, material, output
        self._metrics = _open(output / "metrics.jsonl")
        self._evaluations = _open(output / "evaluations.jsonl")

    def step(self, metrics: StepMetrics) -> None:
        self._metrics.write(json.dumps(metrics.to_dict()) + "\n")

    def evaluation(self, evaluation: Evaluation) -> None:
        self._evaluations.write(json.dumps(evaluation.to_dict()) + "\n")

    def best(self, evaluation: Evaluation) -> None:
        save(self._session.model, self._material, self._output / "best")


def save(model: nn.Module, material: Material, folder: Path) -> Path:
    """The model, or its adapter alone, in the format that Transformers and PEFT load."""
    any_model: Any = model
    if adapted_table(model):
        save_adapter(any_model, material.tokenizer, folder)
    else:
        save_model(any_model, material.tokenizer, folder)
    return folder


def _leave(
    run: _Run,
    session: Session,
    model: nn.Module,
    outcome: Outcome,
    proofs: dict[str, Any],
    energy: dict[str, Any],
) -> dict[str, Any]:
    recipe, material, output, known = run.recipe, run.material, run.output, run.known
    seconds, progress = outcome.seconds, session.progress
    adapted = bool(adapted_table(model))
    folder = output / ("adapter" if adapted else "model")
    for suffix in session.versions():
        save(model, material, output / f"{folder.name}{suffix}")
    samples: Sequence[Sample] = write_samples(session, material.tokenizer, material.held_out)
    summary = {
        **outcome.summary(session),
        "startup_seconds": session.startup_seconds,
        "saved": str(folder),
        "plan": session.setup.plan.to_list(),
        "acted": proofs,
        "samples": [asdict(s) for s in samples],
        "cost": cost_of(recipe, seconds, progress.tokens, known.world.size, energy["kwh"]),
        "energy": energy,
        "corpus_sha256": material.note.corpus_sha256,
        "rejected": len(material.note.rejected),
        "hardware": asdict(known.hardware),
        "versions": dict(known.versions),
        "seed": recipe.seed,
    }
    temporary = output / ".summary.json"
    temporary.write_text(json.dumps(summary, indent=1))
    temporary.replace(output / "summary.json")
    return summary


def _resume(session: Session, tell: Tell) -> None:
    found = session.setup.checkpoint.resume(session)
    if found is None:
        tell("no checkpoint to resume from, starting at the beginning")
    else:
        tell(f"resuming from {found}, step {session.progress.step}")


def check_folder(output: Path) -> None:
    """Raise InputError unless the folder is there, or can be made, and takes files."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):  # ranks do this at the same time
            pass
    except OSError as error:
        raise InputError(
            f"output: can't write into {output}: {error.strerror or error}; choose another folder"
        ) from error


def check_space(output: Path, known: Facts) -> None:
    """The saved model, once more while it takes its final name, and some room for the lines."""
    needed = 2 * 4 * known.model.parameters + 64 * 2**20
    free = shutil.disk_usage(output).free
    if free < needed:
        raise InputError(
            f"output: the run needs about {needed / 1e9:.1f} GB in {output} and {free / 1e9:.1f} "
            "GB are free; make room or choose another folder"
        )


def _open(path: Path) -> TextIO:
    return path.open("a", buffering=1)  # a line reaches the file when it is complete


def _both(one: Callable[[Any], None], other: Callable[[Any], None]) -> Callable[[Any], None]:
    def call(value: Any) -> None:
        one(value)
        other(value)

    return call


def _silent(value: Any) -> None:
    return None
