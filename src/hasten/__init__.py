"""hasten: fast training of DeepSeek-family language models, proven on your own job.

The names below are the public API, the names of the articles among them. Each is imported on
first\nuse, so ``import hasten`` is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hasten.version import __version__ as __version__

if TYPE_CHECKING:
    from peft import LoraConfig, get_peft_model

    from hasten.cli.env import check_hardware
    from hasten.core.job import Job
    from hasten.core.plan import Plan
    from hasten.core.technique import Technique
    from hasten.errors import InputError
    from hasten.integrations.gradual import gradual_optimize
    from hasten.integrations.mixed_precision import GradScaler, autocast
    from hasten.integrations.optimized_trainer import OptimizedTrainer
    from hasten.integrations.speed_up import speed_up
    from hasten.integrations.throughput import benchmark
    from hasten.launch.cluster import CloudConfig
    from hasten.machine.gpu import monitor_performance
    from hasten.parts.checkpoint import SmartCheckpointer
    from hasten.parts.comm.collectives import TopoAwareCollective
    from hasten.parts.comm.gradient_compressor import GradientCompressor
    from hasten.parts.data.collate import collate_fn
    from hasten.parts.data.dynamic_batch import DynamicBatcher, DynamicBatchSampler
    from hasten.parts.data.prefetch import SmartPrefetcher
    from hasten.parts.distributed.pipeline.model import AsyncPipeline
    from hasten.parts.distributed.pipeline.one_process import PipeDream
    from hasten.parts.nn.fused_functions import fused_linear_relu
    from hasten.parts.nn.fused_layers import optimize_for_inference
    from hasten.parts.nn.recompute import checkpoint_sequential
    from hasten.training.run import train

_HOMES = {
    "AsyncPipeline": "hasten.parts.distributed.pipeline.model",
    "CloudConfig": "hasten.launch.cluster",
    "DynamicBatchSampler": "hasten.parts.data.dynamic_batch",
    "DynamicBatcher": "hasten.parts.data.dynamic_batch",
    "GradScaler": "hasten.integrations.mixed_precision",
    "GradientCompressor": "hasten.parts.comm.gradient_compressor",
    "InputError": "hasten.errors",
    "Job": "hasten.core.job",
    "LoraConfig": "peft",
    "OptimizedTrainer": "hasten.integrations.optimized_trainer",
    "PipeDream": "hasten.parts.distributed.pipeline.one_process",
    "Plan": "hasten.core.plan",
    "SmartCheckpointer": "hasten.parts.checkpoint",
    "SmartPrefetcher": "hasten.parts.data.prefetch",
    "Technique": "hasten.core.technique",
    "TopoAwareCollective": "hasten.parts.comm.collectives",
    "autocast": "hasten.integrations.mixed_precision",
    "benchmark": "hasten.integrations.throughput",
    "check_hardware": "hasten.cli.env",
    "checkpoint_sequential": "hasten.parts.nn.recompute",
    "collate_fn": "hasten.parts.data.collate",
    "fused_linear_relu": "hasten.parts.nn.fused_functions",
    "get_peft_model": "peft",
    "gradual_optimize": "hasten.integrations.gradual",
    "monitor_performance": "hasten.machine.gpu",
    "optimize_for_inference": "hasten.parts.nn.fused_layers",
    "speed_up": "hasten.integrations.speed_up",
    "train": "hasten.training.run",
}
__all__ = [
    "AsyncPipeline",
    "CloudConfig",
    "DynamicBatchSampler",
    "DynamicBatcher",
    "GradScaler",
    "GradientCompressor",
    "InputError",
    "Job",
    "LoraConfig",
    "OptimizedTrainer",
    "PipeDream",
    "Plan",
    "SmartCheckpointer",
    "SmartPrefetcher",
    "Technique",
    "TopoAwareCollective",
    "autocast",
    "benchmark",
    "check_hardware",
    "checkpoint_sequential",
    "collate_fn",
    "fused_linear_relu",
    "get_peft_model",
    "gradual_optimize",
    "monitor_performance",
    "optimize_for_inference",
    "speed_up",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'hasten' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
