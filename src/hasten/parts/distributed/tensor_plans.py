"""Plan of tensor parallelism: which layers are split, and how, as data.

Names are those of Hugging Face modules below the trunk; ``*`` is a layer's number. Column and row
splits: Shoeybi et al., arXiv:1909.08053; sequence parallelism: Korthikanti et al.,
arXiv:2205.05198. Names that a model doesn't have are ignored: DeepSeek's first layers have a dense
MLP, the others experts.
"""

from __future__ import annotations

# The latents of MLA are small and replicated; layers that expand them into heads are split. Each
# rank's heads read the full rotary part of the key. Routed experts are replicated (expert
# parallelism divides them); shared ones are split like other MLPs. So not every linear layer of
# their attention and MLP is split.
MIXED = ("deepseek_v2", "deepseek_v3")
TENSOR_PARALLEL = ("llama", "mistral", "qwen2", "qwen3", *MIXED)

ATTENTION, MLP = "layers.*.self_attn", "layers.*.mlp"
# Linear layers that are split by output: their input is whole, their output a piece.
COLUMN = (
    *(f"{ATTENTION}.{name}" for name in ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj")),
    *(f"{MLP}.{part}{name}_proj" for part in ("", "shared_experts.") for name in ("gate", "up")),
)
# Linear layers that are split by input: their outputs are summed.
ROW = (f"{ATTENTION}.o_proj", f"{MLP}.down_proj", f"{MLP}.shared_experts.down_proj")
BLOCK_NORMS = ("layers.*.input_layernorm", "layers.*.post_attention_layernorm", "norm")
HEAD_NORMS = (f"{ATTENTION}.q_norm", f"{ATTENTION}.k_norm")  # each head by itself
# Whole on every rank; the last numbers of its output go to every head.
LATENTS, ROTARY_SIZE = f"{ATTENTION}.kv_a_proj_with_mqa", "qk_rope_head_dim"


def uneven_heads(name: str, heads: int, key_value_heads: int, ranks: int) -> str:
    """Returns why heads can't be split over so many ranks, or ""; 0 heads: unknown."""
    for count, kind in ((heads, "attention"), (key_value_heads, "key and value")):
        if count % ranks:
            return (
                f"the {count} {kind} heads of this {name} can't be dealt out evenly over {ranks} "
                "ranks; take a number that divides them"
            )
    return ""
