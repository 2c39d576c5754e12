"""The update of ``adamw_triton.py`` in torch's operators, with the same bits.

The random bits of a number are a hash of its position in the tensor and the tensor's
key. There are 16 bits for each moment, and 16 bits of one more hash for a weight in
bf16. They depend on nothing else. So a resumed run rounds like an uninterrupted one,
and every rank like its neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hasten.parts.kernels import low_bit
from hasten.parts.kernels.adamw import TensorUpdate
from hasten.parts.kernels.codec_reference import mixed


def update(task: TensorUpdate, divisor: Tensor | None = None) -> None:
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
