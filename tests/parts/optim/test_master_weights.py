"""Master weights: what bf16 would lose is kept, and the module gets its float32 weights back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from transformers import AutoModelForCausalLM

from hasten.parts.kernels import rowwise
from hasten.parts.optim.master_weights import MasterWeights
from tiny import ARCHITECTURES, tiny_config, tiny_model
from triton_marks import needs_triton


def linear(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(16, 16, bias=bias)


def mastered(module: nn.Module, lr: float = 0.1) -> tuple[MasterWeights, SGD]:
    masters = MasterWeights()
    masters.prepare(module)
    optimizer = SGD(module.parameters(), lr=lr)
    masters.attach_optimizer(optimizer)
    return masters, optimizer


def draws(count: int, shape: torch.Size) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator).bfloat16() for _ in range(count)]


def test_updates_too_small_for_bf16_are_kept() -> None:
    """1,000 updates of 1e-4 on a weight of 1: bf16 alone, whose step there is 2^-8, stays at 1."""
    weight = nn.Parameter(torch.ones(4))
    module = nn.ParameterList([weight])
    masters, optimizer = mastered(module, lr=1e-4)
    alone = torch.ones(4, dtype=torch.bfloat16)
    for _ in range(1000):
        weight.grad = torch.ones_like(weight)
        masters.accumulate_gradients()
        optimizer.step()
        optimizer.zero_grad()
        masters.update_model_weights()
        alone -= 1e-4
    assert (alone == 1).all()
    assert weight.dtype == torch.bfloat16
    masters.finish(module)
    torch.testing.assert_close(weight.detach(), torch.full((4,), 0.9), rtol=1e-4, atol=0)


@pytest.mark.parametrize("kernel", [False, pytest.param(True, marks=needs_triton)])
def test_gradients_of_micro_batches_add_up_in_float32(
    kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch, and by a GPU's kernel in Triton's interpreter."""
    monkeypatch.setattr(rowwise, "sum_fits", lambda total, more: kernel)
    module = linear(bias=False)
    masters, _ = mastered(module)
    given = draws(256, module.weight.shape)
    for gradient in given:
        module.weight.grad = gradient.clone()
        masters.accumulate_gradients()
        assert module.weight.grad is None
    (master,) = masters.parameters()
    exact = torch.stack(given).double().sum(0)
    narrow = torch.zeros_like(given[0])
    for gradient in given:
        narrow += gradient
    assert master.grad is not None
    assert master.grad.dtype == torch.float32
    error = (master.grad.double() - exact).norm() / exact.norm()
    assert error < 1e-6
    assert error < 1e-3 * (narrow.double() - exact).norm() / exact.norm()


