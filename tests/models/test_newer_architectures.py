"""DeepSeek-V3.2 and V4 as Transformers has them: they train, are saved and come back the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV4Config, DeepseekV32Config

from hasten.core.step import training
from hasten.core.technique import Technique
from hasten.parts.data.collate import packed
from hasten.parts.nn.router_balance import routers
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.collate import Packed
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.routing import BalancedRouting
from tiny import COMMON, MLA, VOCABULARY, job_facts, language_job, records, session_of

TOKENS = torch.arange(3, 43).view(2, 20)
INDEXER = {"index_n_heads": 2, "index_head_dim": 16}


def v32(index_topk: int = 4) -> Any:
    torch.manual_seed(0)
    fields = {**COMMON, **MLA, **INDEXER, "q_lora_rank": 16, "index_topk": index_topk}
    model: Any = AutoModelForCausalLM.from_config(
        DeepseekV32Config(**fields, n_group=2, topk_group=1)
    )
    model.set_attn_implementation("sdpa")
    return model


def v4() -> Any:
    torch.manual_seed(0)
    shape = {"vocab_size": VOCABULARY, "hidden_size": 32, "moe_intermediate_size": 16}
    heads = {"num_attention_heads": 4, "head_dim": 16, "o_groups": 2, "o_lora_rank": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2}
    fields = {**shape, **heads, **experts, **INDEXER, "index_head_dim": 8, "index_topk": 4}
    config = DeepseekV4Config(
        **fields,
        num_hidden_layers=4,
        q_lora_rank=16,
        sliding_window=16,
        max_position_embeddings=128,
        partial_rotary_factor=0.5,
    )
    return AutoModelForCausalLM.from_config(config)


MODELS = {"deepseek_v32": v32, "deepseek_v4": v4}
V32: list[tuple[Technique, ...]] = [(), (LabelledTokenLoss(),), (BalancedRouting(speed=0.01),)]
PLANS = [*(("deepseek_v32", plan) for plan in V32), ("deepseek_v4", ())]


@pytest.mark.parametrize(("architecture", "plan"), PLANS, ids=str)
def test_it_learns_is_saved_and_comes_back_the_same(
    architecture: str, plan: Any, tmp_path: Path
) -> None:
    job = language_job(MODELS[architecture], steps=11)
    session = session_of(job, *plan, architecture=architecture)
    losses, moved = [], False
    for step in training(session):
        losses.append(step.loss)
        # A bias may be back at zero later, and stays where its expert has the mean load.
        moved |= any(bool(r.e_score_correction_bias.any()) for r in routers(session.model))
    assert losses[-1] < losses[0]
    assert moved is any(isinstance(t, BalancedRouting) for t in plan)
    model: Any = session.finish().eval()
    model.save_pretrained(tmp_path)
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(input_ids=TOKENS).logits, model(input_ids=TOKENS).logits)
    for ours, theirs in zip(routers(model), routers(again), strict=True):
        assert torch.equal(ours.e_score_correction_bias, theirs.e_score_correction_bias)


@pytest.mark.parametrize("index_topk", [2, 4, 8, 64])
def test_no_token_of_v32_sees_another_document_of_its_row(index_topk: int) -> None:
    """Through the indexer neither: another document's tokens change nothing, not even a bit."""
    model, found = v32(index_topk).eval(), packed(records(4, seed=1))
    ids, positions = found["input_ids"], found["position_ids"]
    before = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    start = 0
    for length in found["document_lengths"]:
        other = ids.clone()
        other[0, start : start + length] = other[0, start : start + length].flip(0)
        after = model(input_ids=other, position_ids=positions, use_cache=False).logits
        same = (before == after).all(dim=-1)[0]
        assert same[:start].all()
        assert same[start + length :].all()
        assert not same[start : start + length].all()
        start += length


@pytest.mark.parametrize("architecture", MODELS)
def test_what_is_not_proven_for_it_says_so(architecture: str) -> None:
    known = job_facts(language_job(), architecture)
    assert "not proven" in DocumentAttention().obstacles(known)[0]
    if architecture == "deepseek_v4":
        for technique in (Packed(), LabelledTokenLoss(), BalancedRouting()):
            assert architecture in technique.obstacles(known)[0]
