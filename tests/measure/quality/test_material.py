"""What of a job a proof takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hasten.core.context import ModelFacts
from hasten.core.job import GlobalBatch
from hasten.core.plan import Plan
from hasten.errors import InputError
from hasten.measure.quality.bench import (
    BYTES,
    SHARE,
    CheckBudget,
    _cut,
    first_examples,
    limits_of,
    shortened,
    still,
)
from hasten.parts.data.collate import tokenized_example
from measure.quality.verify_plants import bench
from tiny import examples, job_context, language_job, tiny_model

SEVEN = ModelFacts("llama", 6_900_000_000, 4096, 30, 102_400)
KNOWN = job_context(language_job())


def test_a_small_model_is_taken_whole() -> None:
    assert limits_of(KNOWN).layers is None


def test_of_a_large_model_as_many_layers_as_fit_are_taken() -> None:
    limits = limits_of(replace(KNOWN, model=SEVEN), memory=100e9)
    assert limits.layers is not None
    assert 0 < limits.layers < SEVEN.layers
    each = (SEVEN.parameters - 2 * 4096 * 102_400) / 30
    taken = 2 * 4096 * 102_400 + limits.layers * each
    assert taken * BYTES <= 100e9 * SHARE < (taken + each) * BYTES


def test_ranks_on_a_processor_share_its_memory() -> None:
    known = replace(KNOWN, model=SEVEN)
    alone, two = (limits_of(known, memory=200e9, ranks=n).layers for n in (1, 2))
    assert two == limits_of(known, memory=100e9).layers
    assert alone is None or (two is not None and alone > two)


def test_a_machine_too_small_for_one_layer_is_told() -> None:
    with pytest.raises(InputError, match="larger machine"):
        limits_of(replace(KNOWN, model=SEVEN), memory=8e9)


@given(st.integers(1, 10**10), st.floats(1e9, 1e12))
def test_limits_leave_something_to_prove_with(parameters: int, work: float) -> None:
    model = ModelFacts("llama", parameters, 64, 4, 100)
    limits = limits_of(replace(KNOWN, model=model), memory=1e15, work=work)
    assert limits.tokens >= 4 * 32
    assert limits.example_tokens >= 32


def test_the_first_steps_records_are_taken_as_far_as_the_limit_goes() -> None:
    job = language_job(batch=12)
    assert len(first_examples(job, CheckBudget(None, 10_000, 1000))) == 12
    few = first_examples(job, CheckBudget(None, 60, 1000))
    assert 4 <= len(few) < 12


def test_a_step_of_one_record_borrows_from_the_next() -> None:
    job = replace(language_job(), batch=GlobalBatch(examples=1))
    assert len(first_examples(job, CheckBudget(None, 10_000, 1000))) == 4


def test_one_record_alone_proves_nothing() -> None:
    data = examples(1)
    with pytest.raises(InputError, match="two examples"):
        first_examples(language_job(data=data), CheckBudget(None, 1000, 1000))


@given(st.integers(2, 300), st.integers(1, 299), st.integers(32, 128))
def test_a_record_that_is_cut_keeps_a_trained_token(length: int, first: int, tokens: int) -> None:
    trained = np.arange(length) >= min(first, length - 1)
    found = _cut(tokenized_example(np.arange(length), trained), tokens)
    assert found.length == min(length, tokens)
    assert found.trained_tokens > 0


def test_a_shortened_model_is_the_beginning_of_the_whole_one() -> None:
    whole, short = tiny_model(), shortened(tiny_model(), 1)
    names = {name for name, _ in short.named_parameters()}
    assert names < {name for name, _ in whole.named_parameters()}
    assert short(torch.tensor([[3, 4, 5]])).logits.shape == (1, 3, 97)
    assert not [name for name in names if "layers.1." in name]


def test_dropout_is_off_wherever_it_is_kept() -> None:
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), tiny_model())
    model[1].model.layers[0].self_attn.attention_dropout = 0.3
    still(model)
    assert model[0].p == 0.0
    assert model[1].model.layers[0].self_attn.attention_dropout == 0.0


def test_the_small_job_is_one_step_of_all_its_records(tmp_path: Path) -> None:
    job = bench(tmp_path).small(Plan())
    assert job.batch.examples == len(job.examples) == len(job.lengths)
