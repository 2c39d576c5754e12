"""DeepSeek-V4 in packed rows: what each document is alone in transformers' own model.

The reference is that model, in float64, one document at a time. Its norms, softmaxes and rotary
tables compute in float32 whatever the weights are, hence 1e-6; with float64 there too, 1e-12.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from transformers.models.deepseek_v4 import modeling_deepseek_v4

from hasten.models.load import take_own_attention
from hasten.parts.data.collate import (
    TokenizedExample,
    aligned_labels,
    end_to_end,
    padded,
    tokenized_example,
)
from hasten.parts.nn import compressed_attention
from hasten.parts.nn.attention import use_document_attention
from tiny import V4, VOCABULARY

WINDOW, CSA, HCA, TOP_K = 6, 3, 5, 4
KINDS = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
# The tokens of each document: around window and ratios, several of each, more keys than are chosen.
ROWS = [
    (41,),
    (41, 40),
    (5, 6, 17),
    (1, 2, 29, 3),
    (33, 4, 12, 32, 7),
    (2, 1, 2),
]


def plain_model() -> Any:
    """A V4 with all kinds of layers and experts, in which no weight is what it begins with."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    rates = {"compressed_sparse_attention": CSA, "heavily_compressed_attention": HCA}
    kinds = [*KINDS, "compressed_sparse_attention"]
    sizes = {"sliding_window": WINDOW, "index_topk": TOP_K, "compress_rates": rates}
    config = hf.DeepseekV4Config(**{**V4, **sizes, "layer_types": kinds})
    model: Any = hf.DeepseekV4ForCausalLM(config).to(torch.float64)
    take_own_attention(model)
    model.set_experts_implementation("eager")  # the grouped product has no float64
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=generator)
        for name, table in model.named_buffers():
            if name.endswith("tid2eid"):
                table.copy_(torch.randint(0, 4, table.shape, generator=generator))
    return model.train()


def apart(plain: Any) -> Any:
    model = copy.deepcopy(plain)
    use_document_attention(model)
    return model


def documents_of(lengths: Sequence[int], seed: int = 0) -> list[TokenizedExample]:
    draw = np.random.default_rng(seed)
    return [tokenized_example(draw.integers(3, VOCABULARY, n)) for n in lengths]


def row_of(documents: Sequence[TokenizedExample]) -> dict[str, Any]:
    """In the order given, unlike a packed batch's, which begins with the longest."""
    ids = [torch.from_numpy(d.input_ids).long() for d in documents]
    return end_to_end(ids, [torch.from_numpy(aligned_labels(d)) for d in documents])


def alone(model: Any, documents: Sequence[TokenizedExample]) -> Tensor:
    logits = [
        model(input_ids=torch.from_numpy(d.input_ids).long()[None], use_cache=False).logits[0]
        for d in documents
    ]
    return torch.cat(logits)


def results(
    model: nn.Module, logits: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits, loss and the gradient of every weight that has one."""
    model.zero_grad()
    loss = F.cross_entropy(logits, labels, reduction="sum")
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), loss.detach(), gradients


def difference(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach(), expected.detach()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12))


def largest_difference(plain: Any, model: Any, documents: Sequence[TokenizedExample]) -> float:
    """Relative, of logits, loss and all gradients, to those of each document alone."""
    row = row_of(documents)
    labels = row.pop("labels")[0]
    expected = results(plain, alone(plain, documents), labels)
    found = results(model, model(**row, use_cache=False).logits[0], labels)
    assert found[2].keys() == expected[2].keys()
    pairs = [*zip(found[:2], expected[:2], strict=True)]
    pairs += [(found[2][name], gradient) for name, gradient in expected[2].items()]
    return max(difference(one, other) for one, other in pairs)


class Float64Torch:
    """The module torch with float64 in the place of float32."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, {"float32": "float64", "float": "float64"}.get(name, name))


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's code computes nothing in float32."""
    monkeypatch.setattr(modeling_deepseek_v4, "torch", Float64Torch())
    monkeypatch.setattr(Tensor, "float", Tensor.double)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("lengths", ROWS, ids=str)
def test_a_document_of_a_packed_row_is_what_it_is_alone(lengths: tuple[int, ...]) -> None:
    plain = plain_model()
    documents = documents_of(lengths)
    assert largest_difference(plain, apart(plain), documents) < 1e-12


def test_norms_and_softmaxes_in_float32_change_no_more_than_their_rounding() -> None:
    plain = plain_model()
    assert largest_difference(plain, apart(plain), documents_of(ROWS[4])) < 1e-6


def one_document(lengths: Sequence[int]) -> tuple[int, ...]:
    return (lengths[0] + lengths[1], *lengths[2:])


LEAKS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "two documents as one": lambda row: {
        **row,
        "document_lengths": one_document(row["document_lengths"]),
    },
    "no documents": lambda row: {
        "input_ids": row["input_ids"],
        "position_ids": row["position_ids"],
    },
}


