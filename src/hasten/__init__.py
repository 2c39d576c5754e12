"""hasten: fast training of DeepSeek-family language models, proven on your own job.

The names below are the articles' API and the nouns of the house; everything is imported on first
use, so that ``import hasten`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hasten.cluster.config import CloudConfig
    from hasten.core.job import Job
    from hasten.core.plan import Plan
    from hasten.core.technique import Technique
    from hasten.errors import InputError
    from hasten.evidence.speedup import gradual_optimize
    from hasten.hosts.optimized_trainer import OptimizedTrainer
    from hasten.parts.checkpoint import SmartCheckpointer
    from hasten.parts.collectives import TopoAwareCollective
    from hasten.parts.dynamic_batcher import DynamicBatcher
    from hasten.parts.dynamic_sampler import DynamicBatchSampler
    from hasten.parts.gradient_compressor import GradientCompressor
    from hasten.parts.layout.pipeline import AsyncPipeline
    from hasten.parts.linear_relu import fused_linear_relu
    from hasten.parts.prefetcher import SmartPrefetcher

_HOMES = {
    "AsyncPipeline": "hasten.parts.layout.pipeline",
    "CloudConfig": "hasten.cluster.config",
    "DynamicBatchSampler": "hasten.parts.dynamic_sampler",
    "DynamicBatcher": "hasten.parts.dynamic_batcher",
    "GradientCompressor": "hasten.parts.gradient_compressor",
    "InputError": "hasten.errors",
    "Job": "hasten.core.job",
    "OptimizedTrainer": "hasten.hosts.optimized_trainer",
    "Plan": "hasten.core.plan",
    "SmartCheckpointer": "hasten.parts.checkpoint",
    "SmartPrefetcher": "hasten.parts.prefetcher",
    "Technique": "hasten.core.technique",
    "TopoAwareCollective": "hasten.parts.collectives",
    "fused_linear_relu": "hasten.parts.linear_relu",
    "gradual_optimize": "hasten.experiment",
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
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'hasten' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
