"""What hasten's kernels are proven and timed by on a machine: operations, their formulas and ways.

A new kernel joins by one ``register``: its operation, its format, and how far it may lie from
float64. Results and gradients are one set of outputs, as a training step needs both. The bounds are
a few roundings of the format: 2^-8 is half a unit in the last place of bf16, and where weights of
an attention or a step in between are rounded as well, several add up.

``training pass`` ranks whole plans: forward and backward through a few layers, over documents of
lengths that no pass before had. Products alone rank wrongly: in bf16 a library may compile for
every new length, and attention may be slower than in float32.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hasten.machine.ways import KernelWay, Operation, register
from hasten.parts.kernels import adamw, amx, rowwise
from hasten.parts.kernels.refused import is_refused
from hasten.parts.nn import fused_experts, fused_functions, fused_layers
from hasten.parts.nn.attention import attend

WIDTH, INNER, HEADS, LAYERS = 256, 688, 4, 3
HEAD = WIDTH // HEADS
PRODUCT = (1040, 512)  # of the weight: outputs, inputs
EXPERTS, CHOSEN = 4, 2  # experts of a layer, and how many a token meets
DOCUMENTS = (50, 80, 120, 170, 230, 320)  # tokens of the largest; each round adds one to each
COPIED = 1 << 23  # numbers: more than caches hold
EPS = 1e-6
PLAIN, HALF = torch.float32, torch.bfloat16
ONE = 2**-8  # the rounding of a bf16 number
EXACT, ROUNDED = 2e-5, 4 * ONE  # bounds in float32 and in bf16


def gradients(compute: Callable[..., Tensor], learning: int | None = None) -> Callable[..., Any]:
    """The result of ``compute`` and the gradients of its first inputs, of all if left out.

    The last input is the gradient of the result.
    """

    def run(*inputs: Any) -> tuple[Tensor, ...]:
        *given, grad = inputs
        count = len(given) if learning is None else learning
        leaves = [t.detach().requires_grad_() for t in given[:count]]
        found = compute(*leaves, *given[count:])
        return found.detach(), *torch.autograd.grad(found, leaves, grad)

    return run


def on_processors(reason: Callable[[], str]) -> Callable[[str], str]:
    """Why a kernel of the processor's doesn't run on a device."""
    return lambda device: reason() if device == "cpu" else "it is for processors"


_rows = on_processors(lambda: rowwise.library().reason)
_tiles = on_processors(lambda: amx.library().reason)


def _tokens(most: int, size: float, number: int) -> int:
    return max(int(most * size), 8) + number


def _draw(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


# Matrix products.


def _product_inputs(size: float, number: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    tokens, (out, wide) = _tokens(512, size, number), PRODUCT
    return tuple(_draw(generator, *side) for side in ((tokens, wide), (out, wide), (tokens, out)))


PRODUCTS = Operation(
    "matrix products",
    "FLOP",
    _product_inputs,
    gradients(lambda x, weight: x @ weight.t()),
    lambda x, weight, grad: 6.0 * x.shape[0] * weight.numel(),
    seconds=0.3,
)
register(KernelWay(PRODUCTS, "torch, float32", PLAIN, gradients(F.linear), EXACT, own=False))
register(KernelWay(PRODUCTS, "torch, bf16", HALF, gradients(F.linear), ROUNDED, own=False))
register(
    KernelWay(
        PRODUCTS,
        "hasten on tiles, bf16",
        HALF,
        gradients(lambda x, weight: fused_functions.linear(x, weight, None)),
        ROUNDED,
        why_not=_tiles,
    )
)


# Passes over rows: norm, gated SiLU, rotary embedding, loss, update.


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def _norm_inputs(size: float, number: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    x, grad = (_draw(generator, _tokens(2048, size, number), WIDTH) for _ in range(2))
    return x, 1 + 0.1 * _draw(generator, WIDTH), grad


def _gate_inputs(size: float, number: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    tokens = _tokens(1024, size, number)
    return tuple(_draw(generator, tokens, INNER) for _ in range(3))


def _rotary_inputs(size: float, number: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    tokens = _tokens(2048, size, number)
    angles = _draw(generator, tokens, HEAD // 2)
    x, grad = (_draw(generator, tokens, HEADS, HEAD) for _ in range(2))
    return x, angles.cos(), angles.sin(), grad


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of pairs that lie half a head apart."""
    (one, two), cos, sin = x.chunk(2, dim=-1), cos[:, None], sin[:, None]
    return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)


def _fused_turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return fused_functions.rotate(x, cos, sin, False, False)


