"""A model cut into pipeline stages: each stage is a view that holds its own layers and no others.

A view is the model's own class and code with other stages' layers left out, so that masks, rotary
embedding and everything else that a forward pass does between layers stays the model's own. Views
share parameters with the model they are taken from, and nothing is copied. Two kinds of model:

- Hugging Face causal language models of ``KNOWN``: token ids enter the first stage, hidden states
  travel, the last stage computes the loss. The others get hidden states as ``inputs_embeds``.
- ``nn.Sequential``: each child is a layer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hasten.parts.distributed.pipeline import partition
from hasten.parts.nn.causal_lm import causal_lm, trunk

# Trunks that embed, run layers that map hidden states to hidden states, and end with a norm;
# nothing is scaled or added between (Gemma scales embeddings), so that a stage may begin anywhere.
KNOWN = (
    *("llama", "mistral", "qwen2", "qwen3", "qwen3_moe"),
    *("deepseek_v2", "deepseek_v3"),
)
Inputs = Mapping[str, Any]


class Elsewhere(nn.Module):
    """Stands where a module of another stage was, and hands its first argument on."""

    def forward(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        return hidden


class Cuttable(Protocol):
    """A model that can be cut between its layers."""

    layers: int

    def costs(self) -> tuple[list[float], float, float]:
        """Estimated work of each layer, and what the first and the last stage do beside."""

    def measured(self, inputs: Inputs) -> tuple[list[float], float, float]:
        """The same in seconds, on one micro-batch."""

    def stage(self, span: range) -> nn.Module:
        """Maps (hidden or None, inputs of the micro-batch) to hidden states, or to the loss."""


class LanguageModel:
    """A loss module around a Hugging Face causal language model.

    ``loss`` maps (labels, inputs) to (summed loss, count), as in :mod:`hasten.parts.nn.losses`.
    """

    def __init__(self, loss: Any) -> None:
        self.loss = loss
        self.causal = causal_lm(loss.model)
        self.trunk: Any = trunk(loss.model)
        kind = self.causal.config.model_type
        if kind not in KNOWN:
            raise ValueError(
                f"models of type {kind} can't be cut into pipeline stages here; known are "
                f"{', '.join(KNOWN)}, and any nn.Sequential"
            )
        self.layers = len(self.trunk.layers)

    @property
    def tied(self) -> bool:
        """Whether head and embedding are one matrix."""
        head = getattr(self.causal.lm_head, "weight", None)
        return head is not None and head is getattr(self.trunk.embed_tokens, "weight", None)

    @property
    def dtype(self) -> torch.dtype:
        """The format that hidden states travel in: that of the weights."""
        return next(p.dtype for p in self.trunk.parameters() if p.is_floating_point())

    def costs(self) -> tuple[list[float], float, float]:
        """An embedding is looked up, which costs next to nothing beside a product."""
        config = self.causal.config
        routed = getattr(config, "n_routed_experts", None) or getattr(config, "num_experts", None)
        active = config.num_experts_per_tok / routed if routed else 1.0
        each = [partition.work(layer, active) for layer in self.trunk.layers]
        return each, 0.0, float(config.vocab_size * config.hidden_size)

    def measured(self, inputs: Inputs) -> tuple[list[float], float, float]:
        device = inputs["input_ids"].device
        calls: list[tuple[Any, Any]] = []

        def note(layer: nn.Module, args: Any, kwargs: Any) -> None:
            calls.append((args, kwargs))

        hooks = [
            layer.register_forward_pre_hook(note, with_kwargs=True) for layer in self.trunk.layers
        ]
        rest = {k: v for k, v in inputs.items() if k != "labels"}
        try:
            with torch.no_grad():
                hidden = self.trunk(use_cache=False, **rest).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()

        def layer(index: int) -> Tensor:
            (before, *more), named = calls[index]
            found: Tensor = self.trunk.layers[index](_leaf(before), *more, **named)
            return found

        def embedding() -> Tensor:
            found: Tensor = self.trunk.embed_tokens(inputs["input_ids"])
            return found

        last = self.stage(range(self.layers, self.layers))

        def head() -> Tensor:
            found: Tensor = last(_leaf(hidden), inputs)
            return found

        with _gradients_put_back(self.loss):
            each = [partition.seconds(partial(layer, i), device) for i in range(self.layers)]
            return (
                each,
                partition.seconds(embedding, device),
                partition.seconds(head, device),
            )

    def stage(self, span: range) -> nn.Module:
        """The stage that begins at layer 0 embeds; the one that ends at the last computes loss."""
        found = view(self.trunk)
        held = self.trunk.layers._modules  # by number: those of other ranks may be gone already
        found.layers = nn.ModuleList(
            held[str(index)] if index in span else Elsewhere() for index in range(self.layers)
        )
        if span.start > 0:
            found.embed_tokens = Elsewhere()
        if span.stop < self.layers:
            found.norm = Elsewhere()
            return TrunkStage(found, span.start == 0)
        causal = view(self.causal)
        setattr(causal, self.causal.base_model_prefix, found)
        return LossStage(causal, self.loss, span.start == 0)


class TrunkStage(nn.Module):
    """Layers of a language model; hidden states come out."""

    def __init__(self, trunk: Any, first: bool) -> None:
        super().__init__()
        self.trunk, self.first = trunk, first
        self.dtype = next(p.dtype for p in trunk.parameters() if p.is_floating_point())

    def forward(self, hidden: Tensor | None, inputs: Inputs) -> Tensor:
        rest = {k: v for k, v in inputs.items() if k != "labels"}
        out: Tensor = self.trunk(use_cache=False, **_entering(rest, hidden)).last_hidden_state
        return out.to(self.dtype)  # autocast may have ended in another format


class LossStage(nn.Module):
    """The last layers, norm, head and loss: the summed loss comes out."""

    def __init__(self, model: Any, loss: Any, first: bool) -> None:
        super().__init__()
        self.model, self.first = model, first
        self._loss = (loss,)  # in a tuple: the whole model that it holds is not this stage's

    def forward(self, hidden: Tensor | None, inputs: Inputs) -> Tensor:
        """The loss itself runs, over this stage's view, so that what it counts is seen outside."""
        (loss,) = self._loss
        whole, loss.model = loss.model, self.model
        try:
            total: Tensor = type(loss).forward(loss, **_entering(inputs, hidden))[0]
        finally:
            loss.model = whole
        return total


