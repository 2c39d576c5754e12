"""Models with fused layers and without, and how far apart they are.

In float32 both differ by rounding alone. In bf16 each is compared with the same weights in float64,
and the fused one, which rounds less often, may not be further off than the other. There every
expert is chosen: a choice that rounding tips over would hide what is compared.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import Tensor

from hasten.parts.data.collate import packed, padded
from hasten.parts.nn import fused_experts
from hasten.parts.nn.fused_layers import fuse_layers
from hasten.parts.nn.losses import WholeLogitsLoss
from tiny import COMMON, examples, tiny_config, tiny_model

EXAMPLES = examples(6, seed=4)
BATCHES = {"padded": padded(EXAMPLES), "packed": packed(EXAMPLES)}
ROUNDING = 2e-5
TOKENS = torch.arange(3, 67).view(2, 32)


def model_of(
    architecture: str, dtype: torch.dtype = torch.float32, attention: str = "sdpa", **changes: Any
) -> Any:
    if architecture == "qwen3":
        config: Any = hf.Qwen3Config(**COMMON, num_key_value_heads=2, head_dim=8)
    else:
        config = tiny_config(architecture)
    if "deepseek" in architecture:
        # Every expert and, in V3.2, every key.
        changes |= {"num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "index_topk": 64}
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # norms of ones and biases of zeros would hide mistakes
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    model.set_attn_implementation(attention)
    if "deepseek" in architecture:
        model.set_experts_implementation("eager")
    # The weights of every format are those of bf16, so that formats can be compared.
    return model.to(torch.bfloat16).to(dtype)


def experts_layer(architecture: str) -> Any:
    """One layer of experts with weights large enough to tell them apart."""
    model = tiny_model(architecture)
    layer = next(m for m in model.modules() if type(m).__name__ in fused_experts.CLASSES)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.2)
    return layer


def pair(architecture: str, dtype: torch.dtype = torch.float32, **more: Any) -> tuple[Any, Any]:
    plain, other = (model_of(architecture, dtype, **more) for _ in range(2))
    fuse_layers(other)
    return plain, other


def outcome(model: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
    """Logits of tokens, loss, and every gradient, in float64."""
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    model.zero_grad()
    seen: dict[str, Tensor] = {}
    hook = model.register_forward_hook(lambda _m, _i, out: seen.update(logits=out.logits))
    loss, count = WholeLogitsLoss(model)(**batch)
    hook.remove()
    (loss / count).backward()
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    found = {"logits": seen["logits"][mask], "loss": loss}
    found |= {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {name: t.detach().double() for name, t in found.items()}


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    assert found.keys() == expected.keys()
    largest = max(t.norm().item() for name, t in expected.items() if name not in ("logits", "loss"))
    floor = {"logits": 0.0, "loss": 0.0}
    return {
        name: (t - expected[name]).norm().item()
        / max(expected[name].norm().item(), floor.get(name, 1e-3 * largest))
        for name, t in found.items()
    }


def rounding_bounds(wide: Any, batch: dict[str, Any]) -> dict[str, float]:
    """How far float32 may be from ``wide``, a model in float64, by name.

    Weights moved by one rounding of float32, up or down at random, move each gradient by what its
    own conditioning makes of it; whoever computes in float32 rounds several times as often.
    """
    exact = outcome(wide, batch)
    bounds = dict.fromkeys(exact, 0.0)
    weights = {name: p.detach().clone() for name, p in wide.named_parameters()}
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for name, p in wide.named_parameters():
            signs = 2 * torch.randint(0, 2, p.shape, generator=generator) - 1
            p.data = weights[name] * (1 + 2**-24 * signs)
        moved = distance(outcome(wide, batch), exact)
        bounds = {name: max(bounds[name], moved[name]) for name in bounds}
    return {name: 4 * (moved + 2**-23) for name, moved in bounds.items()}


def check_half(found: dict[str, Tensor], plain: dict[str, Tensor], wide: dict[str, Tensor]) -> None:
    """No further from float64 than the plain model in the same format, by name and as a whole.

    Both distances are sums of many roundings, of which the factors leave room for the process
    variance.
    """
    near, far = distance(found, wide), distance(plain, wide)
    assert {n: (e, far[n]) for n, e in near.items() if e > 3 * far[n] + 2**-8} == {}
    assert sum(e**2 for e in near.values()) <= 2 * sum(e**2 for e in far.values())
