"""Packed rows: the same logits and gradients as example by example, and no view of another
document.

The reference is the model itself, in float64, one example at a time. Norms, rotary tables and
routers compute in float32 in these models whatever the weights are: a router's product rounds
differently with the number of rows, hence the wider tolerance where there are experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

from covering import covering
from hasten.parts.data.collate import TokenizedExample, aligned_labels, packed
from hasten.parts.nn import attention as document_attention
from hasten.parts.nn.attention import attend, use_document_attention
from host_waits import HostWaits
from tiny import ARCHITECTURES, COMMON, examples, tiny_model

EXAMPLES = sorted(examples(5, seed=2, longest=20), key=lambda r: -r.length)  # packed() keeps this
BATCH = packed(EXAMPLES)
INPUTS = {k: v for k, v in BATCH.items() if k != "labels"}
LABELS = BATCH["labels"]
NAMES = (*ARCHITECTURES, "qwen3", "deepseek_v32")


def built(architecture: str, attention: str) -> Any:
    if architecture == "qwen3":
        torch.manual_seed(0)
        config = hf.Qwen3Config(**COMMON, num_key_value_heads=2, head_dim=8)
        model: Any = hf.Qwen3ForCausalLM(config).to(torch.float64)
    else:
        model = tiny_model(architecture, dtype=torch.float64)
    if attention == "documents":
        use_document_attention(model)
    else:
        model.set_attn_implementation(attention)
    return model


def close(architecture: str, found: Tensor, expected: Tensor) -> bool:
    relative = 1e-6 if "deepseek" in architecture else 1e-12
    relative = 1e-4 if found.dtype == torch.float32 else relative
    return bool((found - expected).abs().max() <= relative * expected.abs().max())


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def one_by_one(model: Any, given: list[TokenizedExample]) -> tuple[Tensor, Tensor]:
    """(logits of all examples, summed loss), each example on its own in the model."""
    logits, loss = [], torch.zeros((), dtype=torch.float64)
    for example in given:
        ids = torch.from_numpy(example.input_ids).long()
        logits.append(model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0])
        loss = loss + F.cross_entropy(
            logits[-1], torch.from_numpy(aligned_labels(example)), reduction="sum"
        )
    return torch.cat(logits), loss


@pytest.mark.parametrize("architecture", NAMES)
@pytest.mark.parametrize("attention", ["sdpa", "documents"])
def test_packed_equals_record_by_record(architecture: str, attention: str) -> None:
    plain = built(architecture, "sdpa")
    expected, expected_loss = one_by_one(plain, EXAMPLES)
    expected_gradients = gradients(plain, expected_loss)
    model = built(architecture, attention)
    logits = model(use_cache=False, **INPUTS).logits[0]
    loss = F.cross_entropy(logits, LABELS[0], reduction="sum")
    assert close(architecture, logits, expected)
    assert close(architecture, loss, expected_loss)
    found = gradients(model, loss)
    assert found.keys() == expected_gradients.keys()
    assert len(found) > 10
    for name, gradient in found.items():
        assert close(architecture, gradient, expected_gradients[name]), name


def strangers_that_changed(model: Any, **more: Any) -> list[int]:
    """Documents whose replacement changed a bit of any other document's logits."""
    with torch.no_grad():
        before = model(use_cache=False, **INPUTS, **more).logits[0]
        found = []
        for index, (start, end) in enumerate(zip(*_spans(), strict=True)):
            ids = INPUTS["input_ids"].clone()
            ids[0, start:end] = (ids[0, start:end] + 11) % COMMON["vocab_size"]
            after = model(use_cache=False, **{**INPUTS, "input_ids": ids}, **more).logits[0]
            changed = (after != before).any(dim=1)
            assert changed[start], "a new document must change its own logits"
            changed[start:end] = False
            if changed.any():
                found.append(index)
    return found


def _spans() -> tuple[list[int], list[int]]:
    return BATCH["boundaries"][:-1].tolist(), BATCH["boundaries"][1:].tolist()


@pytest.mark.parametrize("architecture", NAMES)
@pytest.mark.parametrize("attention", ["sdpa", "documents"])
def test_a_document_changes_no_bit_of_another(architecture: str, attention: str) -> None:
    assert strangers_that_changed(built(architecture, attention)) == []


def test_a_mask_of_ones_lets_documents_see_the_ones_before_them() -> None:
    """Why packed() gives none: Transformers then stops looking at the positions."""
    mask = torch.ones_like(INPUTS["input_ids"])
    model = built("llama", "sdpa")
    assert strangers_that_changed(model, attention_mask=mask) == [0, 1, 2, 3]
    use_document_attention(model)
    assert strangers_that_changed(model, attention_mask=mask) == []


