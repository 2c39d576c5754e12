"""One rank's part of a pipeline: a model is cut, stages run, and the whole comes together again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hasten.core.setup import Setup, once
from hasten.core.state import order_of
from hasten.errors import InputError
from hasten.parts.distributed.pipeline import stages as partition
from hasten.parts.distributed.pipeline.model import (
    Pruned,
    brought,
    hidden_shape,
    prune,
    put_together,
)
from hasten.parts.distributed.pipeline.runtime import RanksRunner, Seams, Settings, Work
from hasten.parts.distributed.pipeline.schedules import SPLIT
from hasten.parts.distributed.pipeline.stages import LanguageModel, TiedHead
from hasten.parts.nn.recompute import BlockRecompute
from hasten.techniques.compile import Compiling


class Cut:
    """What this rank, ``stage`` of its pipeline, holds of the model; all of it before ``split``.

    Args:
        stage: this rank's place among those of its pipeline, which ``group`` opens.
        first: this rank's pipeline is the one that states and saved models come from.
    """

    def __init__(
        self,
        setup: Setup,
        settings: Settings,
        stage: int,
        first: bool,
        group: Callable[[], dist.ProcessGroup],
    ) -> None:
        self.setup, self.settings = setup, settings
        self.sizes: tuple[int, ...] = ()  # layers of each stage
        self.names: tuple[str, ...] = ()  # in the whole module's state
        self.copies: dict[str, str] = {}  # of a tied head where the embedding isn't
        self.runner: RanksRunner | None = None
        self._stage, self._first, self._open = stage, first, group
        self._device = torch.device(setup.job.device)
        self._pruned: Pruned | None = None
        self._tied: TiedHead | None = None
        self._trained: list[tuple[str, Tensor]] = []  # of the whole model, without memory

    @cached_property
    def group(self) -> dist.ProcessGroup:
        """The pipeline's ranks; opened once, when all ranks come here."""
        return self._open()

    @property
    def model(self) -> LanguageModel:
        assert self._pruned is not None  # split() comes first
        return self._pruned.model

    @property
    def tied(self) -> TiedHead:
        assert self._tied is not None  # split() comes first
        return self._tied

    def split(self, module: nn.Module) -> nn.Module:
        """Cut by cost, and let go what other ranks hold; evaluation goes through all stages."""
        check_company(self.setup, self.settings)
        try:
            whole = LanguageModel(module)
            costs, first, last = whole.costs()
            self.sizes = partition.balanced(costs, len(self.settings.homes), first, last)
        except AttributeError as error:
            raise InputError(
                f"pipeline: {type(module).__name__} isn't a loss around a language model "
                "of Hugging Face's, and nothing else can be cut into stages; take ddp or fsdp2"
            ) from error
        except ValueError as error:
            raise InputError(f"pipeline: {error}") from error
        self._tied = TiedHead(whole, self.settings.homes, self.group)
        state = module.state_dict(keep_vars=True)
        originals = {id(tensor): name for name, tensor in reversed(state.items())}
        self.names = tuple(state)
        self._trained = [
            (n, p.detach().to("meta")) for n, p in module.named_parameters() if p.requires_grad
        ]
        self._pruned = prune(whole, self.sizes, self.settings.homes, self._stage)
        here = module.state_dict(keep_vars=True)
        both = {name: originals[id(tensor)] for name, tensor in here.items()}
        self.copies = {name: original for name, original in both.items() if original not in here}
        if isinstance(self.setup.recompute, BlockRecompute):
            self.setup.recompute.among = lambda module: list(whole.trunk.layers)
        loss: Any = module
        loss.forward = self._evaluate  # of this instance; the class's own runs in the last stage
        return module

    @cached_property
    def stages(self) -> dict[int, nn.Module]:
        """This rank's stages by number, over the modules as they were when first asked for."""
        spans = partition.ranges(self.sizes)
        homes = enumerate(self.settings.homes)
        return {i: self.model.stage(spans[i]) for i, home in homes if home == self._stage}

    def start(self, seams: Seams) -> RanksRunner:
        """What runs this rank's stages."""
        whole, work = self.model, Work(self.settings, seams, self._device)
        shape = hidden_shape(whole.causal.config.hidden_size, lambda: whole.dtype)
        self.runner = RanksRunner(self.stages, work, self.group, self._device, shape)
        return self.runner

    def _evaluate(self, **inputs: Any) -> tuple[Tensor, Tensor]:
        assert self.runner is not None  # the engine has started it
        with torch.no_grad():
            total = self.runner.evaluate(inputs)
        return total, (inputs["labels"] != -100).sum()

    def put_together(self) -> AbstractContextManager[bool]:
        """The whole model on the pipeline's first rank; every rank of it enters."""
        assert self._pruned is not None  # split() comes first
        return put_together(self._pruned, self.group)

    def ordered(self) -> list[str]:
        """Names of the whole model's trained weights as its optimizer counts them."""
        assert self.setup.optimizer is not None  # prepare() put the job's there
        return order_of(self.setup.optimizer, self._trained)

    def told(self, mine: Any) -> list[Any]:
        """What each rank of the pipeline says."""
        found: list[Any] = [None] * self.settings.ranks
        dist.all_gather_object(found, mine, group=self.group)
        return found

    def brought(self, mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Everybody's tensors on the first rank of the first pipeline."""
        return brought(mine, self.group) if self._first else dict(mine)


def check_company(setup: Setup, settings: Settings) -> None:
    """InputError for techniques that reach into passes which a pipeline runs itself."""
    said = {
        "compiled": isinstance(setup.compile, Compiling)
        and "since it compiles a whole model's blocks and a rank has some of them; leave it out",
        "adaptive_batch": setup.attempt is not once
        and "no rank can run its passes again by itself; leave it out",
        "recompute": isinstance(setup.recompute, BlockRecompute)
        and _no_recompute(setup.recompute, settings),
    }
    for name, reason in said.items():
        if reason:
            raise InputError(
                f"plan: {name} doesn't work under pipeline here, {reason}, or take another layout"
            )


def _no_recompute(recompute: BlockRecompute, settings: Settings) -> str:
    if settings.checkpoint != "never":
        return f"whose own checkpoint is {settings.checkpoint} already; give one of the two"
    if recompute.segments is not None:
        return "since a rank's layers need not follow each other; leave segments out"
    if settings.schedule in SPLIT:
        return (
            f"since {settings.schedule} runs a backward pass in two halves that would each compute "
            "the blocks again; take the schedule 1f1b"
        )
    return ""


class DealsCut:
    """A layout of stages deals weights as its cut does (``hasten.core.layout.DealsWeights``)."""

    cut: Cut

    @property
    def names(self) -> Sequence[str]:
        return self.cut.names

    @property
    def copies(self) -> Mapping[str, str]:
        return self.cut.copies

    def ordered(self) -> list[str]:
        return self.cut.ordered()

    def told(self, mine: Any) -> list[Any]:
        return self.cut.told(mine)

    def brought(self, mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self.cut.brought(mine)
