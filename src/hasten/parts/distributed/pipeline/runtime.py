"""Runs a pipeline over ranks: its settings, one pass of a stage, and micro-batches of one shape."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint as recomputed

from hasten.errors import require_whole
from hasten.parts.comm.groups import gathered_objects
from hasten.parts.distributed.pipeline.schedules import (
    SPLIT,
    StageEvent,
    actions,
    rank_of_stage,
    stages_per_rank,
)
from hasten.parts.distributed.pipeline.stages import Inputs, Message

# One pass of one stage, with its activations kept or not, in the run's number format.
#
# Every runner gives each stage's passes to :class:`PipelineWork`. So recomputation, precision and
# the sum of the losses are the same in one process and in many.

CHECKPOINTS = ("always", "except_last", "never")
Pass = Callable[[], Tensor]
ForwardRunner = Callable[[int, Pass], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class PipelineSettings:
    """Settings of a pipeline, for any runner.

    ``ranks`` are processes or, in one process, devices. ``checkpoint`` selects the micro-batches
    for which a stage stores only its input and computes its activations again. These are all, all
    but the last (its backward pass follows at once), or none.
    """

    schedule: str
    ranks: int
    checkpoint: str = "never"
    overlap: bool = True

    def __post_init__(self) -> None:
        stages_per_rank(self.schedule)  # raises ValueError
        require_whole(stages=self.ranks)
        if self.ranks < 1:
            raise ValueError(f"stages is {self.ranks}; give 1 at least")
        if self.checkpoint not in CHECKPOINTS:
            raise ValueError(
                f"checkpoint is {self.checkpoint!r}; it must be one of {', '.join(CHECKPOINTS)}"
            )
        if self.checkpoint != "never" and self.schedule in SPLIT:
            raise ValueError(
                f"{self.schedule} runs a backward pass in two halves and would compute the forward "
                "pass again in each; take checkpoint='never', or the schedule 1f1b"
            )

    @property
    def homes(self) -> tuple[int, ...]:
        """Returns the rank of each stage."""
        return rank_of_stage(self.schedule, self.ranks)

    def recomputes(self, number: int, count: int) -> bool:
        """Returns True if micro-batch ``number`` of ``count`` is computed again in backward."""
        kept = {"always": 0, "except_last": 1, "never": count}[self.checkpoint]
        return number < count - kept


class PipelineWork:
    """The micro-batches of a step in progress, and their losses on this process.

    Args:
        region: context around a forward pass.
        after_backward: called after each backward pass, to take gradients.
        run_forward: runs a stage's forward pass over the micro-batch with a given number. It
            returns the output and the pass's addition to the step's summed loss (a balance of
            experts), or None.
    """

    def __init__(
        self,
        settings: PipelineSettings,
        device: torch.device,
        region: Callable[[], AbstractContextManager[Any]] = nullcontext,
        after_backward: Callable[[], None] = lambda: None,
        run_forward: ForwardRunner = lambda number, run: (run(), None),
    ) -> None:
        self.settings, self.device, self.after_backward = settings, device, after_backward
        self._region, self._run_forward = region, run_forward
        self.last = len(settings.homes) - 1  # the stage that outputs the loss
        # By stage and micro-batch, not a sum: torch may run a trial pass first.
        self._losses: dict[tuple[int, int], Tensor] = {}
        self.scale = 1.0  # factor of the losses in backward passes
        self.recomputed = 0  # number of recomputed passes, for effect checks
        self.batches: Sequence[Inputs] = ()
        self.events: list[StageEvent] = []  # this process's passes in the last recorded step
        self.recording = False
        self._zero = 0.0  # when the recorded step began

    def begin(self, micro_batches: Sequence[Inputs], group: Any = None, scale: float = 1.0) -> None:
        """Begins a step with backward passes of ``scale`` x the losses."""
        self.batches, self.scale = micro_batches, scale
        self._losses.clear()
        if self.recording:
            self._begin_recording(group)

    def _begin_recording(self, group: Any) -> None:
        """Starts the clock on every rank of the group at the same time.

        Ranks of one machine read the same clock. Over machines each counts from its own end of a
        barrier, so that their events may be shifted against each other by a message's way.
        """
        self.events.clear()
        if group is not None:
            dist.barrier(group)
        self._zero = self._now()
        if group is not None:
            clocks = gathered_objects((platform.node(), self._zero), group)
            if len({machine for machine, _ in clocks}) == 1:
                self._zero = clocks[0][1]
            dist.barrier(group)

    @contextmanager
    def noting(self, kind: str, stage: int, number: int) -> Iterator[None]:
        """Records the block as one pass; without a recording, it only checks a flag."""
        start = self._now() if self.recording else 0.0
        yield
        if self.recording:
            times, rank = (start - self._zero, self._now() - self._zero), self.settings.homes[stage]
            self.events.append(StageEvent(rank, kind, stage, number, *times))

    def _now(self) -> float:
        """Returns the time; while a step is recorded, it first waits for the device."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()

    @property
    def total(self) -> Tensor:
        """Returns the local stages' part of the summed loss; the last stage has the loss."""
        if not self._losses:
            return torch.zeros((), device=self.device)
        return torch.stack([loss.double() for loss in self._losses.values()]).sum()

    def forward(self, stage: nn.Module, index: int, number: int, hidden: Tensor | None) -> Tensor:
        """Returns hidden states of a micro-batch, or its loss, which is also added to the sum."""
        with self._region():
            out, more = self._run_forward(number, partial(self._run, stage, number, hidden))
        if index == self.last:
            out = out if more is None else out + more
            self._losses[index, number] = out.detach()
        elif more is not None:
            self._losses[index, number] = more.detach()
            if more.requires_grad:
                zero: Any = GradientSeed.apply(more, self.scale)
                out = out + zero.to(out.dtype)
        return out

    def _run(self, stage: nn.Module, number: int, hidden: Tensor | None) -> Tensor:
        run: Any = stage
        if torch.is_grad_enabled() and self.settings.recomputes(number, len(self.batches)):
            self.recomputed += 1
            run = partial(recomputed, stage, use_reentrant=False)
        out: Tensor = run(hidden, self.batches[number])
        return out


