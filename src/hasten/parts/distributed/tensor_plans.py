"""Plans of tensor parallelism: which layers of each architecture are split, and how, as data.

Names are those of Hugging Face modules below the trunk; ``*`` is a layer's number. Column and row
splits: Shoeybi et al., arXiv:1909.08053; sequence parallelism: Korthikanti et al.,
arXiv:2205.05198. Names that a model doesn't have are ignored: DeepSeek's first layers have a dense
MLP, the others experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

BLOCK_NORMS = ("layers.*.input_layernorm", "layers.*.post_attention_layernorm", "norm")


@dataclass(frozen=True)
class TensorPlan:
    """Plan of the cut of each module of an architecture.

    Names are those of Hugging Face modules below the trunk, ``*`` a layer's number; the words are
    Megatron-LM's (Shoeybi et al., arXiv:1909.08053; sequence parallel: Korthikanti et al.,
    arXiv:2205.05198). A name that a model doesn't have is passed over: DeepSeek's first layers
    have a dense MLP, the others experts.

    Args:
        column: linear layers cut by output; their input is whole, their output a piece.
        row: linear layers cut by input; their outputs are summed.
        regions: modules from whole inputs to a row cut, every linear layer in them cut.
        mixed: modules in which some layers are whole on every rank.
        scattered: of these, those with a whole result instead of a row cut at the end.
        norms: norms over pieces of a sequence, if it is cut between the regions.
        head_norms: norms of each head by itself, over pieces of the heads.
        tails: layers whole on every rank; the last numbers of their output go to every
            head.
        tail_size: the config's name for how many numbers those are.
        embedding: the embedding, cut by rows of the vocabulary together with the head.
    """

    column: tuple[str, ...]
    row: tuple[str, ...]
    regions: tuple[str, ...]
    mixed: tuple[str, ...] = ()
    scattered: tuple[str, ...] = ()
    norms: tuple[str, ...] = BLOCK_NORMS
    head_norms: tuple[str, ...] = ()
    tails: tuple[str, ...] = ()
    tail_size: str = ""
    embedding: str = "embed_tokens"


_MLP = ("layers.*.mlp.gate_proj", "layers.*.mlp.up_proj")
_LLAMA = TensorPlan(
    column=(*(f"layers.*.self_attn.{n}_proj" for n in "qkv"), *_MLP),
    row=("layers.*.self_attn.o_proj", "layers.*.mlp.down_proj"),
    regions=("layers.*.self_attn", "layers.*.mlp"),
)
# The latents of MLA are small and replicated; layers that expand them into heads are split. Each
# rank's heads read the full rotary part of the key. Routed experts are replicated (expert
# parallelism divides them); shared ones are split like other MLPs.
_MLA = TensorPlan(
    column=(
        *(f"layers.*.self_attn.{n}" for n in ("q_proj", "q_b_proj", "kv_b_proj")),
        *_MLP,
        *(f"layers.*.mlp.shared_experts.{n}_proj" for n in ("gate", "up")),
    ),
    row=(
        *("layers.*.self_attn.o_proj", "layers.*.mlp.down_proj"),
        "layers.*.mlp.shared_experts.down_proj",
    ),
    regions=(),
    mixed=("layers.*.self_attn", "layers.*.mlp"),
    scattered=("layers.*.mlp",),
    tails=("layers.*.self_attn.kv_a_proj_with_mqa",),
    tail_size="qk_rope_head_dim",
)
TENSOR_PLANS: dict[str, TensorPlan] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": replace(_LLAMA, head_norms=("layers.*.self_attn.q_norm", "layers.*.self_attn.k_norm")),
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
}