NORMS = Operation(
    "norm", "byte", _norm_inputs, gradients(_norm), lambda x, *_: 20.0 * x.numel()
)  # forward: read, write; backward: read two, write one; of 4 bytes
NORMS_BESIDE = Operation(
    "norm beside a residual",
    "byte",
    _norm_inputs,
    gradients(lambda x, weight: _norm(x, weight) + x),
    lambda x, *_: 28.0 * x.numel(),
)
GATES = Operation(
    "gated SiLU",
    "byte",
    _gate_inputs,
    gradients(lambda gate, up: F.silu(gate) * up),
    lambda gate, *_: 32.0 * gate.numel(),
)
ROTARY = Operation(
    "rotary embedding",
    "byte",
    _rotary_inputs,
    gradients(_turned, learning=1),
    lambda x, *_: 16.0 * x.numel(),
)
ROW_WAYS: tuple[tuple[Operation, Callable[..., Any], Callable[..., Any]], ...] = (
    (
        NORMS,
        gradients(lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS)),
        gradients(lambda x, weight: fused_functions.rms_norm(x, weight, EPS)),
    ),
    (
        NORMS_BESIDE,
        gradients(lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS) + x),
        gradients(lambda x, weight: torch.add(*fused_functions.norm_beside(x, weight, EPS))),
    ),
    (GATES, GATES.formula, gradients(fused_functions.swiglu)),
    (
        ROTARY,
        ROTARY.formula,
        gradients(_fused_turned, learning=1),
    ),
)
for _operation, _plain, _fused in ROW_WAYS:
    register(KernelWay(_operation, "torch, float32", PLAIN, _plain, EXACT, own=False))
    for _name, _dtype, _bound in (("float32", PLAIN, EXACT), ("bf16", HALF, ROUNDED)):
        register(
            KernelWay(
                _operation,
                f"hasten, {_name}",
                _dtype,
                _fused,
                _bound,
                why_not=fused_layers.why_not,
            )
        )


