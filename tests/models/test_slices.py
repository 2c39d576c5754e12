"""What can't be read or drawn in parts is said, and the whole model is there instead."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaPreTrainedModel, conversion_mapping
from transformers.core_model_loading import Concatenate, WeightConverter

from hasten.models.load import load_model, load_tokenizer
from hasten.parts.distributed.arrival import Arrival
from hasten.recipe.build import Building
from hasten.recipe.schema import Recipe


class Interleave(Concatenate):  # type: ignore[misc]
    """A step that transformers may have some day."""


def building(source: Path) -> Building:
    data: Any = SimpleNamespace(
        tokenizer=load_tokenizer(str(source)), note=SimpleNamespace(stop_token=None)
    )
    return Building(Recipe(model=str(source), dataset="stdlib", max_steps=1), data)


def test_a_conversion_that_isnt_known_is_told_and_all_is_loaded(
    saved_v3: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert building(saved_v3).late() is not None
    assert not caplog.records
    known = conversion_mapping.get_model_conversion_mapping

    def another(model: Any) -> list[Any]:
        entries = known(model)
        for entry in entries:
            if isinstance(entry, WeightConverter):
                entry.operations = [
                    Interleave(step.dim) if isinstance(step, Concatenate) else step
                    for step in entry.operations
                ]
        return list(entries)

    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", another)
    with caplog.at_level(logging.WARNING):
        assert building(saved_v3).late() is None
    (warning,) = caplog.messages
    assert str(saved_v3) in warning
    assert "one rank of each host loads all" in warning
    assert "gate_up_proj is made by" in warning
    assert "Interleave" in warning


def test_numbers_that_the_models_rule_leaves_unset_are_its_constructors_or_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rule = LlamaPreTrainedModel._init_weights

    def without_norms(self: Any, module: Any) -> None:
        if "Norm" not in type(module).__name__:
            rule(self, module)

    monkeypatch.setattr(LlamaPreTrainedModel, "_init_weights", without_norms)
    whole, again = (load_model("deepseek-llm-tiny", vocab_size=64, seed=2) for _ in range(2))
    for (name, weight), other in zip(whole.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(weight, other)
        assert bool((weight == 1).all()) == ("norm" in name)
    late = load_model("deepseek-llm-tiny", vocab_size=64, seed=2, late=True)
    with pytest.raises(ValueError, match=r"norm\.weight has no rule for new values; take ddp"):
        Arrival(late).fill(late)
