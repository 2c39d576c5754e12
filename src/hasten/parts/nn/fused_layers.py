"""Fused code for the layers of a Hugging Face causal LM, bound to one model instance.

Every norm, linear layer, gated MLP and attention of the decoder keeps its parameters
and their names. Only its ``forward`` is bound (:mod:`hasten.parts.nn.rebind`) to code
that runs the fused operations of :mod:`hasten.parts.nn.fused_functions`. Other models
in the process are not affected. The state dict is the same, and code that looks for
``nn.Linear`` (adapters, sharding) still finds it. A gated MLP calls its projections as
modules, so an adapter around one of them is not bypassed.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hasten.machine.lazy_torch import is_dtensor
from hasten.parts.kernels import products, rowwise
from hasten.parts.nn import attention, fused_gpu, rebind
from hasten.parts.nn.causal_lm import holds_cache
from hasten.parts.nn.fused_functions import (
    add_adapter,
    autocast_dtype,
    backend,
    fits,
    fused_linear_relu,
    in_autocast,
    joinable,
    joined,
    linear,
    norm_with_residual,
    rms_norm,
    rotate,
    swiglu,
)
from hasten.parts.nn.quantised import QuantisedLinear
from hasten.parts.nn.rebind import has_hooks
from hasten.parts.nn.sparse_attention import has_indexer

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# Fused code on a tensor-parallel model: kernels get this rank's part as plain tensors.
#
# A norm's weight is replicated, and its input is split by positions or heads. The norm of a row
# doesn't depend on other rows, so each rank computes its own rows. The weight's gradient is a sum
# over ranks, which ``Partial`` declares and DTensor computes. Split linear layers stay torch's,
# because torch's hooks on them communicate.

Usual = Callable[..., Tensor]  # the layer's own forward
Attended = tuple[Tensor, Tensor | None]
UsualAttention = Callable[..., Attended]


def is_cut(*layers: nn.Module) -> bool:
    """Returns True if the weight of at least one layer is sharded over ranks."""
    return any(is_dtensor(layer.weight) for layer in layers)


def own_weight(weight: Tensor) -> Tensor:
    """Returns a norm's weight as a plain tensor; its gradient is summed over ranks."""
    from torch.distributed.tensor import DTensor, Partial

    if not isinstance(weight, DTensor):
        return weight
    return weight.to_local(grad_placements=[Partial() for _ in weight.placements])


def norm_of_piece(x: DTensor, weight: Tensor, eps: float) -> DTensor | None:
    """Returns the norm of a shard, laid out as ``x``; None if the kernel doesn't support it."""
    from torch.distributed.tensor import DTensor, Replicate

    replicated = isinstance(weight, DTensor) and all(p.is_replicate() for p in weight.placements)
    if not replicated or x.placements == (Replicate(),):
        return None
    rows, local_weight = x.to_local(), own_weight(weight)
    if not fits("plain_norm", rows, local_weight):
        return None
    normed = rms_norm(rows, local_weight, eps)
    return DTensor.from_local(normed, x.device_mesh, x.placements, run_check=False)


# The layers of one model

ARCHITECTURES = ("llama", "qwen2", "qwen3", "deepseek_v2", "deepseek_v3", "deepseek_v32")
LATENT = ("DeepseekV2", "DeepseekV3", "DeepseekV32")  # multi-head latent attention
LAYERS = tuple(f"{name}DecoderLayer" for name in ("Llama", "Qwen2", "Qwen3", *LATENT))
FEWEST_ROWS = 64  # rows of a linear layer's input below which torch's product runs


def why_not(device: str = "cpu") -> str:
    """Returns why the kernels can't run on a device, in one sentence; empty if they can."""
    return rowwise.library().reason if _on_processor(device) else fused_gpu.why_not(device)


def fuse_layers(model: nn.Module, device: str = "cpu") -> Counter[str]:
    """Binds fused code to all matching layers of ``model``; returns their count by kind.

    ``device`` is the device for training; the model may still be elsewhere. On a GPU linear
    layers stay torch's, because their products are already fast there.

    Raises:
        ValueError: no layer of the model is of a supported kind, or the kernels can't run
            on the device.
    """
    reason = why_not(device)
    if reason:
        raise ValueError(reason)
    bound: Counter[str] = Counter()
    has_products = _on_processor(device) and products.library().library is not None
    for module in model.modules():
        kind = _kind(module, has_products)
        if kind:
            rebind.bind(module, _FUSED[kind])
            bound[kind] += 1
    if not bound:
        raise ValueError(f"{type(model).__name__} has no layer that the fused code supports")
    return bound


