"""A pipeline over ranks, in the runtime of ``torch.distributed.pipelining``.

(1) Each rank wraps its stages as torch's ``PipelineStage`` => (2) torch adds sends and receives to
the schedule's order => (3) on gloo receives are posted earlier, see :func:`earlier` => (4) torch
runs it. Hidden states of all micro-batches of a step have one shape, as torch's buffers want it;
for each shape and number of micro-batches a runtime is kept, the last ``KEPT`` of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from hasten.parts.distributed.pipeline.pipeline_work import Inputs, Work
from hasten.parts.distributed.pipeline.schedules import actions, missing
from hasten.parts.distributed.pipeline.trace import timed

KEPT = 4
AHEAD = 2  # passes by which a receive is posted before torch would
Shape = Callable[[Inputs], tuple[tuple[int, ...], torch.dtype] | None]  # of hidden states


class RanksRunner:
    """This rank's stages among those of a process group."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        work: Work,
        group: dist.ProcessGroup,
        device: torch.device,
        shape: Shape,
    ) -> None:
        if problem := missing(work.settings.schedule):
            raise ValueError(problem)
        self.work, self.group, self.device = work, group, device
        self.rank = dist.get_rank(group)
        self._stages, self._shape = dict(sorted(stages.items())), shape
        self._scale = 1.0
        self._runtimes: OrderedDict[Any, Any] = OrderedDict()

    def run(self, micro_batches: Sequence[Inputs], scale: float) -> Tensor:
        self._scale = scale
        runtime = self._runtime(micro_batches)
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
        """The loss of one micro-batch on every rank, forward passes alone.

        Stages run one after the other: an evaluation is rare, and needs no buffers of its own.
        """
        homes = self.work.settings.homes
        self.work.begin([inputs])
        hidden: Tensor | None = None
        for index, stage in self._stages.items():
            if index and homes[index - 1] != self.rank:
                hidden = self._received(homes[index - 1])
            hidden = self.work.forward(stage, index, 0, hidden)
            if index < self.work.last and homes[index + 1] != self.rank:
                self._send(hidden, homes[index + 1])
        return self._everywhere(self.work.total)

    def _everywhere(self, total: Tensor) -> Tensor:
        """What all ranks brought: the loss from the last, mostly nothing from the others."""
        whole = total.double()
        dist.all_reduce(whole, group=self.group)
        return whole

    def _runtime(self, micro_batches: Sequence[Inputs]) -> Any:
        """The one for so many micro-batches of this shape, kept or new."""
        first, count = micro_batches[0], len(micro_batches)
        shape = self._shape(first)
        key = (count, shape, tuple(v.shape for v in first.values() if isinstance(v, Tensor)))
        if key not in self._runtimes:
            self._runtimes[key] = self._build(count, shape)
        self._runtimes.move_to_end(key)
        if len(self._runtimes) > KEPT:
            self._runtimes.popitem(last=False)
        return self._runtimes[key]

    def _build(self, count: int, shape: Any) -> Any:
        from torch.distributed.pipelining import schedules, stage

        if shape is None and not hasattr(stage, "InferenceMode"):
            raise ValueError(
                "this torch can't find out what travels between the stages of an nn.Sequential; "
                "take torch 2.13, or a language model"
            )
        settings = self.work.settings
        stages = [self._torch_stage(index, shape) for index in self._stages]
        common: Any = {"loss_fn": self._loss, "scale_grads": False}
        if not settings.overlap and settings.schedule in ("gpipe", "1f1b"):
            plain: Any = schedules.ScheduleGPipe
            if settings.schedule == "1f1b":
                plain = schedules.Schedule1F1B
            if settings.schedule == "gpipe" or count >= settings.ranks:
                return plain(stages[0], count, **common)
        runtime = schedules._PipelineScheduleRuntime(stages, count, **common)
        runtime._prepare_schedule_with_comms(actions(settings.schedule, settings.ranks, count))
        if settings.overlap and dist.get_backend(self.group) == "gloo":
            listed = runtime.pipeline_order_with_comms
            runtime.pipeline_order_with_comms = {r: earlier(listed[r], AHEAD) for r in listed}
        return runtime

    def _torch_stage(self, index: int, shape: Any) -> Any:
        from torch.distributed.pipelining import PipelineStage

        last, chunk = self.work.last, _Chunk(self._stages[index], index, self.work)
        known: dict[str, Any] = {}
        if shape is not None:
            size, dtype = shape
            hidden = torch.empty(size, dtype=dtype, device="meta").requires_grad_()
            total = torch.empty((), dtype=torch.promote_types(dtype, torch.float32), device="meta")
            number = torch.empty(1, dtype=torch.int64, device="meta")
            known["input_args"] = hidden if index else number
            known["output_args"] = hidden if index < last else total.requires_grad_()
        stage: Any = PipelineStage(chunk, index, last + 1, self.device, group=self.group, **known)
        recorder, backward = self.work.recorder, stage.backward_one_chunk
        whole = timed(recorder, backward, self.rank, "B", index)
        half = timed(recorder, backward, self.rank, "I", index)

        def either(number: int, loss: Any = None, full_backward: bool = True, **more: Any) -> None:
            (whole if full_backward else half)(
                number, loss=loss, full_backward=full_backward, **more
            )
            self.work.seams.after_backward()

        def weights(number: int, **more: Any) -> None:
            rest(number, **more)
            self.work.seams.after_backward()

        rest = timed(recorder, stage.backward_weight_one_chunk, self.rank, "W", index)
        stage.forward_one_chunk = timed(recorder, stage.forward_one_chunk, self.rank, "F", index)
        stage.backward_one_chunk, stage.backward_weight_one_chunk = either, weights
        return stage

    def _loss(self, total: Tensor, number: Any) -> Tensor:
        return total * self._scale

    def _send(self, hidden: Tensor, to: int) -> None:
        about = [(tuple(hidden.shape), hidden.dtype)]
        dist.send_object_list(about, group=self.group, group_dst=to, device=self.device)
        dist.send(hidden.detach().contiguous(), group=self.group, group_dst=to)

    def _received(self, source: int) -> Tensor:
        about: list[Any] = [None]
        dist.recv_object_list(about, group=self.group, group_src=source, device=self.device)
        hidden = torch.empty(about[0][0], dtype=about[0][1], device=self.device)
        dist.recv(hidden, group=self.group, group_src=source)
        return hidden


class _Chunk(nn.Module):
    """A stage as torch calls it: with hidden states and the number of the micro-batch.

    The micro-batch itself (ids, positions, labels) lies on every rank already, so that nothing but
    hidden states travels.
    """

    def __init__(self, stage: nn.Module, index: int, work: Work) -> None:
        super().__init__()
        self.stage, self.index = stage, index
        self._work = work

    def forward(self, entering: Tensor, number: Tensor) -> Tensor:
        hidden = entering if self.index else None
        return self._work.forward(self.stage, self.index, int(number), hidden)


def earlier(listed: Sequence[Any], ahead: int) -> list[Any]:
    """Receives moved up by so many passes, in the order among themselves that they had.

    A gloo message starts to travel when both its ends are posted; torch posts a receive just before
    the pass that needs it, so that the pass would wait for all of the way. On NCCL receives stay:
    there, one that stands before a send can hold it up.
    """
    found: list[Any] = []
    floor = 0  # no receive may overtake the one before it
    for action in listed:
        place = len(found)
        if action.computation_type.name in ("RECV_F", "RECV_B"):
            passed = 0
            while place > floor and passed < ahead:
                place -= 1
                passed += found[place].is_compute_op
            floor = place + 1
        found.insert(place, action)
    return found
