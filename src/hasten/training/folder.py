"""The folder of a run: archives the previous run, writes lines and final weights.

A run that its supervisor restarts continues in the same files. Lines of repeated steps
are removed, so each step has one line. A line that a killed process wrote only in part
is removed too.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hasten.core.setup import Session
from hasten.data.prepared import PreparedData
from hasten.errors import InputError
from hasten.foreign_files import open_regular
from hasten.formatting import one_line
from hasten.machine.files import TEMPORARY, write_atomic
from hasten.models.adapters import adapted_table
from hasten.models.save import save_adapter, save_model
from hasten.models.weight_files import weight_source
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
    for path in output.glob(TEMPORARY):  # left by a killed run
        path.unlink()
    # lexists: writing would follow a link whose target is missing
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
    """Returns the step of a line; infinite if the line is incomplete."""
    with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return float(json.loads(line)["step"]) if line.endswith("\n") else float("inf")
    return float("inf")


class LineFile:
    """A file that receives complete lines only; lines wait while the disk is full."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._waiting = b""

    def add(self, line: Mapping[str, Any]) -> None:
        was_waiting = bool(self._waiting)
        self._waiting += (json.dumps(line) + "\n").encode()
        try:
            while self._waiting:  # the system may write only a part
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            if not was_waiting:
                warnings.warn(
                    f"{self._path} can't be written: {error.strerror or error}; training "
                    "continues, and its lines follow once there is room",
                    stacklevel=2,
                )


# Saves the trained model: weights in the form that other tools load, averages, samples.
#
# All ranks call these functions. If the layout shards the model, each rank contributes its part,
# and the first rank writes.


def form(session: Session) -> str:
    """Returns the name of the saved folder: a model, or the adapter alone."""
    return "adapter" if adapted_table(session.model) else "model"


@dataclass(frozen=True)
class SavedWeights:
    """The folder of the saved weights, and a sentence for each part that couldn't be saved."""

    folder: Path | None  # None: not saved
    problems: list[str]


def save_weights(
    session: Session, data: PreparedData, folder: Path, formats: NumberFormats
) -> SavedWeights:
    """Saves the current model or adapter, in the form that Transformers and PEFT load.

    Returns:
        A sentence for each further part that couldn't be written.
    """
    model: Any = session.model
    layout, is_main = session.setup.layout, session.setup.context.world.is_main
    if layout.replicated and not is_main:
        return SavedWeights(folder, [])
    source = weight_source(layout)
    try:
        if adapted_table(model):
            unsaved_parts = save_adapter(model, data.tokenizer, folder, source, is_main)
        else:
            unsaved_parts = save_model(model, data.tokenizer, folder, formats, source, is_main)
    except Exception as error:  # safetensors raises its own error for a full disk
        problem = f"the weights couldn't be written to {folder}: {one_line(error)}"
        return SavedWeights(None, [problem])
    return SavedWeights(folder, unsaved_parts)


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
        saved = save_weights(session, data, folder, formats)
        unsaved += saved.problems
        folders.append(saved.folder)
        if saved.folder is None:
            unsaved.append(_retry(session, output))
    if session.preempted:  # samples take long on a large model
        return folders[0], [], unsaved
    samples: Sequence[Sample] = []
    first_version = session.versions()  # the weights of the first folder, until it is deleted
    next(first_version)
    try:
        samples = write_samples(session, data.tokenizer, data.eval_data)
    except Exception as error:  # everything is saved by now, and the summary matters more
        unsaved.append(f"no sample could be written: {one_line(error)}")
    del first_version
    return folders[0], samples, unsaved


def _retry(session: Session, output: Path) -> str:
    """Returns how to save weights that couldn't be saved."""
    if session.has_checkpoints:
        return (
            f"make room, then `hasten export {output} --weights checkpoint -o FOLDER` writes the "
            "last checkpoint"
        )
    return (
        "the plan writes no checkpoints, so these weights are lost: make room, or name an output "
        "on another disk, before the next run"
    )


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    """Writes the summary; a failure becomes a sentence in ``summary["unsaved"]``."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(summary, indent=1))
    except OSError as error:
        reason = error.strerror or error
        summary["unsaved"].append(f"{path} couldn't be written: {reason}")
