"""Before the first step: agreement of ranks, the point to resume from."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hasten.core.context import JobContext
from hasten.core.loop import Evaluation
from hasten.core.plan import Plan, entry_of
from hasten.core.setup import Session
from hasten.data.prepared import PreparedData
from hasten.errors import InputError, pip_install
from hasten.foreign_files import LARGEST_LOG, read_bounded
from hasten.formatting import count_text, flow
from hasten.models.adapters import adapted_table, parameter_counts
from hasten.models.load import (
    check_weights,
    local_folder,
    read_config,
    stored_folder,
    stored_formats,
)
from hasten.models.presets import PRESETS
from hasten.models.weights import ADAPTER, NumberFormats
from hasten.parts.checkpoint import checkpoints
from hasten.recipe.schema import Recipe
from hasten.techniques.checkpoint import Checkpoints

Tell = Callable[[str], None]
RANK_KEYS = ("nproc", "output", "min_nproc")  # a rank may have its own


def terms_of_all_ranks(recipe: Recipe, context: JobContext) -> dict[str, dict[str, Any]]:
    """Values that must be equal on all ranks.

    The function :func:`hasten.launch.ranks.check_agreement` compares them.
    """
    keys = recipe.model_dump(mode="json")
    return {
        "recipe": {key: setting for key, setting in keys.items() if key not in RANK_KEYS},
        "version": dict(context.versions),
        "set of examples": asdict(context.examples),
        "model": asdict(context.model),
    }


def resume_from(session: Session, what: str, tell: Callable[[str], None]) -> None:
    """Resumes from a checkpoint: the newest, or the one of a path."""
    checkpoint = session.resume(None if what == "auto" else Path(what))
    if checkpoint is None:
        tell("no checkpoint to resume from, starting at the beginning")
    else:
        changed = "".join(f"; {phrase}" for phrase in session.changes)
        tell(f"resuming from {checkpoint}, step {session.progress.step}{changed}")


def newest_checkpoint(recipe: Recipe, plan: Plan) -> Path | None:
    """Returns the checkpoint to resume from, if it is on this machine's disks."""
    if recipe.resume != "auto":
        return Path(recipe.resume)
    plan_folder = next((t.folder for t in plan if isinstance(t, Checkpoints)), None)
    folder = Path(plan_folder or Path(recipe.output) / "checkpoints")
    return next(reversed(checkpoints(folder)), None)


def tell_what_trains(
    session: Session, prepared_data: PreparedData, tell: Callable[[str], None]
) -> None:
    """Prints model, machine and plan in a line, adapted modules, and the first example."""
    learns, total = parameter_counts(session.model)
    setup = session.setup
    tell(
        f"{setup.context.model.architecture}, {count_text(total)} parameters of which "
        f"{count_text(learns)} learn, on {setup.context.hardware.short}; "
        f"plan: {flow([entry_of(t) for t in setup.plan])}"
    )
    for row in adapted_table(session.model):
        tell(f"  adapted {row.modules} x {row.count}, rank {row.rank}, {row.parameters:,} weights")
    tell(prepared_data.first_example())


def evaluations_before(session: Session, file: Path, metric: str) -> list[Evaluation]:
    """Returns the evaluations of earlier attempts.

    The first rank reads the file, and all ranks get the same rows. Metrics that a user
    added are left out.
    """
    rows = _rows(file, metric) if session.setup.context.world.is_main else []
    everywhere = session.setup.layout.all_reduce_world
    count = int(everywhere(torch.tensor([len(rows)], dtype=torch.float64)).item())
    if not count:
        return []
    local_rows = torch.tensor(rows or [[0.0] * 4] * count, dtype=torch.float64)
    table = everywhere(local_rows.flatten()).reshape(count, 4).tolist()
    return [
        Evaluation(int(step), int(tokens), loss, {} if metric == "eval_loss" else {metric: score})
        for step, tokens, loss, score in table
    ]


def _rows(file: Path, metric: str) -> list[list[float]]:
    """Returns step, tokens, eval loss and metric of each complete line with all of them."""
    rows: list[list[float]] = []
    with contextlib.suppress(InputError):
        for line in read_bounded(file, LARGEST_LOG, "log").splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
                values = json.loads(line)
                rows.append([float(values[k]) for k in ("step", "tokens", "eval_loss", metric)])
    return rows


