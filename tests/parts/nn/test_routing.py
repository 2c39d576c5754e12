"""Balance of experts: loads and losses against plain loops over tokens, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hasten.parts.data.collate import IGNORED, padded
from hasten.parts.nn.losses import WholeLogitsLoss
from hasten.parts.nn.recompute import BlockRecompute
from hasten.parts.nn.router_balance import (
    FILLER,
    RouterBalance,
    load_ratios,
    routers,
    sequence_balance,
    sequence_ids,
)
from tiny import examples, tiny_model

EXAMPLES = examples(5, seed=2)
PADDED = padded(EXAMPLES)
WHERE = sequence_ids([r.length for r in EXAMPLES], PADDED["input_ids"].shape)


# What each paper makes of a router's logits; V4's is the root of a softplus.
AFFINITIES: dict[str, Callable[[Tensor], Tensor]] = {
    "deepseek_v2": lambda logits: logits.softmax(dim=-1),
    "deepseek_v3": torch.sigmoid,
    "deepseek_v32": torch.sigmoid,
    "deepseek_v4": lambda logits: logits.exp().log1p().sqrt(),
}
every = pytest.mark.parametrize("architecture", AFFINITIES)


@torch.no_grad()
def paper(scores: Tensor, chosen: Tensor, sequences: Tensor, weights: Tensor) -> float:
    """Equations 17 to 20 of arXiv:2412.19437, token by token."""
    experts, top_k, total = scores.shape[1], chosen.shape[1], 0.0
    for sequence, weight in enumerate(weights.tolist()):
        tokens = [t for t in range(len(scores)) if int(sequences[t]) == sequence]
        for expert in range(experts):
            hits = sum(expert in chosen[t].tolist() for t in tokens)
            frequency = experts / (top_k * len(tokens)) * hits if tokens else 0.0
            shares = [float(scores[t, expert] / scores[t].sum()) for t in tokens]
            total += weight * frequency * sum(shares) / max(len(tokens), 1)
    return total


def balance_of(model: Any, batch: dict[str, Any], where: Tensor, **changes: Any) -> RouterBalance:
    """One watched pass, its backward, and the update."""
    balance = RouterBalance(model, **changes)
    backward(balance, WholeLogitsLoss(model).train(), batch, where)
    return balance


def backward(balance: RouterBalance, loss_of: Any, batch: Any, where: Tensor) -> Tensor:
    with balance.watching(where):
        loss, _ = loss_of(**batch)
    (loss + balance.loss(batch["labels"])).backward()
    return loss


@given(
    st.integers(1, 4), st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(0, 10**6)
)
def test_the_balance_loss_is_the_papers_whatever_the_sequences(
    top_k: int, lengths: list[int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    where = sequence_ids(lengths, (len(lengths), 6))
    scores = torch.rand(len(where), 5, generator=generator, dtype=torch.float64) + 0.01
    chosen = scores.topk(top_k).indices
    weights = torch.rand(len(lengths), generator=generator, dtype=torch.float64)
    found = sequence_balance(scores, chosen, where, weights)
    assert float(found) == pytest.approx(paper(scores, chosen, where, weights), rel=1e-12)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 5))
def test_every_token_has_its_sequence_and_filler_none(lengths: list[int], more: int) -> None:
    apart = sequence_ids(lengths, (len(lengths), max(lengths) + more)).view(len(lengths), -1)
    for row, length in enumerate(lengths):
        assert apart[row].tolist() == [row] * length + [FILLER] * (max(lengths) + more - length)
    end_to_end = sequence_ids(lengths, (1, sum(lengths) + more)).tolist()
    assert end_to_end == [i for i, n in enumerate(lengths) for _ in range(n)] + [FILLER] * more


@pytest.mark.parametrize("shape", [(1, 5), (2, 9), (3, 2)])
def test_lengths_that_fit_no_batch_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="have no defined positions"):
        sequence_ids([3, 3, 3], shape)


@every
def test_loads_count_every_token_and_no_filler(architecture: str) -> None:
    model: Any = tiny_model(architecture)
    seen: list[Tensor] = []
    handle = routers(model)[0].register_forward_hook(lambda m, i, o: seen.append(o[2]))
    balance = balance_of(model, PADDED, WHERE, speed=0.0)
    handle.remove()
    balance.after_update()
    expected = [0] * 4
    for slot, choice in enumerate(seen[0].tolist()):
        for expert in choice:
            expected[expert] += int(WHERE[slot]) != FILLER
    assert balance.last is not None
    assert balance.last.tolist() == [expected]
    assert sum(expected) == 2 * sum(r.length for r in EXAMPLES)


def test_a_bias_moves_by_speed_towards_the_experts_with_less_than_the_mean() -> None:
    model: Any = tiny_model("deepseek_v3")
    balance = RouterBalance(model, speed=0.01)
    balance._loads = torch.tensor([[5.0, 1.0, 3.0, 3.0]], dtype=torch.float64)
    balance.after_update()
    bias = routers(model)[0].e_score_correction_bias
    torch.testing.assert_close(bias, torch.tensor([-0.01, 0.01, 0.0, 0.0]))
    loads = torch.tensor([[5.0, 1.0, 3.0, 3.0], [0, 0, 0, 0]], dtype=torch.float64)
    assert load_ratios(loads).tolist() == pytest.approx([5 / 3, 1.0])


@every
def test_the_loss_is_the_papers_with_each_sequence_weighed_by_its_trained_tokens(
    architecture: str,
) -> None:
    model: Any = tiny_model(architecture)
    heard: list[Any] = []
    handle = routers(model)[0].register_forward_hook(lambda m, i, o: heard.append(o))
    balance = RouterBalance(model, speed=0.0, sequence_loss=0.5)
    with balance.watching(WHERE):
        WholeLogitsLoss(model)(**PADDED)
    handle.remove()
    logits, _, chosen = heard[0]
    scores = AFFINITIES[architecture](logits.detach().double())
    if architecture != "deepseek_v2":
        chosen = scores.topk(2).indices
    weights = (PADDED["labels"] != IGNORED).sum(dim=1)
    expected = 0.5 * paper(scores, chosen, WHERE, weights)
    assert float(balance.loss(PADDED["labels"])) == pytest.approx(expected, rel=1e-5)


@every
def test_the_loss_does_not_depend_on_how_records_are_laid_out(architecture: str) -> None:
    """Padded rows, or one at a time: the sums agree, and so do loads and the routers' gradients."""
    found = []
    for pieces in ([EXAMPLES], [[r] for r in EXAMPLES]):
        model: Any = tiny_model(architecture)
        balance = RouterBalance(model, speed=0.0, sequence_loss=0.3)
        for piece in pieces:
            batch = padded(piece)
            where = sequence_ids([r.length for r in piece], batch["input_ids"].shape)
            backward(balance, WholeLogitsLoss(model).train(), batch, where)
        balance.after_update()
        assert balance.last is not None
        found.append((balance.last, routers(model)[0].weight.grad))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-6)


