"""Token examples, their layout in tensors, and the cut into micro-batches."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


class TokenizedExample(NamedTuple):
    """One example: token ids, and ``trained``, True for each token with loss.

    ``trained[0]`` has no effect, because no position predicts the first token.
    """

    input_ids: NDArray[np.int32]  # (tokens,)
    trained: NDArray[np.bool_]  # (tokens,)

    @property
    def length(self) -> int:
        return len(self.input_ids)

    @property
    def rows(self) -> tuple[TokenizedExample, ...]:
        """Returns the token sequences of the example: itself alone."""
        return (self,)

    def mapped(self, change: Callable[[TokenizedExample], TokenizedExample]) -> TokenizedExample:
        """Returns the example with each of its rows changed."""
        return change(self)

    @property
    def trained_tokens(self) -> int:
        """Returns the number of tokens with loss, without the first, which isn't predicted."""
        return int(np.count_nonzero(self.trained[1:]))


def tokenized_example(input_ids: Any, trained: Any = None) -> TokenizedExample:
    """Returns an example from any sequences; without ``trained`` every token has loss."""
    ids = np.asarray(input_ids, dtype=np.int32)
    mask = np.ones(len(ids), bool) if trained is None else np.asarray(trained, dtype=np.bool_)
    if ids.ndim != 1 or mask.shape != ids.shape:
        raise ValueError(
            f"an example needs two equal-length rows, got {ids.shape} and {mask.shape}"
        )
    return TokenizedExample(ids, mask)


# Lays token examples out as one tensor: padded rows, or packed end to end.
#
# Labels are aligned with the position that predicts them: ``labels[t]`` is the token at ``t + 1``
# if that token is trained and belongs to the same example, else -100. So no model has to shift
# labels, and the last token of a packed example never predicts the first of the next. A Hugging
# Face model that computes its own loss shifts ``labels``; pass these as ``shift_labels`` too.

IGNORED = -100  # label of a position without loss, as torch's cross-entropy has it


def aligned_labels(example: TokenizedExample) -> NDArray[np.int64]:
    """Returns the labels of an example's positions, (tokens,); -100 without loss."""
    labels = np.full(example.length, IGNORED, np.int64)
    labels[:-1] = np.where(example.trained[1:], example.input_ids[1:], IGNORED)
    return labels


def padded(examples: Sequence[TokenizedExample], pad_id: int = 0) -> dict[str, Tensor]:
    """Returns one row per example, right-padded to the longest: ``input_ids``, ``labels`` (B, T).

    No mask is needed. Attention is causal, so a token never attends to the padding after
    it, and the padding carries no loss.
    """
    if not examples:
        raise ValueError("there are no examples to lay out")
    longest = max(r.length for r in examples)
    ids = np.full((len(examples), longest), pad_id, np.int64)
    labels = np.full((len(examples), longest), IGNORED, np.int64)
    for row, example in enumerate(examples):
        ids[row, : example.length] = example.input_ids
        labels[row, : example.length] = aligned_labels(example)
    return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}


def packed(examples: Sequence[TokenizedExample]) -> dict[str, Any]:
    """Returns all examples end to end in one row, longest first, without padding.

    Returns:
        ``input_ids``, ``labels``, ``position_ids``: (1, T), positions counted from each
            example's start.
        ``document_lengths``: a tuple of ints.
        ``boundaries``: (documents + 1,), the start of each example and the end of the last,
            int32, as variable-length attention kernels take them.

    Models that read positions separate the examples by the positions alone. For attention
    that also does no work between them, see :mod:`hasten.parts.nn.attention`.
    """
    if not examples:
        raise ValueError("there are no examples to lay out")
    ordered = sorted(examples, key=lambda r: -r.length)
    return end_to_end(
        [torch.from_numpy(r.input_ids.astype(np.int64)) for r in ordered],
        [torch.from_numpy(aligned_labels(r)) for r in ordered],
    )


def end_to_end(input_ids: Sequence[Tensor], labels: Sequence[Tensor]) -> dict[str, Any]:
    """Returns one row of documents in the given order, as :func:`packed` does.

    ``input_ids`` and ``labels`` hold one tensor (tokens,) of each document.
    """
    lengths = tuple(len(ids) for ids in input_ids)
    return {
        "input_ids": torch.cat(tuple(input_ids)).unsqueeze(0),
        "labels": torch.cat(tuple(labels)).unsqueeze(0),
        "position_ids": torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0),
        "document_lengths": lengths,
        "boundaries": torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
    }


