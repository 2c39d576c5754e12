"""What a rank's training needs of memory, added up before anything is built.

    state         weights, gradients, optimizer state and what else stays from step to step
    activations   what a micro-batch's forward pass keeps for backward
    logits        rows of scores as wide as the vocabulary: themselves and their gradient
    overhead      the process itself: Python, libraries, a device's context

State is exact up to small tensors. Activations are counted from what the products of a block keep:
every matrix has the model's width on one side, so the other sides add up to (weights of a block) /
(width) (Korthikanti et al., arXiv:2205.05198, section 4, without dropout and with fused attention).
Beside them lie norms and residual sums, and each expert's own copy of its tokens, before and after.
The low ranks of latent attention are counted by their weights, which is too little.
"""

from __future__ import annotations

from dataclasses import dataclass

ADAMW_FLOAT32 = 16.0  # bytes per weight: itself, its gradient, two moments (arXiv:1910.02054)
LOGITS_COPIES = 2.0  # scores and their gradient
NORMS_AND_SUMS = 8.0  # widths that a block keeps beside its products; Transformers' norms, measured


@dataclass(frozen=True)
class ModelSize:
    """What is counted of a model; a token meets ``active`` weights and ``chosen`` experts."""

    parameters: int
    active: float
    hidden: int
    layers: int
    vocabulary: int
    chosen: int = 0


@dataclass(frozen=True)
class BytesNeeded:
    """Bytes on one rank."""

    state: float
    activations: float = 0.0
    logits: float = 0.0
    overhead: float = 0.0

    @property
    def total(self) -> float:
        return self.state + self.activations + self.logits + self.overhead

    def __str__(self) -> str:
        parts = [
            f"{gigabytes(self.state)} weights, gradients and optimizer",
            f"{gigabytes(self.activations)} activations",
            f"{gigabytes(self.logits)} logits",
            f"{gigabytes(self.overhead)} the process itself",
        ]
        return f"{gigabytes(self.total)} ({', '.join(parts)})"


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 5e7 else f"{count / 1e9:.3f} GB"


def state_bytes(parameters: int, more: float = 0.0, dealt: float = 0.0) -> float:
    """Weights, gradients and AdamW's moments in float32, ``more`` beside them, less what is dealt.

    Args:
        more: bytes that other formats of weights and optimizer add, or (negative) save.
        dealt: bytes of the float32 state that a layout deals out to other ranks; of the rest it
            takes the same share.
    """
    usual = ADAMW_FLOAT32 * parameters
    return (usual + more) * max(1.0 - dealt / usual, 0.0) if usual else 0.0


def routed_weights(
    parameters: int, hidden: int, layers: int, vocabulary: int, tied: bool = False
) -> float:
    """How many of a model's weights belong to its routed experts, from its outer sizes alone.

    All but embedding, head and four square matrices of the model's width in a layer, which is what
    attention has about; latents, shared experts and dense layers are not told apart from that.
    """
    rest = (1 if tied else 2) * vocabulary * hidden + 4 * layers * hidden**2
    return float(max(parameters - rest, 0))


def activation_bytes(
    size: ModelSize, slots: int, number_bytes: float = 4.0, recomputed: float = 0.0
) -> float:
    """What a micro-batch of so many slots keeps; ``recomputed`` of its blocks, only the inputs.

    Blocks that are computed again need one at a time whole.
    """
    if not size.layers or not size.hidden:
        return 0.0
    of_head = size.vocabulary * size.hidden
    widths = max(size.active - of_head, 0.0) / size.layers / size.hidden
    block = (NORMS_AND_SUMS + 2 * size.chosen) * size.hidden + widths
    kept = size.layers * ((1 - recomputed) * block + recomputed * size.hidden)
    return slots * number_bytes * (kept + (block if recomputed else 0.0))


def logits_bytes(size: ModelSize, slots: int, share: float = 1.0) -> float:
    """Scores of ``share`` of the slots at once, in float32, and their gradient."""
    return LOGITS_COPIES * 4.0 * size.vocabulary * slots * share
