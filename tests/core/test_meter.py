"""MFU of a step: model FLOPs over time and ceiling, by counts that no padding or cut changes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from torch import Tensor

from hasten.core.job import WorkCounts, with_language_counts
from hasten.core.layout import OneProcess
from hasten.core.loop import EvaluationSchedule, fit
from hasten.core.plan import Plan
from hasten.core.setup import prepare
from hasten.core.slot import Slot
from hasten.core.step import assemble, batches, training
from hasten.core.technique import Technique
from hasten.core.timing import Meter, StepMetrics
from hasten.models.flops import config_flops, model_flops
from hasten.parts.data.collate import packed, padded
from hasten.techniques import CATALOGUE
from hasten.techniques.batch import GradientAccumulation
from tiny import examples, job_context, language_job, session_of, tiny_config, tiny_model

EDITS = {
    Slot.ROUTING,
    Slot.ATTENTION,
    Slot.LAYERS,
    Slot.LOSS,
    Slot.ACTIVATION_CHECKPOINTING,
    Slot.COMPILE,
}
EDITS |= {Slot.PRECISION, Slot.LAYOUT}


def test_pairs_are_the_sum_of_squared_lengths_however_records_are_laid_out() -> None:
    data = examples(6)
    pairs = sum(r.length**2 for r in data)
    for lay_out in (padded, packed):
        assert with_language_counts(lay_out)(data).counts.attention_pairs == pairs
    assert (WorkCounts(attention_pairs=2) + WorkCounts(attention_pairs=3)).attention_pairs == 5


def test_a_step_s_model_flops_are_those_of_its_records_and_mfu_follows() -> None:
    job = language_job(steps=2, batch=24)
    session = session_of(job)
    flops = model_flops(session.model)
    session.meter = Meter(flops.per_token, flops.per_pair, ceiling=1e9)
    for step in training(session):
        assert step.model_flops == flops.of(job.lengths)  # every example is in each step
        assert step.mfu == pytest.approx(step.model_flops / step.step_seconds / 1e9)


def test_the_cut_into_micro_batches_doesn_t_change_model_flops() -> None:
    job = language_job(steps=2)
    taken = []
    for techniques in ((), (GradientAccumulation(micro_batch_size=2),)):
        session = session_of(job, *techniques)
        session.meter = Meter(per_token=10.0, per_pair=3.0)
        taken.append([s.model_flops for s in training(session)])
    assert taken[0] == taken[1]


def test_a_run_s_mfu_is_that_of_its_steps_weighed_by_time() -> None:
    session = session_of(language_job(steps=3))
    session.meter = Meter(10.0, 3.0, ceiling=1e6, source="a datasheet", convention="usual")
    steps: list[StepMetrics] = []
    found = fit(session, EvaluationSchedule(on_step=steps.append)).summary(session)
    total = sum(s.model_flops or 0 for s in steps)
    seconds = sum(s.step_seconds for s in steps)
    assert found["mfu"] == pytest.approx(total / seconds / 1e6)
    assert found["model_flops_per_second"] == pytest.approx(total / seconds)
    assert found["ceiling"]["source"] == "a datasheet"


def test_without_a_ceiling_or_a_count_mfu_is_unknown_and_never_zero() -> None:
    counts = WorkCounts(tokens=5, attention_pairs=25)
    assert Meter().flops(counts) is None
    assert Meter(2.0, 1.0).flops(counts) == 35
    assert Meter(2.0, 1.0).mfu(35, 1.0) is None
    assert Meter(2.0, 1.0, ceiling=10.0).mfu(None, 1.0) is None
    session = session_of(language_job(steps=1))
    found = fit(session).summary(session)
    assert (found["mfu"], found["ceiling"], found["model_flops_per_second"]) == (None, None, None)


@pytest.mark.parametrize("architecture", ["llama", "deepseek_v3"])
@pytest.mark.parametrize("kind", [k for k in CATALOGUE if k.slot in EDITS], ids=lambda k: k.name())
def test_no_technique_that_replaces_modules_changes_what_the_model_owes(
    kind: type[Technique], architecture: str
) -> None:
    job = language_job(partial(tiny_model, architecture))
    if kind().unsupported_reasons(job_context(job, architecture)):
        pytest.skip("it can't work here")
    session = session_of(job, kind(), architecture=architecture)
    assert model_flops(session.model) == config_flops(tiny_config(architecture))


class TwoEqualRanks(OneProcess):
    """Every sum over ranks is twice this rank's."""

    size = 2

    def all_reduce_data(self, values: Tensor) -> Tensor:
        return 2 * values


def test_pairs_are_summed_over_ranks_like_every_other_count() -> None:
    setup = prepare(job := language_job(steps=1), Plan(), job_context(job))
    one = next(batches(assemble(setup))).counts
    two = next(batches(assemble(replace(setup, layout=TwoEqualRanks())))).counts
    assert one.attention_pairs > one.tokens
    assert two == one + one
