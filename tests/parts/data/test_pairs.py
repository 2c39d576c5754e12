"""Layouts of preference pairs: every token and label of each answer, each at its place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.parts.data.collate import tokenized_example
from hasten.parts.data.pairs import PreferencePair, packed_pairs, padded_pairs, shared_share
from pairs import example

ids = st.lists(st.integers(3, 5), max_size=6)  # few tokens, so that answers often begin alike
any_pair = st.builds(
    lambda prompt, chosen, rejected: PreferencePair(
        example(prompt, chosen), example(prompt, rejected)
    ),
    st.lists(st.integers(3, 5), min_size=1, max_size=6),
    ids,
    ids,
)
PAIR = PreferencePair(example([3, 4, 5], [6, 7]), example([3, 4, 5], [6, 8, 9]))


def before(batch: dict[str, Any], place: int) -> list[int]:
    """The tokens that a position sees: of its document up to it, after those of its prefix."""
    width = batch["input_ids"].shape[1]
    tokens = batch["input_ids"].flatten().tolist()
    if "document_lengths" not in batch:
        return tokens[place // width * width : place + 1]
    start, previous = 0, 0
    prefixes = batch.get("prefixes", (0,) * len(batch["document_lengths"]))
    for length, prefix in zip(batch["document_lengths"], prefixes, strict=True):
        if place < start + length:
            return tokens[previous : previous + prefix] + tokens[start : place + 1]
        previous, start = start, start + length
    raise IndexError(place)


@settings(max_examples=60)
@given(pairs=st.lists(any_pair, min_size=1, max_size=4), sequences=st.sampled_from([2, 3]))
def test_each_label_is_read_behind_the_tokens_before_it(
    pairs: list[PreferencePair], sequences: int
) -> None:
    batches = [
        padded_pairs(pairs, 99, sequences),
        packed_pairs(pairs, False, sequences),
        packed_pairs(pairs, True, sequences),
    ]
    for batch in batches:
        counts = batch["counts"].flatten().tolist()
        assert counts == list(batch["label_counts"])
        assert batch["owners"].tolist() == [i for i, n in enumerate(counts) for _ in range(n)]
        found: list[list[list[int]]] = [[] for _ in counts]
        labelled = zip(batch["labels"], batch["reads"], batch["owners"], strict=True)
        for label, place, owner in labelled:
            found[int(owner)].append([*before(batch, int(place)), int(label)])
        expected = []
        for pair in pairs:
            for row in (pair.chosen, pair.rejected):
                tokens, trained = row.input_ids.tolist(), row.trained.tolist()
                expected.append([tokens[: t + 1] for t in range(1, len(tokens)) if trained[t]])
            if sequences == 3:
                tokens, trained = pair.chosen.input_ids.tolist(), pair.chosen.trained.tolist()
                expected.append([tokens[: t + 1] for t in range(1, len(tokens)) if not trained[t]])
        assert found == expected


@settings(max_examples=60)
@given(pairs=st.lists(any_pair, min_size=1, max_size=4))
def test_a_packed_row_has_every_token_once_and_positions_of_its_answer(
    pairs: list[PreferencePair],
) -> None:
    for shared in (False, True):
        batch = packed_pairs(pairs, shared)
        lengths = batch["document_lengths"]
        assert 0 not in lengths
        assert sum(lengths) == batch["input_ids"].numel()
        assert batch["boundaries"].tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        for place, position in enumerate(batch["position_ids"][0].tolist()):
            assert position == len(before(batch, place)) - 1
        tokens = sum(pair.length for pair in pairs)
        left_out = round(shared_share(pairs) * tokens) if shared else 0
        assert batch["input_ids"].numel() == tokens - left_out


def test_a_shared_prompt_is_laid_out_once_with_the_first_tokens_of_the_answers() -> None:
    batch = packed_pairs([PAIR], shared_prompt=True)
    assert batch["input_ids"].tolist() == [[3, 4, 5, 6, 7, 8, 9]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 4, 5]]
    assert (batch["document_lengths"], batch["prefixes"]) == ((5, 2), (0, 4))
    assert batch["labels"].tolist() == [6, 7, 6, 8, 9]
    assert batch["reads"].tolist() == [2, 3, 2, 3, 5]  # 2 and 3 predict two labels each
    assert "prefixes" not in packed_pairs([PAIR])


def test_labels_beyond_the_shorter_answer_have_a_factor() -> None:
    batch = padded_pairs([PAIR], sequences=3, ld_alpha=0.5)
    assert batch["scales"].tolist() == [1, 1, 1, 1, 0.5, 1, 1]  # the prompt has two labels
    assert batch["scales"].dtype == torch.float64  # 0.4 is not a number of float32


def test_a_reward_model_reads_the_end_of_each_row() -> None:
    pairs = [PAIR, PreferencePair(example([3], [4]), example([3], [4, 5]))]
    padded = padded_pairs(pairs, sequences=0)
    assert padded_pairs(pairs, 7, sequences=0)["reads"].tolist() == [3, 11, 13, 20]  # ends with 7
    assert packed_pairs(pairs, sequences=0, pad_id=7)["reads"].tolist() == [3, 10, 12, 15]
    assert padded["reads"].tolist() == [4, 11, 13, 20]
    assert padded["counts"].tolist() == [[1, 1], [1, 1]]
    shared = packed_pairs(pairs, True, sequences=0)
    assert [before(shared, place) for place in shared["reads"].tolist()] == [
        row.input_ids.tolist() for pair in pairs for row in (pair.chosen, pair.rejected)
    ]
    alone = PreferencePair(example([3], [4]), tokenized_example([]))
    with pytest.raises(ValueError, match="no tokens"):
        padded_pairs([alone], sequences=0)


def test_an_answer_judged_alone_has_an_empty_other_side() -> None:
    alone = PreferencePair(tokenized_example([]), example([3], [4, 5]))
    batch = packed_pairs([alone, PAIR], shared_prompt=True)
    assert batch["document_lengths"] == (3, 5, 2)
    assert batch["counts"].tolist() == [[0, 2], [2, 3]]


def test_nothing_to_lay_out_is_an_error() -> None:
    for lay_out in (padded_pairs, packed_pairs):
        with pytest.raises(ValueError, match="no pairs"):
            lay_out([])
