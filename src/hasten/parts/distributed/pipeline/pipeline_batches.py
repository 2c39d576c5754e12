"""A batch cut into micro-batches, and micro-batches of one shape, as stages send them.

Stages exchange hidden states through buffers of one size, and some schedules want micro-batches in
certain numbers. So rows and columns of filler are added, and whole micro-batches where one is
missing. Filler has no label. In padded rows it stands behind the tokens, where causal attention
doesn't look; in packed rows it is a document of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hasten.parts.distributed.pipeline.pipeline_work import Settings
from hasten.parts.distributed.pipeline.schedules import enough, impossible

IGNORED = -100
FILLERS = {"input_ids": 0, "labels": IGNORED, "attention_mask": 1, "position_ids": 0}
PACKED = ("document_lengths", "boundaries")
LossFunction = Callable[[Any, Any], Tensor]
TAKES = (
    "a language model takes a batch with input_ids and labels; an nn.Sequential takes (x, y): give "
    "loss_fn(output, y)"
)


def alike(batches: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
    """``count`` micro-batches of the largest shape among those given.

    Raises:
        ValueError: an input whose filler isn't known.
    """
    strange = {name for batch in batches for name in batch} - {*FILLERS, *PACKED}
    if strange:
        raise ValueError(
            f"a pipeline can't fill up the input {sorted(strange)[0]!r} of a micro-batch; it knows "
            f"{', '.join((*FILLERS, *PACKED))}"
        )
    rows = max(len(b["input_ids"]) for b in batches)
    width = max(b["input_ids"].shape[1] for b in batches)
    found = [_filled(batch, rows, width) for batch in batches]
    empty = {**found[-1], "labels": torch.full_like(found[-1]["labels"], IGNORED)}
    return found + [empty] * (count - len(found))


def language_batch(batch: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """Labels aligned with the position that predicts them, as no model has to shift then."""
    if "input_ids" not in batch or "labels" not in batch:
        raise ValueError("a language model's batch needs input_ids and labels")
    aligned = F.pad(batch["labels"], (0, 1), value=IGNORED)[..., 1:]
    trained = int((aligned != IGNORED).sum())  # waits for the device; labels come from the host
    return {**batch, "labels": aligned}, 1 / max(trained, 1)


def usual_loss(target: Any) -> tuple[LossFunction, str]:
    """The loss of a target where none is given, and its name.

    Raises:
        ValueError: the target is no tensor of numbers.
    """
    if not isinstance(target, Tensor) or target.is_complex():
        raise ValueError(f"a target of type {type(target).__name__} has no usual loss; {TAKES}")
    if target.is_floating_point():
        return _squared_error, "the mean squared error"
    return _class_error, "cross-entropy"


def _class_error(output: Tensor, target: Tensor) -> Tensor:
    if output.shape[:-1] == target.shape:  # (..., classes)
        output, target = output.flatten(0, -2), target.flatten()
    return F.cross_entropy(output, target)


def _squared_error(output: Tensor, target: Tensor) -> Tensor:
    if output.shape != target.shape:
        raise ValueError(
            f"the output has shape {tuple(output.shape)} and the target {tuple(target.shape)}, so "
            f"no squared error was meant; {TAKES}"
        )
    return F.mse_loss(output, target)


def micro_batches(
    batch: Any,
    rows: int,
    loss_fn: LossFunction | None,
    language: bool,
    device: torch.device,
    settings: Settings,
) -> tuple[list[dict[str, Any]], float]:
    """A batch in pieces that the schedule can run, and what the sum of their losses is scaled by.

    Raises:
        ValueError: it isn't what such a model takes, or the schedule wants other pieces.
    """
    if language and isinstance(batch, Mapping):
        if loss_fn is not None:
            raise ValueError(
                "a language model's loss is computed in its last stage from the batch's "
                "labels; leave loss_fn out, or cut an nn.Sequential"
            )
        whole, weight = language_batch(batch)
    elif not language and loss_fn is not None and is_pair(batch):
        whole, weight = {"x": batch[0], "y": batch[1]}, 0.0  # by the pieces, see below
    else:
        raise ValueError(TAKES)
    moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in whole.items()}
    pieces = cut(moved, rows)
    schedule, ranks = settings.schedule, settings.ranks
    if problem := impossible(schedule, ranks, len(pieces)):
        if not language:
            raise ValueError(f"{problem}; change the batch or microbatch_size")
        pieces = alike(pieces, enough(schedule, ranks, len(pieces)))
    if language:
        return pieces, weight
    return [{**piece, "loss_fn": loss_fn} for piece in pieces], 1 / len(pieces)


def is_pair(batch: Any) -> bool:
    return isinstance(batch, tuple | list) and len(batch) == 2


def cut(batch: Mapping[str, Any], rows: int) -> list[dict[str, Any]]:
    """The largest equal pieces of ``rows`` rows at most.

    What isn't a tensor with a row per row goes into all of them.
    """
    total = len(batch["input_ids"] if "input_ids" in batch else batch["x"])
    if not total:
        raise ValueError("a batch has no rows; leave it out")
    most = min(rows, total)
    rows = next(size for size in range(most, 0, -1) if total % size == 0)
    count = total // rows
    if 2 * rows < most:
        words = f"microbatch_size={most} doesn't divide a batch of {total} rows, so it goes in"
        warnings.warn(f"{words} {count} pieces of {rows}", stacklevel=4)
    pieces: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, value in batch.items():
        per_row = isinstance(value, Tensor) and value.dim() and len(value) == total
        parts = value.split(rows) if per_row else [value] * count
        for piece, part in zip(pieces, parts, strict=True):
            piece[name] = part
    return pieces


def _filled(batch: Mapping[str, Any], rows: int, width: int) -> dict[str, Any]:
    ids: Tensor = batch["input_ids"]
    right, below = width - ids.shape[1], rows - len(ids)
    if not right and not below:
        return dict(batch)
    found: dict[str, Any] = {
        name: F.pad(value, (0, right, 0, below), value=FILLERS[name])
        for name, value in batch.items()
        if name in FILLERS
    }
    if "position_ids" in batch:  # filler counts from 0, like a document
        positions = found["position_ids"]
        positions[:, ids.shape[1] :] = torch.arange(right, device=ids.device)
        positions[len(ids) :] = torch.arange(width, device=ids.device)
    if "document_lengths" in batch:
        more = [right] * bool(right) + [width] * below
        lengths = (*batch["document_lengths"], *more)
        found["document_lengths"] = lengths
        ends = torch.tensor([0, *lengths]).cumsum(0)
        found["boundaries"] = ends.to(batch["boundaries"])
    return found
