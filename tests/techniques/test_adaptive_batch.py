"""A step that runs out of memory is redone in smaller micro-batches, with the same losses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from hasten.core.layout import OneProcess
from hasten.core.setup import Session
from hasten.core.state import state_of
from hasten.core.step import training
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.machine.environment import World
from hasten.machine.memory import is_out_of_memory
from hasten.parts.nn.losses import WholeLogitsLoss
from hasten.techniques.batch import AdaptiveBatch, GradientAccumulation
from hasten.techniques.checkpoint import Checkpoints
from hasten.techniques.collate import Packed
from hasten.techniques.feed import Prefetched
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.precision import BF16MasterWeights
from ranks import once_on_ranks
from tiny import examples, language_job, restore, run, session_of, tiny_model

# Where memory runs out, and which of the two ranks have to redo a step.
PLACES = {
    "nowhere": [False, False],
    "forward, rank 0": [True, False],
    "forward, rank 1": [False, True],
    "backward, rank 1": [False, True],
    "last backward, rank 0": [True, False],
    "backward, both": [True, True],
    "backward, rank 1, prefetched": [False, True],
}


class Fails(torch.autograd.Function):
    """Memory runs out in the middle of the backward pass, when later layers have gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("simulated")


class SmallMemory(nn.Module):
    """The plain loss on a device that holds ``limit`` slots."""

    limit = 160

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner, self.failures = WholeLogitsLoss(model), 0
        model.model.layers[1].register_forward_pre_hook(self._break)  # type: ignore[union-attr, index]
        self.model = model

    def _break(self, module: nn.Module, args: Any) -> Any:
        hidden = args[0]
        if torch.is_grad_enabled() and self.fails(hidden.shape[0] * hidden.shape[1]):
            self.failures += 1
            return (self.fail(hidden), *args[1:])
        return args

    def fails(self, slots: int) -> bool:
        return slots > self.limit

    def fail(self, hidden: torch.Tensor) -> Any:
        return Fails.apply(hidden)

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs)


def all_places(world: World) -> dict[str, Any]:
    """Losses, weights and redone steps with failures in every place, and a resumed state."""
    found = {place: _described(_session(world, place, AdaptiveBatch(8, 16))) for place in PLACES}
    found["accumulated"] = _described(_session(world, "nowhere", GradientAccumulation(2)))
    masters = BF16MasterWeights()
    found["masters"] = _described(_session(world, "backward, both", AdaptiveBatch(8, 16), masters))
    plain = _session(world, "nowhere", GradientAccumulation(2), masters)
    found["masters, accumulated"] = _described(plain)
    return {**found, **_resumed(world)}


def _session(world: World, place: str, *techniques: Technique) -> Session:
    """Steps of eight examples, four a rank, whose memory holds about two of them."""
    here = PLACES[place][world.rank]

    class Memory(SmallMemory):
        def fails(self, slots: int) -> bool:
            if "last" in place:  # not for its size: in the last pass of a step cut in two
                self.passes = getattr(self, "passes", 0) + 1
                return here and self.passes == 2
            return here and slots > 80

        def fail(self, hidden: torch.Tensor) -> Any:
            if "forward" in place:
                raise torch.OutOfMemoryError("simulated")
            return super().fail(hidden)

    masters = any(isinstance(t, BF16MasterWeights) for t in techniques)
    dtype = torch.float32 if masters else torch.float64
    job = language_job(lambda: tiny_model(dtype=dtype), data=examples(24), steps=3, batch=8)
    job = replace(job, loss=Memory)
    if "last" in place:
        techniques = tuple(
            AdaptiveBatch(2, 16) if isinstance(t, AdaptiveBatch) else t for t in techniques
        )
    if "prefetched" in place:
        techniques = (*techniques, Prefetched())
    return session_of(job, *techniques, DDP(bucket_cap_mb=1), world=world)


def _described(session: Session) -> dict[str, Any]:
    steps = list(training(session))
    redone = getattr(session.setup.run_passes, "redone", 0)
    model: Any = session.finish()
    return {
        "losses": [m.loss for m in steps],
        "positions": [m.positions for m in steps],
        "weights": [float(p.detach().double().flatten()[::7].sum()) for p in model.parameters()],
        "redone": redone,
    }


def _resumed(world: World) -> dict[str, Any]:
    """Each rank's size after a run in which only rank 1 failed, and after it is read again."""
    place = "backward, rank 1"
    first = _session(world, place, AdaptiveBatch(8, 16))
    list(training(first))
    second = _session(world, place, AdaptiveBatch(8, 16))
    restore(second, *state_of(first))
    rooms: list[Any] = [s.setup.run_passes for s in (first, second)]
    return {name: a.room.state_dict() for name, a in zip(("learnt", "resumed"), rooms, strict=True)}


pytestmark = pytest.mark.usefixtures("much_memory")


def trained(small: bool, *techniques: Any, dtype: Any = torch.float64) -> tuple[Session, list[Any]]:
    job = language_job(lambda: tiny_model(dtype=dtype), data=examples(24), steps=6, batch=12)
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
    assert "6 steps" in proof.evidence


def test_without_it_the_error_ends_the_run() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        trained(True)


def test_a_single_record_that_does_not_fit_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SmallMemory, "limit", 20)
    with pytest.raises(torch.OutOfMemoryError):
        trained(True, AdaptiveBatch())


def test_what_torch_says_where_no_memory_is_left_is_recognised() -> None:
    with pytest.raises((RuntimeError, MemoryError)) as full:
        torch.empty(2**58)
    assert is_out_of_memory(full.value), str(full.value)


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
        size, replicated = 2, False

    session.setup.layout = Sharded()
    with pytest.raises(InputError, match="adaptive_batch with 2 ranks needs ddp"):
        next(training(session))


two_ranks = once_on_ranks(all_places)


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
