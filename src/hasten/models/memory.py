"""Memory of a rank's training, computed before anything is built.

- state: weights, gradients, optimizer state, and everything else that stays between
  steps
- activations: tensors that a micro-batch's forward pass stores for backward
- logits: rows of scores as wide as the vocabulary, and their gradient
- overhead: the process itself, with Python, libraries and a device's context

State is exact up to small tensors. Activations are counted from the stored tensors of a
block's products. Every matrix has the model's width on one side. So the other sides add
up to (weights of a block) / (width) (Korthikanti et al., arXiv:2205.05198, section 4,
without dropout and with fused attention).

Norms, residual sums and copies around attention are added. Each expert's own copy of
its tokens, before and after, is added too. Their widths were counted from the live
tensors at the peak of traced steps. ``tests/recipe/test_memory_peak.py`` compares them
again. The low ranks of latent attention are counted by their weights, which is too
little.
"""

from __future__ import annotations

from dataclasses import dataclass

ADAMW_FLOAT32 = 16.0  # bytes per weight: weight, gradient, two moments (arXiv:1910.02054)
# At the peak of its backward pass, cross-entropy over all logits holds its saved softmax, the
# softmax's gradient, and the scores' gradient.
LOGITS_COPIES = 3.0
# Widths that a block stores besides products, by (fused layers, frozen weights). Fused norms only
# store their input; a frozen weight's product doesn't store the input of its gradient.
BESIDE_PRODUCTS = {
    (False, False): 7.0,
    (False, True): 3.0,
    (True, False): 4.5,
    (True, True): 0.85,
}
HALF_NORMS = 2.0  # more, in 16 bits: Transformers' two norms store their input in float32


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a model; a token uses ``active`` weights and ``chosen`` experts.

    ``repeated``: widths by which attention's keys and values grow if heads share them.
    ``score_heads``: heads with stored scores, one number for each pair of positions.
    """

    parameters: int
    active: float
    hidden: int
    layers: int
    vocabulary: int
    chosen: int = 0
    repeated: float = 0.0
    score_heads: int = 0


@dataclass(frozen=True)
class BlockForm:
    """How a block runs: fused layers, frozen weights, repeated keys."""

    fused: bool = False
    frozen: bool = False
    repeats: bool = True
    score_length: float = 0.0  # positions that each position has scores with, if scores are stored


@dataclass(frozen=True)
class BytesNeeded:
    """Bytes on one rank.

    Args:
        later: state that doesn't exist yet when activations do.
        gathered: whole weights and gradients of a layout that shards them, for a while.
    """

    state: float
    activations: float = 0.0
    logits: float = 0.0
    overhead: float = 0.0
    later: float = 0.0
    gathered: float = 0.0

    @property
    def passing(self) -> float:
        """Bytes that a step adds to its state, and gives back."""
        return max(self.activations + self.logits + self.gathered - self.later, 0.0)

    @property
    def total(self) -> float:
        return self.state + self.passing + self.overhead

    def __str__(self) -> str:
        parts = [
            f"{gigabytes(self.state)} weights, gradients and optimizer",
            f"{gigabytes(self.activations)} activations",
            f"{gigabytes(self.logits)} logits",
            *([f"{gigabytes(self.gathered)} gathered shards"] if self.gathered else []),
            f"{gigabytes(self.overhead)} the process itself",
        ]
        return f"{gigabytes(self.total)} ({', '.join(parts)})"


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 5e7 else f"{count / 1e9:.3f} GB"


def state_bytes(parameters: int, more: float = 0.0, dealt: float = 0.0) -> float:
    """Returns the bytes of float32 weights, gradients and AdamW's moments.

    ``more`` is added to them and the sharded part is subtracted.

    Args:
        more: bytes that other formats of weights and optimizer add, or (negative) save.
        dealt: bytes of the float32 state that a layout shards to other ranks. The same
            share of the other bytes is subtracted.
    """
    usual = ADAMW_FLOAT32 * parameters
    return (usual + more) * max(1.0 - dealt / usual, 0.0) if usual else 0.0


# Copies of a group of weights that is brought together from shards (torch's FSDP2): the weights,
# their gradients and the message that sums these. The embedding, the head and the last norm stay
# for both passes; the weights of a second block come before the first one is done.
GATHERED_ENDS, GATHERED_BLOCKS = 3.0, 4.0


def gathered_bytes(parameters: float, hidden: int, layers: int, vocabulary: int) -> float:
    """Returns the bytes of weights and gradients that FSDP2 brings together, at their most."""
    ends = min(2.0 * vocabulary * hidden, parameters)
    blocks = (parameters - ends) / max(layers, 1)
    return 4.0 * (GATHERED_ENDS * ends + GATHERED_BLOCKS * blocks)


def routed_weights(
    parameters: int, hidden: int, layers: int, vocabulary: int, tied: bool = False
) -> float:
    """Estimates the weights of a model's routed experts, from its outer sizes alone.

    These are all weights without embedding, head and four square matrices of the model's
    width per layer. Attention has about this size. Latents, shared experts and dense layers
    are not separated from it.
    """
    unrouted = (1 if tied else 2) * vocabulary * hidden + 4 * layers * hidden**2
    return float(max(parameters - unrouted, 0))


def activation_bytes(
    size: ModelSize,
    positions: int,
    number_bytes: float = 4.0,
    recomputed: float = 0.0,
    form: BlockForm = BlockForm(),  # an immutable default
) -> float:
    """Returns the bytes that a micro-batch with this number of positions stores.

    For the share ``recomputed`` of its blocks only the inputs are stored. Blocks that are
    computed again need the full memory of one block at a time.
    """
    block = block_bytes(size, positions, number_bytes, form)
    inputs = positions * number_bytes * size.hidden
    stored_bytes = size.layers * ((1 - recomputed) * block + recomputed * min(inputs, block))
    return stored_bytes + (block if recomputed else 0.0)


def block_bytes(size: ModelSize, positions: int, number_bytes: float, form: BlockForm) -> float:
    """Returns the bytes that one block stores of a micro-batch."""
    if not size.layers or not size.hidden:
        return 0.0
    of_head = size.vocabulary * size.hidden
    widths = max(size.active - of_head, 0.0) / size.layers / size.hidden
    extra_widths = BESIDE_PRODUCTS[form.fused, form.frozen]
    if not form.fused:
        extra_widths += HALF_NORMS if number_bytes < 4 else 0.0
    count = widths + (extra_widths + 2 * size.chosen) * size.hidden
    if form.repeats:
        count += size.repeated
    if not form.fused and not form.frozen:  # the gate's activation is a separate tensor
        count += max(widths - 4 * size.hidden + size.repeated, 0.0) / 3
    count += size.score_heads * form.score_length
    return positions * number_bytes * count


def logits_bytes(size: ModelSize, positions: int) -> float:
    """Returns the bytes of all positions' scores in float32, with those of their backward pass."""
    return LOGITS_COPIES * 4.0 * size.vocabulary * positions


def chunk_logits_bytes(
    size: ModelSize, rows: int, number_bytes: float = 4.0, frozen: bool = False
) -> float:
    """Returns the bytes of a chunk of scores, and of the head's gradient over all chunks."""
    number = 4.0 if number_bytes >= 4 else 4.0 + number_bytes
    return size.vocabulary * (number * rows + (0.0 if frozen else 4.0 * size.hidden))
