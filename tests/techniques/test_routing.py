"""BalancedRouting and the routers' loss in a run: the global batch, files, loads that even out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
import transformers as hf
import yaml
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DeepseekV2Config, DeepseekV3Config

from hasten.core.context import JobContext
from hasten.core.job import Stop
from hasten.core.loop import evaluate
from hasten.core.plan import Plan
from hasten.core.setup import Session, StepNumbers, prepare, unsupported_reasons
from hasten.core.state import state_of
from hasten.core.step import StepMetrics, assemble, training
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.machine.environment import World
from hasten.parts.data.collate import IGNORED, TokenizedExample
from hasten.parts.nn.router_balance import routers
from hasten.recipe.build import model_facts
from hasten.recipe.prepare import weight_notes
from hasten.recipe.schema import Recipe
from hasten.techniques.activation_checkpointing import ActivationCheckpointing
from hasten.techniques.adapter import LoRA
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.collate import Packed
from hasten.techniques.compile import Compiled
from hasten.techniques.experts import ExpertsImplementation
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.layout.pipeline import Pipeline
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.routing import BalancedRouting, RealTokens
from ranks import on_ranks
from tiny import (
    COMMON,
    MLA,
    examples,
    job_context,
    language_job,
    restore,
    run,
    session_of,
    tiny_config,
    tiny_model,
)

CASES: dict[str, tuple[Technique, ...]] = {
    "deepseek_v3": (BalancedRouting(speed=0.01, sequence_loss=0.05),),
    "deepseek_v3, accumulated": (
        BalancedRouting(speed=0.01, sequence_loss=0.05),
        GradientAccumulation(micro_batch_size=1),
        LabelledTokenLoss(),
    ),
    "deepseek_v2": (BalancedRouting(speed=0.0, sequence_loss=0.05),),
}


def session_on(world: World, case: str) -> Session:
    """Nine examples in fours: the last step has one, and a rank without any."""
    architecture = case.split(",")[0]
    job = language_job(
        lambda: tiny_model(architecture), data=examples(9), batch=4, stop=Stop(epochs=1), lr=1e-3
    )
    techniques = CASES[case] + ((DDP(),) if world.size > 1 else ())
    return session_of(job, *techniques, architecture=architecture, world=world)


def train_all(world: World) -> dict[str, Any]:
    found = {}
    for case in CASES:
        session = session_on(world, case)
        steps = list(training(session))
        found[case] = {
            "losses": [m.loss for m in steps],
            "ratios": [m.expert_load_ratio for m in steps],
            "biases": [
                b.tolist()
                for r in routers(session.model)
                if (b := getattr(r, "e_score_correction_bias", None)) is not None
            ],
        }
    return found


V3 = "deepseek_v3"
FAST = BalancedRouting(speed=0.02, sequence_loss=0.0)


def crowded() -> nn.Module:
    """Eight experts of which two get every token at first."""
    torch.manual_seed(0)
    fields = {**MLA, "q_lora_rank": 16, "n_routed_experts": 8, "norm_topk_prob": True}
    config = DeepseekV3Config(**COMMON, **fields, n_group=1, topk_group=1)
    model: Any = AutoModelForCausalLM.from_config(config)
    model.set_attn_implementation("sdpa")
    for router in routers(model):
        router.e_score_correction_bias[:2] = 0.25
    built: nn.Module = model
    return built


def biases(session: Session) -> torch.Tensor:
    return torch.stack([r.e_score_correction_bias for r in routers(session.model)])


def v3(*techniques: Technique, **changes: Any) -> Session:
    job = language_job(lambda: tiny_model(V3), **{"lr": 1e-3, "steps": 3, **changes})
    return session_of(job, *techniques, architecture=V3)


def test_a_crowded_model_becomes_balanced_and_without_it_stays_crowded() -> None:
    def ratios(technique: BalancedRouting) -> list[float]:
        job = language_job(crowded, steps=20, lr=1e-3)
        return [m.expert_load_ratio or 0.0 for m in run(session_of(job, technique))]

    with_it, without = (
        ratios(BalancedRouting(speed=speed, sequence_loss=0.0)) for speed in (0.01, 0.0)
    )
    assert with_it[0] == without[0] == pytest.approx(4.0)
    assert min(without) == pytest.approx(4.0, rel=0.05)
    assert mean(with_it[-5:]) < 2.0


def leaning() -> nn.Module:
    """A V2 model whose hidden states all lean towards two of eight experts."""
    torch.manual_seed(0)
    config = DeepseekV2Config(
        **COMMON, **{**MLA, "n_routed_experts": 8}, topk_method="greedy", n_group=1
    )
    model: Any = AutoModelForCausalLM.from_config(config)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        model.model.embed_tokens.weight += 0.05
        for router in routers(model):
            router.weight[:2] += 0.1
    built: nn.Module = model
    return built


def test_a_sequence_loss_alone_evens_the_load_of_v2() -> None:
    def ratios(weight: float) -> list[float]:
        job = language_job(leaning, steps=30, lr=3e-3)
        technique = BalancedRouting(speed=0.0, sequence_loss=weight)
        return [m.expert_load_ratio or 0.0 for m in run(session_of(job, technique))]

    with_it, without = ratios(0.3), ratios(0.0)
    assert with_it[0] == without[0] > 3.0
    assert with_it[-1] < 0.6 * without[-1]


def test_a_balance_loss_that_only_deepseek_s_own_code_adds_is_named(tmp_path: Path) -> None:
    def notes(plan: Any = (), **keys: Any) -> list[str]:
        tiny_config(keys.pop("architecture", "deepseek_v2")).save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | keys))
        recipe = Recipe(
            model=str(tmp_path), dataset="d.jsonl", from_scratch=True, max_steps=1, plan=list(plan)
        )
        return weight_notes(recipe, fetch=False)

    (note,) = notes(aux_loss_alpha=0.003, seq_aux=True)
    assert "aux_loss_alpha 0.003: DeepSeek's own code adds a loss" in note
    assert "over each sequence, and this training doesn't" in note
    advice = note[note.index("{") : note.rindex("}") + 1]
    plan = yaml.safe_load(advice)
    assert plan == {"balanced_routing": {"speed": 0, "sequence_loss": 0.003}}
    assert notes([plan], aux_loss_alpha=0.003) == []
    assert "over each batch" in notes(aux_loss_alpha=0.003, seq_aux=False)[0]
    assert notes(aux_loss_alpha=0.0) == notes() == []
    assert notes(architecture="deepseek_v3", aux_loss_alpha=0.001) == []  # its code adds none


def test_two_ranks_move_the_biases_of_one_process(tmp_path: Path) -> None:
    found, alone = on_ranks(train_all, tmp_path), train_all(World())
    assert found[0] == found[1]
    for case in CASES:
        one, two = alone[case], found[0][case]
        assert two["losses"] == pytest.approx(one["losses"], rel=1e-4)
        assert two["ratios"] == pytest.approx(one["ratios"])
        assert len(one["biases"]) == (1 if V3 in case else 0)
        for mine, theirs in zip(one["biases"], two["biases"], strict=True):
            assert theirs == pytest.approx(mine, abs=1e-6)
            assert any(mine)


@pytest.mark.parametrize(
    "others",
    [
        (GradientAccumulation(micro_batch_size=2),),
        (LabelledTokenLoss(),),
        (Packed(),),
        (ActivationCheckpointing(),),
    ],
    ids=str,
)
def test_other_techniques_leave_loads_and_biases_as_they_are(others: Any) -> None:
    technique = BalancedRouting(speed=0.01, sequence_loss=0.1)
    data = examples(8, longest=8)  # a packed row of 64 in each step: a graph is traced once
    alone, together = v3(technique, data=data), v3(technique, *others, data=data)
    plain, found = run(alone), run(together)
    assert [m.loss for m in found] == pytest.approx([m.loss for m in plain], rel=1e-3)
    assert torch.equal(biases(alone), biases(together))
    assert biases(alone).any()


def test_a_bias_survives_saving_and_resuming(tmp_path: Path) -> None:
    whole = v3(FAST, steps=6)
    expected = [m.loss for m in run(whole)]
    half = v3(FAST, steps=3)
    run(half)
    tensors, meta = state_of(half)
    resumed = v3(FAST, steps=6)
    restore(resumed, {k: v.clone() for k, v in tensors.items()}, meta)
    assert biases(resumed).any()
    assert [m.loss for m in run(resumed)] == expected[3:]
    assert torch.equal(biases(resumed), biases(whole))
    whole.finish().save_pretrained(tmp_path)  # type: ignore[operator]
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(routers(again)[0].e_score_correction_bias, biases(whole)[0])


def test_eval_data_records_are_not_counted_and_their_loss_is_plain() -> None:
    with_it = v3(BalancedRouting(speed=0.01, sequence_loss=10.0))
    assert evaluate(with_it).eval_loss == evaluate(v3()).eval_loss
    assert with_it.setup.routing.load_ratio() is None


def test_a_step_that_moved_nothing_moves_no_bias() -> None:
    session = v3(FAST, steps=1)
    given_up = StepNumbers(float("nan"), 1.0, False, 1.0, 1.0)
    session.engine.norm = lambda *numbers: given_up  # type: ignore[method-assign]
    (metrics,) = run(session)
    assert metrics.skipped
    assert not biases(session).any()


def test_tokens_of_a_step_that_moved_nothing_count_in_no_later_one() -> None:
    counted = BalancedRouting(speed=0.0, sequence_loss=0.0)
    whole, session = v3(counted, steps=2, lr=0.0), v3(counted, steps=2, lr=0.0)
    norm = session.engine.norm

    def norm_of_no_number(loss_sum: Tensor, positions: int) -> StepNumbers:
        session.engine.norm = norm  # type: ignore[method-assign]
        return StepNumbers(float("nan"), 1.0, False, 1.0, positions)

    session.engine.norm = norm_of_no_number  # type: ignore[method-assign]
    skipped, second = run(session)
    first, expected = run(whole)
    assert (skipped.skipped, second.skipped) == (True, False)
    assert second.expert_load_ratio == expected.expert_load_ratio != first.expert_load_ratio


def test_metrics_name_the_load_only_where_it_is_counted() -> None:
    assert run(v3(steps=1))[0].expert_load_ratio is None
    assert run(v3(FAST, steps=1))[0].to_dict()["expert_load_ratio"] >= 1.0


def test_what_stands_in_the_way_is_said() -> None:
    job = language_job()
    assert "not proven" in BalancedRouting().unsupported_reasons(job_context(job))[0]
    v2 = job_context(job, "deepseek_v2")
    assert "give speed: 0" in BalancedRouting().unsupported_reasons(v2)[0]
    assert BalancedRouting(speed=0.0).unsupported_reasons(v2) == ()
    assert "models with experts" in ExpertsImplementation().unsupported_reasons(job_context(job))[0]
    with pytest.raises(InputError, match="an adapter's files have no place"):
        v3(FAST, LoRA())


@pytest.mark.parametrize("kind", ["eager", "batched_mm"])
def test_only_the_instance_that_was_asked_changes_its_experts(kind: str) -> None:
    session = v3(ExpertsImplementation(kind=kind), steps=1)
    assert session.model.config._experts_implementation == kind
    other: Any = tiny_model(V3)
    assert other.config._experts_implementation == "grouped_mm"


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
