"""SAMPLER and FEED in a job: whole rows, the global batch, reading ahead, resuming."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from feed_rank_jobs import both_ways
from hasten.core.context import ExampleStats, JobContext
from hasten.core.job import GlobalBatch, Stop
from hasten.core.plan import Plan
from hasten.core.setup import prepare
from hasten.core.step import batches
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.machine.environment import World
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.collate import Packed
from hasten.techniques.feed import Prefetched
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.sampler import LengthGrouped, PackedEpoch
from ranks import on_ranks
from tiny import examples, job_context, language_job, run, session_of, tiny_model

DATA = examples(60)
TOKENS = sum(r.length for r in DATA)


def sampler(technique: Technique, world: World | None = None, **changes: Any) -> Any:
    job = language_job(data=DATA, **changes)
    below = (DDP(),) if world else ()
    return prepare(job, Plan([technique, *below]), job_context(job, world=world)).sampler


def test_each_packed_row_is_a_micro_batch_of_its_own() -> None:
    job = language_job(data=DATA, batch=12, stop=Stop(epochs=1))
    session = session_of(job, PackedEpoch(row_tokens=64), Packed())
    order: Any = session.setup.sampler
    found = [sorted(m.counts.tokens for m in step.micro_batches) for step in batches(session)]
    sizes = [r.length for r in DATA]
    assert found == [
        sorted(sum(sizes[i] for i in row) for row in rows) for rows in order.row_steps(0)
    ]


def test_a_cut_is_made_within_rows_and_never_across() -> None:
    job = language_job(data=DATA, batch=12, stop=Stop(epochs=1))
    session = session_of(
        job, PackedEpoch(row_tokens=64), Packed(), GradientAccumulation(micro_batch_size=2)
    )
    order: Any = session.setup.sampler
    for step, rows in zip(batches(session), order.row_steps(0), strict=True):
        pieces = Counter(m.counts.examples for m in step.micro_batches)
        assert pieces == Counter(min(2, len(r) - i) for r in rows for i in range(0, len(r), 2))


@pytest.mark.parametrize("technique", [PackedEpoch(row_tokens=64), LengthGrouped(window=16)])
def test_an_epoch_trains_every_record_once(technique: Technique) -> None:
    job = language_job(data=DATA, batch=12, stop=Stop(epochs=1))
    steps = run(session_of(job, technique, Packed()))
    assert sum(m.examples for m in steps) == len(DATA)
    assert sum(m.tokens for m in steps) == TOKENS


def test_rows_of_a_step_follow_the_global_batch() -> None:
    by_records = sampler(PackedEpoch(row_tokens=64), batch=8)
    assert len(DATA) / len(list(by_records.steps(0))) == pytest.approx(8, rel=0.25)
    job = replace(language_job(data=DATA), batch=GlobalBatch(None, 200))
    by_tokens: Any = prepare(job, Plan([PackedEpoch(row_tokens=64)]), job_context(job)).sampler
    assert by_tokens.rows_per_step == 200 // 64
    sizes = [r.length for r in DATA]
    assert all(sum(sizes[i] for i in step) <= 200 for step in by_tokens.steps(0))


def test_a_row_never_takes_more_than_a_step() -> None:
    order = sampler(PackedEpoch(row_tokens=4096), batch=8)
    assert order.efficiency.row_tokens <= TOKENS * 8 // len(DATA)
    assert order.rows_per_step == 1


def test_a_row_that_cannot_hold_the_longest_record_is_named_before_anything_runs() -> None:
    technique = PackedEpoch(row_tokens=30)
    job = language_job(data=DATA)
    assert "at least 38" in technique.unsupported_reasons(job_context(job))[0]
    with pytest.raises(InputError, match="row_tokens=30 can't hold the longest example of 38"):
        prepare(job, Plan([technique]), job_context(job))


def test_records_without_lengths_are_an_obstacle_and_unknown_records_are_none() -> None:
    hardware = job_context(language_job()).hardware
    for technique in (PackedEpoch(), LengthGrouped()):
        assert technique.unsupported_reasons(JobContext(hardware)) == ()
        (reason,) = technique.unsupported_reasons(
            JobContext(hardware, examples=ExampleStats(count=9))
        )
        assert "lengths" in reason


def test_fewer_rows_than_ranks_are_refused_with_both_numbers() -> None:
    with pytest.raises(InputError, match=r"has 1 row.* for 4 ranks; lower row_tokens"):
        sampler(PackedEpoch(), World(size=4), batch=8)


def test_grouping_leaves_less_padding_in_padded_steps() -> None:
    shares = []
    for techniques in ((), (LengthGrouped(window=60),)):
        session = session_of(language_job(data=DATA, batch=6, stop=Stop(epochs=1)), *techniques)
        run(session)
        shares.append(1 - session.progress.tokens / session.progress.positions)
    assert shares[1] < shares[0] / 2


def with_dropout() -> nn.Module:
    """A model whose every step draws from the global generator."""
    model: Any = tiny_model()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.2
    return model


def readers() -> int:
    return sum(t.name == "hasten-read-ahead" for t in threading.enumerate())


def test_losses_are_the_same_bits_over_epochs_and_with_dropout() -> None:
    job = language_job(with_dropout, data=examples(16), batch=3, steps=14)
    plain = [m.loss for m in run(session_of(job))]
    assert [m.loss for m in run(session_of(job, Prefetched()))] == plain
    assert len(set(plain)) == 14
    assert not readers()


def test_a_stream_that_draws_its_order_keeps_it() -> None:
    def stream(epoch: int) -> Iterator[Any]:
        data = examples(12)
        order = torch.randperm(12).tolist()  # from the global generator, as shuffling loaders do
        yield from ([data[i] for i in order[k : k + 3]] for k in range(0, 12, 3))

    job = language_job(with_dropout, data=[], steps=10, stream=stream)
    plain = [m.loss for m in run(session_of(job))]
    assert [m.loss for m in run(session_of(job, Prefetched()))] == plain


def test_two_ranks_that_read_ahead_have_the_bits_and_the_order_of_two_that_do_not(
    tmp_path: Path,
) -> None:
    for rank in on_ranks(both_ways, tmp_path):
        assert rank["ahead"] == rank["plain"]
        assert rank["resumed"] == [tokens for _, _, tokens in rank["plain"][5:-1]]


def test_an_error_of_a_record_ends_the_run_with_that_error() -> None:
    class Torn(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            if index == 5:
                raise OSError("example 5 is torn")
            return super().__getitem__(index)

    job = language_job(data=Torn(examples(12)), batch=1, steps=12)
    with pytest.raises(OSError, match="example 5 is torn"):
        run(session_of(job, Prefetched()))
    assert not readers()
