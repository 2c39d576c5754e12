"""Techniques of preference pairs: the baseline's losses; prompts are laid out once if it pays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from hasten.core.job import Job, with_pair_counts
from hasten.core.plan import Plan
from hasten.core.setup import Session, prepare
from hasten.core.step import assemble, training
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.parts.data.pairs import PreferencePair, padded_pairs
from hasten.parts.nn.preference import OnePassPreferenceLoss, PreferenceLoss
from hasten.parts.nn.preference_objectives import Objective
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.collate import Packed
from hasten.techniques.loss import LabelledTokenLoss
from pairs import example
from tiny import examples, job_context, language_job, tiny_model

LONG = [
    PreferencePair(example(range(3, 30), [40, index]), example(range(3, 30), [50, index, 60]))
    for index in range(30, 46)
]
SHORT = [
    PreferencePair(example([3], range(4, 20 + index)), example([3], range(5, 20 + index)))
    for index in range(16)
]


def session_of(data: Sequence[PreferencePair], *plan: Technique) -> Session:
    objective = Objective("simpo", beta=2.0, sft_weight=0.1, sft_mean="examples")
    with_counts = partial(with_pair_counts, **objective.layout)
    job: Job = language_job(
        partial(tiny_model, dtype=torch.float64),
        data=data,  # type: ignore[arg-type]
        loss=partial(PreferenceLoss, objective=objective),
        collate=with_counts(padded_pairs),
        with_counts=with_counts,
        unit="pairs",
        eval_data=data[:4],
    )
    return assemble(prepare(job, Plan(plan), job_context(job)))


def losses(session: Session) -> list[float]:
    return [metrics.loss for metrics in training(session)]


USUAL = (DocumentAttention(), LabelledTokenLoss())


@pytest.mark.parametrize("data", [LONG, SHORT], ids=["long prompts", "short prompts"])
@pytest.mark.parametrize("shared", ["auto", True, False])
def test_packed_pairs_have_the_baselines_losses(data: list[PreferencePair], shared: Any) -> None:
    baseline = session_of(data)
    expected = losses(baseline)
    found = session_of(data, Packed(shared_prompt=shared), *USUAL)
    # Norms compute in float32 and see a shared prompt once.
    assert losses(found) == pytest.approx(expected, rel=1e-5)
    assert expected[0] != expected[-1]
    assert isinstance(found.loss_module, OnePassPreferenceLoss)
    tokens, positions = found.progress.tokens, found.progress.positions
    assert tokens == baseline.progress.tokens
    is_shared = data is LONG if shared == "auto" else shared
    assert positions < tokens if is_shared else positions == tokens
    for technique in (Packed(shared_prompt=shared), *USUAL):
        assert technique.check_effect(found).effective


def test_prompts_are_laid_out_twice_if_attention_cannot_share_them() -> None:
    session = session_of(LONG, Packed(), LabelledTokenLoss())
    losses(session)
    assert session.progress.positions == session.progress.tokens
    with pytest.raises(ValueError, match="shared_prompt: false"):
        losses(session_of(LONG, Packed(shared_prompt=True)))


def test_the_one_pass_head_is_refused_for_other_losses() -> None:
    class Another(torch.nn.Module):
        pass

    job = language_job(loss=lambda model: Another(), data=examples(8))
    with pytest.raises(InputError, match="Another; leave it out"):
        assemble(prepare(job, Plan([LabelledTokenLoss()]), job_context(job)))
