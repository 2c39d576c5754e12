"""Layers cut over ranks: the same losses, norms and weights as one process, whatever is cut."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hasten.core.technique import Technique
from hasten.machine.environment import World
from hasten.parts.data.collate import IGNORED
from hasten.parts.distributed.vocabulary_parallel import VocabularyParallelHead
from hasten.parts.nn import losses
from hasten.parts.nn.losses import PLAIN, LabelOnlyHead, LossTerms, whole_cross_entropy
from hasten.parts.nn.preference import Answers, OnePass
from hasten.parts.nn.preference_objectives import Objective
from hasten.techniques.activation_checkpointing import ActivationCheckpointing
from hasten.techniques.adapter import LoRA
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.collate import Packed
from hasten.techniques.compile import Compiled
from hasten.techniques.layers import FusedLayers
from hasten.techniques.layout.hybrid import Hybrid
from hasten.techniques.layout.tensor import TensorParallel
from hasten.techniques.loss import LabelledTokenLoss
from ranks import on_ranks, once_on_ranks
from techniques.sharded_rank_jobs import Case, check_same, even_examples, outcome
from tiny import COMMON, compiled_in, tiny_model
from told import refusal

ONE, TWO = GradientAccumulation(micro_batch_size=1), GradientAccumulation(micro_batch_size=2)
LABELS = LabelledTokenLoss(chunk=16)
WHOLE_SEQUENCE = TensorParallel(sequence=False)


def tiny_qwen3(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Norms of each head by itself, few key and value heads."""
    import transformers as hf

    torch.manual_seed(0)
    config = hf.Qwen3Config(**COMMON, num_key_value_heads=2, head_dim=8)
    model = hf.AutoModelForCausalLM.from_config(config)
    model.set_attn_implementation("sdpa")
    built: nn.Module = model.to(dtype)
    return built


def dropping() -> nn.Module:
    """A model whose attention drops out."""
    model: Any = tiny_model(dtype=torch.float64)
    model.config.attention_dropout = 0.1
    found: nn.Module = model
    return found


def mlps_alone() -> nn.Module:
    """A model of which only these are compiled."""
    return compiled_in("mlp", tiny_model(dtype=torch.float64))


SINGLE = torch.float32
LINEAR = LoRA(rank=4, targets="all-linear")
FUSED = FusedLayers()
# Rows of one width: each shape of a micro-batch is another graph to trace, for seconds.
COMPILED = Compiled(backend="aot_eager", bucket=64, share=1.0)
PACKED: tuple[Technique, ...] = (Packed(), DocumentAttention(), ActivationCheckpointing())
EACH_CASE: dict[str, Case] = {
    "whole sequence": Case(WHOLE_SEQUENCE),
    "whole head": Case(TensorParallel(parallel_loss=False), (TWO,)),
    "labels, accumulated, tied": Case(TensorParallel(), (TWO, LABELS), tied=True),
    "packed, recomputed": Case(TensorParallel(), PACKED),
    "biases": Case(TensorParallel(), (TWO,), "qwen2"),
    "norms of heads": Case(TensorParallel(), (), "qwen3", model=tiny_qwen3),
    "latents and experts": Case(TensorParallel(), (TWO,), "deepseek_v3"),
    "latents, whole sequence": Case(WHOLE_SEQUENCE, (), "deepseek_v2"),
    "adapters": Case(TensorParallel(), (LINEAR, TWO)),
    "adapters, whole sequence": Case(WHOLE_SEQUENCE, (LINEAR,)),
    "adapters of latents": Case(TensorParallel(), (LoRA(rank=4), TWO, LABELS), "deepseek_v3"),
    "adapters of experts": Case(
        TensorParallel(), (LoRA(rank=2, targets="all-linear", resolver="peft"),), "deepseek_v3"
    ),
    "adapters that drop": Case(
        TensorParallel(), (LoRA(rank=4, targets="all-linear", dropout=0.3),)
    ),
    "fused": Case(TensorParallel(), (FUSED, TWO), dtype=SINGLE),
    "fused, whole sequence": Case(WHOLE_SEQUENCE, (FUSED, LINEAR), dtype=SINGLE),
    "fused norms of heads": Case(
        TensorParallel(), (FUSED,), "qwen3", SINGLE, model=partial(tiny_qwen3, SINGLE)
    ),
    "fused latents": Case(TensorParallel(), (FUSED, LABELS), "deepseek_v3", SINGLE),
    "fused, packed, recomputed": Case(TensorParallel(), (FUSED, *PACKED), dtype=SINGLE),
    "compiled": Case(TensorParallel(), (ONE, COMPILED), model=mlps_alone),
    "compiled attention": Case(TensorParallel(), (ONE, COMPILED)),
    "compiled latents": Case(TensorParallel(), (ONE, COMPILED), "deepseek_v3"),
}
UNEVEN = ("biases", "packed, recomputed", "fused, packed, recomputed")
CASES = {
    name: case if name in UNEVEN else replace(case, data=even_examples)
    for name, case in EACH_CASE.items()
}
# Each is made of two others, or differs from one in a head, or takes a compiler.
LONG = (
    "whole head",
    *("latents, whole sequence", "adapters, whole sequence", "adapters of latents"),
    *("fused latents", "fused, whole sequence"),
    *("compiled", "compiled attention", "compiled latents"),
    *("fused norms of heads", "fused, packed, recomputed"),
)
MESHES: dict[str, Case] = {
    "shards": Case(Hybrid(shard=2, tp=2), (TWO,), tied=True),
    "copies": Case(Hybrid(dp=2, tp=2), (TWO, LABELS)),
    "experts": Case(Hybrid(shard=2, tp=2, whole_gradients=True), (), "deepseek_v3"),
    "pipelines": Case(Hybrid(dp=2, pp=2)),
    "experts of copies": Case(Hybrid(dp=4, ep=2), (), "deepseek_v3", torch.float32),
    "adapters in shards": Case(Hybrid(shard=2, tp=2), (LINEAR, TWO)),
    "fused in shards": Case(Hybrid(shard=2, tp=2), (FUSED, LABELS), dtype=SINGLE),
}
# Each is made of two others, or of one and a case on two ranks, or is a pipeline's or experts' own
# layout under another name.
LONG_MESHES = (
    *("adapters in shards", "fused in shards", "experts"),
    *("pipelines", "experts of copies"),
)
REFUSED: dict[str, Case] = {
    "directions": Case(TensorParallel(), (LoRA(rank=4, dora=True),)),
    "few bits": Case(TensorParallel(), (LoRA(rank=4, base="int8"),)),
    "dropout": Case(TensorParallel(), model=dropping),
}
TERMS = (
    LossTerms(),
    LossTerms(label_smoothing=0.1, z_loss=1e-2),
    LossTerms(softcap=3.0, z_loss=1e-3),
)


