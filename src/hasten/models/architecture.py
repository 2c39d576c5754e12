"""Matrices of a language model, read from a Hugging Face config for the planner.

Only sizes are stored. Every matrix product of a layer is one ``Matrix``. It has its
width, the number of layers, its share of the tokens, and its split under tensor
parallelism. Parameters, FLOPs and memory follow from that list. So a new kind of layer
needs a few lines here and nothing elsewhere. Parameter counts equal those of
transformers' own models, biases and norms included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hasten.errors import InputError
from hasten.foreign_files import read_json_object
from hasten.models.presets import PRESETS, preset

# Split of a matrix under tensor parallelism: by outputs, by inputs, or none; experts go to EP
# ranks.
Cut = Literal["columns", "rows", "whole", "experts"]


@dataclass(frozen=True)
class LatentAttention:
    """Ranks and head sizes of multi-head latent attention (arXiv 2405.04434); q_rank 0: none."""

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
    dense_layers: int = 0  # first layers with an ordinary MLP
    groups: int = 0  # groups of experts that one token may reach, one group per node; 0: all


@dataclass(frozen=True)
class DistantKeys:
    """Layers, as a share of all, with one key and value for every ``rate`` distant tokens."""

    share: float
    rate: int
    chosen: int  # number of these keys that a query sees; 0: all
    series: int  # 2: each of them also covers the tokens before it

    def visible_keys(self, sequence: int) -> float:
        """Returns the keys per query, averaged over its position."""
        most = min(self.chosen * self.rate or sequence, sequence)
        return (most - most * most / 2 / sequence) / self.rate


@dataclass(frozen=True)
class CompressedKeys:
    """DeepSeek-V4's attention: one key for all heads; near keys complete, distant ones compressed.

    Heads are projected in ``groups`` to ``group_rank`` each, and these to the model's width.
    """

    q_rank: int
    groups: int
    group_rank: int
    near: int
    far: tuple[DistantKeys, ...]


@dataclass(frozen=True)
class Indexer:
    """DeepSeek-V3.2's choice of ``topk`` keys for each query, by ``heads`` of ``width``."""

    heads: int
    width: int
    topk: int


