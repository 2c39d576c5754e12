"""Settings of the parts that are no numbers: each is a sentence with its name, not a traceback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import hasten


def pipedream(**settings: Any) -> Any:
    return hasten.PipeDream(nn.Sequential(nn.Linear(2, 2)), **settings)


def sampler(**settings: Any) -> Any:
    return hasten.DynamicBatchSampler(None, lengths=[1], **settings)


@pytest.mark.parametrize(
    ("part", "name", "kind"),
    [
        (hasten.AsyncPipeline, "stages", "whole number"),
        (hasten.AsyncPipeline, "microbatch_size", "whole number"),
        (hasten.AsyncPipeline, "learning_rate", "number"),
        (sampler, "max_tokens", "whole number"),
        (sampler, "seed", "whole number"),
        (sampler, "rank", "whole number"),
        (sampler, "world_size", "whole number"),
        (hasten.DynamicBatcher, "initial_size", "whole number"),
        (hasten.DynamicBatcher, "max_size", "whole number"),
        (hasten.DynamicBatcher, "growth_factor", "number"),
        (hasten.DynamicBatcher, "memory_threshold", "number"),
        (hasten.GradientCompressor, "compression_ratio", "number"),
        (hasten.GradientCompressor, "rank", "whole number"),
        (hasten.GradientCompressor, "momentum", "number"),
        (hasten.GradientCompressor, "dense_steps", "whole number"),
        (hasten.GradientCompressor, "minimum", "whole number"),
        (hasten.GradientCompressor, "every", "whole number"),
        (hasten.GradientCompressor, "timeout_seconds", "number"),
        (pipedream, "num_worker", "whole number"),
        (pipedream, "chunks", "whole number"),
        (hasten.SmartCheckpointer, "max_checkpoints", "whole number"),
        (hasten.SmartCheckpointer, "longest_loss", "number"),
        (hasten.SmartCheckpointer, "between_failures", "number"),
        (hasten.SmartPrefetcher, "lookahead", "whole number"),
        (hasten.SmartPrefetcher, "max_lookahead", "whole number"),
        (hasten.SmartPrefetcher, "memory_bytes", "number"),
        (hasten.TopoAwareCollective, "timeout", "number"),
    ],
)
def test_a_setting_that_is_no_number_is_named(
    part: Callable[..., Any], name: str, kind: str
) -> None:
    for value in ("8", float("nan"), True, *((2.5,) if kind == "whole number" else ())):
        with pytest.raises(ValueError, match=f"{name} is {value!r}; give a {kind}"):
            part(**{name: value})