class Layers:
    """The children of an ``nn.Sequential``, one after the other."""

    def __init__(self, model: nn.Sequential) -> None:
        self.model = model
        self.layers = len(model)

    def costs(self) -> tuple[list[float], float, float]:
        return [partition.work(child) for child in self.model], 0.0, 0.0

    def measured(self, inputs: Inputs) -> tuple[list[float], float, float]:
        hidden, each = inputs["x"], []
        with _gradients_put_back(self.model):
            for child in self.model:
                taken = _leaf(hidden)
                each.append(partition.seconds(partial(child, taken), taken.device))
                with torch.no_grad():
                    hidden = child(hidden)
        return each, 0.0, 0.0

    def stage(self, span: range) -> nn.Module:
        return SequentialStage([self.model[i] for i in span], span.stop == self.layers)


class SequentialStage(nn.Module):
    """Some children of an ``nn.Sequential``; their output comes out, or of the last the loss."""

    def __init__(self, children: Sequence[nn.Module], last: bool) -> None:
        super().__init__()
        self.last = last
        self.run = nn.Sequential(*children)

    def forward(self, hidden: Tensor | None, inputs: Inputs) -> Tensor:
        out: Tensor = self.run(inputs["x"] if hidden is None else hidden)
        return inputs["loss_fn"](out, inputs["y"]) if self.last else out


def view(module: Any) -> Any:
    """The module under another identity: same parameters and code, submodules of its own choice."""
    found = copy.copy(module)
    found._modules = dict(module._modules)
    return found


def _entering(inputs: Inputs, hidden: Tensor | None) -> dict[str, Any]:
    """What a stage's model is called with: ids where it begins, hidden states where it goes on."""
    if hidden is None:
        return dict(inputs)
    rest = {k: v for k, v in inputs.items() if k != "input_ids"}
    return {"inputs_embeds": hidden, **rest}


def _leaf(hidden: Tensor) -> Tensor:
    return hidden.detach().requires_grad_(hidden.is_floating_point())


@contextmanager
def _gradients_put_back(module: nn.Module) -> Iterator[None]:
    """What a measurement does to ``.grad`` is forgotten."""
    kept = [(p, p.grad) for p in module.parameters()]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient
