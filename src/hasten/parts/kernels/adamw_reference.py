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
    weight, first, second = (t.view(-1) for t in (given.weight, given.first, given.second))
    g, w = given.grad.reshape(-1).float(), weight.float()
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
    root = v.double().sqrt().float()  # torch's own in float32 may be off by its last bit
    w = w * rule.keep - m / (root * rule.root + rule.eps) * rule.rate
    dice = _dice(count, given.key).to(device)
    one, other = (dice & 0xFFFF).int(), (dice >> 16).int()
    if weight.dtype is torch.bfloat16:
        own = mixed(dice + 0x9E3779B9 & 0xFFFFFFFF) & 0xFFFF
        weight.copy_(low_bit.to_bf16(w, own.int()))
    else:
        weight.copy_(w)
    if given.copy is not None:
        given.copy.view(-1).copy_(w)
    if given.scales is not None:
        places, scale = low_bit.quantised_signed(m)
        first.copy_(places)
        given.scales[0].copy_(scale)
        places, scale = low_bit.quantised_squares(v, other)
        second.copy_(places)
        given.scales[1].copy_(scale)
    elif first.dtype is torch.bfloat16:
        first.copy_(low_bit.to_bf16(m, one))
        second.copy_(low_bit.to_bf16(v, other))
    else:
        first.copy_(m)
        second.copy_(v)


def _dice(count: int, key: int) -> Tensor:
    """32 random bits for each number of a tensor, as int64."""
    at = torch.arange(count)
    once = mixed((at + (key & 0xFFFFFFFF)) & 0xFFFFFFFF)
    return mixed(once ^ (key >> 32 & 0xFFFFFFFF) ^ (at >> 32))
