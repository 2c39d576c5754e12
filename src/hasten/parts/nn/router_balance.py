"""Balance of tokens over experts: a bias that follows the load, a loss per sequence.

Transformers uses the correction bias of DeepSeek-V3's routers but never updates it, and
computes no balance loss for V2. This part does both, on the routers of one model:

- *bias*: after each update b_i += speed * sign(mean load - load_i). The load is counted
  in tokens over the whole global batch. The bias chooses experts and doesn't weight
  them, so the loss has no second objective. Sources: Wang et al., Auxiliary-Loss-Free
  Load Balancing, arXiv:2408.15664; DeepSeek-V3, arXiv:2412.19437, section 2.1.2; 0.001
  there.
- *sequence loss*: alpha sum_i f_i P_i of every sequence and layer. The factor f_i is E
  / (K T) times the tokens that chose expert i, and P_i the mean of the normalised
  scores. Sources: V3, eq. 17 to 20, alpha 0.0001; V2, arXiv:2405.04434, section 2.2.3,
  alpha 0.003, with the actual choice. It is 1 times alpha if all is even. A sequence
  has the weight of its trained tokens. The sum, divided by the step's trained tokens,
  doesn't depend on micro-batches or ranks.

    balance = RouterBalance(model, speed=0.001, sequence_loss=0.0001)
    with balance.watching(sequence_ids(lengths, ids.shape)):
        loss, count = loss_of(input_ids=ids, labels=labels)      # sums over trained tokens

    loss = loss + balance.loss(labels)
    ...backward, optimizer.step()...
    balance.after_update()

Group-limited routing is unchanged. Recomputed passes aren't counted. A router's outputs
are recorded only inside ``watching`` and processed after the pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hasten.parts.data.collate import IGNORED

FILLER = -1  # sequence of a position that belongs to none
BIASED = ("deepseek_v3", "deepseek_v32", "deepseek_v4")
UNBIASED = ("deepseek_v2",)


def routers(model: nn.Module) -> list[Any]:
    """Returns the routers of a model in order: modules that choose ``top_k`` of ``num_experts``.

    V4's first layers choose experts by a table of tokens, so they have no such router.
    """
    return [m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")]


def sequence_ids(lengths: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Returns each position's sequence in a (rows, width) batch, (rows * width,) int64.

    With one length per row, sequences start at the rows' starts. With one row, they are end
    to end in it. Positions after them are padding, -1.

    Raises:
        ValueError: the lengths don't fit the batch.
    """
    rows, width = shape
    ids = torch.full((rows, width), FILLER)
    one_per_row = len(lengths) == rows and max(lengths, default=0) <= width
    if one_per_row:
        for row, length in enumerate(lengths):
            ids[row, :length] = row
        return ids.flatten()
    if rows != 1 or sum(lengths) > width:
        raise ValueError(
            f"{len(lengths)} sequences of {sum(lengths)} tokens have no defined positions in "
            f"{rows} rows of {width}; put one in each row, or all in one row"
        )
    ends = [0, *itertools.accumulate(lengths)]
    for number, (start, end) in enumerate(itertools.pairwise(ends)):
        ids[0, start:end] = number
    return ids.flatten()


def sequence_balance(scores: Tensor, chosen: Tensor, sequences: Tensor, weights: Tensor) -> Tensor:
    """Returns the sum over sequences of ``weights`` x sum_i f_i P_i.

    Args:
        scores: (N, E), the routers' affinities, not negative; normalised here.
        chosen: (N, K), the experts for which a token is counted.
        sequences: (N,), the sequence of each token, -1: of none.
        weights: (sequences,), the weight of each sequence.
    """
    experts, top_k, count = scores.shape[1], chosen.shape[1], len(weights)
    real = (sequences != FILLER).to(scores.dtype).unsqueeze(1)  # (N, 1)
    sequence_index = sequences.clamp_min(0)
    tokens = scores.new_zeros(count, 1).index_add(0, sequence_index, real).clamp_min(1)
    ones = torch.zeros_like(scores).scatter(1, chosen, 1.0) * real
    shares = scores / (scores.sum(dim=1, keepdim=True) + 1e-20) * real
    frequency = scores.new_zeros(count, experts).index_add(0, sequence_index, ones)
    frequency = frequency * (experts / top_k) / tokens
    probability = scores.new_zeros(count, experts).index_add(0, sequence_index, shares) / tokens
    return ((frequency * probability).sum(dim=1) * weights.to(scores.dtype)).sum()


def load_ratios(loads: Tensor) -> Tensor:
    """Returns the busiest expert's load / the mean of each layer: (layers, E) to (layers,).

    Less 1 it is the load violation MaxVio of arXiv:2408.15664. Without a token it is 1.
    """
    mean = loads.mean(dim=1)
    return torch.where(mean > 0, loads.amax(dim=1) / mean.clamp_min(1e-20), torch.ones_like(mean))


@dataclass
class _RouterOutputs:
    """Outputs of the routers in a pass: logits (N, E) and choices (N, K) by layer."""

    sequences: Tensor
    count: int
    logits: dict[int, Tensor]
    chosen: dict[int, Tensor]


