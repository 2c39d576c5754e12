"""The folder of a run: archives the previous run, writes lines and final weights.

A run that its supervisor restarts continues in the same files. Lines of repeated steps
are removed, so each step has one line. A line that a killed process wrote only in part
is removed too.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hasten.core.session import Session
from hasten.data.prepared import PreparedData
from hasten.errors import InputError
from hasten.foreign_files import open_regular
from hasten.formatting import one_line
from hasten.machine import environment
from hasten.machine.files import TEMPORARY, write_atomic
from hasten.models.adapters import adapted_table
from hasten.models.save import save_adapter, save_model
from hasten.models.weights import NumberFormats
from hasten.recipe.sample import Sample, write_samples

STEP_LINES = ("metrics.jsonl", "evaluations.jsonl", "samples.jsonl")
FAULT_LINES = ("quarantined.jsonl", "spikes.jsonl", "restarts.jsonl")
ADJUSTMENTS = "adjustments.jsonl"  # settings that were tried while training
WATCHED = ("run.json", ADJUSTMENTS, "machine.jsonl", "ranks", "tensorboard", "wandb", "mlflow")
RESULTS = (*STEP_LINES, *FAULT_LINES, *WATCHED, "summary.json", "rejected.jsonl", "recipe.yaml")
MODELS = ("model", "adapter", "model_average", "adapter_average")
BEST = "best"


def archive_previous_run(output: Path, keep_checkpoints: bool, keep: Collection[str] = ()) -> str:
    """Moves an earlier run's results to ``previous/N``, except its prepared data and ``keep``.

    Returns:
        A message if that run wasn't done and can be resumed, and how; otherwise "".

    Raises:
        InputError: they can't be moved there.
    """
    output.mkdir(parents=True, exist_ok=True)
    names = [name for name in (*RESULTS, *MODELS, BEST) if name not in keep]
    if not keep_checkpoints:
        names.append("checkpoints")
    for path in output.glob(TEMPORARY):  # a killed run's
        path.unlink()
    # lexists: a link to nothing is one that writing would follow.
    earlier = [output / name for name in names if os.path.lexists(output / name)]
    if not earlier:
        return ""
    folder = output / "previous"
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise InputError(
            f"output: {folder} is no folder, and an earlier run's results belong there; "
            "remove it, or choose another output"
        )
    number = 1
    while os.path.lexists(folder / str(number)):
        number += 1
    archive = folder / str(number)
    try:
        archive.mkdir(parents=True)
        for path in earlier:
            path.rename(archive / path.name)
    except OSError as error:
        raise InputError(
            f"output: the earlier run can't be moved to {archive}: {error.strerror or error}; "
            "choose another output"
        ) from error
    saved = sorted((archive / "checkpoints").glob("step-*"))
    if not saved or (archive / "summary.json").exists():
        return ""
    return (
        f"the earlier run in {output} was not done and is now in {archive}; "
        f"resume={saved[-1]} continues it, and resume=auto continues it without moving it"
    )


def keep_lines_until(output: Path, step: int) -> None:
    """Keeps the lines of an earlier attempt up to ``step``."""
    for name in STEP_LINES:
        path = output / name
        if not path.exists():
            continue
        with open_regular(path) as file:
            lines = file.read().decode(errors="replace").splitlines(keepends=True)
        retained_text = "".join(line for line in lines if _step_of(line) <= step)
        write_atomic(path, retained_text)


def _step_of(line: str) -> float:
    """The step of a line; infinite where the line isn't whole."""
    with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return float(json.loads(line)["step"]) if line.endswith("\n") else float("inf")
    return float("inf")


class LineFile:
    """A file that each line reaches when it is complete; a full disk's lines wait for room."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._waiting = b""

    def add(self, line: Mapping[str, Any]) -> None:
        was_waiting = bool(self._waiting)
        self._waiting += (json.dumps(line) + "\n").encode()
        try:
            while self._waiting:  # the system may take a part of it
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            if not was_waiting:
                warnings.warn(
                    f"{self._path} can't be written: {error.strerror or error}; training "
                    "continues, and its lines follow once there is room",
                    stacklevel=2,
                )


# What a run leaves of its model: weights in the form that others load, averages, samples.
#
# All ranks call these functions: where a layout has dealt the model out, each brings its part, and
# the first rank writes.


def form(session: Session) -> str:
    """Returns what is saved, as its folder is called: a model, or the adapter alone."""
    return "adapter" if adapted_table(session.model) else "model"


RESCUE = "HASTEN_RESCUE"  # a folder, best on another disk, for what `output` has no room for


@dataclass(frozen=True)
class SavedWeights:
    """The folder where weights were saved, and a sentence for each part that couldn't be."""

    folder: Path | None  # None: they are nowhere
    problems: list[str]


