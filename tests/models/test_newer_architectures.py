"""DeepSeek-V3.2 and V4 as Transformers has them: they train, are saved and come back the same."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from hasten.core.plan import Plan
from hasten.core.setup import prepare
from hasten.core.slot import Slot
from hasten.core.step import assemble, training
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.machine.environment import World
from hasten.models.adapters import add_lora, lora_targets
from hasten.models.load import load_model, take_own_attention
from hasten.parts.data.collate import packed
from hasten.parts.nn.attention import use_document_attention
from hasten.parts.nn.quantised import Float8Layers
from hasten.parts.nn.router_balance import routers
from hasten.parts.nn.sparse_attention import Row, RowIndexer, choose, documents_of
from hasten.recipe.build import model_facts
from hasten.recipe.schema import Recipe
from hasten.techniques.adapter import LoRA
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.collate import Packed
from hasten.techniques.layers import FusedLayers
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.layout.fsdp import FSDP2
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.objective import MultiTokenPrediction
from hasten.techniques.routing import BalancedRouting
from ranks import on_ranks
from tiny import NEWER, examples, job_context, language_job, session_of, tiny_config, tiny_model


def _given(architecture: str, thawed: bool) -> nn.Module:
    model = tiny_model(architecture)
    return model.requires_grad_(True) if thawed else model


CASES: dict[str, tuple[str, tuple[Technique, ...]]] = {
    "v3.2": ("deepseek_v32", ()),
    "v3.2, packed": ("deepseek_v32", (Packed(), DocumentAttention(), MultiTokenPrediction())),
    "v4, accumulated": (
        "deepseek_v4",
        (GradientAccumulation(micro_batch_size=1), BalancedRouting()),
    ),
    "v4, packed, sharded": ("deepseek_v4", (Packed(), MultiTokenPrediction(), FSDP2())),
}


def train_newest(world: World) -> dict[str, list[float]]:
    """The losses of every case; some examples are shorter than what V4 compresses to a key."""
    found = {}
    for case, (architecture, plan) in CASES.items():
        data = [*examples(6, seed=4, longest=3), *examples(6, seed=5, longest=12)]
        # Some come with indexers that nobody has frozen, as models of the user's own do.
        given = partial(_given, architecture, thawed="packed" not in case)
        job = language_job(given, data=data, batch=4)
        plan = tuple(t for t in plan if world.size > 1 or t.slot is not Slot.LAYOUT)
        more = (DDP(),) if world.size > 1 and Slot.LAYOUT not in Plan(plan) else ()
        context = job_context(job, architecture, world=world)
        session = assemble(prepare(job, Plan((*plan, *more)), context))
        found[case] = [metrics.loss for metrics in training(session)]
        session.finish()
    return found


TOKENS = torch.arange(3, 43).view(2, 20)
BALANCED, AHEAD = BalancedRouting(speed=0.01), MultiTokenPrediction()
PLANS: list[tuple[str, tuple[Technique, ...]]] = [
    *((architecture, (LoRA(),)) for architecture in NEWER),
    ("deepseek_v32", ()),
    ("deepseek_v32", (Packed(), DocumentAttention(), FusedLayers(), BALANCED, AHEAD)),
    ("deepseek_v4", (Packed(), LabelledTokenLoss(), BALANCED, AHEAD)),
]
INDEXERS_OWN = ("wq_b", "wk", "k_norm", "weights_proj", "q_b_proj", "kv_proj", "gate_proj")


def built(architecture: str, **changes: Any) -> Any:
    """The tiny model with another config."""
    torch.manual_seed(0)
    config = tiny_config(architecture)
    for name, value in changes.items():
        setattr(config, name, value)
    model: Any = AutoModelForCausalLM.from_config(config)
    take_own_attention(model)
    return model


@pytest.mark.parametrize(("architecture", "plan"), PLANS, ids=str)
def test_it_learns_is_saved_and_comes_back_the_same(
    architecture: str, plan: Any, tmp_path: Path
) -> None:
    job = language_job(lambda: tiny_model(architecture), steps=7)
    session = session_of(job, *plan, architecture=architecture)
    losses, moved = [], False
    for step in training(session):
        losses.append(step.loss)
        # A bias may be back at zero later, and stays where its expert has the mean load.
        moved |= any(bool(r.e_score_correction_bias.any()) for r in routers(session.model))
    assert losses[-1] < losses[0]
    assert moved is any(isinstance(t, BalancedRouting) for t in plan)
    model: Any = session.finish().eval()
    if any(isinstance(t, LoRA) for t in plan):
        model = model.merge_and_unload()
    take_own_attention(model)
    model.save_pretrained(tmp_path)
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    found, expected = (m(input_ids=TOKENS).logits for m in (model, again))
    if any(isinstance(t, FusedLayers) for t in plan):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    else:
        assert torch.equal(found, expected)
    for ours, theirs in zip(routers(model), routers(again), strict=True):
        assert torch.equal(ours.e_score_correction_bias, theirs.e_score_correction_bias)


@pytest.mark.parametrize("documents", [False, True], ids=["sdpa", "documents"])
@pytest.mark.parametrize("index_topk", [2, 4, 8, 64])
def test_no_token_of_v32_sees_another_document_of_its_row(index_topk: int, documents: bool) -> None:
    """Through the indexer neither: another document's tokens change nothing, not even a bit."""
    model = built("deepseek_v32", index_topk=index_topk).eval()
    if documents:
        use_document_attention(model)
    found = packed(examples(4, seed=1))
    ids, inputs = found.pop("input_ids"), {**found, "use_cache": False}
    del inputs["labels"]
    before = model(input_ids=ids, **inputs).logits
    start = 0
    for length in found["document_lengths"]:
        other = ids.clone()
        other[0, start : start + length] = other[0, start : start + length].flip(0)
        after = model(input_ids=other, **inputs).logits
        same = (before == after).all(dim=-1)[0]
        assert same[:start].all()
        assert same[start + length :].all()
        assert not same[start : start + length].all()
        start += length


