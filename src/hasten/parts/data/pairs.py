"""Preference pairs: a prompt with a better and a worse answer, as tokens and as tensors.

A batch of P pairs holds 2 P sequences in the order chosen, rejected, chosen, ... They are
padded rows, or lie end to end in one row. With a shared prompt the tokens with which both
sequences of a pair begin are laid out once:

    chosen    p p p p c c c        the rejected document continues the first four tokens,
    rejected          r r          with positions 4, 5

The loss needs log-probabilities of the answers' tokens alone. So labels aren't aligned with
positions, but listed sequence by sequence, each with the position that predicts it. The last
shared position predicts two labels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hasten.parts.data.collate import TokenizedExample, tokenized_example

Numbers = NDArray[np.int64]


class PreferencePair(NamedTuple):
    """A prompt with its chosen and its rejected answer, each as an example of both.

    The prompt's tokens are the same in both. ``trained`` marks the answer's tokens. One side
    may be empty (no tokens): an answer that was judged alone. KTO also needs ``other``, its
    prompt with the answer of another pair.
    """

    chosen: TokenizedExample
    rejected: TokenizedExample
    index: int = -1  # type: ignore[assignment]  # number of the pair in its job, for its reference
    other: TokenizedExample | None = None

    @property
    def rows(self) -> tuple[TokenizedExample, ...]:
        """Returns both examples."""
        return self.chosen, self.rejected

    def mapped(self, change: Callable[[TokenizedExample], TokenizedExample]) -> PreferencePair:
        """Returns the pair with both examples changed, and without its number."""
        return PreferencePair(change(self.chosen), change(self.rejected))

    @property
    def length(self) -> int:
        """Returns the tokens of both examples."""
        return self.chosen.length + self.rejected.length

    @property
    def trained_tokens(self) -> int:
        """Returns the tokens of both answers."""
        return self.chosen.trained_tokens + self.rejected.trained_tokens

    @property
    def shared_tokens(self) -> int:
        """Returns the tokens with which both examples begin: the prompt, maybe more."""
        shortest = min(self.chosen.length, self.rejected.length)
        one, other = (example.input_ids[:shortest] for example in (self.chosen, self.rejected))
        differs = np.flatnonzero(one != other)
        return int(differs[0]) if len(differs) else shortest


EMPTY = tokenized_example(())


def with_other_answer(pair: PreferencePair, other: PreferencePair) -> PreferencePair:
    """Returns the pair with its prompt and the answer of ``other``, both judged alone."""
    row, answer = (p.chosen if p.chosen.length else p.rejected for p in (pair, other))
    prompt, tokens = row.input_ids[~row.trained], answer.input_ids[answer.trained]
    trained = np.arange(len(prompt) + len(tokens)) >= len(prompt)
    return pair._replace(other=tokenized_example(np.concatenate([prompt, tokens]), trained))


def shared_share(pairs: Sequence[PreferencePair]) -> float:
    """Returns the share of tokens that a layout with shared prompts leaves out."""
    tokens = sum(pair.length for pair in pairs)
    return sum(pair.shared_tokens for pair in pairs) / max(tokens, 1)


def padded_pairs(
    pairs: Sequence[PreferencePair],
    pad_id: int = 0,
    sequences: int = 2,
    ld_alpha: float | None = None,
) -> dict[str, Any]:
    """Returns a right-padded row per example, ``input_ids`` (2 P, T), and :func:`answers`.

    No mask is needed, because attention is causal and padding has no label. Empty examples
    have no row. ``other`` is such a batch of the pairs' other answers, if they have some.
    """
    rows = _rows(pairs)
    present = [row for row in rows if row.length]
    longest = max(row.length for row in present)
    ids = np.full((len(present), longest), pad_id, np.int64)
    for index, row in enumerate(present):
        ids[index, : row.length] = row.input_ids
    starts = np.cumsum([0] + [longest * bool(row.length) for row in rows])
    positions = [start + np.arange(row.length) for start, row in zip(starts, rows, strict=False)]
    others = _others(pairs)
    return {
        "input_ids": torch.from_numpy(ids),
        **answers(pairs, positions, sequences, ld_alpha, pad_id),
        **({"other": padded_pairs(others, pad_id)} if others else {}),
    }


def _rows(pairs: Sequence[PreferencePair]) -> list[TokenizedExample]:
    if not pairs:
        raise ValueError("there are no pairs to lay out")
    return [example for pair in pairs for example in (pair.chosen, pair.rejected)]


def _others(pairs: Sequence[PreferencePair]) -> list[PreferencePair]:
    """Returns the pairs' other answers as pairs without a rejected one."""
    return [PreferencePair(pair.other, EMPTY) for pair in pairs if pair.other is not None]