def _loss_inputs(size: float, number: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    rows, words = _tokens(512, size, number), 1000
    return _draw(generator, rows, words), torch.randint(words, (rows,), generator=generator)


def _losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """Each row's loss, and the gradient of their sum."""
    leaf = logits.detach().requires_grad_()
    found = F.cross_entropy(leaf, labels, reduction="none")
    return found.detach(), *torch.autograd.grad(found.sum(), leaf)


LOSSES = Operation(
    "loss of a row", "byte", _loss_inputs, _losses, lambda logits, _: 16.0 * logits.numel()
)
register(KernelWay(LOSSES, "torch, float32", PLAIN, _losses, EXACT, own=False))
for _name, _dtype, _bound in (("float32", PLAIN, EXACT), ("bf16", HALF, ROUNDED)):
    register(
        KernelWay(
            LOSSES,
            f"hasten, {_name}",
            _dtype,
            lambda logits, labels: (rowwise.cross_entropy_(logits, labels), logits),
            _bound,
            why_not=_rows,
        )
    )


RATE, BETAS, DECAY, UPDATE_EPS, STEPS = 1e-3, (0.9, 0.999), 0.01, 1e-8, 3


def _update_inputs(size: float, number: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    count = 1024 * _tokens(1024, size, number)
    weight, grad, first, second = (_draw(generator, count) for _ in range(4))
    return weight, grad, first, second.square()


def _update(weight: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
    """AdamW's third step (arXiv:1711.05101)."""
    first = BETAS[0] * first + (1 - BETAS[0]) * grad
    second = BETAS[1] * second + (1 - BETAS[1]) * grad.square()
    mean, spread = (m / (1 - b**STEPS) for m, b in zip((first, second), BETAS, strict=True))
    weight = weight * (1 - RATE * DECAY) - RATE * mean / (spread.sqrt() + UPDATE_EPS)
    return weight, first, second


def _torch_update(*tensors: Tensor) -> tuple[Tensor, ...]:
    weight, grad, first, second = tensors
    weight.requires_grad_().grad = grad
    optimizer = torch.optim.AdamW(
        [weight], lr=RATE, betas=BETAS, eps=UPDATE_EPS, weight_decay=DECAY, fused=True
    )
    step = torch.tensor(STEPS - 1.0, device=weight.device)
    optimizer.state[weight] = {"step": step, "exp_avg": first, "exp_avg_sq": second}
    optimizer.step()
    return weight.detach(), first, second


def _own_update(*tensors: Tensor) -> tuple[Tensor, ...]:
    weight, grad, first, second = tensors
    group = {"lr": RATE, "betas": BETAS, "eps": UPDATE_EPS, "weight_decay": DECAY}
    rule = adamw.rule_of(group, STEPS)
    if weight.device.type == "cpu":
        rowwise.adamw_(weight, grad, first, second, None, (*rule, 1.0))
    else:
        adamw.update([adamw.TensorUpdate(weight, grad, first, second, rule)])
    return weight, first, second


def _no_update(device: str) -> str:
    if device == "cpu":
        return rowwise.library().reason
    return "it is refused" if is_refused(adamw.PLAIN) else adamw.why_not(device)


UPDATES = Operation(
    "update by AdamW", "byte", _update_inputs, _update, lambda weight, *_: 28.0 * weight.numel()
)
PLAIN_UPDATE = register(
    KernelWay(UPDATES, "torch, float32", PLAIN, _torch_update, EXACT, own=False)
)
OWN_UPDATE = register(
    KernelWay(UPDATES, "hasten, float32", PLAIN, _own_update, EXACT, why_not=_no_update)
)


# Attention inside each document.


def _lengths(size: float, number: int) -> tuple[int, ...]:
    return tuple(max(int(length * size), 3) + number for length in DOCUMENTS)


def _attention_inputs(size: float, number: int, generator: torch.Generator) -> tuple[Any, ...]:
    lengths = _lengths(size, number)
    query, key, value, grad = (_draw(generator, sum(lengths), HEADS, HEAD) for _ in range(4))
    return query, key, value, lengths, grad


def _by_documents(*tensors: Tensor, lengths: Sequence[int], attention: Any) -> Tensor:
    pieces = [t.transpose(0, 1)[None].split(list(lengths), dim=2) for t in tensors]
    found = [attention(*piece) for piece in zip(*pieces, strict=True)]
    return torch.cat(found, dim=2)[0].transpose(0, 1)


def _defined(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention by its definition."""
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    unseen = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(unseen, -math.inf).softmax(-1) @ value


def _by_definition(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    return _by_documents(q, k, v, lengths=lengths, attention=_defined)


def _by_torch(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    def attention(*piece: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*piece, is_causal=True)

    return _by_documents(q, k, v, lengths=lengths, attention=attention)


def _as_trained(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """By ``document_attention``, which takes the fastest kernel of the device."""
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    starts = torch.tensor((0, *itertools.accumulate(lengths)), dtype=torch.int32, device=q.device)
    found, _ = attend(
        torch.nn.Identity(), q, k, v, None, document_lengths=tuple(lengths), boundaries=starts
    )
    return found[0]


def _attention_work(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], grad: Tensor
) -> float:
    return 14.0 * HEADS * HEAD * sum(length**2 / 2 for length in lengths)


ATTENTION = Operation(
    "attention in documents",
    "FLOP",
    _attention_inputs,
    gradients(_by_definition, learning=3),
    _attention_work,
)
_torch_attention = gradients(_by_torch, learning=3)
register(KernelWay(ATTENTION, "torch, float32", PLAIN, _torch_attention, EXACT, own=False))
register(KernelWay(ATTENTION, "torch, bf16", HALF, _torch_attention, 2 * ROUNDED, own=False))
register(
    KernelWay(
        ATTENTION,
        "hasten, bf16",
        HALF,
        gradients(_as_trained, learning=3),
        2 * ROUNDED,
        why_not=lambda device: amx.library().reason if device == "cpu" else "",
    )
)


# Tokens through their experts.


def _expert_inputs(size: float, number: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    tokens, wide, inner = _tokens(512, size, number), 128, 96
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    weights, index = scores.topk(CHOSEN)
    gate_up = _draw(generator, EXPERTS, 2 * inner, wide) * wide**-0.5
    down = _draw(generator, EXPERTS, wide, inner) * inner**-0.5
    x, grad = (_draw(generator, tokens, wide) for _ in range(2))
    return x, weights, gate_up, down, index, grad


def _one_by_one(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, index: Tensor) -> Tensor:
    """One expert after the other, as Transformers' ``eager`` has it."""
    found = torch.zeros_like(x)
    for expert in range(EXPERTS):
        token, choice = (index == expert).nonzero(as_tuple=True)
        gate, up = (x[token] @ gate_up[expert].t()).chunk(2, dim=-1)
        mine = (F.silu(gate) * up) @ down[expert].t()
        found = found.index_add(0, token, mine * weights[token, choice, None])
    return found


def _fused_experts(
    x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, index: Tensor
) -> Tensor:
    return fused_experts.run(x, index, weights, gate_up, down)


ROUTED = Operation(
    "routed experts",
    "FLOP",
    _expert_inputs,
    gradients(_one_by_one, learning=4),
    lambda x, weights, gate_up, *_: 9.0 * weights.numel() * gate_up[0].numel() * 2,
)
register(KernelWay(ROUTED, "torch, float32", PLAIN, ROUTED.formula, EXACT, own=False))
for _name, _dtype, _bound in (("float32", PLAIN, EXACT), ("bf16", HALF, 2 * ROUNDED)):
    register(
        KernelWay(
            ROUTED,
            f"hasten, {_name}",
            _dtype,
            gradients(_fused_experts, learning=4),
            _bound,
            why_not=on_processors(fused_experts.why_not),
        )
    )


# Memory.


def _copy_inputs(size: float, number: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    source = torch.full((int(COPIED * size) + number,), 0.5)
    return source, torch.empty_like(source)  # memory that is there: a fresh page costs more


COPIES = Operation(
    "copy of memory",
    "byte",
    _copy_inputs,
    lambda source, target: (source,),
    lambda source, target: 2.0 * source.nbytes,
    seconds=0.15,
)
register(
    KernelWay(
        COPIES,
        "torch, float32",
        PLAIN,
        lambda source, target: (target.copy_(source),),
        EXACT,
        own=False,
    )
)


# Forward and backward through a few layers.


def _pass_inputs(size: float, number: int, generator: torch.Generator) -> tuple[Any, ...]:
    lengths = _lengths(size, number)
    tokens = sum(lengths)
    angles = _draw(generator, tokens, HEAD // 2)
    sides = ((3 * WIDTH, WIDTH), (WIDTH, WIDTH), (2 * INNER, WIDTH), (WIDTH, INNER))
    weights = [0.05 * _draw(generator, LAYERS, *side) for side in sides]
    x, grad = (_draw(generator, tokens, WIDTH) for _ in range(2))
    norms = 1 + 0.1 * _draw(generator, LAYERS, 2, WIDTH)
    return x, norms, *weights, angles.cos(), angles.sin(), lengths, grad


def _pass_work(x: Tensor, norms: Tensor, *others: Any) -> float:
    return float(sum(6 * x.shape[0] * weight.numel() for weight in others[:4]))


def _layers(
    x: Tensor,
    norms: Tensor,
    *others: Any,
    norm: Callable[..., Tensor],
    gate: Callable[..., Tensor],
    rotate: Callable[..., Tensor],
    attention: Callable[..., Tensor],
    linear: Callable[[Tensor, Tensor], Tensor] = F.linear,
) -> Tensor:
    """Attention and a gated MLP in each layer, each of a norm, each added to what came in."""
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


def _pass_by_definition(*inputs: Any) -> Tensor:
    return _layers(
        *inputs,
        norm=_norm,
        gate=lambda one, two: F.silu(one) * two,
        rotate=_turned,
        attention=_by_definition,
    )


def _pass_by_torch(*inputs: Any) -> Tensor:
    return _layers(
        *inputs,
        norm=lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS),
        gate=lambda one, two: F.silu(one) * two,
        rotate=_turned,
        attention=_by_torch,
    )


def _pass_by_hasten(*inputs: Any) -> Tensor:
    """As ``fused_layers`` and ``document_attention`` have it together."""
    return _layers(
        *inputs,
        norm=lambda x, weight: fused_functions.rms_norm(x, weight, EPS),
        gate=fused_functions.swiglu,
        rotate=_fused_turned,
        attention=_as_trained,
        linear=_fused_linear,
    )


def _fused_linear(x: Tensor, weight: Tensor) -> Tensor:
    return fused_functions.linear(x, weight, None) if amx.fits(x, weight) else F.linear(x, weight)


PASS = Operation(
    "training pass",
    "FLOP",
    _pass_inputs,
    gradients(_pass_by_definition, learning=6),
    _pass_work,
    seconds=1.1,
)
PASS_PLAIN, PASS_HALF, PASS_FUSED, PASS_FUSED_HALF = (
    register(way)
    for way in (
        KernelWay(
            PASS, "torch, float32", PLAIN, gradients(_pass_by_torch, learning=6), EXACT, own=False
        ),
        KernelWay(
            PASS,
            "torch, bf16",
            HALF,
            gradients(_pass_by_torch, learning=6),
            16 * ROUNDED,
            own=False,
        ),
        KernelWay(
            PASS,
            "hasten, float32",
            PLAIN,
            gradients(_pass_by_hasten, learning=6),
            EXACT,
            why_not=fused_layers.why_not,
        ),
        KernelWay(
            PASS,
            "hasten, bf16",
            HALF,
            gradients(_pass_by_hasten, learning=6),
            16 * ROUNDED,
            why_not=fused_layers.why_not,
        ),
    )
)