def test_recomputed_passes_are_not_counted_and_gradients_stay() -> None:
    found = []
    for recompute in (False, True):
        model: Any = tiny_model("deepseek_v3")
        balance = RouterBalance(model, speed=0.0, sequence_loss=0.3)
        loss_of = WholeLogitsLoss(model).train()
        if recompute:
            BlockRecompute()(loss_of)
        backward(balance, loss_of, PADDED, WHERE)
        balance.after_update()
        assert balance.last is not None
        found.append((balance.last, routers(model)[0].weight.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_a_pass_of_filler_alone_counts_nothing_and_adds_nothing() -> None:
    """A rank without an example of its own takes part in a step like this."""
    model: Any = tiny_model("deepseek_v3")
    labels = torch.full_like(PADDED["labels"], IGNORED)
    nobody = sequence_ids([0] * len(labels), labels.shape)
    balance = RouterBalance(model, speed=0.1, sequence_loss=1.0)
    with balance.watching(nobody):
        model(input_ids=PADDED["input_ids"])
    assert float(balance.loss(labels)) == 0.0
    balance.after_update()
    assert balance.last is not None
    assert not balance.last.any()
    assert not balance.biases[0].any()


def test_a_model_that_was_moved_has_its_own_biases_moved() -> None:
    """A move to another device or format makes new buffers."""
    model: Any = tiny_model("deepseek_v3")
    balance = RouterBalance(model, speed=0.01)
    model.double()
    model.set_experts_implementation("eager")
    backward(balance, WholeLogitsLoss(model).train(), PADDED, WHERE)
    balance.after_update()
    assert routers(model)[0].e_score_correction_bias.any()


def test_a_rank_that_holds_no_layer_with_experts_counts_zero_and_is_told_the_rest() -> None:
    model: Any = tiny_model("deepseek_v3")
    balance, others = RouterBalance(model, speed=0.01), torch.tensor([[3.0, 1.0, 0.0, 0.0]])
    with balance.watching(WHERE):
        pass  # its layers have run
    assert float(balance.loss(PADDED["labels"])) == 0.0
    balance.after_update(lambda loads: loads + others)
    assert balance.last is not None
    assert torch.equal(balance.last, others.double())
    assert balance.biases[0].tolist() == pytest.approx([-0.01, 0.0, 0.01, 0.01])


def test_half_precision_biases_become_wide_enough_for_small_steps() -> None:
    model: Any = tiny_model("deepseek_v3", dtype=torch.bfloat16)
    balance = RouterBalance(model, speed=0.001)
    assert {b.dtype for b in balance.biases} == {torch.float32}


def test_hooks_come_off() -> None:
    model: Any = tiny_model("deepseek_v3")
    balance = RouterBalance(model)
    balance.remove()
    assert not any(router._forward_hooks for router in routers(model))


def test_models_without_routers_or_biases_are_refused() -> None:
    with pytest.raises(ValueError, match="has no routers that are known here"):
        RouterBalance(tiny_model("llama"))
    with pytest.raises(ValueError, match="have no bias to move; give speed 0"):
        RouterBalance(tiny_model("deepseek_v2"))
    with pytest.raises(ValueError, match="no pass was watched"):
        RouterBalance(tiny_model("deepseek_v3")).loss(PADDED["labels"])