def test_the_indexer_runs_for_documents_that_have_more_keys_than_it_chooses() -> None:
    model = built("deepseek_v32", index_topk=10)
    use_document_attention(model)
    seen: list[int] = []
    for layer in model.model.layers:
        layer.self_attn.indexer.wk.register_forward_hook(
            lambda module, given, out: seen.append(len(out))
        )
    found = packed([r for r in examples(8, seed=1) if r.length > 2])
    del found["labels"]
    model(**found, use_cache=False)
    long = [n for n in found["document_lengths"] if n > 10]
    assert seen == 2 * [sum(long)]  # a call for all of them
    assert len(long) < len(found["document_lengths"])


def test_a_query_sees_top_k_keys_of_its_own_document() -> None:
    model = built("deepseek_v32", index_topk=3)
    indexer, lengths = model.model.layers[0].self_attn.indexer, (9, 3, 7)
    generator = torch.Generator().manual_seed(0)
    hidden, latent = (torch.randn(1, 19, n, generator=generator) for n in (32, 16))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    tables = model.model.rotary_emb(hidden, positions)
    documents = documents_of(lengths)
    read = (hidden[0], latent[0], tables[0][0], tables[1][0])
    chosen = choose(RowIndexer(indexer, Row(read, *read[:3], documents), learns=False), documents)
    for document in documents:
        for query in range(document.first, document.end):
            keys = chosen[query][chosen[query] >= 0].tolist()
            assert keys == sorted(set(keys))
            assert len(keys) == min(query - document.first + 1, 3)
            assert document.first <= keys[0] <= keys[-1] <= query


@pytest.mark.parametrize("architecture", NEWER)
def test_what_is_not_proven_for_it_says_so(architecture: str) -> None:
    context = job_context(language_job(), architecture)
    every = (Packed(), DocumentAttention(), FusedLayers())
    if architecture == "deepseek_v4":
        assert [bool(t.unsupported_reasons(context)) for t in every] == [False, False, True]
    else:
        assert not any(technique.unsupported_reasons(context) for technique in every)


