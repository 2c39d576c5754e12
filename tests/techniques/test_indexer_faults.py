"""Mistakes that trainers have made with an indexer's loss, each planted and seen in one step."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from hasten.parts.nn import sparse_attention as part
from hasten.techniques import indexer
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.collate import Packed
from hasten.techniques.compile import Bucketed
from hasten.techniques.indexer import IndexerLoss
from indexer_reference import plain_gradients, wide_model
from tiny import examples, language_job, run, session_of

ROUNDING, SEEN = 1e-6, 1e-3  # relative errors of a gradient; a router's scores are float32
DATA = examples(6, longest=20)
Patch = pytest.MonkeyPatch


class Gradients(torch.optim.SGD):
    """Keeps the gradients of a step and moves nothing."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen = [p.grad.clone() for g in self.param_groups for p in g["params"]]


@cache
def expected() -> dict[str, Tensor]:
    return plain_gradients(wide_model(), DATA)


def worst() -> float:
    """The largest relative error of a weight's gradient, of three micro-batches with filler."""
    job = language_job(
        wide_model, data=DATA, batch=6, steps=1, optimizer=Gradients, max_grad_norm=None
    )
    plan = (Packed(), DocumentAttention(), GradientAccumulation(micro_batch_size=2))
    session = session_of(job, *plan, IndexerLoss(clip=0), architecture="deepseek_v32")
    session.setup.collate = Bucketed(session.setup.collate, 64)  # type: ignore[arg-type]
    run(session)
    optimizer: Any = session.optimizer
    names = [name.removeprefix("model.") for name in session.weight_names]
    pairs = [(g, expected()[n]) for n, g in zip(names, optimizer.seen, strict=True)]
    return max(float((g - wanted).norm() / wanted.norm()) for g, wanted in pairs)


def test_a_step_without_a_fault_has_the_gradients_of_the_plain_formulas() -> None:
    assert worst() < ROUNDING


def pair_rotation(patch: Patch) -> None:
    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        width = cos.shape[-1]
        one, other = x[..., 0:width:2], x[..., 1:width:2]
        cos, sin = cos[..., : width // 2], sin[..., : width // 2]
        both = torch.stack([one * cos - other * sin, other * cos + one * sin], -1).flatten(-2)
        return torch.cat([both, x[..., width:]], -1)

    patch.setattr(part.RowIndexer, "_turned", staticmethod(turned))


def no_detach(patch: Patch) -> None:
    usual = part.RowIndexer.__init__

    def planted(self: Any, module: Any, row: Any, learns: bool) -> None:
        usual(self, module, row, learns)
        hidden, _, cos, sin = row.read
        self.graph = self._turned(module.k_norm(module.wk(hidden)), cos, sin)

    patch.setattr(part.RowIndexer, "__init__", planted)


def mean_over_padding(patch: Patch) -> None:
    usual = part.documents_of
    patch.setattr(part, "documents_of", lambda lengths, fillers=0, rows=1: usual(lengths))


def mass_over_all_keys(patch: Patch) -> None:
    usual = part._sparse

    def planted(module: Any, row: Any, way: str, loss: Any) -> Tensor:
        with torch.no_grad():
            part._warm_up(module, row, lambda query, key, value, documents: value, loss)
        return usual(module, row, way, None)

    patch.setattr(part, "_sparse", planted)


def future_keys(patch: Patch) -> None:
    usual = part.QuerySpan.later

    def later(self: part.QuerySpan, device: torch.device) -> Tensor:
        """The choice is of six keys: early queries get those of the first six that are later."""
        return usual(self, device) & (torch.arange(self.length) >= 6)

    patch.setattr(part.QuerySpan, "later", later)


def gradient_into_the_trunk(patch: Patch) -> None:
    usual = part.AttachLoss.backward

    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return usual(ctx, grads[0] + ctx.factor)

    patch.setattr(part.AttachLoss, "backward", staticmethod(backward))


def sum_over_micro_batches(patch: Patch) -> None:
    usual: Callable[..., None] = indexer._Learning.begin

    def each(self: Any, tokens: int) -> None:
        usual(self, tokens // 3)

    patch.setattr(indexer._Learning, "begin", each)


def documents_see_each_other(patch: Patch) -> None:
    usual = part.documents_of

    def one(lengths: tuple[int, ...], fillers: int = 0, rows: int = 1) -> list[part.QuerySpan]:
        split = len(lengths) - fillers
        return usual((sum(lengths[:split]), *lengths[split:]), fillers, rows)

    patch.setattr(part, "documents_of", one)


FAULTS = (
    *(pair_rotation, no_detach, mean_over_padding, mass_over_all_keys, future_keys),
    *(gradient_into_the_trunk, sum_over_micro_batches, documents_see_each_other),
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_planted_fault_is_seen(fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    fault(monkeypatch)
    assert worst() > SEEN
