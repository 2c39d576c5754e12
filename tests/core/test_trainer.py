"""The loop around the step: evaluation, early stop, the best model, interruption, resuming."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hasten.core.job import GlobalBatch, Schedule, Stop
from hasten.core.loop import (
    Evaluation,
    EvaluationSchedule,
    Outcome,
    RemainingTime,
    evaluate,
    fit,
    request_stop,
)
from hasten.core.state import state_of
from hasten.core.step import training
from hasten.errors import InputError
from hasten.techniques.adapter import LoRA
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.checkpoint import Checkpoints
from hasten.techniques.collate import Packed
from hasten.techniques.feed import Prefetched
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.precision import BF16MasterWeights
from saved import load_latest, save
from tiny import examples, language_job, restore, run, session_of, tiny_model


def test_eval_loss_is_the_mean_over_trained_tokens_of_all_records() -> None:
    eval_data = examples(19, seed=5)
    job = language_job(lambda: tiny_model(dtype=torch.float64), eval_data=eval_data)
    found = evaluate(session_of(job)).eval_loss
    model = tiny_model(dtype=torch.float64).eval()
    total, count = 0.0, 0
    for example in eval_data:
        ids = torch.tensor(example.input_ids.astype("int64"))[None]
        kept = torch.tensor(example.trained[1:])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1][kept]
        total += float(F.cross_entropy(logits, ids[0, 1:][kept], reduction="sum"))
        count += int(kept.sum())
    assert found == pytest.approx(total / count, rel=1e-12)


def test_evaluation_leaves_training_untouched() -> None:
    plain = run(session_of(language_job(steps=4)))
    session = session_of(language_job(steps=4))
    losses = []
    for metrics in training(session):
        losses.append(metrics.loss)
        evaluate(session)
        assert session.module.training
    assert losses == [m.loss for m in plain]


def test_metrics_of_the_user_are_measured_at_every_evaluation() -> None:
    def weight_norm(model: Any) -> float:
        return float(model.lm_head.weight.norm())

    job = language_job(steps=4, metrics={"weight_norm": weight_norm})
    outcome = fit(session_of(job), EvaluationSchedule(every_steps=2))
    assert [e.step for e in outcome.evaluations] == [2, 4]
    norms = [e.metrics["weight_norm"] for e in outcome.evaluations]
    assert norms[0] != norms[1]


def test_training_stops_early_when_the_eval_loss_stops_falling() -> None:
    job = language_job(steps=200, lr=1.0)  # far too high: the eval loss can only rise
    best: list[int] = []
    watch = EvaluationSchedule(every_steps=2, patience=3, on_best=lambda e: best.append(e.step))
    session = session_of(job)
    outcome = fit(session, watch)
    assert outcome.stopped == "early stop"
    assert session.progress.step < 200
    assert outcome.best is not None
    assert best[-1] == outcome.best.step
    assert session.progress.step == outcome.best.step + 2 * 3


def test_an_attempt_goes_on_with_what_the_one_before_measured() -> None:
    earlier = [Evaluation(1, 10, 0.001), Evaluation(2, 20, 0.002)]
    best: list[int] = []
    watch = EvaluationSchedule(2, 3, earlier, on_best=lambda e: best.append(e.step))
    session = session_of(language_job(steps=20))
    outcome = fit(session, watch)
    assert best == [], "the best model so far is an earlier attempt's"
    assert session.progress.step == 4, "three looks without a better one"
    assert [e.step for e in outcome.evaluations] == [1, 2, 2, 4]


def test_what_was_measured_before_does_not_stand_for_the_last_look() -> None:
    session = session_of(language_job(steps=4))
    outcome = fit(session, EvaluationSchedule(earlier=[Evaluation(4, 10, 0.5)]))
    assert len(outcome.evaluations) == 2


def test_a_loss_that_is_no_number_is_never_the_best() -> None:
    outcome = Outcome(evaluations=[Evaluation(1, 1, math.nan), Evaluation(2, 2, 3.0)])
    assert outcome.best == outcome.evaluations[1]


def test_rates_are_of_this_process_alone_after_a_resume() -> None:
    first = session_of(language_job(steps=30))
    steps = training(first)
    for _ in range(28):
        next(steps)
    second = session_of(language_job(steps=30))
    restore(second, *state_of(first))
    outcome = fit(second)
    summary = outcome.summary(second)
    trained = sum(outcome.step_seconds)
    new = second.progress.tokens - first.progress.tokens
    assert summary["steps"] == 30
    assert summary["tokens"] == second.progress.tokens
    assert summary["tokens_per_second"] == pytest.approx(new / trained)
    assert summary["examples_per_second"] * trained == pytest.approx(
        second.progress.examples - first.progress.examples
    )
    assert outcome.tokens(second) == new
    assert summary["resumed_step"] == 28
    assert summary["tokens"] - summary["resumed_tokens"] == new


def test_a_run_without_a_step_left_has_a_summary_that_json_can_say() -> None:
    first = session_of(language_job(steps=2))
    run(first)
    second = session_of(language_job(steps=2))
    restore(second, *state_of(first))
    summary = fit(second).summary(second)
    assert summary["training_loss"] is None
    json.dumps(summary, allow_nan=False)


def test_a_run_that_is_asked_to_stop_says_why() -> None:
    session = session_of(language_job(steps=50))

    def ask(metrics: Any) -> None:
        if metrics.step == 3:
            request_stop(session, haste=False, reason="time limit")

    outcome = fit(session, EvaluationSchedule(on_step=ask))
    assert (outcome.stopped, session.progress.step) == ("time limit", 3)
    assert outcome.evaluations  # its loss is still taken


def test_an_interrupt_ends_the_run_between_two_steps() -> None:
    session = session_of(language_job(steps=50))

    def interrupt(metrics: Any) -> None:
        if metrics.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    outcome = fit(session, EvaluationSchedule(on_step=interrupt))
    assert outcome.stopped == "interrupted"
    assert session.progress.step == 3
    assert outcome.evaluations[-1].step == 3
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize(("total", "every", "first"), [(40, 8, 1), (45, 8, 1), (45, 8, 24)])
def test_the_remaining_time_has_all_evaluations_and_checkpoints_of_the_rest(
    total: int, every: int, first: int
) -> None:
    """Against the times of a whole run, written down before: a step of 1 s, the first of 60 s, a
    checkpoint of 3 s after each fourth step, an evaluation of 20 s."""
    now = 0.0
    remaining = RemainingTime(total, every, clock=lambda: now)
    predicted: dict[int, tuple[float, float]] = {}
    for step in range(first, total + 1):
        now += (60 if step == first else 1) + 3 * (step % 4 == 0)
        eta = remaining.after_step(step)
        assert eta is not None
        predicted[step] = now, eta
        if step % every == 0 or step == total:
            now += 20
            remaining.evaluated()
    for at, eta in [times for step, times in predicted.items() if step > first + 2 * every]:
        assert eta == pytest.approx(now - at, abs=5)
    assert predicted[total][1] == pytest.approx(20)


def test_a_step_line_has_the_remaining_time_and_one_behind_the_last_step_has_none() -> None:
    found: list[float | None] = []
    watch = EvaluationSchedule(1, on_step=lambda m: found.append(m.to_dict()["eta_seconds"]))
    fit(session_of(replace(language_job(steps=3), schedule=Schedule(total_steps=3))), watch)
    assert all(isinstance(eta, float) and eta > 0 for eta in found[1:])
    assert RemainingTime(3, 1).after_step(4) is None


def test_the_summary_says_what_was_done() -> None:
    data = examples(10)
    session = session_of(language_job(data=data, batch=4, stop=Stop(epochs=2)))
    summary = fit(session).summary(session)
    assert summary["steps"] == 6
    assert summary["examples"] == 20
    assert summary["tokens"] == 2 * sum(r.length for r in data)
    assert len(summary["epoch_seconds"]) == 2
    assert summary["perplexity"] > 1
    assert summary["stopped"] == "done"


PLANS = {
    "plain": (),
    "masters": (BF16MasterWeights(), Packed(), LabelledTokenLoss(chunk=32)),
    "accumulating": (GradientAccumulation(micro_batch_size=3),),
    "lora with dropout": (LoRA(rank=4, dropout=0.2),),
}


@pytest.mark.parametrize("techniques", PLANS.values(), ids=PLANS.keys())
def test_a_resumed_run_continues_with_the_same_bits(tmp_path: Path, techniques: Any) -> None:
    def job() -> Any:
        return language_job(data=examples(20), batch=6, stop=Stop(epochs=2))

    whole = [m.loss for m in run(session_of(job(), *techniques))]
    first = session_of(job(), *techniques)
    steps = training(first)
    for _ in range(5):  # into the second epoch
        next(steps)
    tensors, meta = state_of(first)
    save(tmp_path, 5, tensors, meta)
    found = load_latest(tmp_path)
    assert found is not None
    second = session_of(job(), *techniques)
    restore(second, found[0], found[1])
    assert [m.loss for m in run(second)] == whole[5:]


@pytest.mark.parametrize(
    "techniques", [(), (Packed(), Prefetched(lookahead=3)), (Checkpoints(interval=3),)], ids=str
)
def test_who_moves_the_progress_has_the_next_step_from_there(
    tmp_path: Path, techniques: Any
) -> None:
    session = session_of(language_job(data=examples(64), steps=12), *techniques, folder=tmp_path)
    found, before = [], set(threading.enumerate())
    for metrics in training(session):
        found.append(metrics)
        if metrics.step in (4, 9):
            session.progress.epoch = session.progress.step_in_epoch = 0
    assert [m.step for m in found] == list(range(1, 13))  # steps are counted on
    tokens = [m.tokens for m in found]
    assert tokens[4:9] == tokens[:4] + tokens[8:9]
    assert tokens[9:] == tokens[:3]
    assert len(set(tokens)) >= 5
    assert set(threading.enumerate()) <= before


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    tensors, meta = state_of(session_of(language_job(lambda: tiny_model("qwen2"))))
    session = session_of(language_job())
    before = {k: v.clone() for k, v in session.loss_module.state_dict().items()}
    with pytest.raises(InputError, match="another model"):
        restore(session, tensors, meta)
    after = session.loss_module.state_dict()
    assert all(torch.equal(after[k], v) for k, v in before.items())


def test_checkpoints_without_a_folder_are_refused() -> None:
    with pytest.raises(InputError, match="run folder"):
        session_of(language_job(), Checkpoints())


def test_an_evaluation_pass_is_no_larger_than_a_micro_batch() -> None:
    job = language_job(eval_data=examples(19, seed=5))
    sizes: list[int] = []

    def look(plan: list[Any], batch: GlobalBatch) -> float | None:
        session = session_of(replace(job, batch=batch), *plan)
        sizes.clear()
        handle = session.loss_module.register_forward_pre_hook(
            lambda module, args, inputs: sizes.append(len(inputs["input_ids"])), with_kwargs=True
        )
        loss = evaluate(session).eval_loss
        handle.remove()
        return loss

    whole = look([], GlobalBatch(examples=32))
    assert max(sizes) == 16
    assert look([GradientAccumulation(3)], GlobalBatch(examples=32)) == pytest.approx(whole)
    assert (max(sizes), sum(sizes)) == (3, 19)
    assert look([], GlobalBatch(examples=4)) == pytest.approx(whole)
    assert (max(sizes), sum(sizes)) == (4, 19)


def test_the_best_evaluation_is_by_the_metric_that_was_named() -> None:
    values = iter([0.1, 0.5, 0.5, 0.2])
    job = language_job(steps=4, metrics={"accuracy": lambda model: next(values)})
    best: list[int] = []
    watch = EvaluationSchedule(
        every_steps=1,
        best_by="accuracy",
        lower_is_better=False,
        on_best=lambda e: best.append(e.step),
    )
    outcome = fit(session_of(job), watch)
    assert best == [1, 2]
    assert outcome.best is not None
    assert outcome.best.step == 2
