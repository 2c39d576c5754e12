"""Token accuracy: the share of trained tokens that the model would have chosen itself.

The measure that classification tasks and the common trainers report as accuracy, taken without
sampling: at each position that carries a label, the most likely next token against the label.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from hasten.parts.data.collate import padded
from hasten.parts.data.records import TokenRecord
from hasten.parts.nn.causal_lm import causal_lm, trunk
from hasten.parts.nn.cross_entropy import IGNORED

ROWS = 16  # records at once
CHUNK = 1024  # positions whose logits exist at once


class Records(Protocol):
    """Token records by position."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> TokenRecord: ...


def token_accuracy(model: nn.Module, records: Records) -> float:
    """Share (0 to 1) of the records' trained tokens that come first among the model's logits.

    Args:
        model: a Hugging Face causal language model, with an adapter or without, in ``eval`` mode.
        records: from position 1 on, each trained token is predicted from those before it.

    Raises:
        ValueError: no record has a trained token.
    """
    right = seen = 0
    device = next(model.parameters()).device
    for start in range(0, len(records), ROWS):
        rows = [records[i] for i in range(start, min(start + ROWS, len(records)))]
        batch = {name: tensor.to(device) for name, tensor in padded(rows).items()}
        hits, count = _hits(model, batch["input_ids"], batch["labels"])
        right, seen = right + hits, seen + count
    if not seen:
        raise ValueError("token accuracy needs a record with a trained token")
    return right / seen


@torch.no_grad()
def _hits(model: nn.Module, input_ids: Tensor, labels: Tensor) -> tuple[int, int]:
    """Labels that the model puts first, and labels; both (B, T), labels aligned with positions."""
    hidden = trunk(model)(input_ids=input_ids, use_cache=False).last_hidden_state
    head, kept = causal_lm(model).lm_head, labels.flatten() != IGNORED
    rows, wanted = hidden.flatten(0, 1)[kept], labels.flatten()[kept]
    pairs = zip(rows.split(CHUNK), wanted.split(CHUNK), strict=True)
    return sum(int((head(r).argmax(-1) == w).sum()) for r, w in pairs), len(wanted)