@pytest.mark.parametrize("leak", LEAKS)
def test_a_planted_leak_is_seen(leak: str) -> None:
    """Also through the model without document attention, which mixes documents of a row."""
    plain, documents = plain_model(), documents_of((12, 9, 11))
    model = plain if leak == "no documents" else apart(plain)
    row = row_of(documents)
    del row["labels"]
    found = model(**LEAKS[leak](row), use_cache=False).logits[0]
    expected = alone(plain, documents)
    assert difference(found[:12], expected[:12]) < 1e-6
    assert difference(found[12:21], expected[12:21]) > 0.01


@pytest.mark.usefixtures("in_float64")
def test_no_token_sees_another_document_or_its_filler() -> None:
    """Other tokens in one document change the logits of no other one of its batch."""
    model, lengths = apart(plain_model()), (20, 17, 19, 4)
    assert compressed_attention.similar(lengths) == [[0, 2, 1], [3]]
    row = row_of(documents_of(lengths))
    del row["labels"]
    with torch.enable_grad():
        before = model(**row, use_cache=False).logits[0].detach()
        start = 0
        for length in lengths:
            ids = row["input_ids"].clone()
            ids[0, start : start + length] = (ids[0, start : start + length] + 11) % VOCABULARY
            after = model(**{**row, "input_ids": ids}, use_cache=False).logits[0].detach()
            change = (after - before).abs().amax(dim=1)
            assert change[start] > 1e-3
            change[start : start + length] = 0
            assert change.max() < 1e-12
            start += length


@pytest.mark.usefixtures("in_float64")
def test_positions_are_those_of_the_documents_whatever_is_given() -> None:
    plain, documents = plain_model(), documents_of((9, 14))
    model, row, expected = apart(plain), row_of(documents), alone(plain, documents)
    for positions in (None, torch.arange(23)[None]):
        given = {**row, "position_ids": positions}
        del given["labels"]
        assert difference(model(**given, use_cache=False).logits[0], expected) < 1e-12


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(
    ("first", "second"), [((8, 5), (8, 5)), ((13,), (13,)), ((7, 5), (3, 9))], ids=str
)
def test_several_rows_have_the_same_documents_or_all_of_them_end_to_end(
    first: tuple[int, ...], second: tuple[int, ...]
) -> None:
    plain = plain_model()
    documents = documents_of(first), documents_of(second, seed=1)
    rows = [row_of(one) for one in documents]
    ids, positions = (torch.cat([row[k] for row in rows]) for k in ("input_ids", "position_ids"))
    expected = torch.cat([alone(plain, one) for one in documents])
    ways = [{"position_ids": positions}, {"document_lengths": (*first, *second)}]
    ways += [{"document_lengths": first}] * (first == second)
    model = apart(plain)
    for way in ways:
        found = model(input_ids=ids, use_cache=False, **way).logits.flatten(0, 1)
        assert difference(found, expected) < 1e-12


def test_rows_that_are_not_packed_are_those_of_the_plain_model_to_the_bit() -> None:
    plain = plain_model()
    ids = padded(documents_of((12, 7, 9)))["input_ids"]
    expected = plain(input_ids=ids, use_cache=False).logits
    assert torch.equal(apart(plain)(input_ids=ids, use_cache=False).logits, expected)


def test_masks_caches_and_evaluation_are_those_of_the_plain_model_to_the_bit() -> None:
    plain = plain_model()
    model, ids = apart(plain), torch.arange(3, 27).view(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    calls: list[dict[str, Any]] = [
        {"attention_mask": mask, "use_cache": False},
        {"attention_mask": mask.flip(1), "use_cache": False},
        {"use_cache": True},
    ]
    for call in calls:
        one, other = (m.train()(input_ids=ids, **call) for m in (plain, model))
        assert torch.equal(one.logits, other.logits)
    with torch.no_grad():
        one, other = (
            m(input_ids=ids[:, :1], past_key_values=r.past_key_values).logits
            for m, r in ((plain, one), (model, other))
        )
    assert torch.equal(one, other)
    for way in ({}, {"num_beams": 2}):
        settings = {"input_ids": ids, "max_new_tokens": 5, "pad_token_id": 0, "do_sample": False}
        expected, found = (m.eval().generate(**settings, **way) for m in (plain, model))
        assert torch.equal(found, expected)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # its name in the next major release
def test_gradients_survive_recomputation_and_copies() -> None:
    row = row_of(documents_of((12, 9, 11)))
    labels, model = row.pop("labels")[0], apart(plain_model())
    expected = results(model, model(**row, use_cache=False).logits[0], labels)[2]
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for one in (model, copy.deepcopy(model)):
        found = results(one, one(**row, use_cache=False).logits[0], labels)[2]
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_shared_prompt_is_refused() -> None:
    row = row_of(documents_of((12, 9)))
    del row["labels"]
    with pytest.raises(ValueError, match="a shared prompt needs a model without compressed keys"):
        apart(plain_model())(**row, prefixes=(0, 4), use_cache=False)


def test_similar_documents_share_a_batch() -> None:
    assert compressed_attention.similar((3, 100, 81, 79, 3)) == [[1, 2], [3], [0, 4]]