class GradientSeed(torch.autograd.Function):
    """Returns zero to add to a stage's output; backward gives ``loss`` the gradient ``scale``.

    As Megatron's MoEAuxLossAutoScaler.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return torch.zeros_like(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return torch.full_like(gradients[0], ctx.scale), None


# A pipeline over ranks, in the runtime of ``torch.distributed.pipelining``.
#
# 1. Each rank wraps its stages as torch's ``PipelineStage``.
# 2. torch adds sends and receives to the schedule's order.
# 3. On gloo, receives are posted earlier, see :func:`receives_earlier`.
# 4. torch runs the schedule.
#
# Hidden states of all micro-batches of a step have one shape, because torch's buffers require it.
# The last ``KEPT`` runtimes are kept, one for each shape and number of micro-batches.

KEPT = 4
AHEAD = 2  # number of passes by which a receive is posted earlier than by torch


class RanksRunner:
    """This rank's stages among those of a process group."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        work: PipelineWork,
        group: dist.ProcessGroup,
        message: Message | None,
    ) -> None:
        self.work, self.group, self.rank = work, group, dist.get_rank(group)
        self._stages, self._message = stages, message  # in the order of their numbers
        self._runtime = lru_cache(KEPT)(self._build)

    def run(self, micro_batches: Sequence[Inputs], scale: float) -> Tensor:
        """Computes gradients of ``scale`` x the summed losses; the unscaled sum, on every rank."""
        first = micro_batches[0]
        if self._message is None:
            key = tuple(value.shape for value in first.values() if isinstance(value, Tensor))
        else:
            key = self._message(first)
        runtime = self._runtime(len(micro_batches), key)
        numbers = torch.arange(len(micro_batches))
        self.work.begin(micro_batches, self.group, scale)
        runtime.step(
            *((numbers,) if 0 in self._stages else ()),
            target=numbers if self.work.last in self._stages else None,
            return_outputs=False,
            number=numbers,
        )
        return self._everywhere(self.work.total)

    def evaluate(self, inputs: Inputs) -> Tensor:
        """Returns the result of one micro-batch on every rank, from forward passes only.

        It is the summed loss, with ``predict`` the token at each label, or with ``log_probs``
        the sums of preference pairs.
        Stages run one after the other: an evaluation is rare, and needs no buffers of its own.
        """
        homes, device = self.work.settings.homes, self.work.device
        self.work.begin([inputs])
        hidden: Any = None
        for index, stage in self._stages.items():
            if index and homes[index - 1] != self.rank:
                assert self._message is not None  # only language models are evaluated
                shape, dtype = self._message(inputs)
                hidden = torch.empty(shape, dtype=dtype, device=device)
                dist.recv(hidden, group=self.group, group_src=homes[index - 1])
            hidden = self.work.forward(stage, index, 0, hidden)
            if index < self.work.last and homes[index + 1] != self.rank:
                dist.send(hidden.contiguous(), group=self.group, group_dst=homes[index + 1])
        if self.work.last in self._stages:
            return self._everywhere(hidden)
        size: Any = ()
        if inputs.get("predict"):
            size = int((inputs["labels"] != IGNORED).sum())
        elif inputs.get("log_probs"):
            size = inputs["counts"].shape
        return self._everywhere(torch.zeros(size, device=device))

    def _everywhere(self, total: Tensor) -> Tensor:
        """Returns the sum over ranks; only the last rank has a loss of its own."""
        summed = total.double()
        dist.all_reduce(summed, group=self.group)
        return summed

    def _build(self, count: int, key: Any) -> Any:
        """Returns a runtime for so many micro-batches; ``key``: their message or shapes."""
        from torch.distributed.pipelining import schedules, stage

        if self._message is None and not hasattr(stage, "InferenceMode"):
            raise ValueError(
                "this torch can't find out what travels between the stages of an nn.Sequential; "
                "take torch 2.13 or newer, or a language model"
            )
        settings = self.work.settings
        stages = [self._torch_stage(index, key) for index in self._stages]
        common: Any = {"loss_fn": lambda loss, _: loss * self.work.scale, "scale_grads": False}
        if not settings.overlap and settings.schedule == "gpipe":
            return schedules.ScheduleGPipe(stages[0], count, **common)
        if not settings.overlap and settings.schedule == "1f1b" and count >= settings.ranks:
            return schedules.Schedule1F1B(stages[0], count, **common)
        runtime = schedules._PipelineScheduleRuntime(stages, count, **common)
        runtime._prepare_schedule_with_comms(actions(settings.schedule, settings.ranks, count))
        if settings.overlap and dist.get_backend(self.group) == "gloo":
            listed = runtime.pipeline_order_with_comms
            runtime.pipeline_order_with_comms = {
                r: receives_earlier(listed[r], AHEAD) for r in listed
            }
        return runtime

    def _torch_stage(self, index: int, key: Any) -> Any:
        from torch.distributed.pipelining import stage as torch_stage

        last, chunk = self.work.last, _Chunk(self._stages[index], index, self.work)
        more: dict[str, Any] = {"group": self.group}
        if self._message is not None:
            shape, dtype = key
            hidden = torch.empty(shape, dtype=dtype, device="meta").requires_grad_()
            total = torch.empty((), dtype=torch.float64, device="meta").requires_grad_()
            number = torch.empty(1, dtype=torch.int64, device="meta")
            more["input_args"] = hidden if index else number
            more["output_args"] = hidden if index < last else total
        deep = getattr(self._stages[index], "ahead", None) is not None
        if deep or not hasattr(torch_stage, "InferenceMode"):
            # torch can't split the backward pass into halves for inputs and for weights if a weight
            # is used at several depths of the graph, as in modules that predict further tokens;
            # before 2.13 also if a function of its own is in the graph. So the first half runs the
            # full backward pass, and the second half does nothing.
            more["dw_builder"] = lambda: lambda: None
        stage: Any = torch_stage.PipelineStage(chunk, index, last + 1, self.work.device, **more)
        if dist.get_backend(self.group) == "gloo":
            # torch 2.11 sends to both neighbours once, for NCCL. In a V-shaped schedule one of them
            # is on the same rank, and gloo can't send to its own rank.
            stage._get_init_p2p_neighbors_ops = list
        for name, kind in (("forward", "F"), ("backward", "B"), ("backward_weight", "W")):
            run = getattr(stage, f"{name}_one_chunk")
            setattr(stage, f"{name}_one_chunk", partial(self._noted, run, index, kind))
        return stage

    def _noted(self, run: Any, stage: int, kind: str, number: int, *args: Any, **more: Any) -> Any:
        """Runs a pass in torch's stage, records it, and takes its gradients."""
        kind = kind if more.get("full_backward", True) else "I"
        with self.work.noting(kind, stage, number):
            out = run(number, *args, **more)
        if kind != "F":
            self.work.after_backward()
        return out


