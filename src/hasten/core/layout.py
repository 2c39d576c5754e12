"""Layouts: which rank holds which part of the model and which examples (LAYOUT).

Ranks with the same ``data_rank`` are partners: they process the same examples and hold
different parts of the model (tensor, pipeline). Results of ranks with different data
are summed, those of partners aren't. The default is one process that holds everything.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from hasten.core.timing import BACKWARD

if TYPE_CHECKING:
    from hasten.core.job import Job
    from hasten.machine.environment import World


# Excludes the numbers that ranks exchange besides gradients (counts, loss); the clock measures
# them.


@dataclass(frozen=True)
class CommTiming:
    """Communication of one step's gradients, or of the weights that are sent instead.

    Args:
        exposed: seconds in which this rank only waited for communication; None: unknown.
        hidden: seconds of communication that overlapped with computation; None: unknown.
        sent_bytes: bytes that this rank sent to others; None: unknown.
        during: the part of the step in which the exposed seconds were spent.
    """

    exposed: float | None
    hidden: float | None = None
    sent_bytes: int | None = None
    during: str = BACKWARD


class Communication(Protocol):
    """COMMUNICATION: data that is sent between ranks, with three functions."""

    def attach(self, module: nn.Module) -> None:
        """Hooks into the wrapped module to receive gradients."""
        return

    def before_update(self, parameters: Sequence[Tensor]) -> None:
        """Called when all gradients are complete and the weights haven't moved."""
        return

    def after_update(self, parameters: Sequence[Tensor]) -> None:
        """Called after each update of the weights (local steps average here)."""
        return

    @property
    def sent_bytes(self) -> int | None:
        """Returns the bytes that this rank has sent so far; None: unknown."""
        return None

    def traffic(self) -> CommTiming | None:
        """Returns the timing of the last step, moved or skipped; called once per step."""
        return None