@pytest.mark.parametrize("architecture", NEWER)
def test_lora_adapts_what_learns_and_no_indexer(architecture: str) -> None:
    model = tiny_model(architecture)
    for targets in ("auto", "all-linear"):
        assert not any(".indexer." in name for name in lora_targets(model, targets))
    adapted = add_lora(model, 2, 4, targets="all-linear")
    adapted(input_ids=TOKENS, labels=TOKENS).loss.backward()
    learns = {n: p for n, p in adapted.named_parameters() if p.requires_grad}
    assert learns
    assert not [name for name, weight in learns.items() if weight.grad is None]
    assert not [n for n, w in learns.items() if "lora_B" in n and not w.grad.any()]


def test_v4s_grouped_projection_learns_as_its_weight_would() -> None:
    """B A added to the weight is what the adapter computes, though the layer isn't a plain one."""
    model = tiny_model("deepseek_v4").eval()
    adapted = add_lora(model, 2, 4, targets=["o_a_proj"])
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.2)
    found = adapted(input_ids=TOKENS).logits
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(input_ids=TOKENS).logits, found, rtol=1e-4, atol=1e-5)


def test_v4s_grouped_projection_stays_as_it_is_in_a_quantised_base_and_under_float8() -> None:
    model = add_lora(tiny_model("deepseek_v4"), 2, 4, targets=["q_a_proj"], base="int8")
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    kinds = {n.split(".")[-1]: type(m).__name__ for n, m in model.named_modules()}
    assert kinds["o_a_proj"] == "DeepseekV4GroupedLinear"
    assert kinds["o_b_proj"] == "QuantisedLinear"
    plain = tiny_model("deepseek_v4")
    layers = Float8Layers(emulate=True)
    layers.attach(plain)
    plain(input_ids=TOKENS, labels=TOKENS).loss.backward()
    assert layers.names
    assert not any(name.endswith("o_a_proj") for name in (*layers.names, *layers.left))


@pytest.mark.parametrize("architecture", NEWER)
def test_a_loaded_model_has_its_indexers_frozen_and_all_else_learns(
    architecture: str, tmp_path: Path
) -> None:
    tiny_config(architecture).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), from_scratch=True)
    frozen = {n.split(".")[-2] for n, p in model.named_parameters() if not p.requires_grad}
    assert frozen
    assert frozen <= {*INDEXERS_OWN, "kv_norm", "indexer"}
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()  # type: ignore[operator]
    assert all((p.grad is not None) is p.requires_grad for p in model.parameters())


def test_without_trained_weights_v4s_tables_give_each_token_experts_of_its_own(
    tmp_path: Path,
) -> None:
    tiny_config("deepseek_v4").save_pretrained(tmp_path)
    one, other = (load_model(str(tmp_path), from_scratch=True, seed=s) for s in (0, 1))
    tables = [m.tid2eid for m in one.modules() if hasattr(m, "tid2eid")]
    assert len(tables) == 3
    for table in tables:
        assert all(len(set(row)) == len(row) for row in table.tolist())
        loads = table.flatten().bincount(minlength=4)
        assert int(loads.max() - loads.min()) <= 2
    again = [m.tid2eid for m in other.modules() if hasattr(m, "tid2eid")]
    assert not torch.equal(tables[0], again[0])


def test_what_transformers_refuses_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_config("deepseek_v4").save_pretrained(tmp_path)
    recipe = Recipe(model=str(tmp_path), dataset="no.jsonl", max_steps=1, from_scratch=True)

    def fails(*given: Any, **named: Any) -> None:
        raise ValueError("two\n  lines")

    model = load_model(str(tmp_path), from_scratch=True)
    monkeypatch.setattr(model, "set_attn_implementation", fails)
    with pytest.raises(InputError, match="a deepseek_v4 model can't take eager attention: two li"):
        take_own_attention(model)
    monkeypatch.setattr(AutoModelForCausalLM, "from_config", fails)
    for build in (
        lambda: load_model(str(tmp_path), from_scratch=True),
        lambda: model_facts(recipe, None),
    ):
        with pytest.raises(InputError, match="a deepseek_v4 model can't be built: two lines"):
            build()


@pytest.mark.slow
def test_two_ranks_train_like_one_process(tmp_path: Path) -> None:
    """Weights without a gradient, for all examples or for short ones, keep no rank waiting."""
    alone = train_newest(World())
    for found in on_ranks(train_newest, tmp_path):
        for case, losses in alone.items():
            assert found[case] == pytest.approx(losses, rel=1e-5), case
