"""How much of a device a choice will take, before anything is built.

Where the choice was traced on paper (`gpu.on_paper`) it is the peak of live tensors found there;
elsewhere an estimate with its terms. Bytes per weight go by the techniques in the plan; activations
by what a block of a Llama keeps for its backward pass with fused layers: (hidden) the input of each
norm and of each group of products, (heads) query, key and value before and after the rotary
embedding and what attention gives back, (between) gate, up and their product.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpu.rows import Choice, Row, Shape
from hasten.techniques.adapter import LoRA
from hasten.techniques.optimizer import BYTES as MOMENTS
from hasten.techniques.optimizer import CompactAdamW
from hasten.techniques.precision import BF16MasterWeights
from hasten.techniques.recompute import Recompute

PEAKS = Path(__file__).with_name("paper_peaks.json")  # bytes by row and choice
RESERVE = 3e9  # the driver's context, workspaces of libraries
FRAGMENTS = 1.03  # what the allocator can't use of what it holds
LOGITS = 4 * (1 << 26)  # a chunk of them, and what becomes of it
FORMATS = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Estimate:
    """Bytes by what they are for."""

    weights: float
    masters: float
    gradients: float
    moments: float
    activations: float
    head: float

    @property
    def total(self) -> float:
        return FRAGMENTS * sum(asdict(self).values()) + RESERVE

    def to_dict(self) -> dict[str, float]:
        return {**asdict(self), "total": self.total}


@dataclass(frozen=True)
class OnPaper:
    """Bytes of live tensors at the peak of a traced step."""

    peak: float

    @property
    def total(self) -> float:
        return FRAGMENTS * self.peak + RESERVE

    def to_dict(self) -> dict[str, float]:
        return {"on_paper": self.peak, "total": self.total}


def kept_peaks() -> dict[str, dict[str, float]]:
    """What was traced, by row and choice."""
    found: dict[str, dict[str, float]] = json.loads(PEAKS.read_text()) if PEAKS.exists() else {}
    return found


def choice_key(row: Row, choice: Choice) -> str:
    """Names a choice of a row in the file of peaks."""
    plan = ", ".join(str(technique) for technique in choice.techniques(row.batch))
    return f"{plan}; {choice.weights}, {choice.records} x {row.length}"


def predicted(row: Row, choice: Choice) -> OnPaper | Estimate:
    """The peak of a choice on its device: from paper where it is known, else estimated."""
    peak = kept_peaks().get(row.name, {}).get(choice_key(row, choice))
    return estimate(row, choice) if peak is None else OnPaper(peak)


def estimate(row: Row, choice: Choice) -> Estimate:
    """The peak of a choice on its device by arithmetic, in bytes."""
    found: dict[type, Any] = {type(t): t for t in choice.plan}
    weights = parameters(row.shape)
    lora, compact = found.get(LoRA), found.get(CompactAdamW)
    learns = adapter_parameters(row.shape, lora.rank) if lora else weights
    several = row.batch > choice.records
    masters = BF16MasterWeights in found
    each = 2.0 if masters else float(FORMATS[choice.weights])
    gradient = (6.0 if several else 4.0) if masters else FORMATS[choice.weights]
    tokens = choice.records * row.length
    head = row.shape["vocab_size"] * row.shape["hidden_size"]
    return Estimate(
        weights=each * (weights + (learns if lora else 0)),
        masters=4.0 * learns if masters else 0.0,
        gradients=gradient * learns,
        moments=(MOMENTS[compact.moments] if compact else 8.0) * learns,
        activations=tokens * _kept(row.shape, found.get(Recompute), bool(lora)),
        head=LOGITS + (0 if lora else 4.0 * head),
    )


def parameters(shape: Shape) -> float:
    """Weights of a Llama or Qwen of this shape, norms and biases left out (a ten-thousandth)."""
    return shape["num_hidden_layers"] * sum(o * i for o, i in _matrices(shape)) + (
        2 * shape["vocab_size"] * shape["hidden_size"]
    )


def adapter_parameters(shape: Shape, rank: int) -> float:
    """Weights of a LoRA on every linear layer of the blocks."""
    return float(shape["num_hidden_layers"] * sum(rank * (o + i) for o, i in _matrices(shape)))


def _matrices(shape: Shape) -> list[tuple[int, int]]:
    hidden, between = shape["hidden_size"], shape["intermediate_size"]
    groups = hidden * shape["num_key_value_heads"] // shape["num_attention_heads"]
    attention = [(hidden, hidden), (groups, hidden), (groups, hidden), (hidden, hidden)]
    return [*attention, (between, hidden), (between, hidden), (hidden, between)]


def _kept(shape: Shape, recompute: Recompute | None, lora: bool) -> float:
    """Bytes of activations per token, in bf16: what stays, and one block with its gradients."""
    hidden, between, layers = (
        shape[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    groups = hidden * shape["num_key_value_heads"] // shape["num_attention_heads"]
    # Groups are repeated for the variable-length kernel: key and value at full width as well.
    block = 2.0 * (6 * hidden + 2 * (hidden + groups) + 2 * hidden + 3 * between)
    if lora:  # inputs of the adapters' products are those of the layers; what lies between is thin
        block *= 1.05
    stays = 1.0 if recompute is None else recompute.budget or 0.0
    return layers * (stays * block + (1 - stays) * 2.0 * hidden) + 2 * block
