"""DeepSeek-V4's attention in packed rows: the model's own, on each document alone.

V4 attends through a window, and to compressed keys of earlier tokens. There is one key for every
few tokens from the start of the row. In a packed row both would cross documents, as they do in
Transformers. So here the attention module of a layer (projections, compressors, indexer, sinks)
gets one document at a time. The document's first compressed key then has no earlier tokens.
Positions begin at 0, and the indexer chooses among the keys of the document. The rest of the
layer runs on the whole row.

Documents of similar length are the rows of a batch, with filler after the shorter ones. Filler
changes nothing, because a compressed key is visible only from its last token on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from hasten.parts.nn import rebind

ARCHITECTURE = "deepseek_v4"
SIMILAR = 0.8  # least share of the longest document's tokens in a batch
WINDOW = "aten::triu"  # operator that each call of the attention runs once, for its window

Tables = tuple[Tensor, Tensor]


def has_compressed_keys(config: Any) -> bool:
    """Returns True for the config of a model with compressed keys."""
    return bool(config.model_type == ARCHITECTURE)


def is_compressed_attention(module: nn.Module) -> bool:
    """Returns True for an attention module of such a model."""
    return type(module).__name__ == "DeepseekV4Attention"


def positions_of(lengths: Sequence[int], tokens: int, device: torch.device) -> Tensor:
    """Returns positions from the start of each document, (rows, ``tokens``).

    ``lengths`` are those of every row, which gives one row, or of all rows end to end.
    """
    positions = [torch.arange(length, device=device) for length in lengths]
    return torch.cat(positions).view(-1, tokens)


def attend_apart(
    attention: Any,
    usual: Callable[..., Any],
    hidden_states: Tensor,
    position_embeddings: Mapping[str, Tables],
    position_ids: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    document_lengths: Sequence[int] | None = None,
    prefixes: Sequence[int] | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor | None]:
    """Runs the forward of V4's attention on each document; without documents, on the rows.

    Rows are (B, T, hidden), and positions restart with each document. The sum of
    ``document_lengths`` is T if all rows have the same documents, or B T for all rows end to end.

    Raises:
        ValueError: a document begins with tokens of the one before.
    """
    if document_lengths is None:
        output: tuple[Tensor, Tensor | None] = usual(
            hidden_states, position_embeddings, position_ids, attention_mask, *args, **more
        )
        return output
    if prefixes is not None and any(prefixes):
        raise ValueError(
            "a shared prompt needs a model without compressed keys; lay the prompt out with each "
            "answer"
        )
    rows, tokens, _ = hidden_states.shape
    lengths = tuple(document_lengths)
    if sum(lengths) == tokens:
        lengths *= rows
    starts = [*itertools.accumulate(lengths, initial=0)]
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    tables = {  # angles of the longest document, whose first ones all others have
        kind: [
            t.expand(rows, -1, -1).flatten(0, 1)[starts[longest] : starts[longest + 1]]
            for t in pair
        ]
        for kind, pair in position_embeddings.items()
    }
    documents = hidden_states.flatten(0, 1).split(lengths)
    outputs = [*documents]
    for group in similar(lengths):
        batch = pad_sequence([documents[index] for index in group], batch_first=True)
        size, length, _ = batch.shape
        angles = {kind: tuple(t[None, :length] for t in pair) for kind, pair in tables.items()}
        positions = torch.arange(length, device=batch.device).expand(size, -1)
        mask = _window(length, attention.sliding_window, batch).expand(size, 1, -1, -1)
        found = usual(batch, angles, positions, mask)[0]
        for index, row in zip(group, found, strict=True):
            outputs[index] = row[: lengths[index]]
    return torch.cat(outputs).view(rows, tokens, -1), None


def similar(lengths: Sequence[int]) -> list[list[int]]:
    """Returns the documents' indices in groups of similar length, each with its longest first."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and lengths[index] >= SIMILAR * lengths[groups[-1][0]]:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _window(length: int, width: int, like: Tensor) -> Tensor:
    """Returns what is added to scores (length, length): 0 for the last ``width`` tokens."""
    seen = like.new_ones((length, length), dtype=torch.bool).tril().triu(1 - width)
    least = torch.finfo(like.dtype).min
    return like.new_zeros((length, length)).masked_fill(~seen, least)


def give_all_gradients(module: nn.Module) -> None:
    """Gives compressors a gradient of zero in passes without a document of a key's tokens.

    They would have none. Ranks that send the gradients of a block in one message need the same
    ones.
    """
    for part in module.modules():
        if is_compressed_attention(part) and getattr(part, "compressor", None) is not None:
            rebind.bind(part, _with_all_gradients)


def _with_all_gradients(
    attention: Any, usual: Callable[..., Any], hidden_states: Tensor, *args: Any, **named: Any
) -> tuple[Tensor, Tensor | None]:
    output, scores = usual(hidden_states, *args, **named)
    lengths = named.get("document_lengths") or hidden_states.shape[1:2]
    if max(lengths) < attention.compressor.compress_rate:
        for weight in attention.compressor.parameters():
            if weight.requires_grad:
                output = output + 0 * weight.flatten()[0].to(output.dtype)
    return output, scores