# Examples as {'input', 'target'} or pairs, with tensors of different lengths.


def collate_fn(
    batch: Sequence[Any], *, padding: float = 0, target_padding: float = 0
) -> tuple[Tensor, Tensor]:
    """Returns inputs and targets (examples, longest, ...), padded after each example.

    Numbers as targets, such as classes, become one row. Examples of several dtypes have the
    dtype to which torch promotes them.

    Raises:
        ValueError: an example is neither a mapping with ``input`` and ``target`` nor a pair.
            Other reasons are shapes that differ, and a padding that the dtype can't hold.
    """
    if not len(batch):
        raise ValueError("there are no examples to lay out")
    pairs = [_pair(example, index) for index, example in enumerate(batch)]
    inputs, targets = (list(column) for column in zip(*pairs, strict=True))
    return _column("input", inputs, padding), _column("target", targets, target_padding)


def _column(name: str, values: list[Any], padding: float) -> Tensor:
    try:
        tensors = [torch.as_tensor(value) for value in values]
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"an example's {name} can't become a tensor: {error}") from error
    first = tensors[0]
    for tensor in tensors:
        if (tensor.ndim, tensor.shape[1:]) != (first.ndim, first.shape[1:]):
            raise ValueError(
                f"two examples' {name} have the shapes {[*first.shape]} and {[*tensor.shape]}; "
                "they may differ in the first number alone"
            )
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    tensors = [tensor.to(dtype) for tensor in tensors]
    if not first.ndim:
        return torch.stack(tensors)
    if not (dtype.is_floating_point or dtype.is_complex):
        least, most = (0, 1)
        if dtype != torch.bool:
            least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        if not (least <= padding <= most and padding == int(padding)):
            raise ValueError(f"{dtype}, the dtype of each {name}, can't hold the padding {padding}")
    return pad_sequence(tensors, batch_first=True, padding_value=padding)


def _pair(example: Any, index: int) -> tuple[Any, Any]:
    if isinstance(example, Mapping) and "input" in example and "target" in example:
        pair = example["input"], example["target"]
    elif isinstance(example, tuple | list) and len(example) == 2:
        pair = example[0], example[1]
    else:
        has = (
            ", ".join(map(str, example)) if isinstance(example, Mapping) else type(example).__name__
        )
        raise ValueError(
            f"example {index} of the batch needs 'input' and 'target', or must be a pair of them; "
            f"it has {has}"
        )
    return pair


def filled(form: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    """Returns ``items`` in the class of ``form``, with its attributes if it is a dictionary."""
    if type(form) is dict or not isinstance(form, dict | UserDict):
        return items
    new = copy.copy(form)
    for key, item in items.items():
        new[key] = item
    return new


# Cuts a step's examples into micro-batches by number of examples, or of positions.

Example = TypeVar("Example")


def by_count(examples: Sequence[Example], size: int) -> list[list[Example]]:
    """Returns pieces of ``size`` examples in the given order; the last may be smaller.

    Raises:
        ValueError: ``size`` is below 1.
    """
    if size < 1:
        raise ValueError(f"size is {size}; a piece has at least one example")
    return [list(examples[i : i + size]) for i in range(0, len(examples), size)]


def by_tokens(
    examples: Sequence[Example], lengths: Sequence[int], limit: int
) -> list[list[Example]]:
    """Returns pieces with at most ``limit`` tokens in total, longest examples first.

    Each example goes into the fullest piece that still has room for it (best fit
    decreasing). So few pieces are needed. An example longer than the limit is a piece of
    its own.
    """
    pieces: list[list[Example]] = []
    room: list[int] = []
    for index in sorted(range(len(examples)), key=lambda i: -lengths[i]):
        fits = [p for p in range(len(pieces)) if room[p] >= lengths[index]]
        if fits:
            best = min(fits, key=lambda p: room[p])
            pieces[best].append(examples[index])
            room[best] -= lengths[index]
        else:
            pieces.append([examples[index]])
            room.append(limit - lengths[index])
    return pieces


def by_positions(
    examples: Sequence[Example], lengths: Sequence[int], limit: int
) -> list[list[Example]]:
    """Returns pieces in the given order with at most ``limit`` padded positions (longest x count).

    An example longer than the limit is a piece of its own.
    """
    pieces: list[list[Example]] = []
    longest = 0
    for example, length in zip(examples, lengths, strict=True):
        longest = max(longest, length)
        if pieces and longest * (len(pieces[-1]) + 1) <= limit:
            pieces[-1].append(example)
        else:
            pieces.append([example])
            longest = length
    return pieces
