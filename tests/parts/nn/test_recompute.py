"""Recomputation: the same bits from less memory, on every architecture and in every mode."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

import hasten
from covering import covering
from hasten.parts.nn import rebind
from hasten.parts.nn.losses import WholeLogitsLoss
from hasten.parts.nn.recompute import (
    BlockRecompute,
    blocks_to_recompute,
    decoder_blocks,
    is_thrown_away,
    saved_bytes,
)
from tiny import ARCHITECTURES, VOCABULARY, tiny_config

MODES: dict[str, dict[str, Any]] = {
    "every block": {},
    "segments": {"segments": 2},
    "budget": {"budget": 0.5},
    "offload": {"offload": True},
}
modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def model(architecture: str, layers: int = 4) -> nn.Module:
    """With dropout in attention, so that a lost random state would show."""
    import transformers as hf

    config = tiny_config(architecture)
    config.num_hidden_layers = layers
    config.layer_types = ["full_attention"] * layers
    config.attention_dropout = 0.2
    torch.manual_seed(0)
    built: Any = hf.AutoModelForCausalLM.from_config(config)
    built.set_attn_implementation("sdpa")
    return WholeLogitsLoss(built).train()


def batch(seed: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.roll(-1, 1), "attention_mask": torch.ones_like(ids)}


def step(module: nn.Module, seed: int = 0, autocast: bool = False) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(7)
    module.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss, _ = module(**batch(seed))
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in module.parameters() if p.grad is not None]


def same(one: tuple[Tensor, list[Tensor]], other: tuple[Tensor, list[Tensor]]) -> bool:
    assert len(one[1]) == len(other[1]) > 0
    pairs = zip([one[0], *one[1]], [other[0], *other[1]], strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("architecture", "autocast", "mode"), covering(ARCHITECTURES, (False, True), MODES, rounds=2)
)
def test_losses_and_gradients_keep_their_bits_with_dropout(
    architecture: str, autocast: bool, mode: str
) -> None:
    plain, module = model(architecture), model(architecture)
    recompute = BlockRecompute(**MODES[mode])
    recompute(module)
    for seed in (0, 1):  # the second pass follows the budget's measurement
        assert same(step(module, seed, autocast), step(plain, seed, autocast))
    assert recompute.passes > 0
    assert torch.equal(torch.get_rng_state(), _state_after(plain, autocast))


def _state_after(plain: nn.Module, autocast: bool) -> Tensor:
    step(plain, 1, autocast)
    return torch.get_rng_state()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_fewer_bytes_are_saved_the_more_is_recomputed(architecture: str) -> None:
    found = {}
    for name, mode in MODES.items():
        module = model(architecture)
        recompute = BlockRecompute(**mode)
        recompute(module)
        step(module)  # a budget is planned in the first pass
        found[name] = recompute.saved_bytes(lambda: module(**batch()), module)  # noqa: B023
    plain = model(architecture)
    whole = saved_bytes(lambda: plain(**batch()), plain)
    assert found["every block"] < found["budget"] < whole
    assert found["every block"] < found["segments"] < whole
    assert found["offload"] < whole
    with recompute.off():
        assert recompute.saved_bytes(lambda: module(**batch()), module) == whole


@pytest.mark.parametrize("budget", [0.25, 0.5, 0.75])
def test_a_budget_is_met_by_the_blocks_own_bytes(budget: float) -> None:
    def blocks_bytes(recompute: BlockRecompute, module: nn.Module, head: int) -> int:
        return recompute.saved_bytes(lambda: module(**batch()), module) - head

    module = model("llama", layers=8)
    recompute = BlockRecompute(budget=budget)
    recompute(module)
    step(module)
    bare = model("llama", layers=8)
    for block in decoder_blocks(bare):
        block.forward = lambda hidden, **kwargs: hidden
    head = saved_bytes(lambda: bare(**batch()), bare)
    kept = blocks_bytes(recompute, module, head)
    with recompute.off():
        whole = blocks_bytes(recompute, module, head)
    assert kept <= budget * whole * 1.02  # rotary tables belong to no block
    assert kept > (budget - 0.2) * whole  # and no block too many is recomputed


@given(
    st.lists(
        st.tuples(st.integers(1, 1000), st.integers(0, 1000)).map(lambda p: (sum(p), p[0])),
        min_size=1,
        max_size=12,
    ),
    st.floats(0, 1),
)
def test_the_fewest_first_blocks_that_meet_a_budget_are_chosen(
    sizes: list[tuple[int, int]], budget: float
) -> None:
    def stays(count: int) -> int:
        return sum(r for _, r in sizes[:count]) + sum(k for k, _ in sizes[count:])

    picked = blocks_to_recompute(sizes, budget)
    assert picked == set(range(len(picked)))
    if len(picked) < len(sizes):
        assert stays(len(picked)) <= budget * stays(0)
    if picked:
        assert stays(len(picked) - 1) > budget * stays(0)


@pytest.mark.parametrize("segments", [2, 3, 4, 6])
def test_segments_are_those_of_checkpoint_sequential(segments: int) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)))
    module = copy.deepcopy(plain)
    x = torch.randn(5, 8, requires_grad=True)
    runs: list[int] = []
    for position, block in enumerate(plain):
        block.register_forward_pre_hook(lambda m, a, p=position: runs.append(p))
    checkpoint_sequential(plain, segments, x, use_reentrant=False).sum().backward()
    again = sorted(p for p in range(6) if runs.count(p) == 2)
    expected = x.grad.clone()
    x.grad = None
    recompute = BlockRecompute(segments=segments)
    recompute(module)
    size = 6 // segments
    assert again == [b for s in sorted(recompute.recomputed) for b in range(s, s + size)]
    module(x).sum().backward()
    assert torch.equal(x.grad, expected)


def test_names_and_modules_stay_and_removal_leaves_nothing() -> None:
    plain, module = model("llama"), model("llama")
    names = list(module.state_dict())
    recompute = BlockRecompute(segments=2)
    recompute(module)
    assert list(module.state_dict()) == names
    recompute.remove()
    assert not any(rebind.has_own_forward(m) for m in module.modules())
    assert same(step(module), step(plain))


def test_generation_with_a_cache_goes_on_as_before() -> None:
    plain, module = model("llama").eval(), model("llama").eval()
    BlockRecompute(segments=2)(module)
    ids = batch()["input_ids"]
    one, other = (m.model.generate(ids, max_new_tokens=5, do_sample=False) for m in (plain, module))
    assert torch.equal(one, other)


def test_a_cache_in_training_does_not_take_keys_twice() -> None:
    plain, module = model("llama"), model("llama")
    BlockRecompute()(module)
    given = {k: v for k, v in batch().items() if k != "labels"}
    found = []
    for m, cached in ((plain, False), (module, True)):  # recomputed blocks go without one
        torch.manual_seed(0)
        m.model(**given, use_cache=cached).logits.sum().backward()
        found.append([p.grad for p in m.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_blocks_with_arguments_of_their_own_cannot_share_a_segment() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Scaled() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for position, layer in enumerate(self.layers):
                x = layer(x, by=position)
            return x

    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)

        def forward(self, x: Tensor, by: int) -> Tensor:
            return super().forward(x) * by

    module = Odd()
    BlockRecompute()(module)
    module(torch.ones(1, 4)).sum().backward()
    module = Odd()
    BlockRecompute(segments=2)(module)
    with pytest.raises(ValueError, match="leave segments out"):
        module(torch.ones(1, 4))


def test_saved_bytes_count_each_storage_once_and_no_weight() -> None:
    layer = nn.Linear(8, 8, bias=False)
    x = torch.ones(4, 8)
    assert saved_bytes(lambda: layer(x), layer) == x.nbytes
    assert saved_bytes(lambda: layer(x) + layer(x[:2]).sum(), layer) == x.nbytes
    assert saved_bytes(lambda: layer(x).exp(), layer) == 2 * x.nbytes


def test_a_model_without_enough_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="no two neighbouring blocks of one class"):
        BlockRecompute()(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="has 4 blocks"):
        BlockRecompute(segments=5)(model("llama"))


class Attributes(nn.Module):
    """Blocks that are attributes, beside a child of another class."""

    def __init__(self) -> None:
        super().__init__()
        self.block1, self.block2, self.block3 = (
            nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(3)
        )
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.block3(self.block2(self.block1(x))))
        return found


@pytest.mark.parametrize(
    ("blocks", "passes"), [(None, 3), (["block1", "block3"], 2), (["block2.0"], 1)]
)
def test_blocks_may_be_attributes_or_named(blocks: list[str] | None, passes: int) -> None:
    module, x = Attributes(), torch.randn(4, 6)
    expected = torch.autograd.grad(module(x).square().mean(), list(module.parameters()))
    recompute = BlockRecompute(blocks=blocks)
    recompute(module)
    found = torch.autograd.grad(module(x).square().mean(), list(module.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert recompute.passes == passes


def test_a_block_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"blocks has 'block9'.*children are block1, block2"):
        BlockRecompute(blocks=["block9"])(Attributes())


def test_a_pass_knows_whether_what_it_saves_is_thrown_away() -> None:
    told = []

    class Listening(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            told.append(is_thrown_away())
            return super().forward(x).relu()

    net = nn.Sequential(Listening(4, 4), Listening(4, 4), Listening(4, 4))
    BlockRecompute(segments=3)(net)  # the last of which is kept
    for _ in range(2):
        net(torch.ones(2, 4)).sum().backward()
        assert told == [True, True, False, False, False]
        told.clear()
    with torch.no_grad():
        net(torch.ones(2, 4))
    with pytest.raises(RuntimeError):
        net(torch.ones(2, 5))
    assert told == [False, False, False, True]
    assert not is_thrown_away()


def test_checkpoint_sequential_leaves_every_layer_its_gradient() -> None:
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Dropout()) for _ in range(4)))
    x = torch.randn(3, 6)  # data: it asks for no gradient
    torch.manual_seed(1)
    expected = torch.autograd.grad(layers(x).square().mean(), list(layers.parameters()))
    torch.manual_seed(1)
    out = hasten.checkpoint_sequential(layers, 2, x)
    found = torch.autograd.grad(out.square().mean(), list(layers.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with pytest.raises(ValueError, match="leaves most layers"):
        hasten.checkpoint_sequential(layers, 2, x, use_reentrant=True)
    for segments in (0, -1, len(layers) + 1):
        with pytest.raises(ValueError, match=f"segments is {segments}; give at least 1"):
            hasten.checkpoint_sequential(layers, segments, x)
    torch.manual_seed(1)
    out = hasten.checkpoint_sequential(layers, 2, x, preserve_rng_state=False)
    other = torch.autograd.grad(out.square().mean(), list(layers.parameters()))
    assert not torch.equal(other[0], expected[0])  # dropout fell on other places the second time


def test_measuring_a_block_leaves_nothing_behind() -> None:
    """A result that autograd saves would otherwise hold the node that holds it, for ever."""
    made: list[weakref.ref[Tensor]] = []
    given = torch.randn(8, requires_grad=True)

    def forward() -> Tensor:
        result = given.sigmoid()  # of which autograd saves the result
        made.append(weakref.ref(result))
        return result

    assert saved_bytes(forward, nn.Identity()) == given.nbytes
    assert made[0]() is None
