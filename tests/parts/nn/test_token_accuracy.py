"""Token accuracy against a plain loop over single records, and with replaced heads."""

from __future__ import annotations

import pytest
import torch

from hasten.parts.data.collate import TokenRecord
from hasten.parts.nn.losses import LabelOnlyLoss, token_accuracy
from tiny import ARCHITECTURES, records, tiny_model


def by_hand(model: torch.nn.Module, found: list[TokenRecord]) -> float:
    right = seen = 0
    for record in found:
        logits = model(input_ids=torch.tensor(record.input_ids[None].astype("int64"))).logits[0]
        for place in range(1, record.length):
            if record.trained[place]:
                seen += 1
                right += int(logits[place - 1].argmax()) == int(record.input_ids[place])
    return right / seen


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_is_the_share_of_labels_that_a_loop_over_positions_finds_first(
    architecture: str,
) -> None:
    model, found = tiny_model(architecture, dtype=torch.float64).eval(), list(records(20))
    with torch.no_grad():
        assert token_accuracy(model, found) == pytest.approx(by_hand(model, found), abs=1e-12)


def test_a_model_whose_head_was_replaced_for_its_loss_is_as_accurate() -> None:
    model, found = tiny_model().eval(), list(records(6))
    before = token_accuracy(model, found)
    LabelOnlyLoss(model)
    assert token_accuracy(model, found) == before


def test_records_without_a_trained_token_are_refused() -> None:
    record = next(iter(records(1)))
    silent = TokenRecord(record.input_ids, record.trained & False)
    with pytest.raises(ValueError, match="trained token"):
        token_accuracy(tiny_model().eval(), [silent])
