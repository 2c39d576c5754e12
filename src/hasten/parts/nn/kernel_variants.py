"""Operations, references and variants for verifying and timing hasten's kernels.

A call of ``add`` registers a kernel: its operation, and its largest error from float64 in
each format. Results and gradients are one set of outputs, because a training step needs
both. The bounds are a few roundings of the format: 2^-8 is half a unit in the last place
of bf16. The roundings of intermediate results, such as attention weights, add up.

``training pass`` decides between formats. It runs forward and backward through a few
layers, over documents of lengths that no earlier pass had. The speed of products alone
would mislead: in bf16 a library may compile for every new length, and attention may be
slower than in float32.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hasten.machine.gain import Gain
from hasten.parts.kernels import adamw, products, registry, rowwise
from hasten.parts.kernels.registry import TIMED, KernelVariant, Operation, Sizes, is_refused
from hasten.parts.nn import fused_experts, fused_functions, fused_layers
from hasten.parts.nn.attention import attend

HEADS, HEAD, LAYERS = TIMED.heads, TIMED.head, 3
PRODUCT = (1040, 512)  # (outputs, inputs) of the weight
EXPERTS, CHOSEN = 4, 2  # experts of a layer, and experts per token
DOCUMENTS = (50, 80, 120, 170, 230, 320)  # tokens of each; a round adds one
COPIED = 1 << 23  # numbers of the copied tensor, more than caches hold
EPS = 1e-6
EXACT, ROUNDED = 2e-5, 4 * 2**-8  # bounds in float32 and in bf16
FLOAT32, BOTH = {"float32": EXACT}, {"float32": EXACT, "bf16": ROUNDED}


def gradients(compute: Callable[..., Tensor], learning: int | None = None) -> Callable[..., Any]:
    """Returns the result of ``compute`` and the gradients of its first inputs (default: all).

    The last input is the gradient of the result.
    """

    def run(*inputs: Any) -> tuple[Tensor, ...]:
        *arguments, grad = inputs
        count = len(arguments) if learning is None else learning
        leaves = [t.detach().requires_grad_() for t in arguments[:count]]
        output = compute(*leaves, *arguments[count:])
        return output.detach(), *torch.autograd.grad(output, leaves, grad)

    return run


def add(
    operation: Operation,
    maker: str,
    run: Callable[..., Any],
    bounds: dict[str, float],
    why_not: Callable[[str], str] = lambda device: "",
) -> list[KernelVariant]:
    """Registers a variant for each format in ``bounds``; ``maker`` is torch or hasten."""
    formats, by_hasten = {"float32": torch.float32, "bf16": torch.bfloat16}, maker != "torch"
    added = [
        KernelVariant(operation, f"{maker}, {name}", formats[name], run, bound, by_hasten, why_not)
        for name, bound in bounds.items()
    ]
    registry.register(*added)
    return added


def on_processors(reason: Callable[[], str]) -> Callable[[str], str]:
    """Returns a ``why_not`` for a processor's kernel: ``reason`` there, a fixed text elsewhere."""
    return lambda device: reason() if device == "cpu" else "it is for processors"


