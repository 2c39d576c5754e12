"""The folder of a run: what moves aside for the next one, lines as they come, weights at the end.

A run that its supervisor starts again goes on in the same files: lines of steps that are done once
more are taken out, so that each step has one line, and one that a killed process left half written
goes with them.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from hasten.core.session import Session
from hasten.machine.files import TEMPORARY, write_atomic
from hasten.models.adapters import adapted_table
from hasten.models.save import save_adapter, save_model
from hasten.models.weights import NumberFormats
from hasten.recipe.prepared_data import PreparedData
from hasten.recipe.sample import Sample, write_samples

STEP_LINES = ("metrics.jsonl", "evaluations.jsonl")
FAULT_LINES = ("quarantined.jsonl", "spikes.jsonl", "restarts.jsonl")
ADJUSTMENTS = "adjustments.jsonl"  # settings that were tried while training
WATCHED = ("run.json", ADJUSTMENTS, "machine.jsonl", "ranks", "tensorboard", "wandb", "mlflow")
RESULTS = (*STEP_LINES, *FAULT_LINES, *WATCHED, "summary.json", "rejected.jsonl", "recipe.yaml")
MODELS = ("model", "adapter", "model_average", "adapter_average")


def archive_previous_run(output: Path, keep_checkpoints: bool) -> str:
    """Move an earlier run's results to ``previous/N``; its prepared data stays.

    Returns:
        What its owner should know: that it wasn't done and could have been gone on with, and how;
        else nothing.
    """
    output.mkdir(parents=True, exist_ok=True)
    names = [*RESULTS, *MODELS, "best"]
    if not keep_checkpoints:
        names.append("checkpoints")
    for path in output.glob(TEMPORARY):  # a killed run's
        path.unlink()
    # lexists: a link to nothing is one that writing would follow.
    earlier = [output / name for name in names if os.path.lexists(output / name)]
    if not earlier:
        return ""
    number = 1
    while os.path.lexists(output / "previous" / str(number)):
        number += 1
    archive = output / "previous" / str(number)
    archive.mkdir(parents=True)
    for path in earlier:
        path.rename(archive / path.name)
    saved = sorted((archive / "checkpoints").glob("step-*"))
    if not saved or (archive / "summary.json").exists():
        return ""
    return (
        f"the earlier run in {output} was not done and is now in {archive}; "
        f"resume={saved[-1]} goes on with it, and resume=auto does so without moving it"
    )


def keep_lines_until(output: Path, step: int) -> None:
    """Of an attempt before this one, the lines up to ``step`` stay."""
    for name in STEP_LINES:
        path = output / name
        if not path.exists():
            continue
        lines = path.read_text(errors="replace").splitlines(keepends=True)
        retained_text = "".join(line for line in lines if _step_of(line) <= step)
        write_atomic(path, retained_text)


def _step_of(line: str) -> float:
    """The step of a line; infinite where the line isn't whole."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return float(json.loads(line)["step"]) if line.endswith("\n") else float("inf")
    return float("inf")


class LineFiles:
    """Files to which a run's lines are added; what a full disk doesn't take waits for room."""

    def __init__(self, output: Path) -> None:
        self._metrics, self._evaluations = (_LineFile(output / name) for name in STEP_LINES)

    def step(self, line: Mapping[str, Any]) -> None:
        self._metrics.add(json.dumps(line) + "\n")

    def evaluation(self, line: Mapping[str, Any]) -> None:
        self._evaluations.add(json.dumps(line) + "\n")


class _LineFile:
    """A file that each line reaches when it is complete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._waiting = b""

    def add(self, line: str) -> None:
        was_waiting = bool(self._waiting)
        self._waiting += line.encode()
        try:
            while self._waiting:  # the system may take a part of it
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            if not was_waiting:
                warnings.warn(
                    f"{self._path} can't be written: {error.strerror or error}; training goes on, "
                    "and its lines follow once there is room",
                    stacklevel=2,
                )


# What a run leaves of its model: weights in the form that others load, averages, samples.
#
# All ranks call these functions: where a layout has dealt the model out, each brings its part, and
# the first rank writes.


def form(session: Session) -> str:
    """What is saved, as its folder is called: a model, or the adapter alone."""
    return "adapter" if adapted_table(session.model) else "model"


def save_weights(
    session: Session, data: PreparedData, folder: Path, formats: NumberFormats
) -> list[str]:
    """Save the model as it is now, or its adapter, in the form that Transformers and PEFT load.

    Returns:
        A sentence for each part beside the weights that couldn't be written.
    """
    with session.setup.layout.gather(session.model):
        if session.setup.context.world.is_main:
            return _write(session.model, data, folder, formats)
    return []


def save_all(
    session: Session, data: PreparedData, output: Path, formats: NumberFormats
) -> tuple[Sequence[Sample], list[str]]:
    """Save every version of the weights that AVERAGE has; then let the model write, on rank 0.

    Returns:
        What the model wrote, and a sentence for each part that couldn't be saved.
    """
    unsaved: list[str] = []
    for suffix in session.versions():
        unsaved += save_weights(session, data, output / f"{form(session)}{suffix}", formats)
    if session.preempted:  # samples take long on a large model
        return [], unsaved
    with session.setup.layout.gather(session.model):
        if session.setup.context.world.is_main:
            try:
                return write_samples(session, data.tokenizer, data.eval_data), unsaved
            except Exception as error:  # all is saved by now, and a summary is worth more
                reason = " ".join(str(error).split())[:200]
                return [], [*unsaved, f"no sample could be written: {reason}"]
    return [], unsaved


def _write(model: nn.Module, data: PreparedData, folder: Path, formats: NumberFormats) -> list[str]:
    any_model: Any = model
    if adapted_table(model):
        return save_adapter(any_model, data.tokenizer, folder)
    return save_model(any_model, data.tokenizer, folder, formats)