class Layout(Protocol):
    """LAYOUT: a mesh, two functions on the model, and sums over ranks.

    A layout has no function for what it leaves as it is.

    Args:
        size: number of all ranks.
        data_rank: this rank's index among the ranks with different examples.
        data_size: number of shares of a step's examples.
        stage: this rank's index among partners with other layers.
        averages: ``apply_data_parallel`` returns gradients that are divided by this number;
            the loss is multiplied by it.
        replicated: True if every rank holds the same full model in plain tensors. If False, ranks
            hold different parts: the loss module's forward pass uses those of all ranks, and a
            model is saved through ``hasten.models.weight_files.GathersWeights``.
    """

    size: int
    data_rank: int
    data_size: int
    averages: int
    replicated: bool
    stage: int = 0

    def build(self, job: Job) -> nn.Module:
        """Returns the job's model.

        A layout that splits it may return it without memory for parameters. It reads the parts of
        this rank after the model is split.
        """
        return job.build_model()

    def late_hash(self, model: nn.Module, names: Collection[str]) -> str:
        """Returns the hash of these weights if they are read later; on the first rank at least."""
        return ""

    def apply_model_parallel(self, module: nn.Module) -> nn.Module:
        """Pipeline stages, tensor, sequence and expert parallelism.

        Of stages, the returned module maps a micro-batch's inputs to (loss sum, count) as the
        input module did, in evaluation too. It returns the same on all partners.
        """
        return module

    def apply_data_parallel(
        self, module: nn.Module, device: torch.device, communication: Communication
    ) -> nn.Module:
        """Replicas or shards on the device, with the communication method's codec.

        A layout of shards moves the module part by part, so the full module need not fit.
        """
        return module.to(device)

    def sync(self, module: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Returns the context of a micro-batch's backward pass; the last sends the gradients."""
        return nullcontext()

    def alone(self, module: nn.Module) -> nn.Module:
        """Returns the module of a replicated layout to run without other ranks."""
        return module

    def send(self, module: nn.Module) -> None:
        """Sends the gradients of such passes; every rank calls it once per step."""
        return

    def traffic(self) -> CommTiming | None:
        """Returns the timing of the last step, moved or skipped; called once per step."""
        return None

    def all_reduce_data(self, values: Tensor) -> Tensor:
        """The elementwise sum over data ranks of a float64 tensor on the host.

        Partners bring the same values and count once (it is the sum over all ranks divided by the
        number of partners). So a flag that any rank sets is nonzero, though perhaps not 1.
        """

    def all_reduce_world(self, values: Tensor) -> Tensor:
        """The elementwise sum over all ranks, partners too (a row per rank, a broadcast)."""

    def norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """L2 norm of the whole model's gradient, from the ``.grad`` of this rank's true weights.

        The same number on every rank. A weight that several ranks hold counts once.
        """
        half: list[Tensor] = []
        wide: list[Tensor] = []
        for parameter in parameters:
            if (grad := parameter.grad) is not None:
                (half if grad.dtype in (torch.bfloat16, torch.float16) else wide).append(grad)
        # torch's own norm has 8 bits of precision in bf16
        norms = torch._foreach_norm(half, 2, dtype=torch.float32) if half else []
        return torch.nn.utils.get_total_norm([*norms, *wide])


@runtime_checkable
class SplitsModel(Protocol):
    """A layout in which ranks hold different parts of the model.

    Its state is saved by weight name: each rank has chunks of tensors, or tensors of its own.

    Args:
        pieces: True if true weights are shards of the module's own parameters, without
            separate master weights.
        keeps: True on one rank of each stage: it hands over what was gathered.
        copies: name of the original on another rank, by name of this rank's copy.
    """

    pieces: bool
    keeps: bool
    copies: Mapping[str, str]

    def placed(self, weight: Tensor, tensor: Tensor) -> Tensor:
        """Returns a weight, or one of its moments, as DTensor if this rank has a part of it.

        ``weight`` is one of the module's parameters: a true weight, or the tensor that the
        optimizer holds for it. No rank sends anything.

        Raises:
            InputError: the tensor isn't laid out like its weight.
        """


@runtime_checkable
class KeepsState(Protocol):
    """A layout in which an engine of its own holds true weights and moments."""

    def placed(self, weight: Tensor, tensor: Tensor) -> Tensor:
        """Returns this rank's part of a module's weight; a part of a moment as it is."""

    def moments(self, weights: Sequence[Tensor]) -> dict[int, dict[str, Any]]:
        """Returns the optimizer's state of these weights by number, with this rank's parts."""

    def check_moments(self, moments: Sequence[tuple[Tensor, Mapping[str, Any]]]) -> None:
        """Raises InputError if this state of weights can't be loaded."""

    def load(
        self,
        values: Sequence[tuple[Tensor, Tensor]],
        moments: Sequence[tuple[Tensor, Mapping[str, Any]]],
    ) -> None:
        """Loads this rank's parts of weights and of their moments. All ranks call it."""


def local_state(layout: Layout, module: nn.Module) -> dict[str, Tensor]:
    """Returns a module's state; under an engine this rank's part of each weight."""
    state = module.state_dict(keep_vars=True)
    if isinstance(layout, KeepsState):
        return {name: layout.placed(tensor, tensor) for name, tensor in state.items()}
    return {name: tensor.detach() for name, tensor in state.items()}


class NoCompression(Communication):
    """Sends gradients unchanged."""


class OneProcess(Layout):
    """The layout of a single process."""

    size = 1
    data_rank = 0
    data_size = 1
    averages = 1
    replicated = True

    def all_reduce_data(self, values: Tensor) -> Tensor:
        return values

    all_reduce_world = all_reduce_data


def rank_rows(layout: Layout, world: World, numbers: Any) -> Tensor:
    """Returns each rank's numbers as a row in float64; each rank writes its own row of a sum.

    All ranks call it.
    """
    local_numbers = torch.as_tensor(numbers, dtype=torch.float64)
    rows = torch.zeros(world.size, *local_numbers.shape, dtype=torch.float64)
    rows[world.rank] = local_numbers
    return layout.all_reduce_world(rows.flatten()).reshape(rows.shape)


def gradients_of(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Returns the gradients of all parameters that have one."""
    return [p.grad for p in parameters if p.grad is not None]
