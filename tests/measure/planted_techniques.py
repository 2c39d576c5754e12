"""Techniques of which the truth is known: they do nothing, slow, leak, lie, or ruin the model.

Each does in earnest what it is named for, so an experiment with them has one right answer for every
variant. `small_proofs` trains models of a second with them and writes down what a verification
would find, in the form of ``report.verification``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hasten.core.job import MicroBatch, StepBatch, language_counts
from hasten.core.loop import evaluate
from hasten.core.setup import Engine, Session, Setup
from hasten.core.slot import Slot
from hasten.core.technique import Claim, EffectCheck, Fidelity, Technique, setting
from hasten.parts.data.collate import packed, tokenized_example
from tiny import examples, language_job, run, session_of, tiny_model

SCALE = 4.0  # as if a step of four micro-batches forgot to divide by their number
ALLOWED = 1e-4  # error of a logit or, relative, of a gradient that rounding in float32 explains


@dataclass(frozen=True)
class Waits(Technique):
    """Sleeps for a share of what a step takes."""

    slot = Slot.BATCH
    share: float = setting(0.0, "of a step's time")

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.EXACT

    def apply(self, setup: Setup) -> None:
        inner, last = setup.run_passes, time.process_time()

        def attempt(engine: Engine, batch: StepBatch) -> Any:
            nonlocal last
            began, used = time.perf_counter(), time.process_time()
            found = inner(engine, batch)
            wall, passes = time.perf_counter() - began, time.process_time() - used
            # Processor time doesn't run while the variant waits for its turn, so between two calls
            # it is a whole step's; how crowded the cores are shows in the passes.
            whole = max(time.process_time() - last, passes)
            last = time.process_time()
            time.sleep(self.share * wall * min(whole / max(passes, 1e-9), 3.0))
            return found

        setup.run_passes = attempt

    def check_effect(self, session: Session) -> EffectCheck:
        return EffectCheck(True, f"slept in {session.progress.step} steps")


@dataclass(frozen=True)
class DoesNothing(Technique):
    """Takes part in the run and changes nothing."""

    slot = Slot.ALLOCATOR

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.EXACT

    def apply(self, setup: Setup) -> None:
        return None

    def check_effect(self, session: Session) -> EffectCheck:
        return EffectCheck(True, f"was there for {session.progress.step} steps")


@dataclass(frozen=True)
class ClaimsOnly(Technique):
    """Promises much, and its code is never reached."""

    slot = Slot.LAYERS

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.EXACT

    @property
    def claims(self) -> tuple[Claim, ...]:
        return (Claim("tokens_per_second", 1.5, "a brochure"),)

    def apply(self, setup: Setup) -> None:
        return None

    def check_effect(self, session: Session) -> EffectCheck:
        return EffectCheck(False, "0 modules replaced")


@dataclass(frozen=True)
class LeaksDocuments(Technique):
    """Examples end to end in one row with positions that run on: each reads those before it."""

    slot = Slot.COLLATE

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.ROUNDING

    def apply(self, setup: Setup) -> None:
        setup.collate = run_together

    def check_effect(self, session: Session) -> EffectCheck:
        return EffectCheck(
            True, f"{session.progress.positions - session.progress.tokens} slots of padding"
        )


def run_together(together: Sequence[Any]) -> MicroBatch:
    """All examples in one row as if they were one document."""
    inputs = packed(together)
    inputs = {name: inputs[name] for name in ("input_ids", "labels")}
    return MicroBatch(inputs, language_counts(together, inputs))


@dataclass(frozen=True)
class ScalesLoss(Technique):
    """Leaves a step's gradients too large by a factor, as a wrong division does."""

    slot = Slot.ACTIVATION_CHECKPOINTING  # any slot that the other planted ones leave free

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.EXACT

    def apply(self, setup: Setup) -> None:
        inner = setup.run_passes

        def attempt(engine: Engine, batch: StepBatch) -> Any:
            counts = replace(batch.counts, units=batch.counts.units / SCALE)
            loss, _ = inner(engine, replace(batch, counts=counts))
            return loss, batch

        setup.run_passes = attempt

    def check_effect(self, session: Session) -> EffectCheck:
        return EffectCheck(True, f"{session.progress.step} steps")


@dataclass(frozen=True)
class RuinsHeldOut(Technique):
    """An update that costs little, because it hardly moves the weights."""

    slot = Slot.OPTIMIZER

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.LOSSY

    def apply(self, setup: Setup) -> None:
        build = setup.optimizer
        assert build is not None

        def idle(named: Any) -> torch.optim.Optimizer:
            optimizer = build(named)
            for group in optimizer.param_groups:
                group["lr"] *= 1e-3
            return optimizer

        setup.optimizer = idle

    def check_effect(self, session: Session) -> EffectCheck:
        return EffectCheck(True, f"{session.progress.step} updates")


PLANTED = (Waits, DoesNothing, ClaimsOnly, LeaksDocuments, ScalesLoss, RuinsHeldOut)


def small_proofs() -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Entries of ``report.verification``, and eval losses with and without `RuinsHeldOut`."""
    losses = {
        name: _eval_data(*techniques)
        for name, techniques in (("baseline", ()), ("ruined", (RuinsHeldOut(),)))
    }
    entries = [
        _entry(LeaksDocuments(), "leak", _leak()),
        _entry(ScalesLoss(), "gradient", _gradient_error(ScalesLoss())),
        _entry(DoesNothing(), "gradient", _gradient_error(DoesNothing())),
    ]
    return entries, losses


def _leak() -> float:
    """How far a document's logits move when the one before it in its row is another."""
    first, second = sorted(examples(2, seed=4), key=lambda r: -r.length)  # as rows are laid out
    other = tokenized_example((first.input_ids + 7) % 90 + 3, first.trained)
    model = tiny_model().eval()
    ends = []
    for before in (first, other):
        with torch.no_grad():
            row = run_together([before, second]).inputs["input_ids"]
            ends.append(model(input_ids=row).logits[0, before.length :])
    return float((ends[0] - ends[1]).abs().max())


def _gradient_error(technique: Technique) -> float:
    """The relative L2 error that a technique brings into one step's gradient."""
    gradients = []
    for techniques in ((), (technique,)):
        job = language_job(steps=1, optimizer=torch.optim.SGD, lr=1.0, max_grad_norm=None)
        session = session_of(job, *techniques)
        before = [p.detach().clone() for p in session.model.parameters()]
        run(session)
        moved = zip(before, session.model.parameters(), strict=True)
        gradients.append(torch.cat([(b - p.detach()).flatten() for b, p in moved]))
    return float((gradients[1] - gradients[0]).norm() / gradients[0].norm())


def _eval_data(*techniques: Technique) -> float:
    """The eval loss after some steps on counting, which can be learnt as noise can't."""
    counting = [
        tokenized_example(3 + (start + np.arange(24)) % 20, np.ones(24, bool))
        for start in range(20)
    ]
    job = language_job(data=counting[:16], eval_data=counting[16:], steps=12)
    session = session_of(job, *techniques)
    run(session)
    found = evaluate(session).eval_loss
    assert found is not None
    return found


def _entry(technique: Technique, test: str, found: float) -> dict[str, Any]:
    return {
        "technique": technique.name(),
        "fidelity": technique.fidelity.name,
        "test": test,
        "verdict": "differs" if found > ALLOWED else "equal",
        "measured": found,
        "allowed": ALLOWED,
        "seeds": None,
        "text": f"{test} off by {found:.2g}, allowed {ALLOWED:g}",
    }
