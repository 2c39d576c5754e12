"""A batch cut into micro-batches, and micro-batches of one shape, as stages send them.

Stages exchange hidden states through buffers of one size, and some schedules want micro-batches in
certain numbers. So rows and columns of filler are added, and whole micro-batches where one is
missing. Filler has no label. In padded rows it stands behind the tokens, where causal attention
doesn't look; in packed rows it is a document of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
FILLERS = {"input_ids": 0, "labels": IGNORED, "attention_mask": 1, "position_ids": 0}
PACKED = ("document_lengths", "boundaries")


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


def cut(batch: Mapping[str, Any], rows: int) -> list[dict[str, Any]]:
    """Pieces of ``rows`` rows; what isn't a tensor with a row per row goes into all of them."""
    total = len(batch["input_ids"] if "input_ids" in batch else batch["x"])
    if total % rows or not total:
        raise ValueError(
            f"microbatch_size={rows} doesn't cut a batch of {total} rows into equal pieces; choose "
            "a divisor of the rows"
        )
    count = total // rows
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