def fused(model: nn.Module) -> Counter[str]:
    """Returns the number of layers of each kind with fused code."""
    kinds = {function: name for name, function in _FUSED.items()}
    bound = (function for module in model.modules() for function in rebind.bound(module))
    return Counter(kinds[function] for function in bound if function in kinds)


def is_fused(module: nn.Module) -> bool:
    """Returns True if a module runs fused code."""
    return any(function in _FUSED.values() for function in rebind.bound(module))


def _on_processor(device: str) -> bool:
    return bool(torch.device(device).type == "cpu")


def _kind(module: nn.Module, has_products: bool) -> str:
    name = type(module).__name__
    if rebind.plain_class(module) is nn.Linear:
        return "linear" if has_products else ""
    if _is_adapted(module):
        return "" if has_products else "adapter"
    if name.endswith("RMSNorm") and isinstance(getattr(module, "variance_epsilon", None), float):
        return "norm"
    inner = dict(module.named_children())
    gated = {"gate_proj", "up_proj", "down_proj"} <= inner.keys()
    if name.endswith("MLP") and gated and type(inner.get("act_fn")).__name__.startswith("SiLU"):
        return "mlp"
    if name in ("LlamaAttention", "Qwen2Attention", "Qwen3Attention"):
        return "attention"
    if name in LAYERS:
        return "layer"
    return "latent attention" if name.removesuffix("Attention") in LATENT else ""


def _is_adapted(module: nn.Module) -> bool:
    """Returns True for a linear layer with LoRA adapters of PEFT."""
    layer_class = rebind.plain_class(module)
    return f"{layer_class.__module__}.{layer_class.__qualname__}" == "peft.tuners.lora.layer.Linear"