def test_gradients_about_to_be_reduced_take_along_what_has_added_up() -> None:
    module = linear(bias=False)
    masters, _ = mastered(module)
    first, second, last = draws(3, module.weight.shape)
    for gradient in (first, second):
        masters.before_backward(reduces=False)
        module.weight.grad = gradient.clone()
        masters.accumulate_gradients()
    masters.before_backward(reduces=True)
    (master,) = masters.parameters()
    assert master.grad is None
    handed = (first.float() + second.float()).bfloat16()
    assert module.weight.grad is not None
    assert torch.equal(module.weight.grad, handed)
    module.weight.grad += last  # what backward does
    masters.accumulate_gradients()
    assert master.grad is not None
    assert torch.equal(master.grad, (handed + last).float())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_become_bf16_and_buffers_keep_their_format(architecture: str) -> None:
    model = tiny_model(architecture)
    before = {n: (b.dtype, b.clone()) for n, b in model.named_buffers()}
    assert before, "a model without buffers proves nothing"
    MasterWeights().prepare(model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    for name, buffer in model.named_buffers():
        assert buffer.dtype == before[name][0]
        assert torch.equal(buffer, before[name][1])


def test_tied_weights_stay_tied_and_have_one_master() -> None:
    config = tiny_config("llama")
    config.tie_word_embeddings = True
    model = AutoModelForCausalLM.from_config(config)
    head, embedding = model.lm_head, model.model.embed_tokens
    assert head.weight is embedding.weight
    masters, _ = mastered(model)
    assert len(masters.parameters()) == len(list(model.parameters()))
    assert head.weight is embedding.weight
    masters.finish(model)
    assert head.weight is embedding.weight
    assert head.weight.data_ptr() == embedding.weight.data_ptr()


def test_finish_gives_the_exact_float32_weights_back() -> None:
    module = linear()
    before = [p.detach().clone() for p in module.parameters()]
    masters, _ = mastered(module)
    assert not torch.equal(module.weight.float(), before[0]), "nothing was rounded"
    masters.finish(module)
    for parameter, original in zip(module.parameters(), before, strict=True):
        assert torch.equal(parameter, original)
        assert parameter.dtype == torch.float32


def test_finish_gives_copies_that_the_optimizer_moves_no_more() -> None:
    module = linear()
    masters, optimizer = mastered(module)
    masters.finish(module)
    before = module.weight.detach().clone()
    for master in masters.parameters():
        master.grad = torch.ones_like(master)
    optimizer.step()
    assert torch.equal(module.weight, before)


def test_a_finished_module_works_in_float32_again() -> None:
    """Frozen weights have the format they had, rounded, and inputs are no longer cast."""
    module = nn.Sequential(linear(), linear())
    module[0].requires_grad_(False)
    given = module[0].weight.clone()
    masters, _ = mastered(module)
    masters.finish(module)
    assert torch.equal(module[0].weight, given.bfloat16().float())
    assert module(torch.randn(2, 16)).dtype == torch.float32


def test_a_weight_that_no_optimizer_moves_comes_back_exact() -> None:
    module = nn.Sequential(linear(), linear())
    before = module[0].weight.detach().clone()
    masters = MasterWeights()
    masters.prepare(module)
    masters.attach_optimizer(SGD(module[1].parameters(), lr=0.1))
    masters.finish(module)
    assert torch.equal(module[0].weight, before)


def test_frozen_weights_may_stand_in_the_optimizer() -> None:
    module = nn.Sequential(linear(), linear())
    module[0].requires_grad_(False)
    masters, optimizer = mastered(module)
    assert len(masters.parameters()) == 2
    held = optimizer.param_groups[0]["params"]
    assert [p.dtype for p in held] == [torch.bfloat16] * 2 + [torch.float32] * 2


def test_an_optimizer_keeps_its_memory_through_own_and_finish() -> None:
    module = linear()
    optimizer = AdamW(module.parameters(), lr=0.1)
    module(torch.randn(2, 16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = {k: v.clone() for k, v in optimizer.state[module.weight].items()}
    masters = MasterWeights()
    masters.prepare(module)
    masters.attach_optimizer(optimizer)
    assert all(
        torch.equal(optimizer.state[masters.parameters()[0]][k], v) for k, v in before.items()
    )
    module(torch.randn(2, 16)).sum().backward()
    masters.accumulate_gradients()
    optimizer.step()
    masters.update_model_weights()
    masters.finish(module)
    held = optimizer.param_groups[0]["params"]
    assert [id(p) for p in held] == [id(p) for p in module.parameters()]
    assert optimizer.state[module.weight]["step"] == 2
    assert set(optimizer.state) == set(module.parameters())


def test_a_weight_that_was_not_prepared_is_refused_and_nothing_is_exchanged() -> None:
    module, stranger = linear(), linear()
    masters = MasterWeights()
    masters.prepare(module)
    optimizer = SGD([*module.parameters(), *stranger.parameters()], lr=0.1)
    held = list(optimizer.param_groups[0]["params"])
    with pytest.raises(ValueError, match="isn't in the prepared module"):
        masters.attach_optimizer(optimizer)
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], held, strict=True))
    assert masters.parameters() == []


def test_a_weight_that_was_frozen_when_prepared_is_refused() -> None:
    module = linear().requires_grad_(False)
    masters = MasterWeights()
    masters.prepare(module)
    module.requires_grad_(True)
    with pytest.raises(ValueError, match="was frozen when prepare"):
        masters.attach_optimizer(SGD(module.parameters(), lr=0.1))


class Nested(nn.Module):
    """Takes its inputs in every shape a loader may give them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(
        self, x: Tensor, pair: tuple[Tensor], named: dict[str, Tensor], *, y: Tensor
    ) -> Tensor:
        ids = named["ids"]
        assert ids.dtype == torch.int64
        return self.layer(x) + self.layer(pair[0]) + self.layer(named["x"]) + self.layer(y)


def test_floating_inputs_are_cast_wherever_they_stand_and_integers_are_not() -> None:
    module = Nested()
    mastered(module)
    x = torch.randn(2, 16)
    out = module(x, (x,), {"x": x, "ids": torch.arange(3)}, y=x)
    assert out.dtype == torch.float32  # widened on its way out
    assert torch.equal(out, out.bfloat16().float())


class Loss(nn.Module):
    """A loss around a model, as the trainer wraps them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.seen = [self.model(x), target]
        return (self.seen[0] - target).square().sum()


def test_targets_keep_their_digits_and_the_loss_is_taken_in_float32() -> None:
    loss = Loss(linear())
    mastered(loss)
    target = torch.full((2, 16), 1000.001)
    assert loss(torch.randn(2, 16), target).dtype == torch.float32
    assert torch.equal(loss.seen[1], target)
