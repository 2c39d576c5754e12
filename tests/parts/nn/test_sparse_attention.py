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
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as v32

from hasten.parts.nn import sparse_attention
from hasten.parts.nn.attention import use_document_attention
from hasten.parts.nn.fused_layers import fuse_layers
from hasten.parts.nn.sparse_attention import (
    IndexerLearning,
    QuerySpan,
    documents_of,
    gathers,
    indexed_attentions,
    learn,
    measured_queries,
    take_sums,
    taken,
)
from host_waits import HostWaits

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


IDS = torch.randint(3, 64, (1, 70), generator=torch.Generator().manual_seed(1))
PACKED = {
    "input_ids": IDS,
    "position_ids": torch.cat([torch.arange(n) for n in (41, 20, 9)])[None],
    "document_lengths": (41, 20, 9),
    "use_cache": False,
}


def step(model: Any, stage: str = "", **more: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits, and the gradients of a pass over packed documents by weight."""
    for _, module in indexed_attentions(model):
        learn(module, IndexerLearning(stage) if stage else None)
    model.zero_grad()
    logits = model(**PACKED, **more).logits
    logits.float().square().mean().backward()
    named = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), named


def test_a_model_is_transformers_model_one_document_at_a_time() -> None:
    """To 1e-6: routers and norms compute in float32 whatever the weights are."""
    model = model_of()
    logits = [
        model(input_ids=ids, use_cache=False).logits
        for ids in IDS.split(PACKED["document_lengths"], dim=1)
    ]
    expected = torch.cat(logits, dim=1)
    expected.float().square().mean().backward()
    theirs = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    use_document_attention(model)
    found, ours = step(model)
    assert worst([found], [expected]) < 1e-6
    assert ours.keys() == theirs.keys()
    assert len(ours) > 25
    assert worst(ours.values(), theirs.values()) < 1e-6


def test_the_loss_changes_no_bit_outside_of_the_indexers() -> None:
    model = model_of(torch.float32)
    use_document_attention(model)
    logits, without = step(model)
    found, ours = step(model, "sparse")
    assert torch.equal(found, logits)
    assert all(torch.equal(ours[name], without[name]) for name in without)
    learned = ours.keys() - without.keys()
    assert len(learned) == 2 * 5
    assert all(".indexer." in name and ours[name].any() for name in learned)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("stage", ["warmup", "sparse"])
def test_the_loss_survives_activation_checkpointing(stage: str, reentrant: bool) -> None:
    model = model_of(torch.float32)
    use_document_attention(model)
    _, expected = step(model, stage)
    shares = [s / s[1] for s in take_sums(model)]
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    _, found = step(model, stage)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    for ours, theirs in zip(take_sums(model), shares, strict=True):
        torch.testing.assert_close(ours / ours[1], theirs)


@pytest.mark.parametrize("form", ["fused", "bf16", "autocast", "fused autocast"])
@pytest.mark.parametrize("way", ["masked", "gathered"])
@pytest.mark.parametrize("stage", STAGES)
def test_other_formats_are_close_to_float64(
    stage: str, way: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Index scores are in float32, so few choices change; in bf16 weights are rounded, too."""
    monkeypatch.setattr(sparse_attention, "gathers", lambda *_: way == "gathered")
    formats: list[torch.dtype] = []
    usual = sparse_attention.scores
    monkeypatch.setattr(
        sparse_attention,
        "scores",
        lambda *tensors: formats.extend(t.dtype for t in tensors) or usual(*tensors),
    )
    half = form != "fused"
    dtype = torch.bfloat16 if form == "bf16" else torch.float32
    reference, model = (model_of(dtype, index_topk=30) for _ in "ab")
    reference.double()
    for one in (reference, model):
        use_document_attention(one)
    if "fused" in form:
        fuse_layers(model)
    _, theirs = step(reference, stage)
    formats.clear()
    with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in form):
        _, ours = step(model, stage)
    assert set(formats) == {torch.float32}
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        error = (ours[name].double() - expected).norm() / expected.norm()
        assert error < (0.35 if half else 2e-4), (name, float(error))


def test_of_equal_scores_the_earlier_keys_win() -> None:
    index = torch.tensor([[1.0, 0, 2, 0, 0, 3, 0], [0, 0, -torch.inf, 0, 0, 0, 0]])
    assert taken(index, 4).nonzero().tolist() == [
        *([0, column] for column in (0, 1, 2, 5)),
        *([1, column] for column in (0, 1, 3, 4)),
    ]
    assert taken(index, 7).sum(1).tolist() == [7, 6]


