"""Whole steps of the job itself: losses and weights to the bit, and a training on eval data."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from hasten.core.job import Stop
from hasten.core.loop import Evaluation, evaluate
from hasten.core.plan import Plan
from hasten.core.session import Session, assemble
from hasten.core.setup import Setup, prepare
from hasten.core.slot import Slot
from hasten.core.step import training
from hasten.errors import InputError
from hasten.measure.quality.bench import CheckContext, local, trainable
from hasten.recipe.build import total_steps


def losses(bench: CheckContext, plan: Plan, steps: int) -> dict[str, Any]:
    """The losses of the job's first steps, no bit lost, and a digest of the weights after them."""
    job = replace(bench.job_of(plan, None, None), stop=Stop(steps=steps))
    session = assemble(prepare(job, plan, bench.context, bench.folder / f"variant-{plan.key}"))
    hex_losses = [m.loss.hex() for m in itertools.islice(training(session), steps)]
    effective = [{"technique": t.name(), **asdict(t.check_effect(session))} for t in plan]
    return {"losses": hex_losses, "weights": _digest(session), "effective": effective}


def train(bench: CheckContext, plan: Plan, seed: int, tokens: int) -> dict[str, Any]:
    """Train until so many tokens; the eval loss and the job's own measures then.

    Ranks that train apart end after as many steps as take so many tokens on the average.
    """
    session = assemble(_until(bench, plan, seed, tokens))
    before, largest = None, 0
    for metrics in training(session):
        done, largest = session.progress.tokens, max(largest, metrics.tokens)
        near = done < tokens <= done + 1.5 * largest  # perhaps the last step that ends before
        if near and not session.setup.rank_sync.diverged:  # those wouldn't all look at once
            before = evaluate(session)
    last = evaluate(session)
    loss, job_metrics = _at(tokens, before, last)
    ends = last.tokens if before is None else min(tokens, last.tokens)
    return {"eval_loss": loss, "metrics": job_metrics, "tokens": ends, "steps": last.step}


def _until(bench: CheckContext, plan: Plan, seed: int, tokens: int) -> Setup:
    context, folder = bench.context, bench.folder / f"variant-{plan.key}-{seed}"
    try:
        return prepare(bench.job_of(plan, seed, tokens), plan, context, folder)
    except InputError:
        if context.world.size == 1:
            raise
    # Ranks that train apart can't stop at a number of tokens: so after the steps that it makes.
    usual = Plan(t for t in plan if t.slot is not Slot.COMMUNICATION)
    job = bench.job_of(usual, seed, tokens)
    sampler = prepare(job, usual, context, folder).sampler
    if sampler is None:
        raise InputError("the examples' order isn't known, so that no number of tokens can be met")
    job = replace(job, stop=Stop(steps=total_steps(job, sampler)))
    return prepare(job, plan, context, folder)


def _at(
    tokens: int, before: Evaluation | None, last: Evaluation
) -> tuple[float | None, Mapping[str, float | None]]:
    """Eval loss and the job's own measures after exactly so many tokens."""
    if before is None or not before.tokens < tokens <= last.tokens:
        return last.eval_loss, last.metrics
    # Plans have steps of different sizes; a step more or less would be taken for better or worse.
    share = (tokens - before.tokens) / (last.tokens - before.tokens)

    def between(first: float | None, second: float | None) -> float | None:
        return second if first is None or second is None else first + share * (second - first)

    metrics = {name: between(before.metrics[name], last.metrics[name]) for name in last.metrics}
    return between(before.eval_loss, last.eval_loss), metrics


def _digest(session: Session) -> str:
    """Hash of the bytes of every local weight.

    Equal losses can hide a difference that only later steps show.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(trainable(session.module), key=lambda pair: pair[0]):
        digest.update(name.encode())
        shard = local(parameter.detach())
        digest.update(shard.float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