def packed_pairs(
    pairs: Sequence[PreferencePair],
    shared_prompt: bool = False,
    sequences: int = 2,
    ld_alpha: float | None = None,
    pad_id: int | None = None,
) -> dict[str, Any]:
    """Returns all sequences end to end in one row without padding, and :func:`answers`.

    Returns:
        ``input_ids``, ``position_ids`` (1, T), ``document_lengths`` and ``boundaries`` as
        :func:`hasten.parts.data.collate.packed`. With ``shared_prompt`` also ``prefixes``: the
        tokens of the document before to which each document also attends. ``other`` as in
        :func:`padded_pairs`.
    """
    _rows(pairs)
    documents: list[
        tuple[NDArray[np.int32], int]
    ] = []  # tokens, and how many come from the one before
    positions: list[Numbers] = []  # each sequence's tokens in the row
    start = 0
    for pair in pairs:
        chosen, rejected = pair.chosen, pair.rejected
        shared = pair.shared_tokens if shared_prompt else 0
        own = np.arange(shared, rejected.length) + start + chosen.length - shared
        positions += [start + np.arange(chosen.length)]
        positions += [np.concatenate([start + np.arange(shared), own])]
        documents += [(chosen.input_ids, 0), (rejected.input_ids[shared:], shared)]
        start += chosen.length + rejected.length - shared
    documents = [document for document in documents if len(document[0])]
    lengths = tuple(len(ids) for ids, _ in documents)
    row = np.concatenate([ids for ids, _ in documents]).astype(np.int64)
    others = _others(pairs)
    places = np.concatenate([np.arange(len(ids)) + shared for ids, shared in documents])
    return {
        "input_ids": torch.from_numpy(row).unsqueeze(0),
        "position_ids": torch.from_numpy(places).unsqueeze(0),
        "document_lengths": lengths,
        "boundaries": torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        **({"prefixes": tuple(shared for _, shared in documents)} if shared_prompt else {}),
        **answers(pairs, positions, sequences, ld_alpha, pad_id),
        **({"other": packed_pairs(others)} if others else {}),
    }


def answers(
    pairs: Sequence[PreferencePair],
    positions: Sequence[Numbers],
    sequences: int = 2,
    ld_alpha: float | None = None,
    pad_id: int | None = None,
) -> dict[str, Any]:
    """Returns what the loss reads, for L labels of P pairs and S ``sequences`` of each.

    Sequences of a pair are the chosen answer, the rejected one and, if S is 3, the chosen
    row's prompt. With S = 0 a reward model reads each row: its last token is the only label.
    Transformers' reward models pass over tokens at the end that are equal to ``pad_id``, which
    may be the tokenizer's end of text.

    Args:
        positions: place of each token of the 2 P sequences among all positions of the batch.
        ld_alpha: factor of log-probabilities beyond the length of the shorter answer
            (LD-DPO, arXiv:2409.06411); None: 1.

    Returns:
        - ``labels`` (L,)
        - ``reads`` (L,): the position that predicts each
        - ``owners`` (L,): number of its sequence, from 0 to S P - 1
        - ``counts`` (P, S): labels of each sequence; ``label_counts``: the same as a tuple
        - ``weights`` (P,): 1
        - ``scales`` (L,), float64: factors of the labels, unless ``ld_alpha`` is None.
    """
    labels, reads, scales, counts = [], [], [], []
    for index, pair in enumerate(pairs):
        shorter = min(pair.chosen.trained_tokens, pair.rejected.trained_tokens)
        for example, number, part in _sequences(pair, index, sequences):
            tokens = _tokens(example, part, pad_id)
            labels.append(example.input_ids[tokens])
            reads.append(positions[number][tokens - (part != "end")])
            beyond = (np.arange(len(tokens)) >= shorter) & (part == "answer")
            scales.append(np.where(beyond, 1.0 if ld_alpha is None else ld_alpha, 1.0))
            counts.append(len(tokens))
    owners = np.repeat(np.arange(len(counts)), counts)
    weights = torch.ones(len(pairs), dtype=torch.float64)
    return {
        "labels": torch.from_numpy(np.concatenate(labels).astype(np.int64)),
        "reads": torch.from_numpy(np.concatenate(reads)),
        "owners": torch.from_numpy(owners),
        "counts": torch.tensor(counts).view(len(pairs), -1),
        "label_counts": tuple(counts),
        "weights": weights,
        **({} if ld_alpha is None else {"scales": torch.from_numpy(np.concatenate(scales))}),
    }


def _sequences(
    pair: PreferencePair, index: int, sequences: int
) -> list[tuple[TokenizedExample, int, str]]:
    """Returns the example of each sequence of a pair, its number, and the part with labels."""
    part = "answer" if sequences else "end"
    listed = [(pair.chosen, 2 * index, part), (pair.rejected, 2 * index + 1, part)]
    return listed if sequences < 3 else [*listed, (pair.chosen, 2 * index, "prompt")]


def _tokens(example: TokenizedExample, part: str, pad_id: int | None) -> Numbers:
    """Returns the places of the tokens of a part, without the first token of the example."""
    if part == "end":
        if not example.length:
            raise ValueError("a reward model can't read an example with no tokens")
        read = np.flatnonzero(example.input_ids != pad_id)
        return read[-1:] if len(read) else np.array([0])  # as transformers does
    wanted = example.trained if part == "answer" else ~example.trained
    return 1 + np.flatnonzero(wanted[1:])
