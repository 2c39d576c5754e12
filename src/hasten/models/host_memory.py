"""Memory of ranks on their host, by phase, computed before anything is built.

1. loading: a rank reads its own slices of the weights; it holds them and the slice that it reads.
2. step: on a processor weights, gradients, moments and activations; on an accelerator none of them.
3. save: each rank copies the chunks that it writes. The copy stays to the end of the run.
4. export: one weight at a time is brought together and converted on the first rank.

All terms are bytes: plain numbers, or columns of numbers with one entry for each layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hasten.models.memory import gigabytes

Number = Any  # a float or a numpy array

PROCESS = 0.65e9  # a process with torch, transformers and the libraries that the first step loads
DEVICE_PROCESS = 2.5e9  # the same with an accelerator's libraries and context; not measured
FLOAT32 = 4.0  # bytes of a weight while it is loaded
MOMENTS_FLOAT32 = 8.0  # bytes of a trained weight's two moments
READ = 1.0  # slices that are held while one is read, besides those that stay
STAGED = 1.1  # bytes of a rank's copy / bytes that it writes
EXPORTED = 2.0  # whole weights at a time: as it is, and in the saved format
PHASES = ("loading", "step", "save", "export")
ADVICE = {
    "loading": "lay the model out in parts (fsdp2), or run fewer ranks on a host",
    "step": "take a smaller micro-batch, techniques that save memory, or more hosts",
    "save": "leave checkpoints out, train with LoRA, or spread the ranks over more hosts",
    "export": "spread the ranks over more hosts, or take a host with more memory",
}


@dataclass(frozen=True)
class RankShare:
    """One rank's share of a training, in bytes.

    Args:
        weights: its weights as they are loaded.
        largest: the largest weight of the model, whole, in its format.
        part: its own part of that weight.
        resting: what stays in host memory between two steps.
        step: what a step adds to it at most.
        written: its chunks of a checkpoint; 0 without checkpoints.
        process: the process itself.
    """

    weights: Number
    largest: Number
    part: Number
    resting: Number = 0.0
    step: Number = 0.0
    written: Number = 0.0
    process: Number = PROCESS


@dataclass(frozen=True)
class HostBytes:
    """Bytes of all ranks of one host, by phase."""

    loading: Number
    step: Number
    save: Number
    export: Number

    @property
    def most(self) -> Number:
        """The bytes of the phase that needs most."""
        return np.max([getattr(self, phase) for phase in PHASES], axis=0)


def host_bytes(share: RankShare, ranks: Number = 1) -> HostBytes:
    """Returns the bytes that this number of equal ranks needs on its host."""
    copy = STAGED * share.written
    resting = share.process + share.resting
    return HostBytes(
        loading=ranks * (share.process + share.weights + READ * share.part),
        step=ranks * (resting + share.step),
        save=ranks * (resting + share.step + copy),
        export=ranks * (resting + copy) + EXPORTED * share.largest,
    )


def largest_weight(
    hidden: float, vocabulary: float, layers: float = 1.0, routed: float = 0.0
) -> float:
    """Estimates the bytes of the largest weight: the embedding, or a layer's stacked experts.

    Two of the three matrices of all experts are one tensor.
    """
    return FLOAT32 * max(vocabulary * hidden, 2 / 3 * routed / max(layers, 1.0))


def lacking(host: HostBytes, available: float) -> str:
    """Returns the first phase that needs more bytes than ``available``; empty if none does."""
    return next((phase for phase in PHASES if getattr(host, phase) > available), "")


def refusal(host: HostBytes, phase: str, ranks: int, available: float) -> str:
    """Returns a sentence: which phase, the bytes that it needs, those available, what to do."""
    needed = getattr(host, phase)
    shared = f" for {ranks} ranks" if ranks > 1 else ""
    return (
        f"memory: the phase {phase} needs {gigabytes(needed)} of this host's memory{shared}, and "
        f"{gigabytes(available)} are available; {ADVICE[phase]}"
    )