def _norm(self: Any, usual: Usual, hidden_states: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    if isinstance(hidden_states, DTensor):
        normed = norm_of_piece(hidden_states, self.weight, self.variance_epsilon)
        return usual(hidden_states) if normed is None else normed
    if not fits("plain_norm", hidden_states, self.weight):
        return usual(hidden_states)
    return rms_norm(hidden_states, self.weight, self.variance_epsilon)


def _layer(self: Any, usual: Usual, hidden_states: Tensor, **other: Any) -> Tensor:
    """Runs a decoder layer: attention and MLP, each after a norm and added to its input."""
    norm, past = _normed(self.input_layernorm, hidden_states)
    hidden = past + self.self_attn(hidden_states=norm, **other)[0]
    norm, past = _normed(self.post_attention_layernorm, hidden)
    output: Tensor = past + self.mlp(norm)
    return output


def _normed(norm: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    if getattr(norm, "variance_epsilon", None) is None:  # wrapped by an adapter
        return norm(x), x
    weight = own_weight(norm.weight)
    if fits("rms_norm", x, weight) and torch.is_grad_enabled():
        return norm_with_residual(x, weight, norm.variance_epsilon)
    return norm(x), x


def _linear(self: Any, usual: Usual, input: Tensor) -> Tensor:
    if is_cut(self):
        return usual(input)
    x, weight, bias = in_autocast(input, self.weight, self.bias)
    if not products.fits(x, weight) or _few_rows(x):
        return usual(input)
    return linear(x, weight, bias)


def _adapted(self: Any, usual: Usual, x: Tensor, *args: Any, **named: Any) -> Tensor:
    """Runs a linear layer with one LoRA, and adds the LoRA's part to the output in place."""
    part = None if args or named else _plain_adapter(self, x)
    if part is None:
        return usual(x, *args, **named)
    down, up, scale = part
    base: Tensor = self.base_layer(x)
    if base.dtype != x.dtype:
        return (base + x @ down.t() @ up.t() * scale).to(base.dtype)
    return add_adapter(base, x, down, up, scale)


def _plain_adapter(layer: Any, x: Tensor) -> tuple[Tensor, Tensor, float] | None:
    """Returns the weights and the scale of the only LoRA; None if the layer does more."""
    active = layer.active_adapters
    if layer.disable_adapters or layer.merged or len(active) != 1 or active[0] not in layer.lora_A:
        return None
    (name,) = active
    down, up, scale = layer.lora_A[name], layer.lora_B[name], layer.scaling[name]
    dropout, base = layer.lora_dropout[name], layer.base_layer
    plain = (
        name not in layer.lora_variant
        and isinstance(scale, float | int)
        and (isinstance(dropout, nn.Identity) or not layer.training)
        and all(joinable(one, _linear) for one in (down, up))
        and _may_be_overwritten(base)
        and not is_cut(*(one for one in (base, down, up) if hasattr(one, "weight")))
        and down.weight.dtype == up.weight.dtype == x.dtype
        and not torch.is_autocast_enabled(x.device.type)
        and not torch.compiler.is_compiling()
    )
    return (down.weight, up.weight, float(scale)) if plain else None


def _may_be_overwritten(layer: Any) -> bool:
    """Returns True if no other code can use the layer's output: no hooks, no replaced forward."""
    hooks = (layer._forward_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    usual_class = rebind.plain_class(layer) in (nn.Linear, QuantisedLinear)
    return usual_class and "forward" not in vars(layer) and not any(hooks)


def _few_rows(x: Tensor) -> bool:
    on_tiles: bool = products.unit(x.dtype) == "tiles"
    return on_tiles and x.numel() < FEWEST_ROWS * x.shape[-1]


def _projected(x: Tensor, *layers: Any) -> tuple[Tensor, ...]:
    """Runs ``x`` through each layer: by `joined` if all are plain and supported, else by calls."""
    if (
        products.fits(x)
        and not torch.compiler.is_compiling()  # a compiler can't trace the check of bound code
        and not torch.is_autocast_enabled(x.device.type)
        and not _few_rows(x)
        and all(joinable(layer, _linear) for layer in layers)
        and not is_cut(*layers)
        and products.fits(*(layer.weight for layer in layers))
    ):
        return joined(x, *(layer.weight for layer in layers))
    return tuple(layer(x) for layer in layers)


def _mlp(self: Any, usual: Usual, x: Tensor) -> Tensor:
    gate, up = _projected(x, self.gate_proj, self.up_proj)
    between = swiglu(gate, up) if fits("swiglu", gate, up) else self.act_fn(gate) * up
    output: Tensor = self.down_proj(between)
    return output


def _attention(
    self: Any,
    usual: UsualAttention,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    **other: Any,
) -> Attended:
    """Runs attention of Llama and Qwen: all columns of a head are rotary, paired in halves."""
    batch, length, _ = hidden_states.shape
    if holds_cache(other) or not _takes(hidden_states):
        return usual(
            hidden_states=hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            **other,
        )
    projected = _projected(hidden_states, self.q_proj, self.k_proj, self.v_proj)
    query, key, value = (t.view(batch, length, -1, self.head_dim) for t in projected)
    if "q_norm" in self._modules:
        query, key = self.q_norm(query), self.k_norm(key)
    cos, sin = (_table(t[..., : t.shape[-1] // 2], batch) for t in position_embeddings)
    query, key = (_rotated(t, cos, sin, False, False) for t in (query, key))
    return _attended(self, query, key, value, attention_mask, **other)


def _latent_attention(
    self: Any,
    usual: UsualAttention,
    hidden_states: Tensor,
    position_embeddings: Any,
    attention_mask: Tensor | None = None,
    **other: Any,
) -> Attended:
    """Runs multi-head latent attention of DeepSeek: the last columns of a head are rotary."""
    batch, length, _ = hidden_states.shape
    if holds_cache(other) or not _takes(hidden_states):
        return usual(
            hidden_states=hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            **other,
        )
    if self.q_lora_rank is None:
        query = self.q_proj(hidden_states)
    else:
        residual = self.q_a_layernorm(self.q_a_proj(hidden_states))
        query = self.q_b_proj(residual)
    by_documents = has_indexer(self) and attention.is_no_mask(attention_mask)
    if has_indexer(self) and not by_documents:
        read = hidden_states, residual, position_embeddings
        attention_mask = _limited(self, read, attention_mask)
    query = query.view(batch, length, -1, self.qk_head_dim)
    latent, shared = self.kv_a_proj_with_mqa(hidden_states).split(
        [self.kv_lora_rank, self.qk_rope_head_dim], dim=-1
    )
    cos, sin, pairs_out = _latent_tables(position_embeddings, batch)
    pairs_in = pairs_out or getattr(self.config, "rope_interleave", True)  # V3.2 has none
    query = _rotated(query, cos, sin, pairs_in, pairs_out)
    shared = _rotated(shared.unsqueeze(2), cos, sin, pairs_in, pairs_out)
    latent = self.kv_a_layernorm(latent)
    if by_documents:
        tensors = query, latent, shared.squeeze(2)
        return attention.indexed(
            self, (hidden_states, residual, *position_embeddings), tensors, other
        )
    both = self.kv_b_proj(latent).view(batch, length, -1, self.qk_nope_head_dim + self.v_head_dim)
    plain, value = both.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
    key = torch.cat((plain, shared.expand(-1, -1, plain.shape[2], -1)), dim=-1)
    return _attended(self, query, key, value, attention_mask, **other)


def _limited(self: Any, read: tuple[Any, ...], mask: Tensor | None) -> Tensor:
    """Returns V3.2's mask with the keys alone that its indexer chooses."""
    if mask is None:
        raise ValueError("DeepSeek-V3.2's indexer needs the model's causal mask")
    indices = self.indexer(*read, mask[:, 0], None)
    return attention.with_chosen_keys(mask, indices, read[0].dtype)


def _takes(hidden: Tensor) -> bool:
    """Returns True if projections of ``hidden`` will have a supported format."""
    return autocast_dtype(hidden) in backend(hidden).DTYPES and fits("rotate", hidden)


def _latent_tables(positions: Any, batch: int) -> tuple[Tensor, Tensor, bool]:
    """Returns V2's tables (complex numbers, adjacent pairs) or V3's (two tables, halves)."""
    if isinstance(positions, tuple):
        cos, sin = (_table(t[..., : t.shape[-1] // 2], batch) for t in positions)
        return cos, sin, False
    return _table(positions.real, batch), _table(positions.imag, batch), True


def _table(table: Tensor, batch: int) -> Tensor:
    """Returns (rows of the table, T, m) as (batch * T, m) in a format for the kernels."""
    table = table.expand(batch, -1, -1).flatten(0, 1)
    return table if table.dtype in backend(table).DTYPES else table.float()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, pairs_in: bool, pairs_out: bool) -> Tensor:
    return rotate(x.flatten(0, 1), cos, sin, pairs_in, pairs_out).view(x.shape)


def _attended(
    self: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **other: Any
) -> Attended:
    """Runs the model's selected attention on (B, T, heads, width), then the output layer."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    eager = sys.modules[type(self).__module__].eager_attention_forward
    chosen = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
    window = getattr(self, "sliding_window", None)
    if window is not None:
        other["sliding_window"] = window
    tensors = (t.transpose(1, 2) for t in (query, key, value))
    dropout = self.attention_dropout if self.training else 0.0
    out, weights = chosen(self, *tensors, mask, dropout=dropout, scaling=self.scaling, **other)
    return self.o_proj(out.reshape(*query.shape[:2], -1)), weights


_FUSED: dict[str, Callable[..., Any]] = {
    "layer": _layer,
    "linear": _linear,
    "adapter": _adapted,
    "norm": _norm,
    "mlp": _mlp,
    "attention": _attention,
    "latent attention": _latent_attention,
}


# torch's optimisation for inference freezes a model: it has no parameters afterwards, and torch
# doesn't warn. A model in training mode gets fused linear layers and ReLUs instead.


class LinearReLU(nn.Linear):
    """A linear layer and the following ReLU in one call, with the layer's parameters."""

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.train(layer.training)

    def forward(self, input: Tensor) -> Tensor:
        return fused_linear_relu(input, self.weight, self.bias)


def optimize_for_inference(model: nn.Module, sample: Any = None) -> Any:
    """Returns a faster model with equal outputs.

    In eval mode: ``torch.jit.optimize_for_inference`` of the scripted model, without parameters.
    In training mode: the model itself, each linear layer and the ReLU behind it in an
    ``nn.Sequential`` fused in place. Its parameters stay the same objects, as optimizers need.

    Args:
        sample: an input (or a tuple of inputs) to trace a model with that torch can't script.

    Raises:
        ValueError: torch can't script the model, and no ``sample`` was given.
    """
    if model.training:
        return _fused(model)
    if isinstance(model, torch.jit.ScriptModule):
        return torch.jit.optimize_for_inference(model)
    if sample is not None:
        inputs = sample if isinstance(sample, tuple) else (sample,)
        return torch.jit.optimize_for_inference(torch.jit.trace(model, inputs))
    try:
        scripted = torch.jit.script(model)
    except Exception as error:  # torch's compiler raises many types
        first = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"torch can't script this {type(model).__name__} ({first}); give sample=, an input to "
            "trace it with"
        ) from error
    return torch.jit.optimize_for_inference(scripted)


def _fused(model: nn.Module) -> nn.Module:
    if isinstance(model, torch.jit.ScriptModule):
        print(
            "optimize_for_inference: a scripted model in training mode stays as it is; give the "
            "model itself to have its layers fused, or call eval() first"
        )
        return model
    count = 0
    for inner in list(model.modules()):
        if not isinstance(inner, nn.Sequential):
            continue
        for index in range(len(inner) - 1):
            layer = inner[index]
            if type(layer) is not nn.Linear or type(inner[index + 1]) is not nn.ReLU:
                continue
            if not has_hooks(layer) and "weight" in layer._parameters:  # the layer's own weight
                inner[index], inner[index + 1] = LinearReLU(layer), nn.Identity()
                count += 1
    print(
        f"optimize_for_inference: the model is in training mode and keeps its parameters: {count} "
        "linear layers fused with the ReLU behind them; torch's optimisation is for eval()"
    )
    return model