class _Chunk(nn.Module):
    """A stage as torch calls it: with hidden states and the number of the micro-batch.

    The micro-batch itself (ids, positions, labels) is already on every rank. So only hidden
    states are sent.
    """

    def __init__(self, stage: nn.Module, index: int, work: PipelineWork) -> None:
        super().__init__()
        self.stage, self._index, self._work = stage, index, work

    def forward(self, entering: Tensor, number: Tensor) -> Tensor:
        hidden = entering if self._index else None
        out = self._work.forward(self.stage, self._index, int(number), hidden)
        return out.double() if self._index == self._work.last else out  # one format of losses


def receives_earlier(listed: Sequence[Any], ahead: int) -> list[Any]:
    """Moves receives earlier by ``ahead`` passes, without changing their order.

    A gloo message starts when both its ends are posted. But torch posts a receive just
    before the pass that needs it. So the pass would wait for the full transfer. On NCCL
    receives stay: a receive before a send can block it.
    """
    reordered: list[Any] = []
    floor = 0  # a receive must not overtake an earlier one
    for action in listed:
        position = len(reordered)
        if action.computation_type.name in ("RECV_F", "RECV_B"):
            passed = 0
            while position > floor and passed < ahead:
                position -= 1
                passed += reordered[position].is_compute_op
            floor = position + 1
        reordered.insert(position, action)
    return reordered


