"""AdamW on a GPU: one launch for all tensors of a format, torch operator ``adamw_``.

In one pass the kernel divides gradients, widens, updates and rounds moments, and
updates and rounds weights. It also writes a bf16 copy of float32 weights. Each number
is read once and written once. Weights in bf16 are rounded up or down at random. So
updates smaller than a step of bf16 are right in the mean (Gupta et al.,
arXiv:1502.02551). The launch needs no number on the host.

``reference_update`` has the rule in torch's operators, with the same bits.
``adamw_triton.py`` is the kernel. If either of its two forms doesn't work on a GPU, it is
refused by name. Then torch's operators run.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hasten.parts.kernels import low_bit
from hasten.parts.kernels.codec_reference import key_of, mixed
from hasten.parts.kernels.low_bit import tables
from hasten.parts.kernels.operators import (
    launch,
    no_results,
    operator,
    why_no_triton,
)
from hasten.parts.kernels.registry import is_refused
from hasten.parts.kernels.rowwise import check_alike, is_alike

PLAIN, COMPACT = "adamw_float32_moments", "adamw_compact_moments"  # names for refusals of the forms
STEP = 8  # numbers moved together if all addresses and sizes are multiples of it
WARPS = 4
KINDS = {torch.float32, torch.bfloat16}  # formats of weights and gradients


class AdamWRule(NamedTuple):
    """The numbers of one update: ``w <- keep w - rate m / (root sqrt(v) + eps)``."""

    rate: float
    keep: float
    beta1: float
    beta2: float
    root: float
    eps: float


class TensorUpdate(NamedTuple):
    """One tensor's update; all its tensors have the same order of numbers, without gaps.

    Args:
        first, second: moments; with ``scales`` they are places in the tables of 8 bits.
        copy: gets the new float32 weights, rounded to bf16.
        key: of the dice, see :func:`dice_key`.
    """

    weight: Tensor
    grad: Tensor
    first: Tensor
    second: Tensor
    rule: AdamWRule
    scales: tuple[Tensor, Tensor] | None = None
    copy: Tensor | None = None
    key: int = 0


def rule_of(group: Mapping[str, Any], step: int) -> AdamWRule:
    """Returns the rule of a group of parameters for update number ``step``, from 1."""
    beta1, beta2 = group["betas"]
    return AdamWRule(
        group["lr"] / (1 - beta1**step),
        1 - group["lr"] * group["weight_decay"],
        beta1,
        beta2,
        1 / math.sqrt(1 - beta2**step),
        group["eps"],
    )


def dice_key(seed: int, index: int, step: int) -> int:
    """Returns 64 mixed bits that depend on the seed, the tensor's index and the step."""
    mixed = (seed * 1_000_003 + index) * 0x9E3779B97F4A7C15 + step
    return key_of(mixed % 2**64) | key_of(~mixed % 2**64) << 32


def why_not(device: str | torch.device) -> str:
    """Returns why the kernel can't run on a device, in one sentence; empty if it can."""
    return _why_no_triton(torch.device(device))


@functools.cache
def _why_no_triton(device: torch.device) -> str:
    return why_no_triton(device, "the update in one launch is")


def takes(weight: Tensor, form: str = PLAIN) -> bool:
    """Returns True if the kernel can update a weight: float32 or bf16, on a supported GPU.

    A refused form returns False. The gradient must be in one of these formats, too. A
    tensor that only represents its parts (a DTensor) has no memory of its own.
    """
    grad = weight if weight.grad is None else weight.grad
    supported = {weight.dtype, grad.dtype} <= KINDS and not is_traceable_wrapper_subclass(weight)
    return supported and not why_not(weight.device) and not is_refused(form)


def writes(copy: Tensor, weight: Tensor) -> bool:
    """Returns True if an update of ``weight`` can write ``copy``.

    ``copy`` must be bf16 of float32, in the same order.
    """
    return (copy.dtype, weight.dtype) == (torch.bfloat16, torch.float32) and is_alike(weight, copy)


def update(updates: Iterable[TensorUpdate], divisor: Tensor | None = None) -> None:
    """Updates tensors of one device, in place; one launch per combination of formats.

    Args:
        divisor: one number that divides all gradients. If it is float32 and on the device,
            the host doesn't wait.
    """
    alike: dict[Any, list[TensorUpdate]] = {}
    for one in updates:
        moments = (one.first, one.second) if one.scales is None else ()
        copy = () if one.copy is None else (one.copy,)
        check_alike(one.weight, one.grad, *moments, *copy)
        formats = one.weight.dtype, one.grad.dtype, one.first.dtype, one.copy is None
        alike.setdefault(formats, []).append(one)
    for tensors in alike.values():
        numbers: list[float] = []
        for one in tensors:  # as in the kernel: differences are computed here, in float64
            rate, keep, beta1, beta2, root, eps = one.rule
            numbers += [rate, keep, 1 - beta1, beta2, 1 - beta2, root, eps]
        if divisor is not None:
            divisor = divisor.to(tensors[0].weight.device, torch.float32)
        adamw_(
            [one.weight for one in tensors],
            [one.grad for one in tensors],
            [one.first for one in tensors],
            [one.second for one in tensors],
            [scale for one in tensors for scale in one.scales or ()],
            [one.copy for one in tensors if one.copy is not None],
            numbers,
            [one.key - (one.key >> 63 << 64) for one in tensors],  # as signed numbers
            divisor,
        )


