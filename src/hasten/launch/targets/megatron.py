"""Megatron-LM: a plan's layout and a Hugging Face config as the arguments of ``pretrain_gpt.py``.

Shape, experts and latent attention come from the config, the split over ranks from the plan, rates
and lengths from the recipe. What Megatron-LM can't run as planned is refused, not approximated.
Names of the arguments as in Megatron-LM's ``megatron/training/arguments.py`` (core 0.12 and later).
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from typing import Any

from hasten.errors import InputError
from hasten.launch.targets.job import Launch, exports, script
from hasten.launch.targets.node import meeting_at

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "deepseek_v2", "deepseek_v3")
FP8 = {"fp8": ("hybrid", "tensorwise"), "mxfp8": ("e4m3", "mxfp8")}
Words = list[tuple[str, ...]]


def files(launch: Launch) -> dict[str, str]:
    """``megatron.sh``, which holds the arguments.

    Raises:
        InputError: no plan, or one that Megatron-LM can't run.
    """
    lines = arguments(launch.config, launch.layout, launch.batch, launch.cloud.devices)
    if launch.minutes is not None:  # it saves and ends by itself, before the scheduler does it
        saving = math.ceil(launch.grace / 60)
        lines.append(("--exit-duration-in-mins", str(max(1, launch.minutes - saving))))
    missing = f'"${{1:?give the address where ranks meet: megatron.sh FIRST_HOST:{launch.port}}}"'
    text = script(
        "megatron",
        port=launch.port,
        exports="\n".join(
            [
                *exports(launch.cloud, launch.interface, launch.grace),
                "# tensor parallelism overlaps its exchanges only with one queue to the device",
                "export CUDA_DEVICE_MAX_CONNECTIONS=1",
            ]
        ),
        workdir=shlex.quote(launch.workdir),
        arguments="\n".join("  " + " ".join(map(shlex.quote, line)) for line in lines),
        python=shlex.quote(launch.python),
        meeting=meeting_at(launch, launch.nodes, missing, launch.name, ""),
        ranks=launch.cloud.gpus_per_node,
        restarts=launch.restarts,
    )
    return {"megatron.sh": text}


def arguments(
    config: Mapping[str, Any], layout: Mapping[str, Any], batch: Mapping[str, Any], devices: int
) -> Words:
    """The arguments, a line each: a name and its values.

    Args:
        config: fields of a Hugging Face config.
        layout: fields of the plan's layout (dp, tp, pp, ep, cp, zero, micro_batch ...).
        batch: sequence, global_batch, steps, and the recipe's rates.
        devices: of the cluster; has to be what the layout deals out.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise InputError(f"megatron: {family!r} isn't one of {', '.join(FAMILIES)}")
    if batch.get("task") == "lora":
        raise InputError("megatron: the recipe trains a LoRA, and pretrain_gpt.py trains all")
    try:
        return [
            *_shape(config),
            *_latent(config),
            *_experts(config),
            *_split(config, layout, devices),
            *_training(layout, batch),
            *_recompute(config, layout["recompute"]),
        ]
    except KeyError as error:
        raise InputError(f"megatron: the config, layout or batch lacks {error.args[0]!r}") from None


def _shape(c: Mapping[str, Any]) -> Words:
    heads, groups = c["num_attention_heads"], c.get("num_key_value_heads")
    rope = c.get("rope_parameters") or {}
    lines: Words = [
        ("--num-layers", str(c["num_hidden_layers"])),
        ("--hidden-size", str(c["hidden_size"])),
        ("--ffn-hidden-size", str(c["intermediate_size"])),
        ("--num-attention-heads", str(heads)),
        ("--max-position-embeddings", str(c["max_position_embeddings"])),
        ("--position-embedding-type", "rope"),
        ("--rotary-base", f"{rope.get('rope_theta') or c.get('rope_theta') or 10000:.0f}"),
        ("--normalization", "RMSNorm"),
        ("--norm-epsilon", f"{c['rms_norm_eps']:g}"),
        ("--swiglu",),
        ("--disable-bias-linear",),
        ("--attention-dropout", "0"),
        ("--hidden-dropout", "0"),
    ]
    if not c.get("tie_word_embeddings"):
        lines.append(("--untie-embeddings-and-output-weights",))
    if c["model_type"] == "qwen2":
        lines.append(("--add-qkv-bias",))
    if c["model_type"] == "qwen3":
        lines.append(("--qk-layernorm",))
    if c.get("kv_lora_rank"):
        return lines
    width = c.get("head_dim") or c["hidden_size"] // heads
    if width * heads != c["hidden_size"]:
        lines.append(("--kv-channels", str(width)))
    if groups and groups != heads:
        lines += [("--group-query-attention",), ("--num-query-groups", str(groups))]
    return lines