@pytest.mark.parametrize("architecture", ["llama", "deepseek_v3"])
def test_rows_that_are_not_packed_are_plain_causal(architecture: str) -> None:
    ids = torch.randint(3, 97, (3, 12), generator=torch.Generator().manual_seed(0))
    plain, model = built(architecture, "sdpa"), built(architecture, "documents")
    expected = plain(input_ids=ids, use_cache=False).logits
    assert close(architecture, model(input_ids=ids, use_cache=False).logits, expected)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # its name in the next major release
def test_gradients_survive_recomputation() -> None:
    model = built("llama", "documents").train()
    expected = gradients(model, model(use_cache=False, **INPUTS).logits.square().sum())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found = gradients(model, model(use_cache=False, **INPUTS).logits.square().sum())
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# Calls that bring no lengths: the same as the model with its former attention.

IDS = torch.randint(3, 97, (3, 12), generator=torch.Generator().manual_seed(3))
LEFT = torch.ones_like(IDS)
LEFT[0, :5] = LEFT[2, :2] = 0
RESTARTS = torch.stack(
    [torch.cat([torch.arange(n) for n in row]) for row in ((7, 5), (12,), (1, 8, 3))]
)
CALLS: dict[str, dict[str, Any]] = {
    "rows alone": {},
    "left padding": {"attention_mask": LEFT, "position_ids": (LEFT.cumsum(1) - 1).clamp(min=0)},
    "right padding": {"attention_mask": LEFT.flip(1)},
    "a mask of ones": {"attention_mask": torch.ones_like(LEFT), "position_ids": RESTARTS},
    "documents by positions": {"position_ids": RESTARTS},
    "one row's positions": {"position_ids": RESTARTS[2:]},
    "positions and a cache": {"position_ids": RESTARTS, "use_cache": True},
    "positions from five on": {"position_ids": torch.arange(5, 17)[None]},
    "a mask of four dimensions": {"attention_mask": torch.ones(3, 1, 12, 12).bool().tril(-0)},
}
SEPARATED = ("rows alone", "a mask of ones", "documents by positions", "one row's positions")