@dataclass(frozen=True)
class Matrix:
    """One kind of matrix product: ``inputs`` x ``outputs``, in ``layers`` layers."""

    name: str
    inputs: int
    outputs: int
    layers: int
    cut: Cut
    copies: int = 1  # number of routed experts
    chosen: int = 1  # number of routed experts per token

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
    """The sizes of a decoder; ``window`` keys are seen by one layer in ``window_every``.

    ``unlisted`` weights are in no product here: V4's mixing of streams, and the indexers of V3.2
    and V4. Their products add under 1 % to the FLOPs of the published models. The scores of V3.2's
    indexers count as keys of the attention.
    """

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
    latent: LatentAttention | None = None
    compressed: CompressedKeys | None = None
    moe: Experts | None = None
    window: int = 0
    window_every: float = 1
    qkv_bias: bool = False
    qk_norm: bool = False
    indexer: Indexer | None = None
    unlisted: int = 0
    family: str = ""  # the config's model_type

    def __post_init__(self) -> None:
        for field in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocabulary"):
            if getattr(self, field) < 1:
                raise InputError(
                    f"{self.name}: {field} is {getattr(self, field)}; it must be at least 1"
                )

    @classmethod
    def from_config(cls, source: Mapping[str, Any] | str | Path) -> Architecture:
        """Reads a config: its fields, a ``config.json``, its folder, a preset's or a hub's name.

        Raises:
            InputError: no such file or name, or a field that the planner needs is missing.
        """
        if isinstance(source, Mapping):
            return _read(source, str(source.get("name") or source.get("_name_or_path") or "model"))
        if known_preset := PRESETS.get(str(source)):
            fields = {"model_type": known_preset.architecture, **known_preset.config}
            return _read(fields, known_preset.name)
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        name = path.parent.name or path.stem
        if not path.exists():
            if isinstance(source, Path) or path.suffix == ".json":
                raise InputError(f"there is no config at {path}: name a config.json, or its folder")
            if "/" not in source:
                preset(source)  # raises, with similar names
            from hasten.models.load import config_folder  # which imports torch

            path, name = config_folder(source) / "config.json", source
        return _read(read_json_object(path, "model's config"), name)

    @property
    def query_width(self) -> int:
        """Returns the dimensions of a head's query and key."""
        return self.latent.nope + self.latent.rope if self.latent else self.head_dim

    @property
    def value_width(self) -> int:
        return self.latent.value if self.latent else self.head_dim

    @property
    def dense_layers(self) -> int:
        return self.layers if self.moe is None else min(self.moe.dense_layers, self.layers)

    def matrices(self) -> tuple[Matrix, ...]:
        """Returns all matrix products, those of the layers first, the head last."""
        head = Matrix("head", self.hidden, self.vocabulary, 1, "columns")
        return (*self._attention(), *self._mlp(), head)

    def _attention(self) -> tuple[Matrix, ...]:
        n, h = self.layers, self.hidden
        if self.compressed:
            return self._compressed(self.compressed)
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

    def _compressed(self, v4: CompressedKeys) -> tuple[Matrix, ...]:
        n, h, heads = self.layers, self.hidden, self.heads * self.head_dim
        compressing = (
            # A compressed key, and the weight of each token in it, for each series.
            Matrix(f"compress_{far.series}", h, 2 * far.series * self.head_dim, layers, "whole")
            for far in v4.far
            if (layers := round(far.share * n))
        )
        return (
            Matrix("q_down", h, v4.q_rank, n, "whole"),
            Matrix("q", v4.q_rank, heads, n, "columns"),
            Matrix("kv_down", h, self.head_dim, n, "whole"),
            *compressing,
            Matrix("group_out", heads // v4.groups, v4.groups * v4.group_rank, n, "rows"),
            Matrix("attention_out", v4.groups * v4.group_rank, h, n, "rows"),
        )

    def _mlp(self) -> tuple[Matrix, ...]:
        h, dense, two = self.hidden, self.dense_layers, 2 if self.gated else 1
        matrices = []
        if dense:
            matrices += [
                Matrix("up", h, two * self.ffn, dense, "columns"),
                Matrix("down", self.ffn, h, dense, "rows"),
            ]
        moe, sparse = self.moe, self.layers - dense
        if moe is None or not sparse:
            return tuple(matrices)
        matrices += [
            Matrix("router", h, moe.count, sparse, "whole"),
            Matrix("expert_up", h, two * moe.width, sparse, "experts", moe.count, moe.active),
            Matrix("expert_down", moe.width, h, sparse, "experts", moe.count, moe.active),
        ]
        if moe.shared_width:
            matrices += [
                Matrix("shared_up", h, two * moe.shared_width, sparse, "columns"),
                Matrix("shared_down", moe.shared_width, h, sparse, "rows"),
            ]
        return tuple(matrices)

    def parameters(self) -> int:
        """Returns the number of all weights; a tied head counts once."""
        small = (2 * self.layers + 1) * self.hidden + self.unlisted
        if self.latent:
            small += self.layers * (self.latent.kv_rank + self.latent.q_rank)
        if self.qkv_bias:
            small += self.layers * (self.heads + 2 * self.kv_heads) * self.head_dim
        if self.qk_norm:
            small += self.layers * 2 * self.head_dim
        embedding = 0 if self.tied else self.vocabulary * self.hidden
        return embedding + small + sum(matrix.parameters for matrix in self.matrices())

    def expert_parameters(self) -> int:
        """Returns the weights of routed experts, which expert parallelism divides."""
        return sum(m.parameters for m in self.matrices() if m.cut == "experts")

    def active_parameters(self) -> int:
        """Returns the weights per token, embedding included, as in models' advertised sizes."""
        active = sum(m.parameters // m.copies * m.chosen for m in self._mlp() if m.copies > 1)
        return self.parameters() - self.expert_parameters() + active

    def keys(self, sequence: int) -> float:
        """Returns the keys per query, averaged over its position and the layers.

        Causal attention halves the number. For DeepSeek-V3.2 it is the number of keys of a dense
        attention with as many products (`_sparse_keys`).
        """
        if self.compressed:
            every = (DistantKeys(1.0, 1, self.compressed.near, 1), *self.compressed.far)
            return sum(keys.share * keys.visible_keys(sequence) for keys in every)
        if self.indexer and self.latent and sequence > self.indexer.topk:
            return self._sparse_keys(sequence, self.indexer, self.latent)
        if not self.window:
            return sequence / 2
        near = min(self.window, sequence)
        windowed = near - near * near / 2 / sequence
        return sequence / 2 + (windowed - sequence / 2) / self.window_every

    def _sparse_keys(self, sequence: int, indexer: Indexer, latent: LatentAttention) -> float:
        """Returns the keys of a dense attention with as many products as ``document_attention``.

        It computes the chosen keys from their latents, or all keys under a mask if that is less.
        The indexer scores all keys. It runs forward only, a third of a training step.
        """
        dense, widths = sequence / 2, self.query_width + self.value_width
        of_latent = (2 * latent.kv_rank + latent.rope) / widths
        chosen = indexer.topk - indexer.topk**2 / 2 / sequence
        scored = dense * indexer.heads * indexer.width / (self.heads * widths)
        return min(dense, chosen * of_latent) + scored / 3

    def attention_flops(self, tokens: float, sequence: int) -> float:
        """Returns the FLOPs of scores and values of all layers, forward, half the square."""
        width = self.heads * (self.query_width + self.value_width)
        return 2.0 * tokens * self.keys(sequence) * width * self.layers

    def operators(self, tokens: float, sequence: int) -> tuple[Operator, ...]:
        """Returns a forward pass's products: ``tokens`` in rows of ``sequence``, two-byte operands.

        A training step takes three times their FLOPs: the backward pass has two products for
        one.
        """
        operators = []
        for m in self.matrices():
            rows = tokens * m.chosen
            used = min(m.copies, max(1, rows)) * m.inputs * m.outputs
            moved = 2.0 * m.layers * (rows * (m.inputs + m.outputs) + used)
            flops = 2.0 * m.layers * rows * m.inputs * m.outputs
            operators.append(Operator(m.name, flops, moved))
        widths = self.heads * (self.query_width + self.value_width)
        keys = self.kv_heads * (self.query_width + self.value_width)
        moved = 2.0 * tokens * (widths + keys) * self.layers
        operators.append(Operator("attention", self.attention_flops(tokens, sequence), moved))
        return tuple(operators)

    def training_flops(self, tokens: float, sequence: int) -> float:
        """Returns the model FLOPs of a training step, as `hasten.models.flops` counts them."""
        return 3 * sum(operator.flops for operator in self.operators(tokens, sequence))


# Reads an ``Architecture`` from the fields of a Hugging Face config with any of their names.

# The planner's name -> names in configs (llama first, then GPT-2, BLOOM, MPT).
_NAMES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocabulary": ("vocab_size",),
    "experts": ("n_routed_experts", "num_local_experts", "num_experts"),
}
# Architectures with one plain MLP four times as wide as the model, and a tied head.
_PLAIN = ("gpt2", "bloom", "mpt", "gpt_neox", "opt", "gptj")
_QKV_BIAS = ("qwen2", "qwen2_moe")
_QK_NORM = ("qwen3", "qwen3_moe")


def _read(fields: Mapping[str, Any], name: str) -> Architecture:
    text = fields.get("text_config")  # models with vision store their language part separately
    if isinstance(text, Mapping):
        fields = {**fields, **text}
    kind = str(fields.get("model_type", ""))
    plain = kind in _PLAIN
    layers, hidden, heads = (_need(fields, word, name) for word in ("layers", "hidden", "heads"))
    vocabulary = _need(fields, "vocabulary", name)
    moe = _experts(fields, name)
    ffn = 4 * hidden if plain and not _have(fields, "ffn") else 0
    if not ffn:
        ffn = moe.width if moe and not _have(fields, "ffn") else _need(fields, "ffn", name)
    if not fields.get("head_dim") and hidden % heads:
        raise InputError(
            f"{name}: hidden_size {hidden} can't be shared by {heads} heads: give head_dim"
        )
    window, every = _window(fields)
    architecture = Architecture(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=_number(fields, "num_key_value_heads", name, heads),
        head_dim=_number(fields, "head_dim", name, max(1, hidden // heads)),
        ffn=ffn,
        vocabulary=vocabulary,
        gated=not plain,
        tied=bool(fields.get("tie_word_embeddings", plain)),
        latent=_latent(fields, name),
        moe=moe,
        window=window,
        window_every=every,
        qkv_bias=kind in _QKV_BIAS,
        qk_norm=kind in _QK_NORM,
        family=kind,
    )
    if kind == "deepseek_v32":
        # The weights of the indexer: queries, one key with its norm, and the weights of the heads.
        keys = ("index_n_heads", "index_head_dim", "hidden_size", "q_lora_rank")
        heads, width, hidden, rank = (_number(fields, key, name) for key in keys)
        weights = rank * heads * width + hidden * width + 2 * width + hidden * heads
        indexer = Indexer(heads, width, _number(fields, "index_topk", name))
        return replace(architecture, unlisted=layers * weights, indexer=indexer)
    return _as_v4(architecture, fields) if kind == "deepseek_v4" else architecture


def _as_v4(model: Architecture, fields: Mapping[str, Any]) -> Architecture:
    """Returns the model with DeepSeek-V4's attention and streams; the config may have old names."""
    from transformers import DeepseekV4Config

    try:
        config: Any = DeepseekV4Config.from_dict(dict(fields))
    except Exception as error:  # any error of its checks about a user's file
        reason = " ".join(str(error).split())
        raise InputError(f"{model.name}: the config can't be read: {reason}") from error
    n, width, hidden = config.num_hidden_layers, config.head_dim, config.hidden_size
    kinds = (("compressed_sparse_attention", 2), ("heavily_compressed_attention", 1))
    layers = {kind: config.layer_types.count(kind) for kind, _ in kinds}
    far = tuple(
        DistantKeys(
            layers[kind] / n,
            config.compress_rates[kind],
            config.index_topk if series == 2 else 0,
            series,
        )
        for kind, series in kinds
    )
    streams = config.hc_mult
    mixing = streams * (streams + 2) * (streams * hidden + 1) + 3
    index, heads = config.index_head_dim, config.index_n_heads
    of_index = 4 * index * hidden + (1 + 2 * far[0].rate) * index
    of_index += config.q_lora_rank * heads * index + hidden * heads
    compressing = sum(
        layers[kind] * (1 + series * one.rate) * width
        for (kind, series), one in zip(kinds, far, strict=True)
    )
    assert model.moe is not None  # every V4 has experts
    return replace(
        model,
        head_dim=width,
        kv_heads=1,
        window=0,
        window_every=1,
        compressed=CompressedKeys(
            config.q_lora_rank, config.o_groups, config.o_lora_rank, config.sliding_window, far
        ),
        moe=replace(model.moe, shared_width=config.moe_intermediate_size),
        ffn=config.moe_intermediate_size,
        unlisted=n * (2 * mixing + config.q_lora_rank + width + model.heads)
        + streams * (streams * hidden + 1)
        + 1
        + compressing
        + layers[kinds[0][0]] * of_index,
    )


def _latent(fields: Mapping[str, Any], name: str) -> LatentAttention | None:
    if not fields.get("kv_lora_rank"):
        return None
    return LatentAttention(
        q_rank=_number(fields, "q_lora_rank", name, 0),
        kv_rank=_number(fields, "kv_lora_rank", name),
        nope=_number(fields, "qk_nope_head_dim", name),
        rope=_number(fields, "qk_rope_head_dim", name),
        value=_number(fields, "v_head_dim", name),
    )


def _experts(fields: Mapping[str, Any], name: str) -> Experts | None:
    if not _have(fields, "experts"):
        return None
    count = _need(fields, "experts", name)
    if count < 2:
        return None
    fallback = _need(fields, "ffn", name) if _have(fields, "ffn") else None
    width = _number(fields, "moe_intermediate_size", name, fallback)
    shared = _number(fields, "n_shared_experts", name, 0) * width
    active = _number(fields, "num_experts_per_tok", name)
    groups, chosen = (_number(fields, key, name, 1) for key in ("n_group", "topk_group"))
    if not 1 <= active <= count:
        raise InputError(
            f"{name}: num_experts_per_tok is {active}; it must lie between 1 and {count} experts"
        )
    return Experts(
        count=count,
        active=active,
        width=width,
        shared_width=_number(fields, "shared_expert_intermediate_size", name, shared),
        dense_layers=_number(fields, "first_k_dense_replace", name, 0),
        # Node-limited routing (arXiv 2412.19437, section 2.1.2): number of groups per token.
        groups=chosen if 0 < chosen < groups else 0,
    )


def _window(fields: Mapping[str, Any]) -> tuple[int, float]:
    """Returns the keys of a sliding window, and all layers / those with a window; (0, 1): none."""
    window = fields.get("sliding_window")
    if not window or fields.get("use_sliding_window") is False:
        return 0, 1
    kinds = fields.get("layer_types") or ("sliding_attention",)
    windowed = sum(kind == "sliding_attention" for kind in kinds)
    return (int(window), len(kinds) / windowed) if windowed else (0, 1)


def _have(fields: Mapping[str, Any], word: str) -> bool:
    return any(fields.get(name) for name in _NAMES[word])


def _need(fields: Mapping[str, Any], word: str, name: str) -> int:
    for key in _NAMES[word]:
        if fields.get(key) is not None:
            return _number(fields, key, name)
    raise InputError(
        f"{name}: the config has no {_NAMES[word][0]}, without which no step can be "
        "predicted: add the field"
    )


def _number(fields: Mapping[str, Any], key: str, name: str, default: int | None = None) -> int:
    number = fields.get(key)
    if number is None:
        if default is None:
            raise InputError(f"{name}: the config lacks {key}: add the field")
        return default
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise InputError(f"{name}: {key} is {number!r}; it must be a whole number")
    return number
