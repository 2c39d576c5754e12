"""LoRA around fused layers: an adapter that a layer reads past would stay silently untrained."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from fused_models import (
    BATCHES,
    ROUNDING,
    TOKENS,
    check_half,
    distance,
    model_of,
    outcome,
    rounding_bounds,
)
from hasten.parts.kernels import products, rowwise
from hasten.parts.nn.causal_lm import freeze_indexers
from hasten.parts.nn.fused_layers import ARCHITECTURES, fuse_layers, fused

pytestmark = [
    pytest.mark.skipif(not rowwise.library().library, reason=rowwise.library().reason),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]
architectures = pytest.mark.parametrize("architecture", ARCHITECTURES)
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
    ("architecture", "targets"),
    [*TARGETS.items(), *((a, "all-linear") for a in ARCHITECTURES)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_adapter_has_the_gradient_it_had(
    architecture: str, targets: Any, dtype: torch.dtype
) -> None:
    plain = adapted(architecture, targets, dtype, fuse=False)
    expected, found = (
        outcome(m, BATCHES["packed"]) for m in (plain, adapted(architecture, targets, dtype))
    )
    adapters = [n for n in expected if "lora_" in n]
    trainable = [n for n, p in plain.named_parameters() if p.requires_grad]
    assert sorted(adapters) == sorted(trainable)
    assert all(found[n].abs().max() > 0 for n in adapters)
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
