"""A step with the routers' loss: what its mean is over, and that techniques leave it as it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from hasten.core.context import JobContext
from hasten.core.plan import Plan
from hasten.core.session import assemble
from hasten.core.setup import prepare, unsupported_reasons
from hasten.core.step import StepMetrics
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.parts.data.collate import IGNORED, TokenizedExample
from hasten.recipe.build import model_facts
from hasten.recipe.schema import Recipe
from hasten.techniques.activation_checkpointing import ActivationCheckpointing
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.compile import Compiled
from hasten.techniques.experts import ExpertsImplementation
from hasten.techniques.layout.pipeline import Pipeline
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.routing import RealTokens
from tiny import COMMON, examples, job_context, language_job, run

DATA = examples(8, seed=5)
ASKED: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


def model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = hf.Qwen3MoeConfig(**COMMON, **sizes, **ASKED, num_key_value_heads=2, head_dim=8)
    built = hf.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    return built


def facts(job: Any) -> JobContext:
    context = job_context(job, "qwen3_moe")
    return replace(context, model=replace(context.model, experts=4, router_loss=True))


def one_step(*techniques: Technique) -> tuple[StepMetrics, dict[str, Tensor]]:
    """The first step's metrics and gradients; no weight moves."""
    built = model()
    job = language_job(
        lambda: built,
        data=DATA,
        steps=1,
        lr=0.0,
        optimizer=torch.optim.SGD,
        max_grad_norm=None,
        routing=RealTokens,
    )
    grads: dict[str, Tensor] = {}
    for name, parameter in built.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: grads.update({name: p.grad.clone()})
        )
    known = facts(job)
    assert not unsupported_reasons(Plan(techniques), known)
    (metrics,) = run(assemble(prepare(job, Plan(techniques), known)))
    return metrics, grads


def transformers_loss(reference: Any, rows: list[TokenizedExample]) -> tuple[Tensor, int]:
    """The loss that the model returns for padded rows with their mask, and their labels."""
    width = max(r.length for r in rows)
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width)
    labels = torch.full((len(rows), width), IGNORED)
    for i, row in enumerate(rows):
        ids[i, : row.length] = torch.from_numpy(row.input_ids).long()
        mask[i, : row.length] = 1
        chosen = torch.where(torch.from_numpy(row.trained), ids[i, : row.length], IGNORED)
        labels[i, : row.length] = chosen
    loss = reference(input_ids=ids, attention_mask=mask.long(), labels=labels).loss
    return loss, int((labels[:, 1:] != IGNORED).sum())


@pytest.mark.parametrize("micro_batch", [8, 3])
def test_the_balances_of_micro_batches_are_weighed_by_their_labels(micro_batch: int) -> None:
    """One micro-batch: what transformers returns. Several: the mean of theirs over labels."""
    order = language_job(data=DATA)
    index = next(iter(prepare(order, Plan(), facts(order)).sampler.steps(0)))  # type: ignore[union-attr]
    rows = [DATA[i] for i in index]
    reference = model().train()
    pieces = [rows[i : i + micro_batch] for i in range(0, len(rows), micro_batch)]
    found = [transformers_loss(reference, piece) for piece in pieces]
    expected = sum(loss * count for loss, count in found) / sum(count for _, count in found)
    expected.backward()
    expected = expected.detach()
    metrics, grads = one_step(GradientAccumulation(micro_batch_size=micro_batch))
    assert metrics.loss == pytest.approx(float(expected), rel=1e-5)
    for name, parameter in reference.named_parameters():
        assert (grads[name] - parameter.grad).norm() <= 2e-4 * parameter.grad.norm() + 1e-7, name


@pytest.mark.parametrize(
    "technique",
    [
        LabelledTokenLoss(chunk=16),
        ActivationCheckpointing(),
        Compiled(backend="aot_eager"),
        ExpertsImplementation(kind="batched_mm"),
    ],
    ids=lambda t: t.name(),
)
def test_techniques_leave_the_routers_loss_as_it_is(technique: Technique) -> None:
    plain, expected = one_step()
    metrics, grads = one_step(technique)
    assert metrics.loss == pytest.approx(plain.loss, rel=1e-5)
    for name, gradient in expected.items():
        assert (grads[name] - gradient).norm() <= 2e-4 * gradient.norm() + 1e-7, name


def test_stages_that_see_some_routers_alone_are_refused() -> None:
    known = facts(language_job(data=DATA))
    assert any("output_router_logits" in r for r in Pipeline().unsupported_reasons(known))


def test_a_routers_loss_that_cannot_be_added_is_refused_before_anything_is_read(
    tmp_path: Path,
) -> None:
    """Llama 4 doesn't name its decoder, and its config has the key."""
    hf.Llama4TextConfig(
        **COMMON, num_key_value_heads=2, head_dim=8, num_local_experts=2, output_router_logits=True
    ).save_pretrained(tmp_path)
    recipe = Recipe(model=str(tmp_path), dataset="unread.jsonl", max_steps=1, from_scratch=True)
    with pytest.raises(InputError, match=r"output_router_logits.*set it to false"):
        model_facts(recipe, None)
