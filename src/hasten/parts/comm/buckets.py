"""A model's gradients in buckets: names, shapes, and their exchange in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hasten.machine.lazy_torch import is_dtensor
from hasten.parts.comm import methods
from hasten.parts.comm.compression_settings import CompressionSettings
from hasten.parts.comm.exchange import FIRST, Hosts, Ranks
from hasten.parts.comm.methods import (
    AveragingMethod,
    BucketPart,
    Dense,
    ErrorMemory,
    Pieces,
    parts_of,
    total_numbers,
)

Named = tuple[str, Tensor]
BUCKET_BYTES, FIRST_BUCKET_BYTES = 25 * 2**20, 2**20  # sizes of DDP's buckets
READABLE = (torch.float32, torch.bfloat16)  # formats that codecs read; others become float32


def named(model: nn.Module | Iterable[Any]) -> list[Named]:
    """Returns a model's trainable parameters by name; a list of parameters is named by index.

    Raises:
        ValueError: an entry isn't a parameter, or a parameter is sharded over ranks.
    """
    if isinstance(model, nn.Module):
        parameters: list[Named] = list(model.named_parameters())
    else:
        entries = list(model)
        parameters = [e if isinstance(e, tuple) else (str(i), e) for i, e in enumerate(entries)]
    for name, parameter in parameters:
        if not isinstance(parameter, Tensor):
            raise ValueError(
                f"gradients belong to a model or to parameters; {name} is a "
                f"{type(parameter).__name__}"
            )
        if is_dtensor(parameter):
            raise ValueError(
                f"{name} is sharded over ranks (DTensor): its gradient isn't averaged like a "
                "replica's, leave it out"
            )
    return [(name, p) for name, p in parameters if p.requires_grad]


def piece_of(name: str, parameter: Tensor) -> BucketPart:
    return BucketPart(name, tuple(parameter.shape), parameter.element_size())


def buckets_of(parameters: Sequence[Named], alone: bool) -> list[list[Named]]:
    """Returns parameters in buckets of one format; missing gradients become zeros.

    If ``alone``, each parameter is a bucket.

    Raises:
        ValueError: a gradient is sparse.
    """
    buckets: list[list[Named]] = []
    size = BUCKET_BYTES
    for name, parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grad = parameter.grad
        if grad.layout is not torch.strided:
            raise ValueError(
                f"the gradient of {name} is sparse: build its embedding with sparse=False"
            )
        if not grad.numel():
            continue
        last = buckets[-1][-1][1] if buckets else None
        alike = last is not None and (last.dtype, last.device) == (grad.dtype, grad.device)
        if alone or not alike or size + grad.nbytes > BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append((name, parameter))
        size += grad.nbytes
    return buckets


def predicted_buckets(parameters: Sequence[Named], cap_mb: float) -> list[Pieces]:
    """Returns buckets as DDP forms them: from the last parameter backwards, until each is full."""
    buckets: list[list[BucketPart]] = [[]]
    size, limit = 0, float(FIRST_BUCKET_BYTES)
    for name, parameter in reversed(parameters):
        if size >= limit:
            buckets.append([])
            size, limit = 0, cap_mb * 2**20
        buckets[-1].append(piece_of(name, parameter))
        size += parameter.nbytes
    return [tuple(bucket) for bucket in buckets]


def split_residual(residual: Tensor, flat: Tensor, pieces: Pieces) -> tuple[Tensor, Tensor | None]:
    """Returns the stored errors to add to a gradient, and those withheld, if any.

    A parameter with an all-zero gradient may be one that no rank has used. DDP then ignores
    the mean of its gradient, and errors sent with it would be lost. So its errors are
    withheld. On a GPU both tensors are always computed, because a check would wait within
    the backward pass.
    """
    filled = [part for part in parts_of(flat, pieces) if part.numel()]
    if not filled:
        return residual, None
    largest = torch._foreach_norm(filled, torch.inf)
    has_gradient = torch.stack([size.float() for size in largest]) != 0
    if methods.may_read(residual) and bool(has_gradient.all()):
        return residual, None
    sent_residual = residual.clone()
    parts = [part for part in parts_of(sent_residual, pieces) if part.numel()]
    torch._foreach_mul_(parts, list(has_gradient.to(residual.dtype).unbind()))
    return sent_residual, residual - sent_residual


def give_back(new_residual: Tensor, withheld: Tensor | None) -> None:
    """Adds the withheld errors to the errors of the message."""
    if withheld is not None:
        new_residual[: len(withheld)].add_(withheld)


# Exchanges the buckets of a step; their errors are stored once the step counts.

DDP_STEPS = 2  # DDP rebuilds its buckets after the first step


class BucketExchange:
    """Sends the buckets of a step: ``begin`` the step, then ``send`` each bucket.

    With ``asks`` a step counts only if it was ``confirmed``. Otherwise a step counts if its
    gradients were finite on all ranks.
    """

    def __init__(self, settings: CompressionSettings) -> None:
        self._settings = settings
        self.way, self._dense = settings.way(settings.momentum), Dense()
        self.memory = ErrorMemory()
        self.steps = 0  # number of started steps
        self.buckets: list[Pieces] = []  # buckets of the step
        self.scale: Callable[[], float] = lambda: 1.0  # factor of the loss
        self.quiet = False  # True: buckets are never compressed
        self.attached = self.asks = self.confirmed = self._spoiled = False
        self._fine: list[Tensor] = []  # unread flags of buckets on a GPU: all numbers are finite

    @property
    def compresses(self) -> bool:
        """Returns True if the current or last step is past the dense start."""
        start = max(self._settings.dense_steps, DDP_STEPS if self.attached else 0)
        return self.steps > start and self._settings.method != "none" and not self.quiet

    @property
    def spoiled(self) -> bool:
        """Returns True if a bucket of the step wasn't finite; on a GPU the first call waits."""
        if self._fine:
            self._spoiled = self._spoiled or not bool(torch.stack(self._fine).all())
            self._fine = []
        return self._spoiled

    def begin(self) -> None:
        self.synchronize()
        self.steps += 1
        self._spoiled = self.confirmed = False
        self.buckets = []

    def synchronize(self) -> None:
        """Stores or discards the error memory of the last step; may be called again."""
        counted = self.confirmed if self.asks else not self.spoiled
        self.memory.commit(counted)
        self.way.commit(counted)

    def send(
        self, buffer: Tensor, pieces: Pieces, ranks: Ranks, way: AveragingMethod
    ) -> Callable[[], Tensor]:
        """Sends a bucket; the returned function waits for its mean and writes it to ``buffer``.

        NaN fills it on every rank if a number of any rank wasn't finite.
        """
        self.buckets.append(pieces)
        try:
            return self._sent_on(buffer, pieces, ranks, way)
        except RuntimeError as error:
            raise ranks.failed(error) from error

    def _sent_on(
        self, buffer: Tensor, pieces: Pieces, ranks: Ranks, way: AveragingMethod
    ) -> Callable[[], Tensor]:
        way = self.way_of(pieces, way) if self.compresses else self._dense
        scale = self.scale() if way.feedback else 1.0
        unchanged = scale == 1.0 and (way is self._dense or buffer.dtype in READABLE)
        flat = buffer if unchanged else buffer.float().div_(scale)
        residual = withheld = None
        if way.feedback:
            residual, withheld = split_residual(
                self.memory.bucket(pieces, buffer.device), flat, pieces
            )
        finish = way.start(flat, residual, pieces, ranks)

        def done() -> Tensor:
            try:
                mean, new_residual = finish()
            except Exception as error:
                raise ranks.failed(error) from error
            if mean is None:
                buffer.fill_(torch.nan)
            else:
                buffer.copy_(mean if scale == 1.0 else mean.mul_(scale))
            if self._judged(buffer, mean is not None) and new_residual is not None:
                give_back(new_residual, withheld)
                self.memory.leave_bucket(pieces, new_residual)
            return buffer

        return done

    def _judged(self, buffer: Tensor, fine: bool) -> bool:
        """Returns True if this bucket's errors are to be stored once the step counts.

        Args:
            fine: all numbers in the messages and their mean are finite.
        """
        if methods.may_read(buffer):
            halved = buffer.dtype is torch.float16  # the mean may be too large for fp16
            fine = fine and (not halved or bool(buffer.isfinite().all()))
            self._spoiled = self._spoiled or not fine
            return fine
        if not self.asks:  # with ``asks`` the caller decides, by the norm of all gradients
            self._fine.append(buffer.isfinite().all())
        return True

    def send_between(
        self, buffer: Tensor, pieces: Pieces, hosts: Hosts, way: AveragingMethod
    ) -> Callable[[], Tensor]:
        """Sends a bucket that is compressed between hosts only."""
        owner = len(self.buckets) % hosts.within.world  # rank that sends it to the other hosts
        self.buckets.append(pieces)
        within = hosts.within.all_reduce(buffer.div_(hosts.within.world), FIRST)

        def done() -> Tensor:
            try:
                within.wait()
                if hosts.within.rank == owner:
                    self._sent_on(buffer, pieces, hosts.across, way)()
                hosts.within.give(buffer, owner)
            except Exception as error:
                raise hosts.within.failed(error) from error
            self._judged(buffer, not methods.may_read(buffer) or bool(buffer.isfinite().all()))
            return buffer

        return done

    def way_of(self, pieces: Pieces, compressing: AveragingMethod) -> AveragingMethod:
        """Returns the method for a bucket after the dense start; small buckets stay dense."""
        small = total_numbers(pieces) < self._settings.minimum
        return self._dense if small or self.quiet else compressing

    def state(self) -> dict[str, Any]:
        self.synchronize()
        return {
            "method": self._settings.method,
            "steps": self.steps,
            "residual": self.memory.state(),
            "way": self.way.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Resumes from a saved state.

        Raises:
            ValueError: the state is from another method.
        """
        if state["method"] != self._settings.method:
            raise ValueError(
                f"the memory is of {state['method']} and this compressor's method is "
                f"{self._settings.method}"
            )
        self.steps = int(state["steps"])
        self.memory.load(state["residual"])
        self.way.load(state["way"])
