"""A rank's stages of a pipeline: splits a model, runs stages, and joins them again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hasten.core.layout import Communication
from hasten.core.setup import Setup, run_once
from hasten.errors import InputError
from hasten.parts.comm.groups import gathered_objects
from hasten.parts.distributed.pipeline.runtime import (
    PipelineSettings,
    PipelineWork,
    RanksRunner,
)
from hasten.parts.distributed.pipeline.schedules import SPLIT
from hasten.parts.distributed.pipeline.stages import (
    LanguageModel,
    OtherStage,
    Pruned,
    TiedEmbedding,
    balanced_layers,
    stages_of,
)
from hasten.parts.nn.recompute import BlockRecompute
from hasten.techniques.communication.compressed import Compressed
from hasten.techniques.compile import Compiling


class PipelineStages:
    """The stages of a loss module on this rank; those of others are freed.

    The model is split by cost. The loss module keeps its names, and its own pass becomes an
    evaluation through all stages.

    Args:
        group: returns the group of the pipeline's ranks.

    Attributes:
        layers: number of layers of each stage.
        copies: name of the original on another rank, by name of this rank's copy: the embedding
            on the last stage's rank.
    """

    def __init__(
        self,
        setup: Setup,
        settings: PipelineSettings,
        module: nn.Module,
        group: Callable[[], dist.ProcessGroup],
    ) -> None:
        check_company(setup, settings)
        self.settings = settings
        try:
            self.model = LanguageModel(module)
            self.layers = balanced_layers(self.model.costs(), len(settings.homes))
        except AttributeError as error:
            raise InputError(
                f"pipeline: {type(module).__name__} isn't a loss around a language model "
                "of Hugging Face's, and nothing else can be cut into stages; take ddp or fsdp2"
            ) from error
        except ValueError as error:
            raise InputError(f"pipeline: {error}") from error
        self.group, homes = group(), settings.homes
        self.rank = dist.get_rank(self.group)
        self.runner: RanksRunner | None = None
        self.tied = TiedEmbedding(self.model, homes, self.group)

        def tied_names() -> list[str]:
            state = module.state_dict(keep_vars=True)
            return [name for name, tensor in state.items() if tensor is self.tied.weight]

        originals = tied_names()
        # Context in which the model has every module; returns the stage of each tensor by id.
        self.all_modules = Pruned(self.model, self.layers, homes, self.group).all_modules
        self.copies = {} if self.tied.counts else dict.fromkeys(tied_names(), originals[0])
        if isinstance(setup.recompute, BlockRecompute):
            setup.recompute.among = lambda module: self.local_layers
        loss: Any = module
        self._loss = loss
        loss.forward = self._evaluate  # set on this instance; the last stage calls the class's own

    @property
    def local_layers(self) -> list[nn.Module]:
        """Returns this rank's layers."""
        return [layer for layer in self.model.trunk.layers if not isinstance(layer, OtherStage)]

    @cached_property
    def stages(self) -> dict[int, nn.Module]:
        """Returns this rank's stages by number, over the modules at the first call."""
        return stages_of(self.model, self.layers, self.settings.homes, self.rank)

    def start(self, work: PipelineWork) -> RanksRunner:
        """Returns the runner of this rank's stages."""
        message = self.model.message(gathered_objects(self.model.dtype, self.group)[0])
        self.runner = RanksRunner(self.stages, work, self.group, message)
        return self.runner

    def _evaluate(self, **inputs: Any) -> tuple[Tensor, Tensor]:
        assert self.runner is not None  # set by the engine
        with torch.no_grad():
            if inputs.get("log_probs"):
                others = [self._others(inputs.pop("other"))] if "other" in inputs else []
                return torch.cat([self.runner.evaluate(inputs), *others], 1), inputs["counts"]
            inputs = self.with_divergence(inputs)
            output, labels = self.runner.evaluate(inputs), inputs["labels"]
        if inputs.get("predict"):
            return output.long(), labels[labels != -100]
        return output, inputs["weights"].sum() if "weights" in inputs else (labels != -100).sum()

    def _others(self, other: Mapping[str, Any]) -> Tensor:
        return self._evaluate(**other, log_probs=True)[0]

    def with_divergence(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns inputs with KTO's divergence in place of the other answers.

        The last stage alone can't compute it. Every rank calls it.
        """
        resolved = dict(inputs)
        if "other" in resolved:
            others = self._others(resolved.pop("other"))[:, 0]
            arguments = resolved.get("reference"), resolved["weights"]
            resolved["kl"] = self._loss.divergence(others, *arguments)
        return resolved


def check_company(setup: Setup, settings: PipelineSettings) -> None:
    """Raises InputError for techniques that change passes which a pipeline runs itself."""
    recompute, schedule = setup.recompute, settings.schedule
    name, reason = "activation_checkpointing", ""
    if isinstance(setup.compile, Compiling):
        name, reason = (
            "compiled",
            "since it compiles a whole model's blocks and a rank has some of ",
        )
        reason += "them; leave it out"
    elif setup.run_passes is not run_once:
        name, reason = "adaptive_batch", "no rank can run its passes again by itself; leave it out"
    elif not isinstance(recompute, BlockRecompute):
        return
    elif settings.checkpoint != "never":
        reason = f"since the pipeline's own checkpoint is {settings.checkpoint} already; give one"
        reason += " of the two"
    elif recompute.segments is not None:
        reason = "since a rank's layers need not follow each other; leave segments out"
    elif schedule in SPLIT:
        reason = f"since {schedule} runs a backward pass in two halves that would each compute the "
        reason += "blocks again; take the schedule 1f1b"
    if reason:
        raise InputError(
            f"plan: {name} doesn't work under pipeline here, {reason}, or take another layout"
        )


def check_communication(communication: Communication, pipelines: int) -> None:
    """Raises InputError if a communication method can't exchange the pipelines' gradients."""
    if not isinstance(communication, Compressed):
        raise InputError(
            f"plan: pipelines average the gradients of their stages, which "
            f"{type(communication).__name__.lower()} can't do for some of the ranks; take half, "
            "quantised, topk or powersgd as the communication method, or none"
        )
    if pipelines == 1:
        raise InputError(
            f"plan: {communication.kind} has nothing to compress in a single pipeline: its ranks "
            "exchange hidden states only; leave it out, or set stages below the number of ranks"
        )
    if communication.compressor.settings()["scope"] != "all":
        raise InputError(
            f"plan: {communication.kind} with scope hosts works on gradients of all ranks, and "
            "pipelines average stage by stage; set scope to all"
        )
