"""Settings that change between two steps of a session: what is offered, and that it is safe."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hasten.core.setup import Session
from hasten.core.step import training
from hasten.core.technique import Technique
from hasten.parts.nn.recompute import BlockRecompute
from hasten.techniques import batch
from hasten.techniques.activation_checkpointing import ActivationCheckpointing
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.collate import Packed
from hasten.techniques.feed import Prefetched
from hasten.techniques.loss import LabelledTokenLoss
from tiny import language_job, session_of, tiny_model

STEPS = 6


pytestmark = pytest.mark.usefixtures("much_memory")


def job() -> Any:
    return language_job(lambda: tiny_model(dtype=torch.float64), steps=STEPS)


def losses(session: Session, changed_after: int = 0) -> list[float]:
    """Losses; after so many steps every setting takes its next value in each step."""
    found = []
    for metrics in training(session):
        found.append(metrics.loss)
        if changed_after and metrics.step >= changed_after:
            for technique in session.setup.plan:
                for switch in technique.live_settings(session):
                    place = switch.values.index(switch.now())
                    switch.set(switch.values[(place + 1) % len(switch.values)])
    return found


def offered(technique: Technique, *others: Technique) -> dict[str, tuple[Any, ...]]:
    session = session_of(job(), technique, *others)
    next(training(session))
    return {s.name: s.values for s in technique.live_settings(session)}


def test_smaller_micro_batches_are_offered_and_larger_ones_not() -> None:
    assert offered(GradientAccumulation(micro_batch_size=8)) == {
        "gradient_accumulation.micro_batch_size": (1, 2, 4, 8)
    }
    assert offered(GradientAccumulation(micro_batch_size=3)) == {
        "gradient_accumulation.micro_batch_size": (1, 3)
    }


def test_no_micro_batch_is_too_small_for_the_longest_record() -> None:
    longest = max(r.length for r in job().examples)
    cut = GradientAccumulation(micro_batch_size=0, micro_batch_tokens=4 * longest)
    assert offered(cut) == {
        "gradient_accumulation.micro_batch_tokens": (longest, 2 * longest, 4 * longest)
    }


def test_chunks_grow_only_where_their_logits_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert offered(LabelledTokenLoss(chunk=256)) == {
        "labelled_token_loss.chunk": (64, 128, 256, 512)
    }
    monkeypatch.setattr(batch, "fits", lambda session, more: False)
    assert offered(LabelledTokenLoss(chunk=256)) == {"labelled_token_loss.chunk": (64, 128, 256)}


def test_recomputation_may_rest_only_where_all_activations_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert offered(ActivationCheckpointing()) == {"activation_checkpointing": (True, False)}
    asked: list[float] = []

    def fits(session: Session, more: float) -> bool:
        asked.append(more)
        return False

    monkeypatch.setattr(batch, "fits", fits)
    assert offered(ActivationCheckpointing()) == {}
    assert asked[0] > 0


def test_a_look_at_its_bytes_leaves_recomputation_as_it_was() -> None:
    session = session_of(job(), ActivationCheckpointing())
    next(training(session))
    [switch] = ActivationCheckpointing().live_settings(session)
    switch.set(False)
    [again] = ActivationCheckpointing().live_settings(
        session
    )  # measures with recomputation and without
    assert again.now() is False


def test_what_has_no_such_setting_offers_nothing() -> None:
    assert offered(Packed()) == {}


def test_a_run_that_toggles_recomputation_keeps_its_bits() -> None:
    plain = losses(session_of(job()))
    toggled = session_of(job(), ActivationCheckpointing())
    assert losses(toggled, changed_after=1) == plain
    assert isinstance(toggled.setup.recompute, BlockRecompute)
    assert 0 < toggled.setup.recompute.passes < 2 * STEPS  # two blocks: not in every step


@pytest.mark.parametrize("others", [(), (Prefetched(lookahead=2),)], ids=["plain", "ahead"])
def test_a_run_whose_settings_keep_changing_has_the_losses_of_one_that_stands_still(
    others: tuple[Technique, ...],
) -> None:
    plan = (
        GradientAccumulation(micro_batch_size=8),
        LabelledTokenLoss(chunk=256),
        ActivationCheckpointing(),
        *others,
    )
    changing_all = session_of(job(), *plan)
    found = losses(changing_all, changed_after=1)
    assert found == pytest.approx(losses(session_of(job())), rel=1e-12)
    assert changing_all.progress.micro_batches > STEPS


def test_steps_that_were_read_ahead_are_counted() -> None:
    session = session_of(job(), GradientAccumulation(micro_batch_size=4), Prefetched(lookahead=3))
    [metrics] = [m for m in training(session) if m.step == STEPS]
    assert metrics.step == STEPS
    assert batch.steps_read_ahead(session) >= 4
    assert batch.steps_read_ahead(session_of(job())) == 0


def test_the_largest_micro_batch_is_found_in_the_order() -> None:
    session = session_of(job(), GradientAccumulation(micro_batch_size=2))
    lengths = sorted((r.length for r in job().examples), reverse=True)
    found = batch.largest_micro_batch(session)
    assert lengths[0] < found <= 2 * lengths[0]


def test_room_is_counted_with_the_peak_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of(job())
    monkeypatch.setattr(batch, "memory_meter", lambda device: lambda: (50.0, 100.0))
    assert batch.fits(session, 30.0)
    assert not batch.fits(session, 31.0)
