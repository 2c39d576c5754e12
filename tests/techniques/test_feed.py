"""Reading ahead in a run: same losses, the position of the steps taken, no thread left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hasten.core.job import MicroBatch, WorkCounts
from hasten.core.state import restore, state_of
from hasten.core.step import training
from hasten.techniques.checkpoint import Checkpoints
from hasten.techniques.feed import Prefetched, PrefetchedFeed
from ranks import on_ranks
from tiny import examples, language_job, run, session_of, tiny_model


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


def test_a_run_resumes_behind_the_steps_it_took_not_those_read_ahead(tmp_path: Any) -> None:
    job = language_job(data=examples(24), batch=2, steps=12)
    whole = [m.loss for m in run(session_of(job))]
    first = session_of(job, Prefetched(), Checkpoints(5), folder=tmp_path)
    steps = training(first)
    taken = [next(steps).loss for _ in range(6)]
    steps.close()
    assert not readers()
    second = session_of(job, Prefetched(), Checkpoints(5), folder=tmp_path)
    second.setup.checkpoint.resume(second)
    assert second.progress.step_in_epoch == 5
    assert taken[:5] + [m.loss for m in run(second)] == whole


def test_two_ranks_that_read_ahead_have_the_bits_and_the_order_of_two_that_do_not(
    tmp_path: Path,
) -> None:
    for rank in on_ranks("feed_rank_jobs:both_ways", tmp_path):
        assert rank["ahead"] == rank["plain"]
        assert rank["resumed"] == [tokens for _, _, tokens in rank["plain"][5:-1]]


def test_the_pace_that_was_learnt_goes_on_in_a_resumed_run() -> None:
    job = language_job(data=examples(24), batch=2, steps=8)
    first, second = session_of(job, Prefetched()), session_of(job, Prefetched())
    run(first)
    saved: Any = first.setup.feed
    saved.prefetcher.statistics.lookahead = 11
    restore(second, *state_of(first))
    second.progress.step = second.progress.epoch = second.progress.step_in_epoch = 0
    run(second)
    resumed: Any = second.setup.feed
    assert resumed.prefetcher.statistics.batches >= 16
    assert resumed.prefetcher.statistics.lookahead >= 10  # by at most one less after a quiet time


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


def test_what_is_no_input_stays_as_it_is() -> None:
    kept = torch.ones(2)
    batch = MicroBatch(
        {"input_ids": torch.ones(1, 3), "lengths": (kept, 2)}, WorkCounts(1, 3, 3, 2)
    )
    feed = PrefetchedFeed(Prefetched())
    steps = list(feed(iter([(batch, batch)] * 4), "cpu"))
    assert len(steps) == 4
    assert all(step[1].counts == batch.counts for step in steps)
    assert steps[3][0].inputs["lengths"][0] is kept


def test_settings_without_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="lookahead must be at least 1"):
        Prefetched(lookahead=40)
