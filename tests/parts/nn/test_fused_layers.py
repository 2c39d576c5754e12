"""Fused layers, with and without LoRA, against the same model without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from covering import covering
from fused_models import (
    BATCHES,
    ROUNDING,
    TOKENS,
    check_half,
    distance,
    model_of,
    outcome,
    pair,
    rounding_bounds,
)
from hasten.parts.kernels import products, rowwise
from hasten.parts.nn.attention import use_document_attention
from hasten.parts.nn.causal_lm import freeze_indexers
from hasten.parts.nn.fused_layers import ARCHITECTURES, fuse_layers, fused
from hasten.parts.nn.quantised import Float8Layers
from hasten.parts.nn.rebind import plain_class
from tiny import COMMON

pytestmark = [
    pytest.mark.skipif(not rowwise.library().library, reason=rowwise.library().reason),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]
architectures = pytest.mark.parametrize("architecture", ARCHITECTURES)
DTYPES = (torch.float32, torch.bfloat16)


@architectures
@pytest.mark.parametrize("layout", BATCHES)
def test_logits_and_gradients_are_those_of_the_plain_model(architecture: str, layout: str) -> None:
    plain, other = pair(architecture)
    expected, found = (outcome(m, BATCHES[layout]) for m in (plain, other))
    assert len(expected) > 15
    assert {n: e for n, e in distance(found, expected).items() if e > ROUNDING} == {}


@pytest.mark.parametrize(("architecture", "layout"), covering(ARCHITECTURES, BATCHES))
def test_in_bf16_they_are_no_further_from_float64(architecture: str, layout: str) -> None:
    batch = BATCHES[layout]
    plain, other = pair(architecture, torch.bfloat16)
    wide = outcome(model_of(architecture, torch.float64), batch)
    check_half(outcome(other, batch), outcome(plain, batch), wide)


@architectures
def test_under_autocast_they_are_no_further_from_float64(architecture: str) -> None:
    batch = BATCHES["packed"]
    wide = outcome(model_of(architecture, torch.float64), batch)
    with torch.autocast("cpu", torch.bfloat16):
        plain, other = (outcome(m, batch) for m in pair(architecture))
    check_half(other, plain, wide)


@architectures
def test_under_autocast_to_a_format_without_kernels_the_layers_run_as_before(
    architecture: str,
) -> None:
    plain, other = pair(architecture)
    with torch.autocast("cpu", torch.float16), torch.no_grad():
        expected, found = (m(TOKENS, use_cache=False).logits for m in (plain, other))
    assert (found - expected).norm() <= 2**-8 * expected.norm()


@architectures
def test_with_attention_by_documents_they_are_the_same(architecture: str) -> None:
    plain, other = pair(architecture)
    for model in (plain, other):
        use_document_attention(model)
    expected, found = (outcome(m, BATCHES["packed"]) for m in (plain, other))
    assert max(distance(found, expected).values()) <= ROUNDING


@architectures
def test_in_float64_the_layers_run_as_before(architecture: str) -> None:
    plain, other = pair(architecture, torch.float64)
    with torch.no_grad():
        assert torch.equal(plain(TOKENS).logits, other(TOKENS).logits)


@architectures
def test_names_classes_and_parameters_stay(architecture: str) -> None:
    model, stranger = model_of(architecture), model_of(architecture)
    expected = stranger(TOKENS).logits
    before = {name: id(p) for name, p in model.named_parameters()}
    keys, classes = list(model.state_dict()), [type(m) for m in model.modules()]
    bound = fuse_layers(model)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert list(model.state_dict()) == keys
    assert [plain_class(m) for m in model.modules()] == classes
    assert all(isinstance(m, c) for m, c in zip(model.modules(), classes, strict=True))
    assert [type(m).__name__ for m in model.modules()] == [c.__name__ for c in classes]
    assert fused(model) == bound
    layers = COMMON["num_hidden_layers"]
    assert bound["latent attention" if "deepseek" in architecture else "attention"] == layers
    assert bound["mlp"] >= layers
    assert bound["norm"] >= 2 * layers + 1
    assert bound["linear"] == (
        sum(c is nn.Linear for c in classes) if products.library().library else 0
    )
    assert not fused(stranger)
    assert torch.equal(stranger(TOKENS).logits, expected)


def test_a_model_without_known_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="Sequential has no layer that the fused code supports"):
        fuse_layers(nn.Sequential(nn.ReLU()))


@pytest.mark.parametrize(("architecture", "dtype"), covering(ARCHITECTURES, DTYPES), ids=str)
def test_it_generates_the_same_tokens_with_a_cache(architecture: str, dtype: torch.dtype) -> None:
    plain, other = pair(architecture, dtype)
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    expected, found = (m.eval().generate(TOKENS[:, :5], **settings) for m in (plain, other))
    assert found.shape == (2, 11)
    if dtype == torch.float32:
        assert torch.equal(found, expected)


@architectures
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_dropout_of_attention_falls_on_the_same_places(architecture: str, attention: str) -> None:
    plain, other = pair(architecture, attention=attention, attention_dropout=0.5)
    found = []
    for model, training in ((plain, True), (other, True), (other, False)):
        model.train(training)
        torch.manual_seed(7)
        found.append(model(TOKENS, use_cache=False).logits.detach())
    assert (found[1] - found[0]).norm() <= ROUNDING * found[0].norm()
    assert (found[2] - found[0]).norm() > 1e-2 * found[0].norm(), "dropout is at work"


def test_a_compiled_layer_runs_them_in_one_graph() -> None:
    def passes(forward: Callable[..., Any]) -> list[Tensor]:
        layer.zero_grad()
        out = forward(x, position_embeddings=tables)
        out.float().square().mean().backward()
        return [out.detach(), *(p.grad.clone() for p in layer.parameters())]

    _, model = pair("llama", num_hidden_layers=1)
    layer, x = model.model.layers[0], torch.randn(2, 8, model.config.hidden_size)
    tables = model.model.rotary_emb(x, torch.arange(8)[None])
    torch._dynamo.reset()
    found = passes(torch.compile(layer, backend="aot_eager", fullgraph=True))
    for one, other in zip(found, passes(layer), strict=True):
        assert (one - other).norm() <= ROUNDING * other.norm()


@pytest.mark.skipif(not products.library().library, reason=products.library().reason)
def test_what_somebody_puts_around_a_layer_later_is_called() -> None:
    _, model = pair("llama", torch.bfloat16)
    float8 = Float8Layers(emulate=True)
    float8.attach(model)
    model(TOKENS, use_cache=False)
    assert float8.ran == set(float8.names)
    float8.detach()
    heard: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda *_, name=name: heard.append(name))
    model(TOKENS, use_cache=False)
    assert set(heard) == {*float8.names, "lm_head"}


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "deepseek_v2"])
def test_generation_with_a_cache_projects_once_for_each_token(architecture: str) -> None:
    _, model = pair(architecture)
    calls: list[int] = []
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: calls.append(1))
    settings: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    model.eval().generate(TOKENS[:, :5], **settings)
    assert len(calls) == 3


needs_products = pytest.mark.skipif(
    not products.library().library, reason=products.library().reason
)


TARGETS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "deepseek_v2": ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj"],
    "deepseek_v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
}


def adapted(
    architecture: str, targets: Any, dtype: torch.dtype = torch.float32, fuse: bool = True
) -> Any:
    """With adapters that already do something, so that every one of them has a gradient."""
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
    model = peft.get_peft_model(model_of(architecture, dtype), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    freeze_indexers(model)  # peft adapts them with all else, and nothing trains them
    if fuse:
        fuse_layers(model.get_base_model())
    return model


@pytest.mark.parametrize(
    ("adapters", "dtype"),
    covering([*TARGETS.items(), *((a, "all-linear") for a in ARCHITECTURES)], DTYPES),
    ids=str,
)
def test_every_adapter_has_the_gradient_it_had(
    adapters: tuple[str, Any], dtype: torch.dtype
) -> None:
    architecture, targets = adapters
    plain = adapted(architecture, targets, dtype, fuse=False)
    expected, found = (
        outcome(m, BATCHES["packed"]) for m in (plain, adapted(architecture, targets, dtype))
    )
    names = [n for n in expected if "lora_" in n]
    trainable = [n for n, p in plain.named_parameters() if p.requires_grad]
    assert sorted(names) == sorted(trainable)
    assert all(found[n].abs().max() > 0 for n in names)
    wide = adapted(architecture, targets, dtype, fuse=False).double()
    exact = outcome(wide, BATCHES["packed"])
    if dtype == torch.float32:
        bounds = rounding_bounds(wide, BATCHES["packed"])
        errors = distance(found, exact)
        assert {n: e for n, e in errors.items() if e > bounds[n]} == {}
    else:
        check_half(found, expected, exact)


@needs_products
def test_a_frozen_weight_gets_no_gradient_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    product = products.product

    def counted(a: Tensor, b: Tensor, a_turned: bool, b_turned: bool) -> Tensor:
        calls.extend([1] if a_turned else [])  # as the gradient of a weight alone has it
        return product(a, b, a_turned, b_turned)

    monkeypatch.setattr(products, "product", counted)
    model = adapted("llama", TARGETS["llama"], torch.bfloat16)
    outcome(model, BATCHES["packed"])
    assert not calls, "adapters are float32 and go torch's way; the base is frozen"
    for parameter in model.parameters():
        parameter.requires_grad_()
    outcome(model, BATCHES["packed"])
    assert len(calls) == 2 * 7 + 1  # every linear layer of two blocks, and the head


@architectures
def test_adapters_merge_into_fused_layers(architecture: str) -> None:
    model = adapted(architecture, "all-linear")
    with torch.no_grad():
        expected = model(TOKENS, use_cache=False).logits
        merged = model.merge_and_unload()
        assert fused(merged)["mlp"] > 0
        found = merged(TOKENS, use_cache=False).logits
    assert (found - expected).norm() <= ROUNDING * expected.norm()
