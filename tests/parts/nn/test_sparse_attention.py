"""DeepSeek's sparse attention and its indexer's loss: equal to the plain formulas, in float64.

The reference is written here with dense masks and autograd, for one layer of Transformers, and
Transformers' own model. It has 16 index heads or more: with few, scores of exactly zero are equal.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as v32

from hasten.parts.nn import sparse_attention
from hasten.parts.nn.attention import use_document_attention
from hasten.parts.nn.sparse_attention import (
    IndexerLearning,
    documents_of,
    learn,
    measured_queries,
    take_sums,
)

TOPK = 6
CONFIG = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "index_topk": TOPK,
    "index_head_dim": 12,
    "index_n_heads": 24,
    "first_k_dense_replace": 1,
    "initializer_range": 0.2,
    "attn_implementation": "sdpa",
}
LENGTHS = {"one": (45,), "three": (3, 40, 21), "five": (30, 1, 17, 6, 8)}
STAGES = ("", "warmup", "sparse")


def model_of(dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = hf.DeepseekV32ForCausalLM(hf.DeepseekV32Config(**{**CONFIG, **changes})).train()
    for weight in model.parameters():
        weight.data.add_(torch.randn_like(weight), alpha=0.05)
    model.set_experts_implementation("eager")
    return model.to(dtype)


def plain(module: Any, x: Tensor, tables: Any, lengths: Any, stage: str) -> Any:
    """Attention, loss, queries and the attention in the chosen and in the best keys of each."""
    tokens, latent = x.shape[1], module.q_a_layernorm(module.q_a_proj(x))
    query = module.q_b_proj(latent).view(1, tokens, -1, module.qk_head_dim).transpose(1, 2)
    q_pass, q_rot = query.split([module.qk_nope_head_dim, module.qk_rope_head_dim], -1)
    c, k_rot = module.kv_a_proj_with_mqa(x).split(
        [module.kv_lora_rank, module.qk_rope_head_dim], -1
    )
    q_rot, k_rot = v32.apply_rotary_pos_emb_interleave(q_rot, k_rot[:, None], *tables)
    key, value = module.expand_kv(module.kv_a_layernorm(c)[:, None], k_rot)
    score = (torch.cat([q_pass, q_rot], -1) @ key.mT * module.scaling)[0]  # (heads, T, T)
    indexer, width = module.indexer, module.qk_rope_head_dim
    x, latent = x.detach(), latent.detach()
    iq = indexer.wq_b(latent).view(1, tokens, indexer.n_heads, -1)
    ik = indexer.k_norm(indexer.wk(x))[:, :, None]
    rotated = v32.apply_rotary_pos_emb(iq[..., :width], ik[..., :width], *tables, unsqueeze_dim=2)
    iq, ik = (torch.cat([a, b[..., width:]], -1) for a, b in zip(rotated, (iq, ik), strict=True))
    iw = indexer.weights_proj(x) * indexer.n_heads**-0.5 * indexer.softmax_scale
    index = torch.einsum(
        "th,ths->ts", iw[0], torch.einsum("thd,sd->ths", iq[0], ik[0, :, 0]).relu()
    )
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seen = (document[:, None] == document[None]) & torch.ones(tokens, tokens).tril().bool()
    index = index.masked_fill(~seen, -torch.inf)
    best = index.detach().topk(min(TOPK, tokens)).indices
    chosen = torch.zeros_like(seen).scatter(1, best, True) & seen
    use = seen if stage == "warmup" else chosen
    weights = score.masked_fill(~use, -torch.inf).softmax(-1)
    out = module.o_proj((weights @ value[0]).transpose(0, 1).reshape(1, tokens, -1))
    target = weights.sum(0).detach()
    target = target / target.sum(-1, keepdim=True)
    log = index.masked_fill(~use, -torch.inf).log_softmax(-1).masked_fill(~use, 0)
    dense = score.detach().masked_fill(~seen, -torch.inf).softmax(-1).mean(0)
    mass = (dense * chosen).sum(-1), dense.topk(min(TOPK, tokens)).values.sum(-1)
    return out, F.kl_div(log, target, reduction="sum"), mass


def worst(ours: Any, expected: Any) -> float:
    pairs = zip(ours, expected, strict=True)
    return max(
        float((a - b).detach().abs().max() / b.detach().abs().max().clamp(min=1e-30))
        for a, b in pairs
    )


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("way", ["masked", "gathered"])
def test_a_layer_is_the_plain_formulas(
    way: str, stage: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse_attention, "gathers", lambda *_: way == "gathered")
    monkeypatch.setitem(sparse_attention.ROWS, "cpu", 16)
    monkeypatch.setitem(sparse_attention.ROOM, "cpu", 1 << 13)
    model, tokens = model_of(), sum(lengths)
    module = model.model.layers[0].self_attn
    x = torch.randn(1, tokens, 32, dtype=torch.float64, requires_grad=True)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    tables = tuple(t.double() for t in model.model.rotary_emb(x, positions))
    expected, kl, mass = plain(module, x, tables, lengths, stage)
    gradient = torch.randn_like(expected)
    weights = [x, *module.parameters()]
    loss = (expected * gradient).sum() + (3.0 * kl if stage else 0)
    theirs = torch.autograd.grad(loss, weights, allow_unused=True)

    use_document_attention(model)
    if stage:
        learn(module, IndexerLearning(stage, factor=3.0))
    empty = torch.empty(1, 1, 0, 0, dtype=torch.bool)
    out, _ = module(
        hidden_states=x, position_embeddings=tables, attention_mask=empty, document_lengths=lengths
    )
    ours = torch.autograd.grad((out * gradient).sum(), weights, allow_unused=True)
    assert worst([out], [expected]) < 1e-12
    assert [g is None for g in ours] == [g is None for g in theirs]
    found = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None]
    assert len(found) == (13 if stage else 8)
    assert worst(*zip(*found, strict=True)) < 1e-12
    if stage:
        sums = take_sums(model)[0]
        assert sums[:2].tolist() == pytest.approx([kl.item(), tokens], rel=1e-12)
        rows = [t for _, r in measured_queries(documents_of(lengths), TOPK) for t in r]
        shares = [float(m[rows].sum()) for m in mass]
        assert sums[2:].tolist() == pytest.approx([*shares, len(rows)], rel=1e-10)
        assert not take_sums(model)[0].any()
