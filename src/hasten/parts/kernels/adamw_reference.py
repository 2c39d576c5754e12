"""The update of ``adamw_triton.py`` in torch's operators: the bits that the kernel has to give.

The dice of a number are a hash of its place in the tensor and the tensor's key: 16 bits for each
moment, and 16 bits of one more hash for a weight in bf16. Nothing else decides them, so a resumed
run rounds as an uninterrupted one, and every rank as its neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hasten.parts.kernels import low_bit
from hasten.parts.kernels.adamw import TensorUpdate
from hasten.parts.kernels.codec_reference import mixed


def update(given: TensorUpdate, divisor: Tensor | None = None) -> None:
    """Move one tensor and its moments, in place; all lie on one device and have no gaps."""
    rule, count = given.rule, given.weight.numel()
    weight, first, second = map(_flat, (given.weight, given.first, given.second))
    g, w = _flat(given.grad).float(), weight.float()
    if divisor is not None:
        g = g * (1 / divisor)
    device = weight.device
    if given.scales is not None:
        m = low_bit.values_of(first, given.scales[0], low_bit.signed_table(device), count)
        v = low_bit.values_of(second, given.scales[1], low_bit.squared_table(device), count)
    else:
        m, v = first.float(), second.float()
    m = m + (g - m) * (1 - rule.beta1)
    v = v * rule.beta2 + g * g * (1 - rule.beta2)
    # On a processor torch's own root in float32 may be off by its last bit.
    root = v.double().sqrt().float() if v.device.type == "cpu" else v.sqrt()
    w = w * rule.keep - m / (root * rule.root + rule.eps) * rule.rate
    weight.copy_(w if weight.dtype is torch.float32 else low_bit.to_bf16(w, _dice(given, 2)))
    if given.copy is not None:
        _flat(given.copy).copy_(w)
    if given.scales is not None:
        places, scale = low_bit.quantised_signed(m)
        first.copy_(places)
        given.scales[0].copy_(scale)
        places, scale = low_bit.quantised_squares(v, _dice(given, 1))
        second.copy_(places)
        given.scales[1].copy_(scale)
    elif first.dtype is torch.bfloat16:
        first.copy_(low_bit.to_bf16(m, _dice(given, 0)))
        second.copy_(low_bit.to_bf16(v, _dice(given, 1)))
    else:
        first.copy_(m)
        second.copy_(v)


def _dice(given: TensorUpdate, which: int) -> Tensor:
    """16 random bits for each number of a tensor: for its first or second moment, or its weight."""
    dice = hashes(given.weight.numel(), given.key)
    if which == 2:
        dice = mixed(dice + 0x9E3779B9 & 0xFFFFFFFF)
    halves = dice >> 16 if which == 1 else dice & 0xFFFF
    return halves.int().to(given.weight.device)


def hashes(count: int, key: int) -> Tensor:
    """32 random bits for each number of a tensor, as int64 on the processor."""
    at = torch.arange(count)
    once = mixed((at + (key & 0xFFFFFFFF)) & 0xFFFFFFFF)
    return mixed(once ^ (key >> 32 & 0xFFFFFFFF) ^ (at >> 32))


def _flat(tensor: Tensor) -> Tensor:
    """The numbers in the order in which they lie in memory, which has no gaps."""
    return tensor.as_strided((tensor.numel(),), (1,))
