"""BalancedRouting in a run: the global batch, the files it leaves, and loads that even out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV2Config, DeepseekV3Config

from hasten.core.loop import evaluate
from hasten.core.session import Session
from hasten.core.state import restore, state_of
from hasten.core.step import StepNumbers
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.machine.environment import World
from hasten.parts.nn.router_balance import routers
from hasten.techniques.activation_checkpointing import ActivationCheckpointing
from hasten.techniques.adapter import LoRA
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.collate import Packed
from hasten.techniques.compile import Compiled
from hasten.techniques.experts import ExpertsImplementation
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.routing import BalancedRouting
from ranks import on_ranks
from techniques.routing_rank_jobs import CASES, train_all
from tiny import COMMON, MLA, job_context, language_job, run, session_of, tiny_model

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
        router.e_score_correction_bias[:2] = 0.5
    built: nn.Module = model
    return built


def biases(session: Session) -> torch.Tensor:
    return torch.stack([r.e_score_correction_bias for r in routers(session.model)])


def v3(*techniques: Technique, **changes: Any) -> Session:
    job = language_job(lambda: tiny_model(V3), **{"lr": 1e-3, "steps": 3, **changes})
    return session_of(job, *techniques, architecture=V3)


def test_a_crowded_model_becomes_balanced_and_without_it_stays_crowded() -> None:
    def ratios(technique: BalancedRouting) -> list[float]:
        job = language_job(crowded, steps=40, lr=1e-3)
        return [m.expert_load_ratio or 0.0 for m in run(session_of(job, technique))]

    with_it, without = ratios(FAST), ratios(BalancedRouting(speed=0.0, sequence_loss=0.0))
    assert with_it[0] == without[0] == pytest.approx(4.0)
    assert min(without) == pytest.approx(4.0, rel=0.05)
    assert max(with_it[-5:]) < 2.0


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


def test_two_ranks_move_the_biases_of_one_process(tmp_path: Path) -> None:
    found, alone = on_ranks("techniques.routing_rank_jobs:train_all", tmp_path), train_all(World())
    assert found[0] == found[1]
    for case in CASES:
        one, two = alone[case], found[0][case]
        assert two["losses"] == pytest.approx(one["losses"], rel=1e-4)
        assert two["ratios"] == pytest.approx(one["ratios"])
        assert len(one["biases"]) == (1 if V3 in case else 0)
        for mine, theirs in zip(one["biases"], two["biases"], strict=True):
            assert theirs == pytest.approx(mine, abs=1e-6)
            assert any(mine)


@pytest.mark.slow
@pytest.mark.parametrize(
    "others",
    [
        (GradientAccumulation(micro_batch_size=2),),
        (LabelledTokenLoss(),),
        (Packed(),),
        (ActivationCheckpointing(),),
        (Compiled(bucket=64, share=1.0, backend="aot_eager"), Packed()),
    ],
    ids=str,
)
def test_other_techniques_leave_loads_and_biases_as_they_are(others: Any) -> None:
    technique = BalancedRouting(speed=0.01, sequence_loss=0.1)
    alone, together = v3(technique), v3(technique, *others)
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
    given_up = StepNumbers(float("nan"), 1.0, False)
    session.engine.norm = lambda loss_sum: given_up  # type: ignore[method-assign]
    (metrics,) = run(session)
    assert metrics.skipped
    assert not biases(session).any()


def test_metrics_name_the_load_only_where_it_is_counted() -> None:
    assert run(v3(steps=1))[0].expert_load_ratio is None
    assert run(v3(FAST, steps=1))[0].to_dict()["expert_load_ratio"] >= 1.0


def test_what_stands_in_the_way_is_said() -> None:
    job = language_job()
    assert "no routers" in BalancedRouting().unsupported_reasons(job_context(job))[0]
    v2 = job_context(job, "deepseek_v2")
    assert "give speed: 0" in BalancedRouting().unsupported_reasons(v2)[0]
    assert BalancedRouting(speed=0.0).unsupported_reasons(v2) == ()
    assert "no experts in llama" in ExpertsImplementation().unsupported_reasons(job_context(job))[0]
    with pytest.raises(InputError, match="an adapter's files have no place"):
        v3(FAST, LoRA())


@pytest.mark.parametrize("bad", [{"speed": -0.1}, {"sequence_loss": float("nan")}])
def test_settings_outside_their_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(bad))} is"):
        BalancedRouting(**bad)


def test_an_unknown_kind_of_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="choose from fused"):
        ExpertsImplementation(kind="fast")


@pytest.mark.parametrize("kind", ["eager", "batched_mm"])
def test_only_the_instance_that_was_asked_changes_its_experts(kind: str) -> None:
    session = v3(ExpertsImplementation(kind=kind), steps=1)
    assert session.model.config._experts_implementation == kind
    other: Any = tiny_model(V3)
    assert other.config._experts_implementation == "grouped_mm"
