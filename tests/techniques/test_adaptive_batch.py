"""A step that runs out of memory is redone in smaller micro-batches, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from hasten import DynamicBatcher, OptimizedTrainer
from hasten.core.facts import World
from hasten.core.session import Session
from hasten.parts.losses import WholeLogitsLoss
from hasten.techniques.batch import AdaptiveBatch
from hasten.techniques.collate import Packed
from hasten.techniques.precision import BF16MasterWeights
from tiny import job_facts, language_job, records, run, session_of, tiny_model

LIMIT = 160  # slots that fit


class Fails(torch.autograd.Function):
    """Memory runs out in the middle of the backward pass, when later layers have gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("simulated")


class SmallMemory(nn.Module):
    """The plain loss on a device that holds ``LIMIT`` slots."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner, self.failures = WholeLogitsLoss(model), 0
        model.model.layers[1].register_forward_pre_hook(self._break)  # type: ignore[union-attr, index]
        self.model = model

    def _break(self, module: nn.Module, args: Any) -> Any:
        hidden = args[0]
        if torch.is_grad_enabled() and hidden.shape[0] * hidden.shape[1] > LIMIT:
            self.failures += 1
            return (Fails.apply(hidden), *args[1:])
        return args

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs)


def trained(small: bool, *techniques: Any, dtype: Any = torch.float64) -> tuple[Session, list[Any]]:
    job = language_job(lambda: tiny_model(dtype=dtype), data=records(24), steps=9, batch=12)
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
        assert (one.records, one.trained_tokens) == (two.records, two.trained_tokens)
    for a, b in zip(session.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)
    failures: Any = session.loss_module.failures
    assert 0 < failures <= 5
    proof = AdaptiveBatch().probe(session)
    assert proof.acted
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
    monkeypatch.setattr(f"{__name__}.LIMIT", 20)
    with pytest.raises(torch.OutOfMemoryError):
        trained(True, AdaptiveBatch())


def test_another_error_is_not_taken_for_memory() -> None:
    class Broken(WholeLogitsLoss):
        def forward(self, **inputs: Any) -> Any:
            raise RuntimeError("shapes")

    job = replace(language_job(), loss=Broken)
    with pytest.raises(RuntimeError, match="shapes"):
        run(session_of(job, AdaptiveBatch()))


def test_on_several_ranks_it_says_why_it_can_not() -> None:
    known = job_facts(language_job(), world=World(0, 0, 2))
    (reason,) = AdaptiveBatch().obstacles(known)
    assert "single process" in reason
    assert "2 ranks" in reason


@pytest.mark.parametrize("switch", [True, DynamicBatcher(4, 64), AdaptiveBatch(4, 64)])
def test_the_articles_switch_leaves_training_as_it_was(switch: Any) -> None:
    x, y = torch.randn(24, 5).double(), torch.randint(0, 3, (24,))
    weights = []
    for dynamic in (switch, False):
        torch.manual_seed(0)
        model = nn.Linear(5, 3).double()
        trainer = OptimizedTrainer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.3),
            nn.CrossEntropyLoss(),
            dynamic_batch=dynamic,
        )
        trainer.train([(x[:12], y[:12]), (x[12:], y[12:])], epochs=3)
        weights.append(model.weight.detach().clone())
        if dynamic and dynamic is not True:
            assert trainer.switches["dynamic_batch"] == (
                "adaptive_batch(initial_size=4, max_size=64)"
            )
    torch.testing.assert_close(*weights, rtol=1e-10, atol=1e-12)