def test_filler_documents_teach_nothing() -> None:
    model = model_of()
    use_document_attention(model)
    for stage in ("warmup", "sparse"):
        step(model, stage, fillers=1)
        sums = take_sums(model)
        assert [int(s[1]) for s in sums] == [61, 61]
        other = IDS.clone()
        other[0, -9:] = 5
        model(**{**PACKED, "input_ids": other}, fillers=1)
        assert torch.equal(torch.stack(take_sums(model)), torch.stack(sums))


@pytest.mark.parametrize("stage", STAGES)
def test_for_given_lengths_the_host_does_not_wait(stage: str) -> None:
    model = model_of(torch.float32, first_k_dense_replace=2)  # experts wait
    use_document_attention(model)
    for _, module in indexed_attentions(model):
        learn(module, IndexerLearning(stage) if stage else None)
    with HostWaits([t for t in PACKED.values() if isinstance(t, Tensor)]) as waits:
        model(**PACKED).logits.sum().backward()
    assert not waits.places


class Largest(TorchDispatchMode):
    """Remembers the most bytes of a tensor that an operator returns."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [t.untyped_storage().nbytes() for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.bytes = max(self.bytes, *sizes, 0)
        return out


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("way", ["masked", "gathered"])
def test_nothing_is_as_large_as_all_pairs_of_tokens(
    way: str, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse_attention, "gathers", lambda *_: way == "gathered")
    monkeypatch.setitem(sparse_attention.ROOM, "cpu", 1 << 14)
    tokens, model = 256, model_of(torch.float32)
    module = model.model.layers[0].self_attn
    use_document_attention(model)
    if stage:
        learn(module, IndexerLearning(stage))
    x = torch.randn(1, tokens, 32, requires_grad=True)
    tables = model.model.rotary_emb(x, torch.arange(tokens)[None])
    empty = torch.empty(1, 1, 0, 0, dtype=torch.bool)
    with Largest() as largest:
        out, _ = module(
            hidden_states=x,
            position_embeddings=tables,
            attention_mask=empty,
            document_lengths=(tokens,),
        )
        out.sum().backward()
    assert 0 < largest.bytes < 4 * tokens * tokens  # one float32 for each pair


def test_gathering_pays_in_long_documents() -> None:
    widths = 512, 64, 192, 128  # of DeepSeek-V3.2
    assert not gathers(13_926, 2048, widths)
    assert gathers(13_927, 2048, widths)


@pytest.mark.parametrize("lengths", [(500,), (9, 8, 7), (70,) * 40, (20, 3, 1000)])
def test_measured_queries_are_few_and_have_more_keys_than_are_chosen(lengths: Any) -> None:
    found = [
        (document, row)
        for document, rows in measured_queries(documents_of(lengths), 6)
        for row in rows
    ]
    assert all(document.first + 6 <= row < document.end for document, row in found)
    candidates = sum(max(n - 6, 0) for n in lengths)
    assert min(candidates, 32) <= len(found) <= 64


def test_where_the_projection_is_not_a_plain_one_keys_are_masked() -> None:
    module = model_of().model.layers[0].self_attn
    assert sparse_attention.absorbable(module.kv_b_proj)
    fuse_layers(module)
    assert sparse_attention.absorbable(module.kv_b_proj)
    module.kv_b_proj.register_forward_hook(lambda *_: None)
    assert not sparse_attention.absorbable(module.kv_b_proj)
    assert not sparse_attention.absorbable(nn.Linear(2, 2))  # has a bias
    assert sparse_attention._way(module, False, QuerySpan(0, 0, 10**6)) == "masked"


def test_learning_ends_and_needs_an_indexer() -> None:
    model = model_of(torch.float32)
    use_document_attention(model)
    module = model.model.layers[1].self_attn
    learn(module, IndexerLearning("sparse"))
    with torch.no_grad():
        model(**PACKED)
    assert [s.tolist() for s in take_sums(model)] == [[0.0] * 5]
    learn(module, None)
    assert take_sums(model) == []
    with pytest.raises(ValueError, match="Linear has no indexer"):
        learn(module.o_proj, IndexerLearning("sparse"))
    with pytest.raises(ValueError, match="warmup or sparse"):
        IndexerLearning("dense")


def test_dropout_is_refused() -> None:
    with pytest.raises(ValueError, match="attention_dropout to 0"):
        use_document_attention(model_of(attention_dropout=0.1))