def check_writers(names: Iterable[str]) -> None:
    """Raises InputError if a writer's package isn't installed."""
    for name in names:  # package and extra have the same name
        if importlib.util.find_spec(name) is None:
            raise InputError(
                f"log_to: {name} needs the package {name}, which isn't installed: "
                f"{pip_install(name)}, or leave {name} out"
            )


def check_folder(output: Path) -> None:
    """Raises InputError if the folder can't be created or written."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):  # a unique name, since ranks do this together
            pass
    except OSError as error:
        raise InputError(
            f"output: can't write into {output}: {error.strerror or error}; choose another folder"
        ) from error


def is_random(recipe: Recipe) -> bool:
    """Returns True if the model's weights are drawn from the seed."""
    return recipe.from_scratch or recipe.model in PRESETS


def saved_formats(recipe: Recipe) -> NumberFormats:
    """Returns the number formats of the run's saved weights."""
    if recipe.save_dtype != "base":
        return NumberFormats(getattr(torch, recipe.save_dtype))
    if is_random(recipe):
        return NumberFormats()
    return stored_formats(recipe.model, read_config(recipe.model, needs_weights=True))


def weight_notes(recipe: Recipe, *, fetch: bool) -> list[str]:
    """Checks the model's weights, and returns notes on them and on their saved format.

    Args:
        recipe: names the model.
        fetch: fetch weights from the hub; else only local weights are checked.

    Raises:
        InputError: the weights don't fit the config, or can't be trained.
    """
    if recipe.model in PRESETS:
        return []
    config = read_config(recipe.model, needs_weights=not recipe.from_scratch)
    notes = _router_notes(recipe, config)
    if recipe.from_scratch:
        return notes
    folder = (local_folder if fetch else stored_folder)(recipe.model)
    notes += [] if folder is None else check_weights(recipe.model, folder, config)
    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(longest, int) and recipe.cutoff_len > longest:
        notes.append(
            f"cutoff_len is {recipe.cutoff_len:,}, but the model was trained on {longest:,} "
            "positions (max_position_embeddings): it has never seen later ones"
        )
    if recipe.finetuning_type == "full" and folder is not None:
        notes.append(f"weights will be saved in {saved_formats(recipe)} (save_dtype)")
    return notes


def check_reference(recipe: Recipe, *, fetch: bool) -> None:
    """Checks the weights of the reference model, if it isn't the start of the training.

    Raises:
        InputError: as `weight_notes`, for the key ``reference``.
    """
    source = recipe.reference
    if source == "start":
        return
    if (Path(source) / ADAPTER).is_file():
        raise InputError(
            f"reference: {source} holds an adapter, and the reference is a full model: take the "
            "folder that hasten export writes of the adapter's run"
        )
    try:
        weight_notes(
            recipe.model_copy(update={"model": source, "from_scratch": False}), fetch=fetch
        )
    except InputError as error:
        raise InputError(f"reference: {error}") from error


def _router_notes(recipe: Recipe, config: Any) -> list[str]:
    """Returns a note on the balance loss of DeepSeek's code, which transformers doesn't have."""
    weight = getattr(config, "aux_loss_alpha", None)
    adds = config.model_type == "deepseek_v2" and isinstance(weight, int | float) and weight > 0
    if not adds or any("balanced_routing" in entry for entry in recipe.plan):
        return []
    span = "sequence" if getattr(config, "seq_aux", True) else "batch"
    return [
        f"config.json has aux_loss_alpha {weight}: DeepSeek's own code adds a loss that balances "
        f"the experts over each {span}, and this training doesn't; to add it for each sequence, "
        f"write {{balanced_routing: {{speed: 0, sequence_loss: {weight}}}}} into plan"
    ]


def check_space(output: Path, context: JobContext) -> None:
    """Raises InputError if the disk has less space than two saved models and the logs need."""
    needed = 2 * 4 * context.model.parameters + 64 * 2**20
    free = shutil.disk_usage(output).free
    if free < needed:
        raise InputError(
            f"output: the run needs about {needed / 1e9:.1f} GB in {output} and {free / 1e9:.1f} "
            "GB are free; make room or choose another folder"
        )