def _latent(c: Mapping[str, Any]) -> Words:
    if not c.get("kv_lora_rank"):
        return []
    lines: Words = [("--multi-latent-attention",), ("--qk-layernorm",)]
    if c.get("q_lora_rank"):
        lines.append(("--q-lora-rank", str(c["q_lora_rank"])))
    lines += [
        ("--kv-lora-rank", str(c["kv_lora_rank"])),
        ("--qk-head-dim", str(c["qk_nope_head_dim"])),
        ("--qk-pos-emb-head-dim", str(c["qk_rope_head_dim"])),
        ("--v-head-dim", str(c["v_head_dim"])),
    ]
    rope = c.get("rope_parameters") or {}
    if rope.get("rope_type") != "yarn":
        return [*lines, ("--rope-type", "rope")]
    lines += [("--rope-type", "yarn"), ("--rotary-scaling-factor", f"{rope['factor']:g}")]
    for name in ("mscale", "mscale_all_dim"):
        if name in rope:
            lines.append((f"--{name.replace('_', '-')}", f"{rope[name]:g}"))
    return lines


def _experts(c: Mapping[str, Any]) -> Words:
    if not c.get("n_routed_experts"):
        return []
    dense = c.get("first_k_dense_replace") or 0
    pattern = f"([0]*{dense}+[1]*{c['num_hidden_layers'] - dense})"
    lines: Words = [
        ("--num-experts", str(c["n_routed_experts"])),
        ("--moe-layer-freq", pattern),
        ("--moe-router-topk", str(c["num_experts_per_tok"])),
        ("--moe-ffn-hidden-size", str(c["moe_intermediate_size"])),
        ("--moe-grouped-gemm",),
        ("--moe-token-dispatcher-type", "alltoall"),
    ]
    if c.get("n_shared_experts"):
        width = c["moe_intermediate_size"] * c["n_shared_experts"]
        lines.append(("--moe-shared-expert-intermediate-size", str(width)))
    if (c.get("n_group") or 1) > 1:
        lines.append(("--moe-router-num-groups", str(c["n_group"])))
        lines.append(("--moe-router-group-topk", str(c["topk_group"])))
    if c.get("routed_scaling_factor", 1.0) != 1.0:
        lines.append(("--moe-router-topk-scaling-factor", f"{c['routed_scaling_factor']:g}"))
    if c["model_type"] == "deepseek_v3":  # balanced by a bias instead of a loss: arXiv 2412.19437
        return [
            *lines,
            ("--moe-router-score-function", "sigmoid"),
            ("--moe-router-enable-expert-bias",),
            ("--moe-router-bias-update-rate", "1e-3"),
            ("--moe-router-load-balancing-type", "none"),
        ]
    return [*lines, ("--moe-router-pre-softmax",), ("--moe-router-load-balancing-type", "aux_loss")]