def cut_long(world: World) -> dict[str, Any]:
    return {name: outcome(CASES[name].session(world)) for name in LONG}


def cut(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: outcome(case.session(world)) for name, case in CASES.items() if name not in LONG
    }
    for name, case in REFUSED.items():
        found[name] = refusal(case.session, world)
    found["vocabulary"] = [_vocabulary(terms, chunk) for terms in TERMS for chunk in (4, 64)]
    found["pairs"] = [_of_pairs(_dealt_out(), chunk) for chunk in (1, 4, 64)]
    return found


def meshes(world: World) -> dict[str, Any]:
    return {
        name: outcome(case.session(world))
        for name, case in MESHES.items()
        if name not in LONG_MESHES
    }


def meshes_long(world: World) -> dict[str, Any]:
    return {name: outcome(MESHES[name].session(world)) for name in LONG_MESHES}


def drawn() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, a head with a bias of an odd number of rows, and labels, some of them none."""
    draw = torch.Generator().manual_seed(5)
    hidden = torch.randn(11, 8, generator=draw, dtype=torch.float64)
    weight = torch.randn(13, 8, generator=draw, dtype=torch.float64)
    bias = torch.randn(13, generator=draw, dtype=torch.float64)
    labels = torch.randint(0, 13, (11,), generator=draw)
    labels[3] = IGNORED
    return hidden, weight, bias, labels


def reference(terms: LossTerms) -> list[list[float]]:
    """Loss and gradients through autograd, of logits that are there."""
    hidden, weight, bias, labels = drawn()
    leaves = [t.requires_grad_() for t in (hidden, weight, bias)]
    loss = whole_cross_entropy(torch.nn.functional.linear(hidden, weight, bias), labels, terms)
    (2 * loss).backward()
    return [[loss.item()], *(leaf.grad.flatten().tolist() for leaf in leaves)]  # type: ignore[union-attr]


def uneven(world: World) -> list[list[float]]:
    """Chunks as long as each rank finds out for itself: of 13 tokens' logits 7 and 6 lie here."""
    losses.FEWEST_ROWS, losses.CHUNK_BYTES = 1, 4 * 7 * 6
    assert [losses.chunk_rows("auto", rows) for rows in (7, 6)] == [6, 7]
    return _vocabulary(LossTerms(), "auto")


def _vocabulary(terms: LossTerms, chunk: int | str) -> list[list[float]]:
    """The same with the head's rows dealt out."""
    hidden, *_, labels = drawn()
    hidden.requires_grad_()
    head = _dealt_out()
    loss = head(hidden, labels, chunk, terms)
    (2 * loss).backward()
    gradients = [hidden.grad, head.weight.grad.full_tensor(), head.bias.grad.full_tensor()]  # type: ignore[union-attr]
    return [[loss.item()], *(g.flatten().tolist() for g in gradients)]  # type: ignore[union-attr]


