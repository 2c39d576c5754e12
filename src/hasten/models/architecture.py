"""A language model as the planner sees it: its matrices, read from a Hugging Face config.

Only sizes are kept. Every matrix product of a layer is one ``Matrix``: how wide it is, how many
layers have it, which share of the tokens meets it, and how tensor parallelism cuts it. Parameters,
FLOPs and memory follow from that list, so a new kind of layer is a few lines here and nothing
elsewhere. Parameter counts equal those of transformers' own models, biases and norms included.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hasten.errors import InputError

# How tensor parallelism cuts a matrix: its outputs, its inputs, not at all; experts go to EP ranks.
Cut = Literal["columns", "rows", "whole", "experts"]


@dataclass(frozen=True)
class Latent:
    """Ranks and head parts of multi-head latent attention (arXiv 2405.04434); q_rank 0: none."""

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: ``count`` routed, ``active`` per token, each ``width`` wide."""

    count: int
    active: int
    width: int
    shared_width: int = 0
    dense_layers: int = 0  # the first layers that have an ordinary MLP
    groups: int = 0  # of experts that one token may reach, a group to a node; 0: all of them


@dataclass(frozen=True)
class Matrix:
    """One kind of matrix product: ``inputs`` x ``outputs``, in ``layers`` layers."""

    name: str
    inputs: int
    outputs: int
    layers: int
    cut: Cut
    copies: int = 1  # of routed experts: all of them
    chosen: int = 1  # of routed experts: those that a token meets

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs * self.layers * self.copies


@dataclass(frozen=True)
class Operator:
    """A matrix product or the attention of one pass: FLOPs forward and bytes of its operands."""

    name: str
    flops: float
    bytes: float


