"""hasten: fast training of DeepSeek-family language models, proven on your own job.

The names below are the articles' API and the nouns of the house; everything is imported on first
use, so that ``import hasten`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hasten import _moved

if TYPE_CHECKING:
    from hasten.core.job import Job
    from hasten.core.plan import Plan
    from hasten.core.technique import Technique
    from hasten.errors import InputError
    from hasten.integrations.optimized_trainer import OptimizedTrainer
    from hasten.integrations.speed_up import speed_up
    from hasten.launch.cluster import CloudConfig
    from hasten.parts.checkpoint import SmartCheckpointer
    from hasten.parts.comm.collectives import TopoAwareCollective
    from hasten.parts.comm.gradient_compressor import GradientCompressor
    from hasten.parts.data.dynamic_batch import DynamicBatcher, DynamicBatchSampler
    from hasten.parts.data.prefetch import SmartPrefetcher
    from hasten.parts.distributed.pipeline.model import AsyncPipeline
    from hasten.parts.nn.fused_functions import fused_linear_relu
    from hasten.report.speedup import gradual_optimize
    from hasten.training.run import train

_HOMES = {
    "AsyncPipeline": "hasten.parts.distributed.pipeline.model",
    "CloudConfig": "hasten.launch.cluster",
    "DynamicBatchSampler": "hasten.parts.data.dynamic_batch",
    "DynamicBatcher": "hasten.parts.data.dynamic_batch",
    "GradientCompressor": "hasten.parts.comm.gradient_compressor",
    "InputError": "hasten.errors",
    "Job": "hasten.core.job",
    "OptimizedTrainer": "hasten.integrations.optimized_trainer",
    "Plan": "hasten.core.plan",
    "SmartCheckpointer": "hasten.parts.checkpoint",
    "SmartPrefetcher": "hasten.parts.data.prefetch",
    "Technique": "hasten.core.technique",
    "TopoAwareCollective": "hasten.parts.comm.collectives",
    "fused_linear_relu": "hasten.parts.nn.fused_functions",
    "gradual_optimize": "hasten.report.speedup",
    "speed_up": "hasten.integrations.speed_up",
    "train": "hasten.training.run",
}
__version__ = "0.1.0"
__all__ = [
    "AsyncPipeline",
    "CloudConfig",
    "DynamicBatchSampler",
    "DynamicBatcher",
    "GradientCompressor",
    "InputError",
    "Job",
    "OptimizedTrainer",
    "Plan",
    "SmartCheckpointer",
    "SmartPrefetcher",
    "Technique",
    "TopoAwareCollective",
    "fused_linear_relu",
    "gradual_optimize",
    "speed_up",
    "train",
]


_moved.install()


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'hasten' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
