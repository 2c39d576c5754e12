"""The step against one whole batch in float64, and how much of hasten it runs through."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hasten
from hasten.core.job import GlobalBatch, ShuffledOrder, Stop
from hasten.core.plan import Plan
from hasten.core.setup import prepare
from hasten.core.step import training
from hasten.errors import InputError
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.collate import Packed
from tiny import examples, job_context, language_job, run, session_of, tiny_model


def reference(data: Any, step: list[int]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a step, example by example, without batches, padding or
    micro-batches.
    """
    model = tiny_model(dtype=torch.float64)
    trained = sum(data[i].trained_tokens for i in step)
    total = torch.zeros((), dtype=torch.float64)
    for index in step:
        ids = torch.tensor(data[index].input_ids.astype("int64"))[None]
        logits = model(input_ids=ids).logits[0, :-1]
        kept = torch.tensor(data[index].trained[1:])
        total = total + F.cross_entropy(logits[kept], ids[0, 1:][kept], reduction="sum")
    (total / trained).backward()
    return float(total.detach() / trained), {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


class KeepGradients(torch.optim.SGD):
    """Remembers the gradients it was given."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen = [p.grad.clone() for g in self.param_groups for p in g["params"]]


@pytest.mark.parametrize(
    "techniques",
    [
        (),
        (GradientAccumulation(micro_batch_size=3),),
        (GradientAccumulation(micro_batch_tokens=45),),
        (GradientAccumulation(micro_batch_size=1), Packed()),
    ],
    ids=["one batch", "by examples", "by tokens", "packed, one by one"],
)
def test_loss_and_gradients_equal_a_float64_loop_over_records(techniques: Any) -> None:
    data = examples(11)  # eleven examples in threes: the last micro-batch has two
    step = next(ShuffledOrder([r.length for r in data], GlobalBatch(11), 3).steps(0))
    loss, gradients = reference(data, step)
    job = language_job(
        lambda: tiny_model(dtype=torch.float64),
        data=data,
        steps=1,
        batch=11,
        optimizer=KeepGradients,
        max_grad_norm=None,
    )
    session = session_of(job, *techniques)
    names = {id(p): n for n, p in session.model.named_parameters()}
    metrics = run(session)[0]
    assert metrics.loss == pytest.approx(loss, rel=1e-12)
    optimizer: Any = session.optimizer
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    for parameter, gradient in zip(parameters, optimizer.seen, strict=True):
        expected = gradients[names[id(parameter)]]
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-13)
    expected_norm = torch.sqrt(sum((g**2).sum() for g in gradients.values()))  # type: ignore[arg-type]
    assert metrics.grad_norm == pytest.approx(float(expected_norm), rel=1e-10)


def test_counts_are_those_of_the_records() -> None:
    data = examples(8)
    session = session_of(language_job(data=data, steps=1))
    (metrics,) = run(session)
    assert metrics.tokens == sum(r.length for r in data)
    assert metrics.trained_tokens == sum(r.trained_tokens for r in data)
    assert metrics.positions == 8 * max(r.length for r in data)
    assert metrics.padding_share == pytest.approx(1 - metrics.tokens / metrics.positions)


def test_the_learning_rate_follows_the_schedule() -> None:
    from hasten.core.job import Schedule

    job = language_job(steps=4, lr=0.5, schedule=Schedule("linear", 0, total_steps=4))
    rates = [m.learning_rate for m in run(session_of(job))]
    assert rates == pytest.approx([0.5, 0.375, 0.25, 0.125])


def test_the_same_seed_gives_the_same_bits() -> None:
    one, two = (run(session_of(language_job(steps=4))) for _ in range(2))
    assert [m.loss for m in one] == [m.loss for m in two]
    other = run(session_of(language_job(steps=4, seed=4)))
    assert [m.loss for m in one] != [m.loss for m in other]


def test_a_run_ends_by_steps_by_epochs_or_by_tokens() -> None:
    data = examples(10)
    per_epoch = sum(r.length for r in data)
    assert len(run(session_of(language_job(data=data, batch=4, steps=5)))) == 5
    by_epochs = language_job(data=data, batch=4, stop=Stop(epochs=2))
    metrics = run(session_of(by_epochs))
    assert [m.epoch for m in metrics] == [0, 0, 0, 1, 1, 1]
    assert sum(m.tokens for m in metrics) == 2 * per_epoch
    by_tokens = language_job(data=data, batch=4, stop=Stop(tokens=per_epoch + 1))
    total = sum(m.tokens for m in run(session_of(by_tokens)))
    assert per_epoch < total


def test_a_stop_must_say_when() -> None:
    with pytest.raises(InputError):
        Stop()
    with pytest.raises(InputError):
        Stop(steps=0)


def test_records_without_a_trained_token_are_refused_in_the_step() -> None:
    from hasten.parts.data.collate import tokenized_example

    mute = [tokenized_example([5, 6, 7], [False] * 3)] * 4
    with pytest.raises(InputError, match="no trained token"):
        run(session_of(language_job(data=mute, batch=4)))


def test_several_ranks_without_a_layout_are_refused() -> None:
    from hasten.machine.environment import World

    job = language_job()
    context = job_context(job, world=World(0, 0, 2))
    with pytest.raises(InputError, match="add a layout technique"):
        prepare(job, Plan(), context)


@pytest.mark.parametrize("limit", [1e6, 1e-3])
def test_clipping_shortens_a_long_gradient_and_leaves_a_short_one(limit: float) -> None:
    found = {}
    for most in (None, limit):
        job = language_job(steps=1, optimizer=KeepGradients, max_grad_norm=most)
        session = session_of(job)
        run(session)
        optimizer: Any = session.optimizer
        found[most] = torch.cat([g.flatten() for g in optimizer.seen])
    norm = float(found[None].norm())
    assert float(found[limit].norm()) == pytest.approx(min(norm, limit), rel=1e-4)
    if limit > norm:
        assert torch.equal(found[limit], found[None])


@pytest.mark.parametrize("limit", [1e6, 1e-3])
def test_clipping_in_a_fused_optimizers_own_pass_is_the_same(limit: float) -> None:
    """There the gradients stay as they are, and the optimizer divides them."""
    found = {}
    for fused in (True, False):
        kind = partial(torch.optim.SGD, fused=fused)
        session = session_of(language_job(steps=1, optimizer=kind, max_grad_norm=limit))
        run(session)
        found[fused] = torch.cat([p.detach().flatten() for p in session.module.parameters()])
    torch.testing.assert_close(found[True], found[False], rtol=1e-6, atol=1e-8)


SOURCE = str(Path(hasten.__file__).parent)


def test_a_plain_step_enters_few_files_and_functions() -> None:
    """The second step of one rank with one micro-batch; the first one sets things up."""
    steps = training(session_of(language_job()))
    entered: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SOURCE):
            entered.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    next(steps)
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        next(steps)
    finally:
        sys.setprofile(before)
    assert len({file for file, _ in entered}) <= 10, sorted(entered)
    assert len(entered) <= 65, sorted(entered)