def _draw(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


# Matrix products


def _product_inputs(sizes: Sizes, generator: torch.Generator) -> tuple[Tensor, ...]:
    out, wide = PRODUCT
    shapes = ((sizes.rows, wide), (out, wide), (sizes.rows, out))
    return tuple(_draw(generator, *shape) for shape in shapes)


PRODUCTS = Operation(
    "matrix products",
    "FLOP",
    _product_inputs,
    gradients(lambda x, weight: x @ weight.t()),
    lambda x, weight, grad: 6.0 * x.shape[0] * weight.numel(),
    lengths=(512,),
    seconds=0.3,
)
add(PRODUCTS, "torch", gradients(F.linear), BOTH)
add(
    PRODUCTS,
    "hasten",
    gradients(lambda x, weight: fused_functions.linear(x, weight, None)),
    BOTH,
    on_processors(lambda: products.library().reason),
)


# Passes over rows: norm, gated SiLU, rotary embedding, loss, update


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """Returns the norm by its definition (arXiv:1910.07467)."""
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def torch_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Returns the norm by torch's operator."""
    return F.rms_norm(x, weight.shape, weight, EPS)


def _norm_inputs(sizes: Sizes, generator: torch.Generator) -> tuple[Tensor, ...]:
    x, grad = (_draw(generator, sizes.rows, sizes.hidden) for _ in range(2))
    return x, 1 + 0.1 * _draw(generator, sizes.hidden), grad


NORMS = Operation(
    *("norm", "byte", _norm_inputs, gradients(norm)),
    lambda x, *_: 20.0 * x.numel(),  # forward: read, write; backward: read two, write one
    lengths=(2048,),
)
add(NORMS, "torch", gradients(torch_norm), FLOAT32)
add(
    NORMS,
    "hasten",
    gradients(lambda x, weight: fused_functions.rms_norm(x, weight, EPS)),
    BOTH,
    fused_layers.why_not,
)

NORMS_BESIDE = Operation(
    "norm with a residual",
    "byte",
    _norm_inputs,
    gradients(lambda x, weight: norm(x, weight) + x),
    lambda x, *_: 28.0 * x.numel(),
    lengths=(2048,),
)
add(NORMS_BESIDE, "torch", gradients(lambda x, weight: torch_norm(x, weight) + x), FLOAT32)
add(
    NORMS_BESIDE,
    "hasten",
    gradients(lambda x, weight: torch.add(*fused_functions.norm_with_residual(x, weight, EPS))),
    BOTH,
    fused_layers.why_not,
)


GATES = Operation(
    "gated SiLU",
    "byte",
    lambda sizes, generator: tuple(_draw(generator, sizes.rows, sizes.between) for _ in range(3)),
    gradients(lambda gate, up: F.silu(gate) * up),
    lambda gate, *_: 32.0 * gate.numel(),
    lengths=(1024,),
)
add(GATES, "torch", GATES.reference, FLOAT32)
add(GATES, "hasten", gradients(fused_functions.swiglu), BOTH, fused_layers.why_not)


def _rotary_inputs(sizes: Sizes, generator: torch.Generator) -> tuple[Tensor, ...]:
    angles = _draw(generator, sizes.rows, sizes.head // 2)
    x, grad = (_draw(generator, sizes.rows, sizes.heads, sizes.head) for _ in range(2))
    return x, angles.cos(), angles.sin(), grad


def rotated(
    x: Tensor, cos: Tensor, sin: Tensor, pairs_in: bool = False, pairs_out: bool = False
) -> Tensor:
    """Rotates the last columns in pairs, which are adjacent or half of the columns apart."""
    m = cos.shape[-1]
    plain, last = x.split([x.shape[-1] - 2 * m, 2 * m], dim=-1)
    one, two = (last[..., 0::2], last[..., 1::2]) if pairs_in else last.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    both = one * cos - two * sin, two * cos + one * sin
    joined = torch.stack(both, -1).flatten(-2) if pairs_out else torch.cat(both, dim=-1)
    return torch.cat((plain, joined), dim=-1)


def _fused_rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return fused_functions.rotate(x, cos, sin, False, False)


ROTARY = Operation(
    "rotary embedding",
    "byte",
    _rotary_inputs,
    gradients(rotated, learning=1),
    lambda x, *_: 16.0 * x.numel(),
    lengths=(2048,),
)
add(ROTARY, "torch", ROTARY.reference, FLOAT32)
add(ROTARY, "hasten", gradients(_fused_rotated, learning=1), BOTH, fused_layers.why_not)


def _loss_inputs(sizes: Sizes, generator: torch.Generator) -> tuple[Tensor, ...]:
    vocabulary = 1000
    logits = _draw(generator, sizes.rows, vocabulary)
    return logits, torch.randint(vocabulary, (sizes.rows,), generator=generator)


def _losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """Returns each row's loss, and the gradient of their sum."""
    leaf = logits.detach().requires_grad_()
    losses = F.cross_entropy(leaf, labels, reduction="none")
    return losses.detach(), *torch.autograd.grad(losses.sum(), leaf)


LOSSES = Operation(
    *("loss of a row", "byte", _loss_inputs, _losses),
    lambda logits, _: 16.0 * logits.numel(),
    lengths=(512,),
)
add(LOSSES, "torch", _losses, FLOAT32)
add(
    LOSSES,
    "hasten",
    lambda logits, labels: (rowwise.cross_entropy_(logits, labels), logits),
    BOTH,
    on_processors(lambda: rowwise.library().reason),
)

ADAMW: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
STEPS = 3  # number of the verified step, for the bias correction


def _update_inputs(sizes: Sizes, generator: torch.Generator) -> tuple[Tensor, ...]:
    count = 4 * sizes.hidden * sizes.rows
    weight, grad, first, second = (_draw(generator, count) for _ in range(4))
    return weight, grad, first, second.square()


def update(
    weight: Tensor, grad: Tensor, first: Tensor, second: Tensor, divisor: float = 1.0
) -> tuple[Tensor, ...]:
    """Runs AdamW's third step by its definition (arXiv:1711.05101)."""
    (beta1, beta2), grad = ADAMW["betas"], grad / divisor
    first = beta1 * first + (1 - beta1) * grad
    second = beta2 * second + (1 - beta2) * grad.square()
    size = (second / (1 - beta2**STEPS)).sqrt() + ADAMW["eps"]
    decayed = weight * (1 - ADAMW["lr"] * ADAMW["weight_decay"])
    return decayed - ADAMW["lr"] * first / (1 - beta1**STEPS) / size, first, second


def torch_update(
    weight: Tensor, grad: Tensor, first: Tensor, second: Tensor, divisor: float | None = None
) -> tuple[Tensor, ...]:
    """Runs AdamW's third step by torch's fused optimizer."""
    weight.requires_grad_().grad = grad
    optimizer: Any = torch.optim.AdamW([weight], **ADAMW, fused=True)
    step = torch.tensor(STEPS - 1.0, device=weight.device)
    optimizer.state[weight] = {"step": step, "exp_avg": first, "exp_avg_sq": second}
    if divisor is not None:
        optimizer.grad_scale = torch.tensor(divisor, device=weight.device)
    optimizer.step()
    return weight.detach(), first, second


def _hasten_update(
    weight: Tensor, grad: Tensor, first: Tensor, second: Tensor
) -> tuple[Tensor, ...]:
    rule = adamw.rule_of(ADAMW, STEPS)
    if weight.device.type == "cpu":
        rowwise.adamw_(weight, grad, first, second, None, (*rule, 1.0))
    else:
        adamw.update([adamw.TensorUpdate(weight, grad, first, second, rule)])
    return weight, first, second


def _why_no_update(device: str) -> str:
    if device == "cpu":
        return rowwise.library().reason
    return "it is refused" if is_refused(adamw.PLAIN) else adamw.why_not(device)


UPDATES = Operation(
    *("update by AdamW", "byte", _update_inputs, update),
    lambda weight, *_: 28.0 * weight.numel(),
    lengths=(1024,),
)
(PLAIN_UPDATE,) = add(UPDATES, "torch", torch_update, FLOAT32)
(FUSED_UPDATE,) = add(UPDATES, "hasten", _hasten_update, FLOAT32, _why_no_update)


# Attention inside each document


def _attention_inputs(sizes: Sizes, generator: torch.Generator) -> tuple[Any, ...]:
    rows, value = sizes.rows, sizes.value or sizes.head
    shapes = (
        *((sizes.heads, sizes.head), (sizes.groups, sizes.head)),
        *((sizes.groups, value), (sizes.heads, value)),
    )
    query, key, values, grad = (_draw(generator, rows, *shape) for shape in shapes)
    return query, key, values, sizes.lengths, grad


def _by_documents(*tensors: Tensor, lengths: Sequence[int], attention: Any) -> Tensor:
    pieces = [t.transpose(0, 1)[None].split(list(lengths), dim=2) for t in tensors]
    outputs = [attention(*document) for document in zip(*pieces, strict=True)]
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)


def _causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Returns causal attention by its definition; several query heads may share keys."""
    shared = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(shared, dim=1) for t in (key, value))
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -math.inf).softmax(-1) @ value


def _by_definition(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    return _by_documents(q, k, v, lengths=lengths, attention=_causal_attention)


def _by_torch(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    def attention(*tensors: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*tensors, is_causal=True)

    return _by_documents(q, k, v, lengths=lengths, attention=attention)


def attend_as_trained(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """Runs ``document_attention``, which uses the fastest kernel of the device."""
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    starts = torch.tensor((0, *itertools.accumulate(lengths)), dtype=torch.int32, device=q.device)
    output, _ = attend(
        torch.nn.Identity(), q, k, v, None, document_lengths=tuple(lengths), boundaries=starts
    )
    return output[0]


ATTENTION = Operation(
    "attention in documents",
    "FLOP",
    _attention_inputs,
    gradients(_by_definition, learning=3),
    lambda query, key, value, lengths, grad: (
        14.0 * HEADS * HEAD * sum(length**2 / 2 for length in lengths)
    ),
    DOCUMENTS,
)
add(ATTENTION, "torch", gradients(_by_torch, learning=3), {"float32": EXACT, "bf16": 2 * ROUNDED})
add(
    ATTENTION,
    "hasten",
    gradients(attend_as_trained, learning=3),
    {"float32": EXACT, "bf16": 2 * ROUNDED},
    lambda device: products.library().reason if device == "cpu" else "",
)


# Tokens through their experts


def _expert_inputs(sizes: Sizes, generator: torch.Generator) -> tuple[Tensor, ...]:
    tokens, wide, inner = sizes.rows, 128, 96
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    weights, index = scores.topk(CHOSEN)
    gate_up = _draw(generator, EXPERTS, 2 * inner, wide) * wide**-0.5
    down = _draw(generator, EXPERTS, wide, inner) * inner**-0.5
    x, grad = (_draw(generator, tokens, wide) for _ in range(2))
    return x, weights, gate_up, down, index, grad


def _one_by_one(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, index: Tensor) -> Tensor:
    """Runs one expert after the other, as Transformers' ``eager``."""
    output = torch.zeros_like(x)
    for expert in range(EXPERTS):
        token, choice = (index == expert).nonzero(as_tuple=True)
        gate, up = (x[token] @ gate_up[expert].t()).chunk(2, dim=-1)
        expert_output = (F.silu(gate) * up) @ down[expert].t()
        output = output.index_add(0, token, expert_output * weights[token, choice, None])
    return output


ROUTED = Operation(
    "routed experts",
    "FLOP",
    _expert_inputs,
    gradients(_one_by_one, learning=4),
    lambda x, weights, gate_up, *_: 9.0 * weights.numel() * gate_up[0].numel() * 2,
    lengths=(512,),
)
add(ROUTED, "torch", ROUTED.reference, FLOAT32)
add(
    ROUTED,
    "hasten",
    gradients(lambda x, w, gate_up, down, i: fused_experts.run(x, i, w, gate_up, down), learning=4),
    {"float32": EXACT, "bf16": 2 * ROUNDED},
    on_processors(fused_experts.why_not),
)


# Memory


def _copy_inputs(sizes: Sizes, generator: torch.Generator) -> tuple[Tensor, ...]:
    source = torch.full((sizes.rows,), 0.5)
    return source, torch.empty_like(source)  # written before, because a fresh page costs more


COPIES = Operation(
    "copy of memory",
    "byte",
    _copy_inputs,
    lambda source, target: (source,),
    lambda source, target: 2.0 * source.nbytes,
    lengths=(COPIED,),
    seconds=0.15,
)
add(COPIES, "torch", lambda source, target: (target.copy_(source),), FLOAT32)


# Forward and backward through a few layers


def _pass_inputs(sizes: Sizes, generator: torch.Generator) -> tuple[Any, ...]:
    wide, inner = sizes.hidden, sizes.between
    angles = _draw(generator, sizes.rows, sizes.head // 2)
    sides = ((3 * wide, wide), (wide, wide), (2 * inner, wide), (wide, inner))
    weights = [0.05 * _draw(generator, LAYERS, *side) for side in sides]
    x, grad = (_draw(generator, sizes.rows, wide) for _ in range(2))
    norms = 1 + 0.1 * _draw(generator, LAYERS, 2, wide)
    return x, norms, *weights, angles.cos(), angles.sin(), sizes.lengths, grad


def _layers(
    norm: Callable[..., Tensor],
    gate: Callable[..., Tensor],
    rotate: Callable[..., Tensor],
    attention: Callable[..., Tensor],
    linear: Callable[[Tensor, Tensor], Tensor] = F.linear,
) -> Callable[..., Any]:
    """Returns a function with a pass through decoder layers made of these operations."""

    def run(x: Tensor, norms: Tensor, *others: Any) -> Tensor:
        *weights, cos, sin, lengths = others
        for layer in range(LAYERS):
            mixed, out, inner, down = (weight[layer] for weight in weights)
            normed = norm(x, norms[layer, 0])
            query, key, value = linear(normed, mixed).view(-1, 3, HEADS, HEAD).unbind(1)
            query, key = (rotate(t, cos, sin) for t in (query, key))
            x = x + linear(attention(query, key, value, lengths).reshape(x.shape), out)
            one, two = linear(norm(x, norms[layer, 1]), inner).chunk(2, dim=1)
            x = x + linear(gate(one, two), down)
        return x

    return gradients(run, learning=6)


def _gate(one: Tensor, two: Tensor) -> Tensor:
    return F.silu(one) * two


PASS = Operation(
    "training pass",
    "FLOP",
    _pass_inputs,
    _layers(norm, _gate, rotated, _by_definition),
    lambda x, norms, *others: float(sum(6 * x.shape[0] * w.numel() for w in others[:4])),
    DOCUMENTS,
    seconds=1.1,
)
PASS_PLAIN, PASS_HALF = add(
    PASS,
    "torch",
    _layers(torch_norm, _gate, rotated, _by_torch),
    {"float32": EXACT, "bf16": 16 * ROUNDED},
)
PASS_FUSED, PASS_FUSED_HALF = add(
    PASS,
    "hasten",  # as ``fused_layers`` and ``document_attention`` together
    _layers(
        lambda x, weight: fused_functions.rms_norm(x, weight, EPS),
        fused_functions.swiglu,
        _fused_rotated,
        attend_as_trained,
        lambda x, weight: (
            fused_functions.linear(x, weight, None)
            if products.fits(x, weight)
            else F.linear(x, weight)
        ),
    ),
    {"float32": EXACT, "bf16": 16 * ROUNDED},
    fused_layers.why_not,
)


# Measured speed-ups for choosing plans; None if the device is absent or nothing was measured


def _gain(device: str, base: KernelVariant, other: KernelVariant) -> Gain | None:
    if not registry.is_here(device):
        return None
    return registry.figures_here(device).gain(base.key, other.key)


def bf16_gain(device: str) -> Gain | None:
    """Returns the speed of a training pass in bf16 as a multiple of that in float32.

    The pass uses hasten's kernels if they run on the device, otherwise torch's.
    """
    fused = _gain(device, PASS_FUSED, PASS_FUSED_HALF)
    return fused or _gain(device, PASS_PLAIN, PASS_HALF)


def layers_gain(device: str) -> Gain | None:
    """Returns the speed-up of a training pass by hasten's kernels, in the faster format."""
    half = bf16_gain(device)
    if half is not None and half.sure:
        return _gain(device, PASS_HALF, PASS_FUSED_HALF)
    return _gain(device, PASS_PLAIN, PASS_FUSED)


def update_gain(device: str) -> Gain | None:
    """Returns the speed-up of the optimizer's update by hasten's pass over torch's."""
    return _gain(device, PLAIN_UPDATE, FUSED_UPDATE)