def _dealt_out() -> VocabularyParallelHead:
    mesh = init_device_mesh("cpu", (2,))
    _, weight, bias, _ = drawn()
    return VocabularyParallelHead(
        nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)])),
        nn.Parameter(distribute_tensor(bias, mesh, [Shard(0)])),
        mesh,
    )


def _of_pairs(head: nn.Module, chunk: int) -> list[list[float]]:
    """Loss, sums and gradients of two preference pairs; two labels are read at one position."""
    hidden, *_ = drawn()
    hidden.requires_grad_()
    counts = torch.tensor([[3, 2], [1, 4]])
    answers = Answers(
        Objective(beta=0.3),
        labels=torch.tensor([1, 12, 7, 6, 0, 5, 5, 11, 2, 8]),
        reads=torch.tensor([0, 1, 2, 0, 4, 5, 6, 7, 8, 9]),
        owners=torch.arange(4).repeat_interleave(counts.flatten()),
        counts=counts,
        weights=torch.tensor([1.0, 0.5], dtype=torch.float64),
        scales=None,
        reference=None,
        nll_unit=None,
        label_counts=(3, 2, 1, 4),
    )
    loss, sums = head(hidden, OnePass(answers, PLAIN, chunk))
    (2 * loss).backward()
    gradients = [hidden.grad, *(p.grad for p in head.parameters())]
    wholes = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
    return [[loss.item()], *(t.flatten().tolist() for t in (sums, *wholes))]  # type: ignore[union-attr]


# Routers and DeepSeek V2's rotary embedding compute in float32 whatever the model's format is.
CLOSE, CLOSE_EXPERTS, CLOSE_SINGLE = 1e-12, 1e-5, 1e-4


two = once_on_ranks(cut)
two_long = once_on_ranks(cut_long)
four = once_on_ranks(meshes, 4)


def same(found: list[Any], case: Case, name: str) -> None:
    plain = replace(case, others=tuple(t for t in case.others if t is not COMPILED))
    alone, close = outcome(plain.session(World())), CLOSE
    if case.dtype is torch.float32:
        close = CLOSE_SINGLE
    elif "deepseek" in case.architecture:
        close = CLOSE_EXPERTS
    one = found[0][name]
    check_same(one, alone, close)
    for other in found[1:]:
        assert other[name]["losses"] == one["losses"]
        assert other[name]["norms"] == one["norms"]
    assert all(one["proofs"].values())


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_products_of_these_on_two_ranks_come_to_what_one_comes_to(
    two_long: list[Any], name: str
) -> None:
    same(two_long, CASES[name], name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in LONG])
def test_two_ranks_with_half_of_every_layer_come_to_what_one_comes_to(
    two: list[Any], name: str
) -> None:
    same(two, CASES[name], name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MESHES if name not in LONG_MESHES])
def test_products_of_layouts_on_four_ranks_come_to_the_same(four: list[Any], name: str) -> None:
    same(four, MESHES[name], name)


@pytest.mark.long
def test_further_products_on_four_ranks_come_to_the_same(tmp_path: Path) -> None:
    found = on_ranks(meshes_long, tmp_path, 4)
    for name in LONG_MESHES:
        same(found, MESHES[name], name)


@pytest.mark.parametrize("index", range(2 * len(TERMS)))
def test_cross_entropy_over_a_dealt_out_vocabulary_is_that_of_whole_logits(
    two: list[Any], index: int
) -> None:
    wanted = reference(TERMS[index // 2])
    for rank in two:
        for found, expected in zip(rank["vocabulary"][index], wanted, strict=True):
            assert found == pytest.approx(expected, rel=1e-12, abs=1e-13)


@pytest.mark.parametrize("index", range(3))
def test_preference_pairs_over_a_dealt_out_vocabulary_are_those_of_a_whole_head(
    two: list[Any], index: int
) -> None:
    whole = nn.Linear(8, 13, dtype=torch.float64)
    _, weight, bias, _ = drawn()
    whole.weight, whole.bias = nn.Parameter(weight), nn.Parameter(bias)
    wanted = _of_pairs(LabelOnlyHead(whole), 64)
    for rank in two:
        for found, expected in zip(rank["pairs"][index], wanted, strict=True):
            assert found == pytest.approx(expected, rel=1e-12, abs=1e-13)


def test_ranks_with_pieces_of_unequal_size_take_the_same_chunks(tmp_path: Path) -> None:
    for rank in on_ranks(uneven, tmp_path):
        for found, expected in zip(rank, reference(TERMS[0]), strict=True):
            assert found == pytest.approx(expected, rel=1e-12, abs=1e-13)


def test_what_cannot_be_cut_is_refused_on_every_rank(two: list[Any]) -> None:
    for found in two:
        assert "has a DoRA adapter, which measures whole rows" in found["directions"]
        assert "QuantisedLinear with code of its own" in found["few bits"]
        assert "attention_dropout is 0.1" in found["dropout"]
        assert all(". " not in found[name] for name in REFUSED)
