"""Token accuracy against a plain loop over single examples, and with replaced heads."""

from __future__ import annotations

import pytest
import torch

from hasten.parts.data.collate import TokenizedExample
from hasten.parts.nn.losses import LabelOnlyLoss, token_accuracy
from tiny import ARCHITECTURES, examples, tiny_model


def by_hand(model: torch.nn.Module, found: list[TokenizedExample]) -> float:
    right = seen = 0
    for example in found:
        logits = model(input_ids=torch.tensor(example.input_ids[None].astype("int64"))).logits[0]
        for place in range(1, example.length):
            if example.trained[place]:
                seen += 1
                right += int(logits[place - 1].argmax()) == int(example.input_ids[place])
    return right / seen


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_is_the_share_of_labels_that_a_loop_over_positions_finds_first(
    architecture: str,
) -> None:
    model, found = tiny_model(architecture, dtype=torch.float64).eval(), list(examples(20))
    with torch.no_grad():
        assert token_accuracy(model, found) == pytest.approx(by_hand(model, found), abs=1e-12)


def test_a_model_whose_head_was_replaced_for_its_loss_is_as_accurate() -> None:
    model, found = tiny_model().eval(), list(examples(6))
    before = token_accuracy(model, found)
    LabelOnlyLoss(model)
    assert token_accuracy(model, found) == before


def test_records_without_a_trained_token_are_refused() -> None:
    example = next(iter(examples(1)))
    silent = TokenizedExample(example.input_ids, example.trained & False)
    with pytest.raises(ValueError, match="trained token"):
        token_accuracy(tiny_model().eval(), [silent])
