"""What techniques know of the kernels on this machine: whether they are right, and what they gain.

Both are found out once and kept (`hasten.machine.ways`); importing this module registers the ways
of hasten's kernels. A device that this process doesn't have (a plan for another machine) has
neither.
"""

from __future__ import annotations

import torch

from hasten.core.facts import Facts
from hasten.machine import ways
from hasten.machine.ways import Gain, Operation
from hasten.parts.nn import kernel_ways as kernels


def faults(facts: Facts, *operations: Operation) -> tuple[str, ...]:
    """What hasten's kernels for these operations compute wrong on the job's device, a sentence."""
    if not _is_here(facts.device):
        return ()
    proofs, names = ways.proofs_here(facts.device), {operation.name for operation in operations}
    return tuple(
        f"its kernel for {way.operation.name} ({way.name}) can't be used: {proofs[way.key].fault} "
        "(hasten bench --fresh looks again)"
        for way in ways.registered()
        if way.own and way.operation.name in names and proofs[way.key].fault
    )


def bf16_gain(device: str) -> Gain | None:
    """How many times as fast a training pass is in bf16 as in float32; None where that isn't known.

    By hasten's kernels where they run, since a plan has them beside bf16; else by torch's.
    """
    if not _is_here(device):
        return None
    figures = ways.figures_here(device)
    return figures.gain(kernels.PASS_FUSED.key, kernels.PASS_FUSED_HALF.key) or figures.gain(
        kernels.PASS_PLAIN.key, kernels.PASS_HALF.key
    )


def layers_gain(device: str) -> Gain | None:
    """How many times as fast a training pass is by hasten's kernels, in the faster format."""
    if not _is_here(device):
        return None
    figures = ways.figures_here(device)
    half = bf16_gain(device)
    if half is not None and half.sure:
        return figures.gain(kernels.PASS_HALF.key, kernels.PASS_FUSED_HALF.key)
    return figures.gain(kernels.PASS_PLAIN.key, kernels.PASS_FUSED.key)


def update_gain(device: str) -> Gain | None:
    """How many times as fast hasten's pass over the optimizer's state is as torch's."""
    if not _is_here(device):
        return None
    return ways.figures_here(device).gain(kernels.PLAIN_UPDATE.key, kernels.OWN_UPDATE.key)


def _is_here(device: str) -> bool:
    kind: str = torch.device(device).type
    return kind == "cpu" or (kind == "cuda" and torch.cuda.is_available())