class RouterBalance:
    """Balances the routers of one model through hooks on these modules.

    Args:
        speed: change of a bias after an update; 0: biases stay.
        sequence_loss: weight of the balance loss; 0: none. With both 0 loads are only counted.

    Raises:
        ValueError: the model has no routers that are known here, or none with a bias to move.
    """

    def __init__(self, model: nn.Module, speed: float = 0.001, sequence_loss: float = 0.0) -> None:
        self.speed, self.sequence_loss = speed, sequence_loss
        self.routers = routers(model)
        if not self.routers:
            raise ValueError(f"{type(model).__name__} has no routers that are known here")
        if speed and len(self.biases) < len(self.routers):
            raise ValueError(
                f"the routers of {type(model).__name__} have no bias to move; give speed 0 and a "
                "sequence_loss"
            )
        for bias in self.biases:  # bf16 would lose steps of 0.001
            bias.data = bias.data.to(torch.promote_types(bias.dtype, torch.float32))
        self.updates = 0
        self.last: Tensor | None = None  # tokens of each expert in the last step, (layers, E)
        self._loads: Tensor | None = None  # tokens of each expert since the last update, on device
        self._outputs: _RouterOutputs | None = None
        self._open = False
        self._hooks = [
            router.register_forward_hook(self._recording_hook(layer))
            for layer, router in enumerate(self.routers)
        ]

    @property
    def biases(self) -> list[Any]:
        """Returns the current biases: a model that moved to another device has new ones."""
        return [r.e_score_correction_bias for r in self.routers if _has_bias(r)]

    def remove(self) -> None:
        """Removes the hooks; biases keep their values."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def watching(self, sequences: Tensor) -> Iterator[None]:
        """Counts forward passes inside; ``sequences`` from :func:`sequence_ids`, on the host.

        A pass of filler alone has one sequence, which weighs nothing.
        """
        self._outputs = _RouterOutputs(sequences, max(int(sequences.max()), 0) + 1, {}, {})
        self._open = True
        try:
            yield
        finally:
            self._open = False
        self._count(self._outputs)

    def loss(self, labels: Tensor) -> Tensor:
        """Returns the addition to the loss sum of the last watched pass, with its ``labels``."""
        outputs = self._outputs
        if outputs is None:
            raise ValueError("no pass was watched: run the model inside `watching`")
        self._outputs = None  # otherwise its graph would live as long as this object
        total = torch.zeros((), device=labels.device)
        if not self.sequence_loss:
            return total
        sequence_index = outputs.sequences.to(labels.device)
        trained = ((labels.flatten() != IGNORED) & (sequence_index != FILLER)).float()
        weights = torch.zeros(outputs.count, device=labels.device)
        weights.index_add_(0, sequence_index.clamp_min(0), trained)
        for layer, logits in outputs.logits.items():
            chosen, router = outputs.chosen[layer], self.routers[layer]
            if _has_bias(router):
                # V3 and V4 count the experts with the highest scores, not the choice.
                has_function = hasattr(router, "score_fn")
                scores = router.score_fn(logits) if has_function else logits.sigmoid()
                chosen = scores.topk(chosen.shape[1], dim=-1, sorted=False).indices
            else:
                scores = logits.softmax(dim=-1)
            total = total + sequence_balance(scores, chosen, sequence_index, weights)
        return self.sequence_loss * total

    @torch.no_grad()
    def after_update(self, total: Callable[[Tensor], Tensor] = lambda loads: loads) -> None:
        """Moves the biases; ``total`` sums a float64 tensor on the host over all ranks."""
        if self._loads is None:
            return
        self.last = total(self._loads.double().cpu())  # waits for the device, once per step
        self._loads = None
        self.updates += 1
        if not self.speed:
            return
        moves = self.speed * torch.sign(self.last.mean(dim=1, keepdim=True) - self.last)
        on_device: dict[tuple[torch.device, torch.dtype], Tensor] = {}  # sent together
        for layer, bias in zip(range(len(moves)), self.biases, strict=True):
            device_and_dtype = bias.device, bias.dtype
            if device_and_dtype not in on_device:
                on_device[device_and_dtype] = moves.to(*device_and_dtype, non_blocking=True)
            bias += on_device[device_and_dtype][layer]

    def discard(self) -> None:
        """Discards the passes since the last update."""
        self._loads = self._outputs = None

    def _recording_hook(self, layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
            if self._open and self._outputs is not None:
                self._outputs.logits[layer], _, self._outputs.chosen[layer] = output

        return hook

    @torch.no_grad()
    def _count(self, outputs: _RouterOutputs) -> None:
        """Counts the tokens per expert; a rank without a layer counts 0 for it."""
        if self._loads is None:
            shape = len(self.routers), self.routers[0].num_experts
            devices = [r.weight.device for r in self.routers if not r.weight.is_meta]
            self._loads = torch.zeros(
                shape, dtype=torch.float64, device=devices[0] if devices else None
            )
        real = (outputs.sequences != FILLER).to(self._loads)
        for layer, chosen in outputs.chosen.items():
            each = real.to(chosen.device).unsqueeze(1).expand_as(chosen)
            self._loads[layer].index_add_(0, chosen.flatten(), each.flatten())


def _has_bias(router: Any) -> bool:
    return isinstance(getattr(router, "e_score_correction_bias", None), Tensor)