@dataclass(frozen=True)
class Architecture:
    """The sizes of a decoder; ``window`` keys are seen by one layer in ``window_every``."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    gated: bool = True
    tied: bool = False
    latent: Latent | None = None
    moe: Experts | None = None
    window: int = 0
    window_every: float = 1
    qkv_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        for field in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocabulary"):
            if getattr(self, field) < 1:
                raise InputError(
                    f"{self.name}: {field} is {getattr(self, field)}; it must be at least 1"
                )

    @classmethod
    def from_config(cls, source: Mapping[str, Any] | str | Path) -> Architecture:
        """From a config's fields, the path of a ``config.json`` or its folder, or a preset's name.

        Raises:
            InputError: no such file or preset, or a field that the planner needs is missing.
        """
        from hasten.models.huggingface import read_config

        return read_config(source)

    @property
    def attention(self) -> str:
        return "mla" if self.latent else "gqa"

    @property
    def query_width(self) -> int:
        """Dimensions of a head's query and key."""
        return self.latent.nope + self.latent.rope if self.latent else self.head_dim

    @property
    def value_width(self) -> int:
        return self.latent.value if self.latent else self.head_dim

    @property
    def dense_layers(self) -> int:
        return self.layers if self.moe is None else min(self.moe.dense_layers, self.layers)

    def matrices(self) -> tuple[Matrix, ...]:
        """All matrix products, those of the layers first, the head last."""
        return (*self._attention(), *self._mlp(), self._head())

    def _attention(self) -> tuple[Matrix, ...]:
        n, h = self.layers, self.hidden
        out = Matrix("attention_out", self.heads * self.value_width, h, n, "rows")
        if self.latent is None:
            width = (self.heads + 2 * self.kv_heads) * self.head_dim
            return Matrix("qkv", h, width, n, "columns"), out
        mla = self.latent
        queries = self.heads * (mla.nope + mla.rope)
        kv_up = Matrix("kv_up", mla.kv_rank, self.heads * (mla.nope + mla.value), n, "columns")
        kv_down = Matrix("kv_down", h, mla.kv_rank + mla.rope, n, "whole")
        if not mla.q_rank:
            return Matrix("q", h, queries, n, "columns"), kv_down, kv_up, out
        q_down = Matrix("q_down", h, mla.q_rank, n, "whole")
        return q_down, Matrix("q", mla.q_rank, queries, n, "columns"), kv_down, kv_up, out

    def _mlp(self) -> tuple[Matrix, ...]:
        h, dense, two = self.hidden, self.dense_layers, 2 if self.gated else 1
        found = []
        if dense:
            found += [
                Matrix("up", h, two * self.ffn, dense, "columns"),
                Matrix("down", self.ffn, h, dense, "rows"),
            ]
        moe, sparse = self.moe, self.layers - dense
        if moe is None or not sparse:
            return tuple(found)
        found += [
            Matrix("router", h, moe.count, sparse, "whole"),
            Matrix("expert_up", h, two * moe.width, sparse, "experts", moe.count, moe.active),
            Matrix("expert_down", moe.width, h, sparse, "experts", moe.count, moe.active),
        ]
        if moe.shared_width:
            found += [
                Matrix("shared_up", h, two * moe.shared_width, sparse, "columns"),
                Matrix("shared_down", moe.shared_width, h, sparse, "rows"),
            ]
        return tuple(found)

    def _head(self) -> Matrix:
        return Matrix("head", self.hidden, self.vocabulary, 1, "columns")

    def parameters(self) -> int:
        """Weights in all; a tied head counts once."""
        small = (2 * self.layers + 1) * self.hidden
        if self.latent:
            small += self.layers * (self.latent.kv_rank + self.latent.q_rank)
        if self.qkv_bias:
            small += self.layers * (self.heads + 2 * self.kv_heads) * self.head_dim
        if self.qk_norm:
            small += self.layers * 2 * self.head_dim
        embedding = 0 if self.tied else self.vocabulary * self.hidden
        return embedding + small + sum(matrix.parameters for matrix in self.matrices())

    def expert_parameters(self) -> int:
        """Weights of the routed experts, which expert parallelism deals out."""
        return sum(m.parameters for m in self.matrices() if m.cut == "experts")

    def active_parameters(self) -> int:
        """Weights that one token meets, embedding included, as models are advertised."""
        active = sum(m.parameters // m.copies * m.chosen for m in self._mlp() if m.copies > 1)
        return self.parameters() - self.expert_parameters() + active

    def keys(self, sequence: int) -> float:
        """Keys that a query sees, averaged over its place and the layers; half, being causal."""
        if not self.window:
            return sequence / 2
        near = min(self.window, sequence)
        windowed = near - near * near / 2 / sequence
        return sequence / 2 + (windowed - sequence / 2) / self.window_every

    def attention_flops(self, tokens: float, sequence: int) -> float:
        """Scores and values of all layers, forward, half the square."""
        width = self.heads * (self.query_width + self.value_width)
        return 2.0 * tokens * self.keys(sequence) * width * self.layers

    def operators(self, tokens: float, sequence: int) -> tuple[Operator, ...]:
        """Products of a forward pass over ``tokens`` in rows of ``sequence``; two-byte operands.

        A training step owes three times their FLOPs: the backward pass has two products for one.
        """
        found = []
        for m in self.matrices():
            rows = tokens * m.chosen
            used = min(m.copies, max(1, rows)) * m.inputs * m.outputs
            moved = 2.0 * m.layers * (rows * (m.inputs + m.outputs) + used)
            flops = 2.0 * m.layers * rows * m.inputs * m.outputs
            found.append(Operator(m.name, flops, moved))
        widths = self.heads * (self.query_width + self.value_width)
        keys = self.kv_heads * (self.query_width + self.value_width)
        moved = 2.0 * tokens * (widths + keys) * self.layers
        found.append(Operator("attention", self.attention_flops(tokens, sequence), moved))
        return tuple(found)

    def training_flops(self, tokens: float, sequence: int) -> float:
        """Model FLOPs of a training step: the convention of MFU (``hasten.models.flops``)."""
        return 3 * sum(operator.flops for operator in self.operators(tokens, sequence))


def load_json(path: Path) -> Any:
    """The file's content; InputError in one sentence for what can't be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} can't be read: {error.strerror or error}") from error
    except ValueError as error:
        raise InputError(f"{path} isn't JSON: {error}") from error
