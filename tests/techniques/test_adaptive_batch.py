"""A step that runs out of memory is redone in smaller micro-batches, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hasten.core.layout import OneProcess
from hasten.core.session import Session
from hasten.core.step import training
from hasten.errors import InputError
from hasten.parts.nn.losses import WholeLogitsLoss
from hasten.techniques.batch import AdaptiveBatch
from hasten.techniques.checkpoint import Checkpoints
from hasten.techniques.collate import Packed
from hasten.techniques.feed import Prefetched
from hasten.techniques.precision import BF16MasterWeights
from ranks import on_ranks
from techniques.adaptive_rank_jobs import PLACES, SmallMemory
from tiny import examples, language_job, run, session_of, tiny_model


@pytest.fixture(autouse=True)
def _much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has, and the tests before have taken of it."""
    monkeypatch.setattr("hasten.techniques.batch.memory_meter", lambda device: lambda: (0.0, 1e12))


def trained(small: bool, *techniques: Any, dtype: Any = torch.float64) -> tuple[Session, list[Any]]:
    job = language_job(lambda: tiny_model(dtype=dtype), data=examples(24), steps=9, batch=12)
    if small:
        job = replace(job, loss=SmallMemory)
    session = session_of(job, *techniques)
    return session, run(session)


@pytest.mark.parametrize("more", [(), (Packed(),)], ids=["padded", "packed"])
def test_losses_and_weights_are_those_of_the_step_in_one_piece(more: Any) -> None:
    plain, expected = trained(False, *more)
    session, found = trained(True, AdaptiveBatch(), *more)
    for one, two in zip(found, expected, strict=True):
        assert one.loss == pytest.approx(two.loss, rel=1e-10)
        assert one.grad_norm == pytest.approx(two.grad_norm, rel=1e-9)
        assert (one.examples, one.trained_tokens) == (two.examples, two.trained_tokens)
    for a, b in zip(session.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)
    failures: Any = session.loss_module.failures
    assert 0 < failures <= 5
    proof = AdaptiveBatch().check_effect(session)
    assert proof.effective
    assert "9 steps" in proof.evidence


def test_gradients_of_a_failed_attempt_do_not_reach_the_masters() -> None:
    _, expected = trained(False, BF16MasterWeights(), dtype=torch.float32)
    _, found = trained(True, AdaptiveBatch(), BF16MasterWeights(), dtype=torch.float32)
    for one, two in zip(found, expected, strict=True):
        assert one.loss == pytest.approx(two.loss, rel=2e-2)


def test_without_it_the_error_ends_the_run() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        trained(True)


def test_a_single_record_that_does_not_fit_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SmallMemory, "limit", 20)
    with pytest.raises(torch.OutOfMemoryError):
        trained(True, AdaptiveBatch())


def test_another_error_is_not_taken_for_memory() -> None:
    class Broken(WholeLogitsLoss):
        def forward(self, **inputs: Any) -> Any:
            raise RuntimeError("shapes")

    job = replace(language_job(), loss=Broken)
    with pytest.raises(RuntimeError, match="shapes"):
        run(session_of(job, AdaptiveBatch()))


@pytest.mark.parametrize("feed", [(), (Prefetched(),)], ids=["straight", "prefetched"])
def test_the_metrics_describe_what_ran_and_not_the_first_cut(feed: Any) -> None:
    session, found = trained(True, AdaptiveBatch(), *feed)
    job = session.setup.job
    for step, metrics in zip(session.setup.sampler.steps(0), found, strict=False):  # type: ignore[union-attr]
        lengths = [job.lengths[i] for i in step]
        assert metrics.tokens == sum(lengths)
        assert metrics.tokens <= metrics.positions < max(lengths) * len(lengths)
        assert metrics.padding_share == 1 - metrics.tokens / metrics.positions
    assert session.progress.positions == sum(m.positions for m in found)


def test_what_was_read_ahead_in_pieces_known_to_fail_is_cut_again_before_it_fails() -> None:
    session, _ = trained(True, AdaptiveBatch(max_size=32), Prefetched(lookahead=8))
    assert session.loss_module.failures <= 5  # type: ignore[operator]


def test_a_resumed_run_goes_on_with_the_size_and_the_ceiling_it_had(tmp_path: Any) -> None:
    job = language_job(loss=SmallMemory, data=examples(24), steps=9, batch=12)
    plan = (AdaptiveBatch(), Prefetched(), Checkpoints(4))
    first = session_of(job, *plan, folder=tmp_path)
    steps = training(first)
    for _ in range(5):  # a step more than was saved: the size of step 4 counts
        next(steps)
        if first.progress.step == 4:
            learnt = first.setup.run_passes.room.state_dict()  # type: ignore[attr-defined]
    steps.close()  # the folder is free for the next one
    second = session_of(job, *plan, folder=tmp_path)
    second.setup.checkpoint.resume(second)
    assert second.setup.run_passes.room.state_dict() == learnt  # type: ignore[attr-defined]
    assert learnt["ceiling"] > 0
    assert learnt["size"] < 32 * max(job.lengths)


def test_with_another_number_of_ranks_the_smallest_size_is_taken() -> None:
    adaptive: Any = session_of(language_job(), AdaptiveBatch()).setup.run_passes
    adaptive.load_state_dict({"rooms": [[90, 0, 0], [40, 30, 50], [60, 0, 0]]})
    assert adaptive.room.state_dict() == {"size": 40, "good": 30, "ceiling": 50}


def test_a_layout_whose_ranks_can_not_repeat_a_pass_alone_is_refused_by_name() -> None:
    session = session_of(language_job(), AdaptiveBatch())

    class Sharded(OneProcess):
        size = 2

    session.setup.layout = Sharded()
    with pytest.raises(InputError, match="adaptive_batch with 2 ranks needs ddp"):
        next(training(session))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks("techniques.adaptive_rank_jobs:all_places", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_fails_redoes_its_passes_and_the_weights_are_those_without_a_failure(
    two_ranks: list[Any], place: str
) -> None:
    undisturbed = two_ranks[0]["accumulated"]
    ours, theirs = two_ranks[0][place], two_ranks[1][place]
    assert ours["weights"] == theirs["weights"]
    assert ours["losses"] == theirs["losses"]
    assert ours["positions"] == theirs["positions"]
    assert ours["losses"] == pytest.approx(undisturbed["losses"], rel=1e-10)
    assert ours["weights"] == pytest.approx(undisturbed["weights"], rel=1e-8, abs=1e-10)
    assert [ours["redone"] > 0, theirs["redone"] > 0] == PLACES[place]


def test_masters_of_two_ranks_follow_those_of_a_run_in_one_cut(two_ranks: list[Any]) -> None:
    ours, plain = two_ranks[0]["masters"], two_ranks[0]["masters, accumulated"]
    assert ours["redone"]
    assert ours["weights"] == two_ranks[1]["masters"]["weights"]
    assert ours["losses"] == pytest.approx(plain["losses"], rel=2e-2)


def test_each_rank_finds_its_own_size_in_a_checkpoint(two_ranks: list[Any]) -> None:
    for rank in two_ranks:
        assert rank["resumed"] == rank["learnt"]
    assert two_ranks[0]["learnt"] != two_ranks[1]["learnt"]
