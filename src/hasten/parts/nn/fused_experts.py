"""A layer's routed experts on fused kernels, bound to one model instance.

    (1) tokens are sorted by expert                        (sorted pairs of token and expert)

    (2) gate and up, for all experts in one call each      (S, intermediate)

    (3) the gated activation, then down, again in one call (S, hidden)

    (4) a token's results are added, times its weights     (T, hidden)

Backward runs in the reverse order. A library that compiles a kernel for each shape
compiles one for every number of tokens of an expert. These kernels take any number.

On a GPU, :mod:`hasten.parts.nn.experts_gpu` does the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hasten.parts.kernels import experts, rowwise
from hasten.parts.nn import experts_gpu, rebind
from hasten.parts.nn.fused_functions import in_autocast

CLASSES = ("DeepseekV2Experts", "DeepseekV3Experts", "DeepseekV32Experts")


def why_not(device: str = "cpu") -> str:
    """Returns why the kernels can't run on a device, in one sentence; empty if they can."""
    if torch.device(device).type == "cpu":
        return rowwise.library().reason
    return experts_gpu.why_not(device)


def fuse_experts(model: nn.Module, device: str = "cpu") -> int:
    """Binds fused code to the expert layers of ``model``; returns their number.

    Parameters, names and classes stay. Inputs that the kernels don't take (float64; on a GPU all
    formats but bf16) go through the layer's own code.

    Args:
        device: where the model will run.

    Raises:
        ValueError: no layer of experts that is known here, or no kernels.
    """
    if reason := why_not(device):
        raise ValueError(f"the experts can't be fused here: {reason}")
    layers = [m for m in model.modules() if type(m).__name__ in CLASSES]
    for module in layers:
        rebind.bind(module, _forward)
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no experts that are known here ({', '.join(CLASSES)})"
        )
    return len(layers)


def fused(model: nn.Module) -> int:
    """Returns the number of expert layers with fused code."""
    return sum(rebind.is_bound(m, _forward) for m in model.modules())


def _forward(
    self: Any, usual: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    x, *weights = in_autocast(hidden_states, self.gate_up_proj, self.down_proj)
    silu = type(self.act_fn).__name__.startswith("SiLU")
    fits = experts_gpu.fits(x, *weights) if on_gpu(x) else rowwise.fits(x, *weights)
    # Transformers' own expert parallelism marks pairs of other ranks by larger expert numbers.
    if not silu or getattr(self, "_is_expert_parallel", False) or not fits:
        output: Tensor = usual(hidden_states, top_k_index, top_k_weights)
        return output
    return run(x, top_k_index, top_k_weights, *weights).to(hidden_states.dtype)


def on_gpu(x: Tensor) -> bool:
    """Returns True if the code for GPUs takes a tensor, and not that for processors."""
    kind: str = x.device.type
    return kind != "cpu"


def run(x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Runs each token of ``x`` (T, n) through its experts ``index`` (T, each), times ``weights``.

    ``gate_up`` (experts, 2 m, n), ``down`` (experts, n, m); see `why_not` before.
    """
    if on_gpu(x):
        return experts_gpu.run(x, index, weights, gate_up, down)
    output: Tensor = _Experts.apply(x, index, weights, gate_up, down)
    return output


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        order = index.flatten().argsort(stable=True)  # (S,), pairs of token and choice
        counts = index.flatten().bincount(minlength=down.shape[0])
        starts = (0, *counts.cumsum(0).tolist())
        sources = order // index.shape[1]  # the token of each pair
        rows = x.index_select(0, sources)
        inner = down.shape[2]
        gate = experts.products(rows, gate_up[:, :inner], starts, True)
        up = experts.products(rows, gate_up[:, inner:], starts, True)
        outputs = experts.products(rowwise.swiglu(gate, up), down, starts, True)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        places = places.view_as(index)
        ctx.save_for_backward(x, weights, gate_up, down, order, places, gate, up, outputs)
        ctx.starts = starts
        return experts.combine(outputs, places, weights.float())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Read once: recomputation computes a tensor when it is read, and then frees it.
        x, weights, gate_up, down, order, places, gate, up, outputs = ctx.saved_tensors
        starts, inner = ctx.starts, down.shape[2]
        sources = order // places.shape[1]
        flat = weights.float().flatten()
        grad, dw = experts.combine_backward(grads[0], outputs, sources, flat.index_select(0, order))
        between = experts.products(grad, down, starts, False)
        dgate, dup = rowwise.swiglu_backward(between, gate, up)
        dgate_up = ddown = dx = None
        if ctx.needs_input_grad[4]:
            ddown = torch.empty_like(down)
            experts.gradients_(ddown, grad, rowwise.swiglu(gate, up), starts)
        if ctx.needs_input_grad[3]:
            dgate_up, rows = torch.empty_like(gate_up), x.index_select(0, sources)
            experts.gradients_(dgate_up[:, :inner], dgate, rows, starts)
            experts.gradients_(dgate_up[:, inner:], dup, rows, starts)
        if ctx.needs_input_grad[0]:
            row_gradients = experts.products(dgate, gate_up[:, :inner], starts, False)
            row_gradients += experts.products(dup, gate_up[:, inner:], starts, False)
            dx = experts.combine(row_gradients, places, None)
        dweights = torch.empty_like(flat).scatter_(0, order, dw).view_as(weights)
        return dx, None, dweights.to(weights.dtype), dgate_up, ddown