def save_weights(
    session: Session,
    data: PreparedData,
    folder: Path,
    formats: NumberFormats,
    rescue: bool = False,
) -> SavedWeights:
    """Saves the current model or adapter, in the form that Transformers and PEFT load.

    Returns:
        A sentence for each further part that couldn't be written.
    """
    model: Any = session.model
    adapter = bool(adapted_table(model))
    second = rescue_path(folder) if rescue else None
    attempts = [(target, formats) for target in (folder, second) if target is not None]
    if rescue and not adapter and formats.most is not torch.bfloat16:
        attempts += [(target, NumberFormats(torch.bfloat16)) for target, _ in attempts]
    problems: list[str] = []
    with session.setup.layout.gather(model):
        if not session.setup.context.world.is_main:
            return SavedWeights(folder, [])
        for target, these in attempts:
            rounded = "" if these is formats else ", rounded to bfloat16"
            try:
                if adapter:
                    unsaved_parts = save_adapter(model, data.tokenizer, target)
                else:
                    unsaved_parts = save_model(model, data.tokenizer, target, these)
            except Exception as error:  # safetensors has an error of its own for a full disk
                problems.append(
                    f"the weights couldn't be written to {target}{rounded}: {one_line(error)}"
                )
                continue
            if problems:
                problems.append(f"the weights are in {target}{rounded}")
            return SavedWeights(target, [*problems, *unsaved_parts])
    return SavedWeights(None, problems)


def rescue_path(path: Path) -> Path | None:
    """A new path in the folder of ``HASTEN_RESCUE`` for what belongs to ``path``; None without."""
    rescue = environment.variable(RESCUE)
    if not rescue:
        return None
    name = f"{path.parent.resolve().name}-{path.name}"
    paths = itertools.chain(
        [Path(rescue, name)], (Path(rescue, f"{number}-{name}") for number in itertools.count(2))
    )
    return next(each for each in paths if not os.path.lexists(each))


def save_all(
    session: Session, data: PreparedData, output: Path, formats: NumberFormats
) -> tuple[Path | None, Sequence[Sample], list[str]]:
    """Saves every version of the weights that AVERAGE has; then the model writes, on rank 0.

    Returns:
        The folder of the weights (None: they couldn't be saved), what the model wrote, and a
        sentence for each part that couldn't be saved.
    """
    unsaved: list[str] = []
    folders: list[Path | None] = []
    for suffix in session.versions():
        folder = output / f"{form(session)}{suffix}"
        saved = save_weights(session, data, folder, formats, rescue=True)
        unsaved += saved.problems
        folders.append(saved.folder)
        if saved.folder is None:
            unsaved.append(_retry(session, output))
    if session.preempted:  # samples take long on a large model
        return folders[0], [], unsaved
    samples: Sequence[Sample] = []
    first_version = session.versions()  # the weights of the first folder, until it is deleted
    next(first_version)
    with session.setup.layout.gather(session.model):
        if session.setup.context.world.is_main:
            try:
                samples = write_samples(session, data.tokenizer, data.eval_data)
            except Exception as error:  # all is saved by now, and a summary is worth more
                unsaved.append(f"no sample could be written: {one_line(error)}")
    del first_version
    return folders[0], samples, unsaved


def _retry(session: Session, output: Path) -> str:
    """How weights that couldn't be saved are saved yet."""
    if session.has_checkpoints:
        return (
            f"make room, then `hasten export {output} --weights checkpoint -o FOLDER` writes the "
            "last checkpoint"
        )
    return (
        "the plan writes no checkpoints, so these weights are lost: make room or set "
        f"{RESCUE} to a folder on another disk before the next run"
    )


def write_summary(path: Path, summary: dict[str, Any]) -> Path | None:
    """Writes the summary, to the folder of ``HASTEN_RESCUE`` if the run's folder has no room.

    Returns:
        Its path; None if it couldn't be written, which ``summary["unsaved"]`` then lists.
    """
    second = rescue_path(path)
    for target in (path, second):
        if target is None:
            continue
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(target, json.dumps(summary, indent=1))
            return target
        except OSError as error:
            reason = error.strerror or error
            summary["unsaved"].append(f"{target} couldn't be written: {reason}")
    return None
