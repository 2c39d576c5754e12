"""A layout says which rank holds which part of the model and which examples; LAYOUT fills it.

Ranks with the same ``data_rank`` are partners: they see the same examples and hold different parts
of the model (tensor, pipeline). Ranks with different data add up, partners don't. The default is
one process that holds everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from hasten.core.timing import BACKWARD

if TYPE_CHECKING:
    from hasten.core.setup import Communication


class Layout(Protocol):
    """LAYOUT: a mesh, three functions on the model, and sums over ranks.

    Args:
        size: ranks in all.
        data_rank: this rank's place among those with different examples.
        data_size: how many shares of a step's examples there are.
        averages: gradients come out of ``across`` divided by this; the loss is multiplied by it.
        whole: every rank holds the whole model in plain tensors, the same as every other; where
            not, ranks hold different parts and only ``gather`` brings them together.
    """

    size: int
    data_rank: int
    data_size: int
    averages: int
    whole: bool

    def apply_pipeline(self, module: nn.Module) -> nn.Module:
        """Pipeline stages. The answer maps a micro-batch's inputs to (loss sum, count) as the given
        module did, in evaluation too, and says the same on all partners."""

    def apply_tensor_parallel(self, module: nn.Module) -> nn.Module:
        """Tensor, sequence, expert, context parallelism."""

    def apply_data_parallel(self, module: nn.Module, communication: Communication) -> nn.Module:
        """Replicas or shards, with the communication method's codec."""

    def sync(self, module: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """The context of a micro-batch's backward pass; gradients travel in the last one."""

    def all_reduce_data(self, values: Tensor) -> Tensor:
        """The elementwise sum over data ranks of a float64 tensor on the host.

        Partners bring the same values and count once (it is the sum over all ranks divided by the
        number of partners). So a flag that any rank sets is nonzero, though perhaps not 1.
        """

    def all_reduce_world(self, values: Tensor) -> Tensor:
        """The same over all ranks, partners each on their own (a row per rank, a broadcast)."""

    def norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """L2 norm of the whole model's gradient, from the ``.grad`` of this rank's true weights.

        The same number on every rank. A weight that several ranks hold counts once.
        """

    def gather(self, model: nn.Module) -> AbstractContextManager[bool]:
        """A context in which the first rank's ``model`` can be saved and run as one process's.

        Every rank enters it, between steps, and leaves it. Inside, on the first rank, the
        parameters are whole plain tensors under the model's own names and its forward pass needs
        no other rank; True there. Elsewhere the answer says whether the same holds (replicas), and
        where it doesn't, the model is not to be touched and no memory is taken beyond one weight.
        Values written inside are lost, unless ``whole``.
        """


@runtime_checkable
class PlacesModule(Protocol):
    """A layout that brings the module to the device itself, part by part, so that the whole of it
    never has to fit there."""

    def place(self, module: nn.Module) -> None:
        """Called after ``across``, in the place of a move of the whole module before it."""


@runtime_checkable
class SendsWeights(Protocol):
    """A layout whose ranks need not all build the model: ``across`` sends them what they keep.

    Args:
        builds: this rank builds it; others begin with the job's skeleton.
    """

    builds: bool


@runtime_checkable
class SplitsState(Protocol):
    """A layout of parts whose state can be brought together for a checkpoint, and dealt again.

    ``weight`` is one of the module's parameters, a true weight or what the optimizer holds in its
    place; one that isn't dealt out has values that are whole already, and keeps them.

    Args:
        pieces: true weights are pieces of the module's own parameters, and no masters beside them.
    """

    pieces: bool

    def full_tensor(self, weight: Tensor, value: Tensor) -> Tensor:
        """What belongs to a weight, itself or a moment, whole on the first rank.

        All ranks call it for the same weights in the same order, between steps; what the others get
        means nothing. Raises InputError where the value isn't laid out like its weight.
        """

    def local_shard(self, weight: Tensor, full: Tensor) -> Tensor:
        """This rank's part; what isn't of the whole weight's shape comes back as it is."""


@runtime_checkable
class SplitsWeights(Protocol):
    """A layout whose ranks hold different weights, each of them whole: the state of all of them is
    put together by name for a checkpoint, and each takes its own out of one.

    Args:
        names: of the weights and buffers in the whole module's state, wherever they are.
        copies: of weights here that another rank holds too, the name under which it does.
    """

    names: Sequence[str]
    copies: Mapping[str, str]

    def ordered(self) -> list[str]:
        """The names of all trained weights, as an optimizer of the whole model counts them."""

    def all_gather_object(self, local_object: Any) -> list[Any]:
        """What each rank with another part of the same model says; all of them call it."""

    def gather_to_rank0(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """On the first rank the tensors of all parts, on the host; what others get means nothing.

        All ranks call it.
        """


class OneProcess:
    """Everything on this rank; there is no other."""

    size = 1
    data_rank = 0
    data_size = 1
    averages = 1
    whole = True

    def apply_pipeline(self, module: nn.Module) -> nn.Module:
        return module

    def apply_tensor_parallel(self, module: nn.Module) -> nn.Module:
        return module

    def apply_data_parallel(self, module: nn.Module, communication: Communication) -> nn.Module:
        return module

    def sync(self, module: nn.Module, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def all_reduce_data(self, values: Tensor) -> Tensor:
        return values

    def all_reduce_world(self, values: Tensor) -> Tensor:
        return values

    def norm(self, parameters: Sequence[Tensor]) -> Tensor:
        return total_norm(parameters)

    def gather(self, model: nn.Module) -> AbstractContextManager[bool]:
        return nullcontext(True)


def gradients_of(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Those that are there."""
    return [p.grad for p in parameters if p.grad is not None]


def total_norm(parameters: Sequence[Tensor]) -> Tensor:
    """L2 norm over all gradients; torch's own would give half formats a norm of 8 bits."""
    half: list[Tensor] = []
    wide: list[Tensor] = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            narrow = gradient.dtype in (torch.bfloat16, torch.float16)
            (half if narrow else wide).append(gradient)
    if not half:
        return torch.nn.utils.get_total_norm(wide)
    norms = torch._foreach_norm(half, 2, dtype=torch.float32)
    return torch.nn.utils.get_total_norm([*norms, *wide])


# What a step's exchange between ranks took on this rank, where the layout can tell.
#
# A layout that can has the methods of ``MeasuresExchange``; with any other the step says that it
# isn't known.
# What ranks tell each other beside it (counts, the loss) isn't in here: the clock's marks have it.


@dataclass(frozen=True)
class CommTiming:
    """Of one step's gradients, or of the weights that travel in their place.

    Args:
        exposed: seconds in which this rank had nothing to do but wait for it; None: not known.
        hidden: seconds in which it was under way beside the computation; None: not known.
        sent_bytes: what this rank has handed over for others; None: not known.
        during: the part of the step in which the exposed seconds were spent.
    """

    exposed: float | None
    hidden: float | None = None
    sent_bytes: int | None = None
    during: str = BACKWARD


@runtime_checkable
class MeasuresExchange(Protocol):
    """A layout, or a communication method, that knows what its exchange took."""

    def traffic(self) -> CommTiming | None:
        """Of the step that has just moved the weights, or given up; asked once a step."""