# Cuts a batch into micro-batches of one shape, as stages send them.
#
# Stages exchange hidden states through buffers of one size, and some schedules require certain
# numbers of micro-batches. So filler rows, columns and micro-batches are added. Filler has no
# label. In padded rows it follows the tokens, where causal attention doesn't read it. In packed
# rows it is a separate document. Labels of preference pairs are lists with positions, which move.

IGNORED = -100
FILLERS = {"input_ids": 0, "labels": IGNORED, "attention_mask": 1, "position_ids": 0}
PACKED = ("document_lengths", "boundaries", "fillers")


def equal_micro_batches(batches: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
    """Returns ``count`` micro-batches of the largest shape among the given ones.

    Raises:
        ValueError: an input without a defined padding value.
    """
    strange = {name for batch in batches for name in batch} - {*FILLERS, *PACKED}
    of_pairs = "reads" in batches[0]
    if strange and not of_pairs:
        raise ValueError(
            f"a pipeline can't pad the input {sorted(strange)[0]!r} of a micro-batch; it supports "
            f"{', '.join((*FILLERS, *PACKED))}"
        )
    rows = max(len(b["input_ids"]) for b in batches)
    width = max(b["input_ids"].shape[1] for b in batches)
    filled = [_filled(batch, rows, width) for batch in batches]
    name, filler = ("weights", 0) if of_pairs else ("labels", IGNORED)
    empty = {**filled[-1], name: torch.full_like(filled[-1][name], filler)}
    return filled + [empty] * (count - len(filled))


def _filled(batch: Mapping[str, Any], rows: int, width: int) -> dict[str, Any]:
    ids: Tensor = batch["input_ids"]
    right, below = width - ids.shape[1], rows - len(ids)
    if not right and not below:
        return dict(batch)
    padded: dict[str, Any] = {
        name: F.pad(value, (0, right, 0, below), value=FILLERS[name])
        for name, value in batch.items()
        if name in FILLERS and value.dim() == 2
    }
    if "reads" in batch:
        padded = {
            **batch,
            **padded,
            "reads": batch["reads"] + batch["reads"] // len(ids[0]) * right,
        }
    if "position_ids" in batch:  # positions of filler start at 0, like a document's
        positions = padded["position_ids"]
        positions[:, ids.shape[1] :] = torch.arange(right, device=ids.device)
        positions[len(ids) :] = torch.arange(width, device=ids.device)
    if "document_lengths" in batch:
        more = [right] * bool(right) + [width] * below
        lengths = (*batch["document_lengths"], *more)
        padded["document_lengths"] = lengths
        padded["fillers"] = batch.get("fillers", 0) + len(more)
        ends = torch.tensor([0, *lengths]).cumsum(0)
        padded["boundaries"] = ends.to(batch["boundaries"])
        if "prefixes" in batch:
            padded["prefixes"] = (*batch["prefixes"], *[0] * len(more))
    return padded