def _split(c: Mapping[str, Any], layout: Mapping[str, Any], devices: int) -> Words:
    dp, tp, pp, cp = (int(layout[name]) for name in ("dp", "tp", "pp", "cp"))
    ep, virtual = int(layout["ep"]), int(layout["virtual"])
    if dp * tp * pp * cp != devices:
        raise InputError(
            f"megatron: the layout deals out {dp * tp * pp * cp} devices, and the cluster has "
            f"{devices}"
        )
    if layout["zero"] not in (0, 1):
        raise InputError(f"megatron: ZeRO {layout['zero']} isn't among what it runs here (0, 1)")
    if pp > 1 and layout["schedule"] not in ("1f1b", "interleaved"):
        raise InputError(
            f"megatron: no schedule {layout['schedule']!r}; plan with --schedules 1f1b,interleaved"
        )
    if layout["compression"] != "none":
        raise InputError("megatron: gradients aren't compressed there; plan without --lossy")
    if c["num_hidden_layers"] % (pp * virtual):
        raise InputError(
            f"megatron: {c['num_hidden_layers']} layers aren't dealt evenly to {pp} stages of "
            f"{virtual}; choose a pp that divides them (--why shows what it costs)"
        )
    sizes = {"tensor-model": tp, "pipeline-model": pp, "context": cp}
    lines: Words = [(f"--{kind}-parallel-size", str(size)) for kind, size in sizes.items()]
    if c.get("n_routed_experts"):
        lines += [("--expert-model-parallel-size", str(ep)), ("--expert-tensor-parallel-size", "1")]
    if virtual > 1:
        lines.append(("--num-virtual-stages-per-pipeline-rank", str(virtual)))
    if tp > 1 and layout.get("sequence_parallel"):
        lines.append(("--sequence-parallel",))
    if layout["zero"] == 1:
        lines += [("--use-distributed-optimizer",), ("--overlap-param-gather",)]
    return [*lines, ("--overlap-grad-reduce",)] if dp * cp > 1 else lines


def _training(layout: Mapping[str, Any], batch: Mapping[str, Any]) -> Words:
    precision = layout["precision"]
    if precision not in ("fp32", "bf16", "fp16", *FP8):
        raise InputError(f"megatron: precision {precision!r} has no argument here")
    lines: Words = [] if precision == "fp32" else [("--fp16" if precision == "fp16" else "--bf16",)]
    if precision in FP8:
        format_, kind = FP8[precision]
        lines += [("--fp8-format", format_), ("--fp8-recipe", kind)]
    lines += [
        ("--micro-batch-size", str(layout["micro_batch"])),
        ("--global-batch-size", str(batch["global_batch"])),
        ("--seq-length", str(batch["sequence"])),
        ("--train-iters", str(batch["steps"])),
        ("--lr", f"{batch['learning_rate']:g}"),
        ("--min-lr", f"{batch['learning_rate'] * batch['min_lr_ratio']:g}"),
        ("--lr-decay-style", {"wsd": "WSD"}.get(batch["lr_schedule"], batch["lr_schedule"])),
        ("--lr-warmup-iters", str(batch["warmup_steps"])),
        ("--weight-decay", f"{batch['weight_decay']:g}"),
        *((f"--adam-beta{n}", f"{beta:g}") for n, beta in enumerate(batch["adam_betas"], start=1)),
        ("--clip-grad", f"{batch['max_grad_norm'] or 0:g}"),
        ("--seed", str(max(1, batch["seed"]))),
        ("--save-interval", str(batch.get("save_interval") or 500)),
        ("--exit-signal-handler",),
    ]
    return lines


def _recompute(c: Mapping[str, Any], word: str) -> Words:
    """Megatron's options for recomputed activations; ``light`` has names of Core 0.12 on."""
    some = ("--recompute-granularity", "selective")
    if word == "full":
        full = ("--recompute-granularity", "full"), ("--recompute-method", "uniform")
        return [*full, ("--recompute-num-layers", "1")]
    if word == "selective":
        return [some]
    if word != "light":
        return []
    if not c.get("n_routed_experts"):
        raise InputError(
            "megatron: recomputing only norms and activation functions (light) is for models with "
            "experts there; plan with recompute none, selective or full"
        )
    modules = ["layernorm", "moe_act", *(["mla_up_proj"] if c.get("kv_lora_rank") else [])]
    return [some, ("--recompute-modules", *modules)]