@operator(
    "hasten_gpu::adamw_",
    no_results,
    mutates=("weights", "firsts", "seconds", "scales", "copies"),
)
def adamw_(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    firsts: Sequence[Tensor],
    seconds: Sequence[Tensor],
    scales: Sequence[Tensor],
    copies: Sequence[Tensor],
    rules: Sequence[float],
    keys: Sequence[int],
    divisor: Tensor | None,
) -> None:
    """Updates tensors of the same formats; see :func:`update`, which checks its arguments."""
    columns: list[Sequence[Tensor]] = [weights, grads, firsts, seconds]
    columns += [scales[0::2] or firsts, scales[1::2] or firsts, copies or weights]  # not read
    addresses = [[t.data_ptr() for t in column] for column in columns]
    sizes = [t.numel() for t in weights]
    for step in (STEP, 1):
        chosen = [
            i
            for i, size in enumerate(sizes)
            if size
            and (step == STEP)
            == (size % STEP == 0 and all(a[i] % (2 * STEP) == 0 for a in addresses))
        ]
        if chosen:
            table = [[column[i] for i in chosen] for column in (sizes, keys, *addresses)]
            numbers = [rules[7 * i + k] for i in chosen for k in range(7)]
            formats = weights[0].dtype, grads[0].dtype, firsts[0].dtype
            _launch(table, numbers, weights[0], formats, bool(copies), step, divisor)


def _launch(
    table: list[list[int]],
    numbers: list[float],
    weight: Tensor,
    formats: tuple[torch.dtype, ...],
    copy: bool,
    step: int,
    divisor: Tensor | None,
) -> None:
    kernels = importlib.import_module("hasten.parts.kernels.adamw_triton")
    device = weight.device
    programs = [-(-size // kernels.CHUNK) for size in table[0]]
    starts = list(accumulate(programs, initial=0))
    tensors = len(programs)
    table_tensor = torch.tensor([starts[:-1], *table], dtype=torch.int64, device="cpu").view(-1)
    rules = torch.tensor(numbers, dtype=torch.float32, device="cpu")
    table_tensor, rules = _sent(table_tensor, device), _sent(rules, device)
    moments = {torch.float32: kernels.FLOAT32, torch.bfloat16: kernels.BF16}
    launch(
        kernels.__name__,
        "adamw_kernel",
        (starts[-1],),
        table_tensor,
        rules,
        rules if divisor is None else divisor,
        *tables(device),
        tensors,
        (tensors - 1).bit_length(),
        WEIGHT=kernels.KINDS[formats[0]],
        GRAD=kernels.KINDS[formats[1]],
        MOMENTS=moments.get(formats[2], kernels.INT8),
        COPY=copy,
        DIVIDED=divisor is not None,
        STEP=step,
        CHUNK=kernels.CHUNK,
        ROWS=kernels.ROWS,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )


def _sent(values: Tensor, device: torch.device) -> Tensor:
    """Sends values to the device from pinned memory, so the host doesn't wait."""
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


# The random bits of a number are a hash of its position in the tensor and the tensor's
# key. There are 16 bits for each moment, and 16 bits of one more hash for a weight in
# bf16. They depend on nothing else. So a resumed run rounds like an uninterrupted one,
# and every rank like its neighbours.


def reference_update(task: TensorUpdate, divisor: Tensor | None = None) -> None:
    """Updates one tensor and its moments in place; all are contiguous and on one device."""
    rule, count = task.rule, task.weight.numel()
    weight, first, second = map(_flat, (task.weight, task.first, task.second))
    g, w = _flat(task.grad).float(), weight.float()
    if divisor is not None:
        g = g * (1 / divisor)
    device = weight.device
    if task.scales is not None:
        m = low_bit.values_of(first, task.scales[0], low_bit.signed_table(device), count)
        v = low_bit.values_of(second, task.scales[1], low_bit.squared_table(device), count)
    else:
        m, v = first.float(), second.float()
    m = m + (g - m) * (1 - rule.beta1)
    v = v * rule.beta2 + g * g * (1 - rule.beta2)
    # A processor's float32 root in torch may be off by its last bit.
    root = v.double().sqrt().float() if v.device.type == "cpu" else v.sqrt()
    w = w * rule.keep - m / (root * rule.root + rule.eps) * rule.rate
    weight.copy_(w if weight.dtype is torch.float32 else low_bit.to_bf16(w, _dice(task, 2)))
    if task.copy is not None:
        _flat(task.copy).copy_(w)
    if task.scales is not None:
        places, scale = low_bit.quantised_signed(m)
        first.copy_(places)
        task.scales[0].copy_(scale)
        places, scale = low_bit.quantised_squares(v, _dice(task, 1))
        second.copy_(places)
        task.scales[1].copy_(scale)
    elif first.dtype is torch.bfloat16:
        first.copy_(low_bit.to_bf16(m, _dice(task, 0)))
        second.copy_(low_bit.to_bf16(v, _dice(task, 1)))
    else:
        first.copy_(m)
        second.copy_(v)


def _dice(task: TensorUpdate, which: int) -> Tensor:
    """Returns 16 random bits per number, for its first or second moment, or its weight."""
    dice = hashes(task.weight.numel(), task.key)
    if which == 2:
        dice = mixed(dice + 0x9E3779B9 & 0xFFFFFFFF)
    halves = dice >> 16 if which == 1 else dice & 0xFFFF
    return halves.int().to(task.weight.device)


def hashes(count: int, key: int) -> Tensor:
    """Returns 32 random bits for each number of a tensor, as int64 on the processor."""
    at = torch.arange(count)
    once = mixed((at + (key & 0xFFFFFFFF)) & 0xFFFFFFFF)
    return mixed(once ^ (key >> 32 & 0xFFFFFFFF) ^ (at >> 32))


def _flat(tensor: Tensor) -> Tensor:
    """Returns the numbers in memory order; the memory has no gaps."""
    return tensor.as_strided((tensor.numel(),), (1,))
