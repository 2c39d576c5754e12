"""The keys of a DeepSpeed configuration and what becomes of each where hasten trains by itself.

honoured: it has a counterpart. ignored: without effect on the result; what is said is why it isn't
needed. refused: it would change what is computed, and nothing here does the same; it counts only
where it is switched on. Keys are those of DeepSpeed 0.19 (its ``runtime/*config*.py``) and of the
documentation, https://www.deepspeed.ai/docs/config-json/.
"""

from __future__ import annotations

from collections.abc import Mapping

HONOURED, IGNORED, REFUSED = "honoured", "ignored", "refused"
Fate = tuple[str, str]

_LOGS: Fate = (IGNORED, "metrics.jsonl and hasten profile have these figures")
_BLOCK: Fate = (IGNORED, "FSDP2 gathers and reduces one transformer block at a time")
_NONE: Fate = (REFUSED, "hasten has no counterpart; run it on DeepSpeed: the technique deep_speed")
_INNER: Fate = (IGNORED, "a detail of DeepSpeed's own buffers")

TOP: Mapping[str, Fate] = {
    "train_batch_size": (HONOURED, "global_batch_size"),
    "train_micro_batch_size_per_gpu": (HONOURED, "accumulate: micro_batch_size"),
    "gradient_accumulation_steps": (HONOURED, "follows from the other two sizes"),
    "gradient_clipping": (HONOURED, "max_grad_norm"),
    "zero_optimization": (HONOURED, "a technique of the slot LAYOUT"),
    "optimizer": (HONOURED, "AdamW"),
    "scheduler": (HONOURED, "lr_schedule and warmup_steps"),
    "fp16": (HONOURED, "autocast with dtype fp16"),
    "bf16": (HONOURED, "bf16_master_weights"),
    "bfloat16": (HONOURED, "bf16_master_weights"),
    "activation_checkpointing": (HONOURED, "recompute"),
    "communication_data_type": (IGNORED, "gradients are reduced in float32; say half in the plan"),
    "seq_parallel_communication_data_type": _INNER,
    "data_types": (IGNORED, "gradients add up in float32"),
    "prescale_gradients": (IGNORED, "the loss is divided by trained tokens before backward"),
    "gradient_predivide_factor": (IGNORED, "the loss is divided by tokens before backward"),
    "zero_allow_untested_optimizer": (IGNORED, "every optimizer of the plan is tested"),
    "zero_force_ds_cpu_optimizer": (IGNORED, "torch's AdamW runs where its state lies"),
    "disable_allgather": _INNER,
    "memory_breakdown": _LOGS,
    "steps_per_print": _LOGS,
    "wall_clock_breakdown": _LOGS,
    "dump_state": _LOGS,
    "flops_profiler": _LOGS,
    "tensorboard": _LOGS,
    "wandb": _LOGS,
    "comet": _LOGS,
    "csv_monitor": _LOGS,
    "monitor_config": _LOGS,
    "comms_logger": _LOGS,
    "timers": _LOGS,
    "checkpoint": (IGNORED, "say checkpoint_every"),
    "nebula": (IGNORED, "say checkpoint_every"),
    "load_universal_checkpoint": (IGNORED, "say resume"),
    "use_node_local_storage": (IGNORED, "say checkpoint_dir"),
    "aio": (IGNORED, "nothing is swapped to a disk"),
    "autotuning": (IGNORED, "hasten speedup finds settings by measuring"),
    "dataloader_drop_last": (IGNORED, "every record is trained on"),
    "seed": (IGNORED, "say seed in the recipe"),
    "train_steps": (IGNORED, "say max_steps in the recipe"),
    "disable_python_gc": _INNER,
    "use_data_before_expert_parallelism": _INNER,
    "eigenvalue": _INNER,
    "compile": (IGNORED, "say compiled in the plan"),
    "managed_gradient_accumulation": _INNER,
    "amp": _NONE,
    "torch_autocast": _NONE,
    "elasticity": _NONE,
    "sparse_gradients": _NONE,
    "sparse_attention": _NONE,
    "curriculum_learning": _NONE,
    "data_efficiency": _NONE,
    "compression_training": _NONE,
    "hybrid_engine": _NONE,
    "pipeline": _NONE,
    "tensor_parallel": _NONE,
    "progressive_layer_drop": _NONE,
    "quantize_training": _NONE,
}
_SCALE = "hasten's scale falls at each overflow and rises after loss_scale_window steps"
_BF16: Mapping[str, Fate] = {
    "enabled": (HONOURED, "bf16_master_weights"),
    "immediate_grad_update": _INNER,
    "check_grad_overflow": (IGNORED, "every step is checked"),
    "bf16_master_weights_and_grads": _NONE,
    "bf16_optimizer_states": _NONE,
}
INSIDE: Mapping[str, Mapping[str, Fate]] = {
    "optimizer": {
        "type": (HONOURED, "AdamW; another rule is a technique of the slot OPTIMIZER"),
        "params": (HONOURED, "learning_rate and weight_decay"),
        "legacy_fusion": _INNER,
    },
    "scheduler": {
        "type": (HONOURED, "lr_schedule"),
        "params": (HONOURED, "warmup_steps and learning_rate"),
    },
    "fp16": {
        "enabled": (HONOURED, "autocast with dtype fp16"),
        "loss_scale": (HONOURED, "0 is a dynamic scale"),
        "initial_scale_power": (HONOURED, "autocast: initial_scale"),
        "loss_scale_window": (HONOURED, "autocast: growth_interval"),
        "hysteresis": (IGNORED, _SCALE),
        "consecutive_hysteresis": (IGNORED, _SCALE),
        "min_loss_scale": (IGNORED, "a run whose scale falls without end stops with exit code 3"),
        "auto_cast": (IGNORED, "inputs are token ids"),
        "fp16_master_weights_and_grads": _NONE,
    },
    "bf16": _BF16,
    "bfloat16": _BF16,  # its old name
    "activation_checkpointing": {
        "partition_activations": (HONOURED, "recompute: each rank keeps its own records' inputs"),
        "number_checkpoints": (HONOURED, "recompute, of every block"),
        "cpu_checkpointing": (IGNORED, "what is kept stays on the device"),
        "contiguous_memory_optimization": _INNER,
        "synchronize_checkpoint_boundary": _INNER,
        "profile": _LOGS,
    },
    "data_types": {"grad_accum_dtype": (IGNORED, "gradients add up in float32")},
    "zero_optimization": {
        "stage": (HONOURED, "0: ddp; 1 and 2: fsdp2 that keeps weights; 3: fsdp2"),
        "offload_optimizer": (HONOURED, "fsdp2: offload"),
        "offload_param": (HONOURED, "fsdp2: offload"),
        "cpu_offload": (HONOURED, "fsdp2: offload"),
        "cpu_offload_param": (HONOURED, "fsdp2: offload"),
        "overlap_comm": (HONOURED, "FSDP2 and DDP always overlap"),
        "contiguous_gradients": (HONOURED, "FSDP2 reduces from one buffer for each block"),
        "reduce_scatter": (HONOURED, "FSDP2 always does"),
        "ignore_unused_parameters": (HONOURED, "always"),
        "stage3_gather_16bit_weights_on_model_save": (HONOURED, "weights are saved whole"),
        "stage3_gather_fp16_weights_on_model_save": (HONOURED, "weights are saved whole"),
        "gather_16bit_weights_on_model_save": (HONOURED, "weights are saved whole"),
        "zero_hpz_partition_size": (REFUSED, "say hybrid in the plan"),
        "mics_shard_size": (REFUSED, "say hybrid in the plan"),
        "zero_quantized_weights": _NONE,
        "zero_quantized_nontrainable_weights": _NONE,
        "zero_quantized_gradients": (REFUSED, "say quantised in the plan"),
        "zenflow": _NONE,
        **dict.fromkeys(
            (
                *("reduce_bucket_size", "allgather_partitions", "allgather_bucket_size"),
                *("sub_group_size", "stage3_prefetch_bucket_size", "prefetch_bucket_size"),
                *("stage3_param_persistence_threshold", "param_persistence_threshold"),
                *("stage3_model_persistence_threshold", "model_persistence_threshold"),
                *("stage3_max_live_parameters", "max_live_parameters"),
                *("stage3_max_reuse_distance", "max_reuse_distance"),
                *("stage3_module_granularity_threshold", "module_granularity_threshold"),
                *("stage3_use_all_reduce_for_fetch_params", "use_all_reduce_for_fetch_params"),
                *("stage3_allgather_sequential", "allgather_sequential"),
            ),
            _BLOCK,
        ),
        **dict.fromkeys(
            (
                *("load_from_fp32_weights", "elastic_checkpoint", "legacy_stage1", "leaf_module"),
                *("cpu_offload_use_pin_memory", "round_robin_gradients", "enable_sanity_checks"),
                *("mics_hierarchical_params_gather", "memory_efficient_linear"),
                *("override_module_apply", "log_trace_cache_warnings", "parameter_alignment"),
                *("use_multi_rank_bucket_allreduce", "pipeline_loading_checkpoint"),
                *("compute_grad_norm", "save_muon_momentum_buffer_in_memory"),
            ),
            _INNER,
        ),
    },
}
OFFLOAD = frozenset(
    (
        *("device", "pin_memory", "buffer_count", "buffer_size", "max_in_cpu", "nvme_path"),
        *("pipeline_read", "pipeline_write", "fast_init", "ratio", "cpuadam_cores_perc"),
        "super_offload",
    )
)
