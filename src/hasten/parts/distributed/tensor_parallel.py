"""Tensor parallelism: each rank computes a part of every layer (DTensor's styles).

- q, k, v, gate, up: cut by output (column). A rank has some heads, some of the MLP's width.
- o, down: cut by input (row). The ranks' results are summed.
- embedding, head: cut by vocabulary; see :mod:`hasten.parts.distributed.vocabulary_parallel`
- norms, residuals: the same on all ranks. With ``sequence`` they are cut along the sequence:

      layer = norm -> gather -> attention -> scatter -> norm -> gather -> ...

Modules outside the plan stay whole on every rank, and so do their gradients.
"""

from __future__ import annotations

import fnmatch
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor import parallel as styles

from hasten.parts.distributed import tensor_plans as plans
from hasten.parts.distributed.vocabulary_parallel import VocabularyParallelHead
from hasten.parts.nn.causal_lm import causal_lm, trunk
from hasten.parts.nn.fused_layers import is_fused
from hasten.parts.nn.losses import LabelOnlyLoss, WholeLogitsLoss
from hasten.parts.nn.multi_token import decoders
from hasten.parts.nn.preference import OnePassPreferenceLoss, PairLoss, PreferenceLoss, RewardLoss
from hasten.parts.nn.rebind import has_own_forward, plain_class

# Low-rank adapters of split layers are split with them; their rank is never split.
#
#     column   y_i = W_i x + B_i (A x)                  A is replicated, B is split by output
#     row      y = sum_i W_i x_i + B sum_i A_i x_i      A is split by input, B is replicated
#
# So messages for an adapter are only as wide as its rank: the sum over A_i, or the gradient of A x
# in the backward pass. A layer that isn't split keeps its full adapter.
#
# An adapter is PEFT's ``lora.Linear`` (Hu et al., arXiv:2106.09685) with ``base_layer`` and linear
# layers ``lora_A`` and ``lora_B``. Functions for shards replace their forwards. Dropout before the
# adapter drops the same elements as in one process: every rank draws for the full input and takes
# its own columns. This requires equal random states on the ranks of a mesh.


def base_of(layer: nn.Module) -> nn.Module:
    """Returns the layer inside an adapter, or the layer itself."""
    inner = layer._modules.get("base_layer")
    return layer if inner is None else inner


def why_not(layer: nn.Module) -> str:
    """Returns why an adapter can't be split with its layer, as the end of a sentence, or ""."""
    if base_of(layer) is layer:
        return ""
    linears = [m for n in ("lora_A", "lora_B") for m in getattr(layer, n, nn.Module()).children()]
    if not linears or any(plain_class(m) is not nn.Linear for m in linears):
        return "has an adapter that isn't made of linear layers"
    if any(layer._modules.get("lora_magnitude_vector") or ()):
        return "has a DoRA adapter, which measures whole rows of the weight"
    if getattr(layer, "parameter_name", None) is not None:
        return "has an adapter on its bare tensor, which is added up before it is cut"
    if any(linear.bias is not None for linear in linears):
        return "has an adapter with a bias"
    return ""


def split_column_adapters(layer: nn.Module, mesh: DeviceMesh) -> None:
    """Splits the adapters of a layer that is split by output."""
    for first, second, drops in _adapters(layer):
        first.weight = _distributed(first.weight, mesh, Replicate())
        second.weight = _distributed(second.weight, mesh, Shard(0))
        first.forward = partial(_column_a, first, drops)
        second.forward = partial(_b, second, None)


def split_row_adapters(layer: nn.Module, mesh: DeviceMesh, between: Placement) -> None:
    """Splits the adapters of a layer that is split by input; ``between``: its output's layout."""
    gradients = [Replicate() if between.is_replicate() else Partial()]
    for first, second, drops in _adapters(layer):
        first.forward = partial(_row_a, first, drops, between, first.in_features)
        first.weight = _distributed(first.weight, mesh, Shard(1))
        second.weight = _distributed(second.weight, mesh, Replicate())
        second.forward = partial(_b, second, gradients)


def _adapters(layer: nn.Module) -> list[tuple[Any, Any, Any]]:
    """Returns (A, B, dropout) of each adapter; none if the layer has no adapter.

    The dropout module becomes the identity. A's own code applies dropout, because it has
    the column range.
    """
    adapters: Any = layer
    found = [] if base_of(layer) is layer else adapters.lora_A
    for dropout in [adapters.lora_dropout[name] for name in found]:
        if isinstance(dropout, nn.Dropout):
            dropout.forward = _through
    return [(adapters.lora_A[n], adapters.lora_B[n], adapters.lora_dropout[n]) for n in found]


def _through(x: Tensor) -> Tensor:
    return x