@pytest.mark.parametrize(
    ("architecture", "usual"),
    covering(["llama", "deepseek_v3", "deepseek_v32"], ["sdpa", "eager"]),
)
def test_a_call_without_lengths_is_what_it_is_in_the_plain_model(
    architecture: str, usual: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In training, with its gradients, and in evaluation.

    In float32 for eager, whose masks of float64 are too low for its softmax.
    """
    plain, model = built(architecture, usual), built(architecture, usual)
    if usual == "eager":
        plain, model = plain.float(), model.float()
    use_document_attention(model)
    former: list[Any] = []
    plainly = document_attention._usual
    monkeypatch.setattr(
        document_attention, "_usual", lambda module: former.append(module) or plainly(module)
    )
    for name, call in CALLS.items():
        settings = {"input_ids": IDS, "use_cache": False, **call}
        counted = call.get("attention_mask", LEFT)
        weights = (counted if counted.ndim == 2 else LEFT).unsqueeze(-1)
        plain.train(), model.train()
        expected, found = plain(**settings).logits * weights, model(**settings).logits * weights
        assert close(architecture, found, expected), name
        if "padding" in name or name in SEPARATED:
            assert bool(former) is ("padding" in name), name
        former.clear()
        one, other = (
            gradients(m, x.square().sum()) for m, x in ((model, found), (plain, expected))
        )
        assert all(close(architecture, one[key], other[key]) for key in other), name
        plain.eval(), model.eval()
        with torch.no_grad():
            assert torch.equal(model(**settings).logits, plain(**settings).logits), name
        former.clear()


@pytest.mark.parametrize(("architecture", "usual"), covering(NAMES, ["sdpa", "eager"]))
def test_generation_is_that_of_the_former_attention(architecture: str, usual: str) -> None:
    plain, model = built(architecture, usual), built(architecture, usual)
    use_document_attention(model)
    model.train()(use_cache=False, **INPUTS).logits.sum().backward()
    ways: list[dict[str, Any]] = [{}, {"num_beams": 2}, {"use_cache": False}]
    if architecture != "deepseek_v2":  # has no static cache
        ways.append({"cache_implementation": "static", "disable_compile": True})
    if architecture in ("llama", "qwen3"):
        ways.append({"prompt_lookup_num_tokens": 2})
    for way in ways:
        rows = 1 if "prompt_lookup_num_tokens" in way else len(IDS)
        given = {"input_ids": IDS[:rows], "attention_mask": LEFT[:rows], "do_sample": False}
        given |= {"max_new_tokens": 5, "eos_token_id": None, "pad_token_id": 0, **way}
        expected, found = plain.eval().generate(**given), model.eval().generate(**given)
        assert torch.equal(found, expected), way


def test_lengths_and_a_mask_that_hides_tokens_are_refused() -> None:
    model, mask = built("llama", "documents"), torch.ones_like(INPUTS["input_ids"])
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="leave one of them out"):
        model(use_cache=False, attention_mask=mask, **INPUTS)


def test_an_attention_that_keeps_documents_apart_itself_is_not_replaced() -> None:
    model = built("llama", "flex_attention")
    with pytest.raises(ValueError, match="flex_attention, which isn't sdpa or eager"):
        use_document_attention(model)


def test_for_given_lengths_the_host_does_not_wait() -> None:
    model = built("llama", "documents").train()
    tensors = [t for t in INPUTS.values() if isinstance(t, Tensor)]
    with HostWaits(tensors) as waits:
        model(use_cache=False, **INPUTS)
    assert not waits.places
    told = {name: INPUTS[name] for name in ("input_ids", "position_ids")}
    with HostWaits(tensors) as waits:  # as it does in Transformers' own attention
        model(use_cache=False, **told)
    assert waits.places


def test_only_the_model_that_asks_is_changed() -> None:
    first, second = built("llama", "sdpa"), built("llama", "sdpa")
    use_document_attention(first)
    assert first.config._attn_implementation == document_attention.NAME
    assert second.config._attn_implementation == "sdpa"


def _tensors(heads: int = 4, kv_heads: int = 2, tokens: int = 9) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(1, n, tokens, 8) for n in (heads, kv_heads, kv_heads)]
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def test_documents_with_a_window_are_refused_not_ignored() -> None:
    with pytest.raises(ValueError, match="neither a cache nor a sliding window"):
        attend(nn.Identity(), *_tensors(), None, document_lengths=(4, 5), sliding_window=4)


def _reference(query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Attention by the definition, one document, head and token at a time: (1, T, heads, d)."""
    out = torch.zeros_like(query).transpose(1, 2)
    group = query.shape[1] // key.shape[1]
    start = 0
    for length in lengths:
        for head in range(query.shape[1]):
            for t in range(start, start + length):
                k, v = (x[0, head // group, start : t + 1] for x in (key, value))
                weights = torch.softmax(k @ query[0, head, t] * 0.3, dim=0)
                out[0, t, head] = weights @ v
        start += length
    return out


def test_attention_is_what_the_definition_says() -> None:
    tensors, lengths = _tensors(), (4, 3, 1, 1)
    found, _ = attend(nn.Identity(), *tensors, None, scaling=0.3, document_lengths=lengths)
    torch.testing.assert_close(found, _reference(*tensors, lengths), rtol=1e-12, atol=1e-14)


def test_documents_of_one_length_are_rows_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, lengths = _tensors(), (3, 3, 3)
    calls: list[tuple[int, ...]] = []
    causal = document_attention._causal

    def counted(query: Tensor, *given: Any) -> Tensor:
        calls.append(tuple(query.shape))
        return causal(query, *given)

    monkeypatch.setattr(document_attention, "_may_be_rows", lambda *given: True)
    monkeypatch.setattr(document_attention.products, "fits_attention", lambda *given: False)
    monkeypatch.setattr(document_attention, "_causal", counted)
    out, _ = attend(nn.Identity(), *tensors, None, scaling=0.3, document_lengths=lengths)
    assert calls == [(3, 4, 3, tensors[0].shape[-1])]
    torch.testing.assert_close(out, _reference(*tensors, lengths), rtol=1e-12, atol=1e-14)


class OnGpu:
    """What is asked of a tensor on a GPU: a row of nine tokens."""

    is_cuda, dtype, device = True, torch.bfloat16, torch.device("cuda:0")

    def __init__(self, width: int = 8) -> None:
        self.shape = (1, 4, 9, width)

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize("lengths", [(4, 5), (3, 3), (9,) * 2])
def test_other_documents_are_no_rows(lengths: tuple[int, ...]) -> None:
    one: Any = OnGpu()
    assert not document_attention._may_be_rows((one, one, one), lengths, 0.0)
    assert document_attention._may_be_rows((one, one, one), (3, 3, 3), 0.0)


@pytest.mark.parametrize(
    ("lengths", "hopper", "takes", "expected"),
    [
        ((1000, 1100), True, True, True),
        ((1000, 1000), True, True, False),
        ((1000, 1100), False, True, False),
        ((1000, 1100), True, False, False),
    ],
)
def test_long_documents_go_one_by_one_where_cudnn_is_faster(
    monkeypatch: pytest.MonkeyPatch,
    lengths: tuple[int, ...],
    hopper: bool,
    takes: bool,
    expected: bool,
) -> None:
    one: Any = OnGpu()
    monkeypatch.setattr(document_attention, "_is_hopper", lambda device: hopper)
    monkeypatch.setattr(document_attention, "_cudnn_takes", lambda *given: takes)
    assert document_attention._are_long((one, one, one), lengths, 0.0) is expected


def test_a_kernel_that_groups_heads_gets_keys_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(
        q: Tensor, k: Tensor, v: Tensor, *where: Any, scale: float, enable_gqa: bool = False
    ) -> Tensor:
        assert (q.shape[1], k.shape[1], v.shape[1]) == (4, kv_heads, kv_heads)
        assert enable_gqa == (kv_heads < 4)
        rows = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        return _reference(*rows, (9,))[0]

    _always(monkeypatch, kernel)
    boundaries = torch.tensor([0, 9], dtype=torch.int32)
    for kv_heads in (1, 2, 4):
        tensors = _tensors(kv_heads=kv_heads)
        found, _ = attend(
            nn.Identity(), *tensors, None, 0.3, document_lengths=(9,), boundaries=boundaries
        )
        torch.testing.assert_close(found, _reference(*tensors, (9,)), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("widths", [(24, 16), (16, 24), (12, 12), (192, 128)])
@pytest.mark.parametrize("scale", [0.3, None])
def test_heads_of_two_widths_share_the_kernel(
    monkeypatch: pytest.MonkeyPatch, widths: tuple[int, int], scale: float | None
) -> None:
    """Latent attention: filled up to one width that the kernel takes, and cut again."""
    boundaries = torch.tensor([0, 4, 7, 9], dtype=torch.int32)

    def kernel(q: Tensor, k: Tensor, v: Tensor, *where: Any, scale: float) -> Tensor:
        assert q.shape == k.shape == v.shape
        assert q.shape[-1] == -(-max(widths) // 8) * 8
        rows = (t.transpose(0, 1).unsqueeze(0).split((4, 3, 2), dim=2) for t in (q, k, v))
        found = [
            F.scaled_dot_product_attention(*piece, is_causal=True, scale=scale)
            for piece in zip(*rows, strict=True)
        ]
        return torch.cat(found, dim=2)[0].transpose(0, 1)

    generator = torch.Generator().manual_seed(1)
    shapes = [(1, 2, 9, widths[0]), (1, 2, 9, widths[0]), (1, 2, 9, widths[1])]
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    documents: dict[str, Any] = {"document_lengths": (4, 3, 2), "boundaries": boundaries}

    def outcome() -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in tensors]
        out, _ = attend(nn.Identity(), *leaves, None, scale, **documents)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    expected = outcome()
    _always(monkeypatch, kernel)
    for found, other in zip(outcome(), expected, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("widths", [(128, 128), (192, 128)])
def test_the_kernel_of_a_gpu_agrees_with_float64(widths: tuple[int, int]) -> None:
    boundaries = torch.tensor([0, 40, 70, 99], dtype=torch.int32, device="cuda")
    shapes = [(1, 4, 99, widths[0]), (1, 2, 99, widths[0]), (1, 2, 99, widths[1])]
    tensors = [torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes]
    near = [t.clone().requires_grad_() for t in tensors]
    wide = [t.double().requires_grad_() for t in tensors]
    lengths = (40, 30, 29)
    out, _ = attend(nn.Identity(), *near, None, document_lengths=lengths, boundaries=boundaries)
    expected, _ = attend(nn.Identity(), *wide, None, document_lengths=lengths)
    found = [out, *torch.autograd.grad(out.float().square().sum(), near)]
    truth = [expected, *torch.autograd.grad(expected.square().sum(), wide)]
    for one, other in zip(found, truth, strict=True):
        assert (one - other).norm() <= 0.02 * other.norm()


def test_heads_too_wide_or_with_dropout_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_attention, "_has_varlen", lambda device: True)
    fits: Any = document_attention._fits_varlen
    assert fits(OnGpu(192), OnGpu(128), 0.0)
    assert not fits(OnGpu(192), OnGpu(128), 0.1)
    assert not fits(OnGpu(264), OnGpu(128), 0.0)


def _always(monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., Tensor]) -> None:
    monkeypatch.setattr(document_attention, "_varlen", lambda: kernel)
    monkeypatch.setattr(document_attention, "_fits_varlen", lambda *given: True)


# A document that attends to the first tokens of the one before

LENGTHS, PREFIXES = (20, 9, 7, 30, 12), (0, 13, 0, 0, 30)


def definition(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention of each document by its definition, (1, T, heads, d)."""
    outputs, start, before = [], 0, 0
    for length, prefix in zip(LENGTHS, PREFIXES, strict=True):
        keys = [*range(before, before + prefix), *range(start, start + length)]
        seen = torch.ones(length, prefix + length, dtype=torch.bool).tril(prefix)
        groups = q.shape[1] // k.shape[1]
        key, value = (t[:, :, keys].repeat_interleave(groups, 1) for t in (k, v))
        scores = q[:, :, start : start + length] @ key.transpose(2, 3) * scale
        outputs.append(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value)
        before, start = start, start + length
    return torch.cat(outputs, 2).transpose(1, 2)


def bottom_right(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: int,
    most_keys: int,
    scale: float,
    enable_gqa: bool = True,
) -> Tensor:
    """A variable-length kernel whose queries are those of a document's last keys."""
    assert (starts.diff().max(), key_starts.diff().max()) == (longest, most_keys)
    outputs = []
    pieces = (
        t.split(n.diff().tolist()) for t, n in ((q, starts), (k, key_starts), (v, key_starts))
    )
    for one, two, three in zip(*pieces, strict=True):
        mask = torch.ones(len(one), len(two), dtype=torch.bool).tril(len(two) - len(one))
        rows = [t.transpose(0, 1) for t in (one, two, three)]
        out = F.scaled_dot_product_attention(*rows, mask, scale=scale, enable_gqa=enable_gqa)
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", ["the processor's", "one for GPUs"])
def test_a_document_sees_the_first_tokens_of_the_one_before(
    kernel: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float64 has no kernel, so SDPA is called for each document."""
    if kernel == "one for GPUs":
        _always(monkeypatch, bottom_right)
        monkeypatch.setattr(document_attention.products, "fits_attention", lambda *given: False)
    draw = torch.Generator().manual_seed(4)
    given = [
        torch.randn(1, heads, sum(LENGTHS), width, generator=draw).to(dtype).requires_grad_()
        for heads, width in ((4, 16), (2, 16), (2, 16))
    ]
    wide = [t.detach().double().requires_grad_() for t in given]
    expected = definition(*wide, 0.3)
    found, _ = attend(nn.Identity(), *given, None, 0.3, document_lengths=LENGTHS, prefixes=PREFIXES)
    grad = torch.randn(found.shape, generator=draw).to(dtype)
    got = [found, *torch.autograd.grad(found, given, grad)]
    want = [expected, *torch.autograd.grad(expected, wide, grad.double())]
    bound = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    for one, other in zip(got, want, strict=True):
        assert one.dtype == dtype
        assert (one - other).norm() <= bound * other.norm()


@pytest.mark.parametrize("architecture", ["llama", "deepseek_v3"])
def test_an_answer_changes_no_bit_of_the_other(architecture: str) -> None:
    """They share seven tokens."""
    model = built(architecture, "documents")
    inputs: dict[str, Any] = {
        "input_ids": torch.arange(3, 27).unsqueeze(0),
        "position_ids": torch.tensor([[*range(12), *range(7, 12), *range(7)]]),
        "document_lengths": (12, 5, 7),
        "prefixes": (0, 7, 0),
    }

    @torch.no_grad()
    def logits(ids: Tensor) -> tuple[Tensor, ...]:
        out: Tensor = model(use_cache=False, **{**inputs, "input_ids": ids}).logits[0]
        return out.split((7, 5, 5, 7))

    ids = inputs["input_ids"]
    before = logits(ids)
    for part, seen in (("prompt", (0, 1, 2)), ("chosen", (1,)), ("rejected", (2,))):
        start, stop = {"prompt": (0, 7), "chosen": (7, 12), "rejected": (12, 17)}[part]
        changed = ids.clone()
        changed[0, start:stop] += 40
        for index, (one, other) in enumerate(zip(before, logits(changed), strict=True)):
            assert torch.equal(one, other) == (index not in seen), (part, index)


def test_a_prefix_needs_one_row_and_no_indexer() -> None:
    q = torch.zeros(2, 2, 5, 8)
    with pytest.raises(ValueError, match="one packed row"):
        attend(nn.Identity(), q, q, q, None, document_lengths=(5, 5), prefixes=(0, 2))
