"""Attention of the processor's kernels against float64, for any width, length and stride.

In bf16, weights and their gradients are rounded before the second product, each by 2^-8 of itself,
and so is the result: the bound is two of these, of the terms' absolute values or of their norm. In
float32 sums are off by a few of 2^-24. Every way to multiply is proven, as in the products.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hasten.parts.kernels import products
from hasten.parts.nn import fused_functions
from hasten.parts.nn.attention import attend
from kernel_units import FORMATS, numbers, take

pytestmark = pytest.mark.skipif(not products.library().library, reason=products.library().reason)
# Half a unit in the last place of bf16; of float32's sums a few units.
BOUNDS = {torch.bfloat16: 2**-8, torch.float32: 2**-19}


@pytest.fixture(params=FORMATS, autouse=True)
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """The format of the inputs; bf16 in each way to multiply."""
    return take(request.param, monkeypatch)


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, ...],
    scale: float,
    keys: tuple[int, ...] | None = None,
) -> Tensor:
    """Float64 attention of each document by its definition: (T, heads, dv).

    Of a document with more ``keys`` the queries are those of the last ones.
    """
    each, out = q.shape[1] // k.shape[1], []
    k, v = (t.repeat_interleave(each, dim=1) for t in (k, v))
    sizes = (lengths, keys or lengths, keys or lengths)
    pieces = (t.split(n) for t, n in zip((q, k, v), sizes, strict=True))
    for a, b, c in zip(*pieces, strict=True):
        scores = torch.einsum("qhd,khd->hqk", a, b) * scale
        seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(len(b) - len(a))
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", weights, c))
    return torch.cat(out)


def starts_of(lengths: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(itertools.accumulate(lengths, initial=0))


def tensors(
    dtype: torch.dtype, tokens: int, heads: int, groups: int, dk: int, dv: int, more_keys: int = 0
) -> list[Tensor]:
    keys = tokens + more_keys
    return [
        numbers(n, h, d, seed=s, dtype=dtype).requires_grad_()
        for s, (n, h, d) in enumerate(((tokens, heads, dk), (keys, groups, dk), (keys, groups, dv)))
    ]


def check_attention(
    dtype: torch.dtype,
    lengths: tuple[int, ...],
    heads: int,
    groups: int,
    dk: int,
    dv: int,
    scale: float | None = None,
    ahead: tuple[int, ...] = (),
) -> None:
    ahead = ahead or (0,) * len(lengths)
    keys = tuple(n + more for n, more in zip(lengths, ahead, strict=True))
    given = tensors(dtype, sum(lengths), heads, groups, dk, dv, sum(ahead))
    wide = [t.detach().double().requires_grad_() for t in given]
    scale = dk**-0.5 if scale is None else scale
    found = fused_functions.attend(*given, starts_of(lengths), scale, starts_of(keys))
    expected = sdpa(*wide, lengths, scale, keys)
    assert found.dtype == dtype
    bound = 2 * BOUNDS[dtype]
    # Weights of sum 1, each rounded, times values; then the result is rounded.
    assert (found - expected).abs().max() <= bound * max(t.abs().max() for t in given)
    grad = numbers(*found.shape, seed=9, dtype=dtype)
    got = torch.autograd.grad(found, given, grad)
    want = torch.autograd.grad(expected, wide, grad.double())
    # The sum rowsum(dO O) stands against terms as large, and in bf16 its output is rounded.
    floor = 1e-2 if dtype == torch.bfloat16 else 1.0
    for one, other in zip(got, want, strict=True):
        largest = max(other.norm().item(), floor * grad.norm().item())
        assert (one - other).norm() <= bound * largest


@pytest.mark.parametrize("lengths", [(7,), (130, 45), (300, 1, 200)], ids=str)
def test_nothing_of_an_earlier_call_is_left(dtype: torch.dtype, lengths: tuple[int, ...]) -> None:
    poisoned = [torch.full_like(t, torch.nan) for t in tensors(dtype, 700, 4, 2, 64, 48)]
    leaves = [t.requires_grad_() for t in poisoned]
    found = fused_functions.attend(*leaves, (0, 700), 0.1)
    assert all(t.isnan().all() for t in torch.autograd.grad(found.sum(), leaves))
    check_attention(dtype, lengths, 4, 2, 64, 48)


@settings(max_examples=20)
@given(
    lengths=st.lists(st.one_of(st.integers(0, 70), st.just(150)), min_size=1, max_size=6),
    groups=st.integers(1, 2),
    each=st.integers(1, 3),
    dk=st.integers(8, 80),
    dv=st.integers(8, 80),
)
def test_attention_and_its_gradients_are_those_of_each_document_alone(
    dtype: torch.dtype, lengths: list[int], groups: int, each: int, dk: int, dv: int
) -> None:
    if not sum(lengths):
        lengths = [*lengths, 1]
    check_attention(dtype, tuple(lengths), groups * each, groups, dk, dv)


@settings(max_examples=20)
@given(
    documents=st.lists(
        st.tuples(st.integers(0, 110), st.one_of(st.just(0), st.integers(0, 210))),
        min_size=1,
        max_size=5,
    ),
    groups=st.integers(1, 2),
    each=st.integers(1, 2),
    dk=st.integers(8, 40),
    dv=st.integers(8, 40),
)
def test_a_document_has_keys_before_those_of_its_queries(
    dtype: torch.dtype, documents: list[tuple[int, int]], groups: int, each: int, dk: int, dv: int
) -> None:
    documents = [(1, 0), *((n, ahead if n else 0) for n, ahead in documents)]
    lengths, ahead = zip(*documents, strict=True)
    check_attention(dtype, lengths, groups * each, groups, dk, dv, ahead=ahead)


def test_a_document_with_fewer_keys_than_queries_is_refused(dtype: torch.dtype) -> None:
    q, k, v = (t.detach() for t in tensors(dtype, 20, 4, 2, 16, 8))
    with pytest.raises(ValueError, match="fewer keys than queries"):
        products.attention(q, k, v, [0, 8, 20], [0, 7, 20], 0.25)


@pytest.mark.parametrize("dk", [8, 64, 96, 128, 192])
@pytest.mark.parametrize("dv", [8, 64, 128])
def test_attention_takes_every_width_of_a_head(dtype: torch.dtype, dk: int, dv: int) -> None:
    check_attention(dtype, (1, 130, 33), 2, 1, dk, dv)


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 127, 128, 129, 255, 256, 257, 600])
def test_attention_takes_every_length_around_its_blocks(dtype: torch.dtype, length: int) -> None:
    check_attention(dtype, (length,), 2, 2, 16, 24)
    check_attention(dtype, (3, length, 0, 5), 2, 1, 16, 24, scale=0.5)


@torch.no_grad()
def test_the_logarithm_of_each_rows_sum_is_kept_for_backward(dtype: torch.dtype) -> None:
    lengths = (40, 0, 70)
    q, k, v = tensors(dtype, 110, 2, 1, 16, 8)
    _, lse = products.attention(q, k, v, starts_of(lengths), starts_of(lengths), 0.3)
    start = 0
    for length in lengths:
        a, b = (t[start : start + length].double() for t in (q, k))
        scores = torch.einsum("qhd,kd->hqk", a, b[:, 0]) * 0.3
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        expected = scores.masked_fill(~seen, -torch.inf).logsumexp(-1)
        torch.testing.assert_close(
            lse[:, start : start + length].double(), expected, rtol=1e-5, atol=1e-5
        )
        start += length


def passes(given: list[Tensor], lengths: tuple[int, ...], grad: Tensor) -> list[Tensor]:
    """Output and the three gradients, without history."""
    leaves = [t.detach().requires_grad_() for t in given]
    out = fused_functions.attend(*leaves, starts_of(lengths), 0.25)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


LENGTHS = (45, 130, 1, 64)


@pytest.mark.parametrize("which", range(len(LENGTHS)))
@pytest.mark.parametrize("bad", [False, True], ids=["other numbers", "NaN"])
def test_a_document_changes_no_bit_of_another(dtype: torch.dtype, which: int, bad: bool) -> None:
    given = tensors(dtype, sum(LENGTHS), 4, 2, 24, 16)
    grad = numbers(sum(LENGTHS), 4, 16, dtype=dtype)
    before = passes(given, LENGTHS, grad)
    start, end = starts_of(LENGTHS)[which : which + 2]
    changed = [t.detach().clone() for t in given]
    for t in changed:
        t[start:end] = torch.nan if bad else t[start:end] * 3 + 1
    after = passes(changed, LENGTHS, grad)
    for old, new in zip(before, after, strict=True):
        differs = (old != new).flatten(1).any(dim=1)
        differs[start:end] = False
        assert not differs.any()
        if bad:
            assert new[start:end].isnan().all()
    assert (before[0] != after[0]).flatten(1).any(dim=1)[start:end].all()


@pytest.mark.parametrize("which", ["query", "key", "value", "gradient"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_number_that_is_not_finite_stays_visible(
    dtype: torch.dtype, which: str, bad: float
) -> None:
    """In the output of each token that sees it, and in the gradients of its document."""
    given = [t.detach().clone() for t in tensors(dtype, 90, 2, 1, 16, 16)]
    grad = numbers(90, 2, 16, dtype=dtype)
    place = ("query", "key", "value", "gradient").index(which)
    [*given, grad][place][60, 0, 5] = bad
    out, *gradients = passes(given, (40, 50), grad)
    if which == "query":
        assert out[60, 0].isnan().all()
    elif which in ("key", "value"):
        seeing = out[60:].flatten(1).isfinite().all(dim=1)
        assert not seeing.any() or which == "key"
        assert not seeing[0]
    assert any(not g[40:].isfinite().all() for g in gradients)
    assert all(t[:40].isfinite().all() for t in (out, *gradients))


def test_the_bits_do_not_depend_on_the_number_of_threads(
    dtype: torch.dtype, monkeypatch: Any
) -> None:
    monkeypatch.setattr(products, "WORTH_THREADS", 1)
    given = tensors(dtype, sum(LENGTHS), 4, 2, 24, 16)
    grad = numbers(sum(LENGTHS), 4, 16, dtype=dtype)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4, 8):
            torch.set_num_threads(threads)
            found.append(passes(given, LENGTHS, grad))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, *more in zip(*found, strict=True) for other in more)


def test_heads_may_lie_apart_and_gradients_may_be_expanded(dtype: torch.dtype) -> None:
    whole = numbers(70, 3, 4, 32, dtype=dtype)
    views = [whole[:, i, :, 3 : 3 + d].requires_grad_() for i, d in enumerate((16, 16, 24))]
    copies = [v.detach().contiguous() for v in views]
    grad = torch.ones((), dtype=dtype).expand(70, 4, 24)
    for one, two in zip(
        passes(views, (70,), grad), passes(copies, (70,), grad.contiguous()), strict=True
    ):
        assert torch.equal(one, two)


@pytest.mark.parametrize("starts", [(0, 5), (1, 9), (0, 7, 3, 9), (), (0, 12)], ids=str)
def test_documents_that_do_not_cover_the_row_are_refused(
    dtype: torch.dtype, starts: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="don't cover 9 tokens"):
        fused_functions.attend(*tensors(dtype, 9, 2, 2, 8, 8), starts, 1.0)


def test_heads_that_do_not_belong_together_are_refused(dtype: torch.dtype) -> None:
    q, k, _ = tensors(dtype, 9, 3, 2, 8, 8)
    with pytest.raises(ValueError, match="don't belong together"):
        fused_functions.attend(q, k, k, (0, 9), 1.0)


@pytest.mark.parametrize("lengths", [(20,), (5, 7, 8)])
def test_attention_of_a_model_runs_here_for_one_row_and_for_several(
    dtype: torch.dtype, lengths: tuple[int, ...]
) -> None:
    q, k, v = (
        numbers(3, h, 20, d, seed=s, dtype=dtype)
        for s, (h, d) in enumerate(((4, 16), (2, 16), (2, 8)))
    )
    found, _ = attend(nn.Identity(), q, k, v, None, document_lengths=lengths)
    for row in range(3):
        parts = (t[row].transpose(0, 1).double() for t in (q, k, v))
        expected = sdpa(*parts, lengths, 0.25)
        assert (found[row] - expected).abs().max() <= 2 * BOUNDS[dtype] * v.abs().max()


def operators(dtype: torch.dtype) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    q, k, v = (t.detach() for t in tensors(dtype, 20, 4, 2, 16, 8))
    starts = [0, 8, 20]
    layout = starts, starts, 0.25
    out, lse = products.attention(q, k, v, *layout)
    return {
        "attention": (products.attention, (q, k, v, *layout)),
        "backward": (products.attention_backward, (out, q, k, v, out, lse, *layout)),
    }


@pytest.mark.parametrize("name", ["attention", "backward"])
def test_each_operator_keeps_its_word_to_torch(dtype: torch.dtype, name: str) -> None:
    operator, arguments = operators(dtype)[name]
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def test_a_compiled_graph_keeps_attention_whole(dtype: torch.dtype) -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fused_functions.attend(q, k, v, (0, 8, 20), 0.25) * 2

    given = tensors(dtype, 20, 4, 2, 16, 8)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    grad = numbers(20, 4, 8, dtype=dtype)
    found, expected = (torch.autograd.grad(f(*given), given, grad) for f in (compiled, layer))
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