def _column_a(self: Any, dropout: Any, x: Tensor) -> Tensor:
    """Runs A of an adapter on a column-split layer."""
    weight = self.weight
    if isinstance(x, DTensor):  # gradients of all its readers are summed over ranks together
        local_input = _dropped(x.to_local(grad_placements=[Partial()]), dropout)
        return F.linear(local_input, weight.to_local(grad_placements=[Partial()]))
    projected = F.linear(_dropped(x, dropout), weight.to_local())
    shared = DTensor.from_local(projected, weight.device_mesh, [Replicate()], run_check=False)
    return shared.to_local(grad_placements=[Partial()])


def _row_a(self: Any, dropout: Any, between: Placement, width: int, x: Tensor) -> Tensor:
    """Runs A of an adapter on a row-split layer: its columns times the local input, summed."""
    weight = self.weight
    mesh, local_input = weight.device_mesh, x.to_local() if isinstance(x, DTensor) else x
    start = -(-width // mesh.size()) * mesh.get_local_rank()  # as Shard splits: the last is smaller
    projected = F.linear(_dropped(local_input, dropout, start, width), weight.to_local())
    part = DTensor.from_local(projected, mesh, [Partial()], run_check=False)
    return part.redistribute(placements=[between]).to_local()


def _b(self: Any, gradients: list[Placement] | None, x: Tensor) -> Tensor:
    """Runs B of an adapter: on a row-split layer, on a part of the sequence or on all of it."""
    return F.linear(x, self.weight.to_local(grad_placements=gradients))


def _dropped(x: Tensor, dropout: Any, start: int = 0, width: int | None = None) -> Tensor:
    """Drops the same elements of ``x``, columns from ``start`` of ``width``, as one process."""
    share = dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0
    if not share:
        return x
    drawn = F.dropout(x.new_ones(*x.shape[:-1], width or x.shape[-1]), share)
    return x * drawn[..., start : start + x.shape[-1]]


def split_model(module: Any, mesh: DeviceMesh, sequence: bool, vocabulary: bool) -> nn.Module:
    """Splits the layers of a loss module's model over the mesh, in place; returns the loss module.

    Args:
        mesh: one axis.
        sequence: cut the sequence too, see :func:`split_layers`.
        vocabulary: cut embedding and head; the loss is then computed from the labels alone.

    Raises:
        ValueError: the loss isn't a language model's, or the split of its layers isn't known.
    """
    if not isinstance(module, WholeLogitsLoss | LabelOnlyLoss | PairLoss):
        raise ValueError(
            f"only language models can be cut, and the loss is {type(module).__name__}; take ddp "
            "or fsdp2 as the layout"
        )
    model = module.model
    if causal_lm(model).config.model_type not in plans.TENSOR_PARALLEL:
        raise ValueError(f"how to cut the layers of {type(model).__name__} isn't known")
    for decoder in decoders(module):
        split_layers(decoder, mesh, sequence)
    if not vocabulary or isinstance(module, RewardLoss):
        return module
    if isinstance(module, WholeLogitsLoss):  # no rank has full rows of logits
        ahead, module = module.ahead, LabelOnlyLoss(model, terms=module.terms)
        module.ahead = ahead
    elif type(module) is PreferenceLoss:
        module = OnePassPreferenceLoss(model, module.objective)
    split_vocabulary(model, mesh)
    return module


SEQUENCE = 1  # the dimension of (batch, sequence, hidden)
HEADS = 2  # the dimension of (batch, sequence, heads, head size)


def split_layers(inner: nn.Module, mesh: DeviceMesh, sequence: bool = True) -> None:
    """Splits the layers of a Hugging Face model's decoder over the mesh, in place.

    Args:
        mesh: one axis.
        sequence: cut the sequence too, between the regions; its length must divide by the ranks.

    Raises:
        ValueError: heads can't be dealt out, attention drops out, or a layer isn't a plain linear
            one, adapted or not.
    """
    config: Any = inner.config
    _check(inner, config, mesh.size())
    learns = {name: p.requires_grad for name, p in inner.named_parameters()}
    mixed, whole = config.model_type in plans.MIXED, Replicate()
    between = Shard(SEQUENCE) if sequence else whole
    for layer in _matches(inner, *plans.COLUMN).values():
        styles.parallelize_module(base_of(layer), mesh, styles.ColwiseParallel())
        split_column_adapters(layer, mesh)
    for name in plans.ROW:
        # A row split inside a region with replicated layers is summed to a replicated tensor.
        after = whole if mixed and name.startswith(plans.MLP) else between
        style = styles.RowwiseParallel(output_layouts=after)
        for layer in _matches(inner, name).values():
            styles.parallelize_module(base_of(layer), mesh, style)
            split_row_adapters(layer, mesh, after)
    for layer in _matches(inner, plans.LATENTS).values():
        layer.register_forward_hook(partial(_sum_tail, getattr(config, plans.ROTARY_SIZE), mesh))
    styled = partial(_parallelize, inner, mesh)
    styled(styles.SequenceParallel(sequence_dim=HEADS, use_local_output=True), *plans.HEAD_NORMS)
    # Hugging Face's blocks call attention with named arguments, and the MLP without. An input that
    # stays a DTensor has the gradients of all its readers summed before they are sent, once.
    named = {
        "input_kwarg_layouts": {"hidden_states": between},
        "desired_input_kwarg_layouts": {"hidden_states": whole},
    }
    if sequence or not mixed:
        styled(styles.PrepareModuleInput(**named, use_local_output=mixed), plans.ATTENTION)
        styled(_input(between, whole, mixed), plans.MLP)
    if sequence:
        styled(styles.SequenceParallel(use_local_output=True), *plans.BLOCK_NORMS)
        if mixed:
            styled(_output(whole, between), plans.MLP)
        styled(_input(whole, between), "layers.0")
        styled(_output(between, whole), "norm")
    for name, parameter in inner.named_parameters():
        parameter.requires_grad_(learns[name])  # SequenceParallel makes replicated ones trainable


def split_vocabulary(model: nn.Module, mesh: DeviceMesh) -> None:
    """Splits embedding and head over the mesh by tokens, tied or not, in place.

    Raises:
        ValueError: the head isn't a linear layer.
    """
    outer, inner = causal_lm(model), trunk(model)
    embedding, head = inner.get_submodule("embed_tokens"), outer.lm_head
    weight = getattr(head, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.ndim != 2 or hasattr(head, "base_layer"):
        raise ValueError(f"the head is {type(head).__name__}, and a linear one can be cut alone")
    tied = weight is embedding.weight
    style = styles.RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    styles.parallelize_module(embedding, mesh, style)
    rows = embedding.weight if tied else _distributed(weight, mesh, Shard(0))
    bias = getattr(head, "bias", None)
    outer.lm_head = VocabularyParallelHead(
        rows, None if bias is None else _distributed(bias, mesh, Shard(0)), mesh
    )


def _distributed(parameter: Tensor, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    cut = distribute_tensor(parameter.detach(), mesh, [placement])
    return nn.Parameter(cut, requires_grad=parameter.requires_grad)


def _input(now: Placement, then: Placement, local: bool = True) -> styles.ParallelStyle:
    return styles.PrepareModuleInput(
        input_layouts=(now,), desired_input_layouts=(then,), use_local_output=local
    )


def _output(now: Placement, then: Placement) -> styles.ParallelStyle:
    return styles.PrepareModuleOutput(output_layouts=now, desired_output_layouts=then)


def _parallelize(
    inner: nn.Module, mesh: DeviceMesh, style: styles.ParallelStyle, *patterns: str
) -> None:
    for module in _matches(inner, *patterns).values():
        styles.parallelize_module(module, mesh, style)


def _sum_tail(size: int, mesh: DeviceMesh, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Leaves the output as it is. Backward sums the last columns' gradients over ranks, because
    each rank's heads used them."""
    latent, tail = output.split([output.shape[-1] - size, size], dim=-1)
    shared = DTensor.from_local(tail, mesh, [Replicate()], run_check=False)
    return torch.cat([latent, shared.to_local(grad_placements=[Partial()])], dim=-1)


def _matches(inner: nn.Module, *patterns: str) -> dict[str, nn.Module]:
    """Returns modules by name that match a pattern, in which ``*`` is a number."""
    return {
        name: module
        for name, module in inner.named_modules()
        for pattern in patterns
        if name.count(".") == pattern.count(".") and fnmatch.fnmatchcase(name, pattern)
    }


def _check(inner: nn.Module, config: Any, ranks: int) -> None:
    heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None) or 0
    if reason := plans.uneven_heads(config.model_type, *heads, ranks):
        raise ValueError(reason)
    if share := getattr(config, "attention_dropout", 0.0):
        raise ValueError(
            f"attention_dropout is {share}: each rank would drop the same positions in its own "
            "heads as the others; set it to 0, or use the layout fsdp2"
        )
    for name, module in _matches(inner, *plans.COLUMN, *plans.ROW).items():
        reason, base = why_not(module), base_of(module)
        if reason:
            raise ValueError(f"{name} {reason}; take fsdp2 as the layout")
        if plain_class(base) is not nn.Linear or (has_own_forward(base) and not is_fused(base)):
            raise ValueError(
                f"{name} is {type(base).__name__} with code of its own, and only plain linear "
                "layers can be cut; leave out what replaces them"
            )
