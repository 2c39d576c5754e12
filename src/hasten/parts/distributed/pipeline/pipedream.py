"""PipeDream: an ``nn.Sequential`` over one process's devices, called like the model.

    model = PipeDream(model, num_worker=4, chunks=8, checkpoint="always")
    loss = criterion(model(x), y)
    loss.backward()

A batch goes in ``chunks`` pieces from stage to stage. On accelerators a pass is only
queued, so stages work on different pieces at the same time (Huang et al., GPipe,
arXiv:1811.06965). For several processes use
:class:`~hasten.parts.distributed.pipeline.model.AsyncPipeline`. Its schedules order the
backward passes as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

from hasten.errors import require_whole
from hasten.parts.comm.groups import world_size
from hasten.parts.distributed.pipeline.model import stage_devices
from hasten.parts.distributed.pipeline.runtime import CHECKPOINTS
from hasten.parts.distributed.pipeline.stages import Layers, balanced_layers, ranges


class PipeDream(nn.Module):
    """Runs a model as a pipeline; ``forward(x)`` returns the whole model's output.

    The output is on the device of the last stage. The model itself is ``module``; its
    parameters and their names are unchanged. Layers that use a whole batch (BatchNorm) get
    a piece of it.

    Args:
        model: cut between its children; the cut makes the slowest stage as fast as
            possible.
        num_worker, num_workers: stages; default: the number of accelerators.
        chunks: pieces of a batch; fewer if it has fewer rows.
        checkpoint: "always": a stage stores only the inputs of a piece and computes its
            activations again in the backward pass. "except_last": the same for all pieces
            but the last. "never".

    Raises:
        ValueError: the model can't be cut so, a setting is invalid, or there are several
            ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        num_worker: int | None = None,
        chunks: int = 1,
        checkpoint: str = "never",
        *,
        num_workers: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Sequential):
            raise ValueError(
                f"PipeDream cuts an nn.Sequential, and this is a {type(model).__name__}; "
                "AsyncPipeline cuts causal language models too"
            )
        if num_worker is not None and num_workers is not None:
            raise ValueError("num_worker and num_workers are the same setting; give one of them")
        worker_count = num_workers if num_worker is None else num_worker
        require_whole(chunks=chunks, num_worker=worker_count or 0)
        if chunks < 1 or checkpoint not in CHECKPOINTS:
            raise ValueError(
                f"chunks is {chunks} and checkpoint {checkpoint!r}; give 1 at least, and one of "
                f"{', '.join(CHECKPOINTS)}"
            )
        if (ranks := world_size()) > 1:
            raise ValueError(
                f"PipeDream has all its stages in one process, and there are {ranks} ranks; take "
                f"AsyncPipeline(stages={ranks})"
            )
        self.module, self.chunks, self.checkpoint = model, chunks, checkpoint
        model_device = next((p.device for p in model.parameters()), torch.device("cpu"))
        device_count = torch.accelerator.device_count() if model_device.type != "cpu" else 1
        sizes = balanced_layers(
            Layers(model).costs()[0], device_count if worker_count is None else worker_count
        )
        local = stage_devices(len(sizes), model_device)
        self.stages = tuple(
            (local[index % len(local)], tuple(span)) for index, span in enumerate(ranges(sizes))
        )
        for device, span in self.stages:
            for layer in span:
                model[layer].to(device)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the outputs of all rows of ``x``, in their order.

        Raises:
            ValueError: the model returns something else than a tensor.
        """
        pieces = x.chunk(self.chunks) if len(x) else (x,)
        outputs = [
            self._through(micro_batch, index + 1 == len(pieces))
            for index, micro_batch in enumerate(pieces)
        ]
        if not all(isinstance(out, Tensor) for out in outputs):
            kind = type(outputs[0]).__name__
            raise ValueError(f"PipeDream joins tensors, and this model returns a {kind}")
        return torch.cat(outputs)

    def _through(self, hidden: Tensor, last: bool) -> Tensor:
        again = self.checkpoint == "always" or (self.checkpoint == "except_last" and not last)
        for device, span in self.stages:
            hidden = hidden.to(device, non_blocking=True)
            if again and torch.is_grad_enabled():
                hidden = recomputed(self._run, span, hidden, use_reentrant=False)
            else:
                hidden = self._run(span, hidden)
        return hidden

    def _run(self, span: Sequence[int], hidden: Tensor) -> Tensor:
        assert isinstance(self.module, nn.Sequential)  # checked in the constructor
        for layer in span:
            hidden = self.module[layer](hidden)
        return hidden
