"""Pipeline stages of a model: each is a view that holds only its own layers.

A view is the model's own class and code without other stages' layers. So masks, rotary
embedding and everything else between layers remain the model's own. Views share
parameters with the original model, and nothing is copied. Two kinds of model are
supported:

- Hugging Face causal language models of ``KNOWN``: token ids enter the first stage,
  hidden states are sent on, the last stage computes the loss. The others get hidden
  states as ``inputs_embeds``.
- ``nn.Sequential``: each child is a layer.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from hasten.parts.comm.groups import gathered_objects, message_device
from hasten.parts.nn.causal_lm import causal_lm, trunk
from hasten.parts.nn.multi_token import MultiToken

SLACK = 1 + 1e-9  # sums of the same costs in another order differ by less


def balanced_layers(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Returns the number of layers of each stage; every stage gets at least one.

    A pipeline goes at the pace of its slowest stage, so the largest stage is as small as possible
    (Skiena, The Algorithm Design Manual, 10.7). Among all such cuts the evenest is taken, which
    keeps memory even too.

    Args:
        costs: cost of each layer, in any unit.
        stages: number of stages.

    Raises:
        ValueError: there are fewer layers than stages, or a cost is no number from 0 on.
    """
    if stages < 1:
        raise ValueError(f"{stages} stages: give 1 at least")
    if len(costs) < stages:
        raise ValueError(
            f"a model of {len(costs)} layers can't be cut into {stages} stages; take "
            f"{len(costs)} stages at most"
        )
    if any(not math.isfinite(c) or c < 0 for c in costs):
        raise ValueError("the costs of layers must be finite and not negative")
    ends = (0.0, *itertools.accumulate(costs))

    def best_cut(join: Callable[[float, float], float]) -> tuple[float, tuple[int, ...]]:
        """Returns the smallest score and its sizes; ``join`` adds a stage's cost to a score."""
        best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # by number of layers
        for index in range(stages):
            best = {
                end: min(
                    (join(score, ends[end] - ends[start]), (*sizes, end - start))
                    for start, (score, sizes) in best.items()
                    if start < end
                )
                for end in range(index + 1, len(costs) - stages + index + 2)
            }
        return best[len(costs)]

    bound = best_cut(max)[0] * SLACK
    return best_cut(lambda total, c: total + c * c if c <= bound else math.inf)[1]


def ranges(sizes: Sequence[int]) -> list[range]:
    """Returns the layers of each stage, as ranges."""
    ends = list(itertools.accumulate(sizes))
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def work_per_token(module: nn.Module, active: float = 1.0) -> float:
    """Returns multiplications per token: elements of matrices, experts by their active share.

    Args:
        module: one layer. Convolutions count as often as their kernel is applied to one position.
        active: the share of a layer's experts that a token passes through.
    """
    total = 0.0
    for name, parameter in module.named_parameters():
        if parameter.dim() >= 2:
            routed = ".experts." in f".{name}"
            total += parameter.numel() * (active if routed else 1.0)
    return total or float(sum(p.numel() for p in module.parameters()))


# Trunks that embed, run layers that map hidden states to hidden states, and end with a norm.
# Nothing is scaled or added between (Gemma scales embeddings), so a stage may begin anywhere.
KNOWN = (
    *("llama", "mistral", "qwen2", "qwen3", "qwen3_moe"),
    *("deepseek_v2", "deepseek_v3", "deepseek_v32"),
)
Inputs = Mapping[str, Any]
Message = Callable[[Inputs], tuple[tuple[int, ...], torch.dtype]]  # shape of hidden states


class OtherStage(nn.Module):
    """Replaces a module of another stage, and returns its first argument."""

    def forward(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        return hidden


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
        # A reward model has a score.
        self.head = "score" if hasattr(self.causal, "score") else "lm_head"
        # On the last stage's rank, for modules that predict further tokens.
        self.embedding: nn.Module | None = None

    @property
    def tied(self) -> bool:
        """Returns True if head and embedding are one matrix."""
        head = getattr(getattr(self.causal, self.head), "weight", None)
        return head is not None and head is getattr(self.trunk.embed_tokens, "weight", None)

    @property
    def ahead(self) -> MultiToken | None:
        """Returns the modules that predict further tokens; None if none is trained."""
        ahead: MultiToken | None = getattr(self.loss, "ahead", None)
        return ahead if ahead is not None and ahead.weight else None

    @property
    def dtype(self) -> torch.dtype:
        """Returns the format of this rank's first weights: on the first rank, of the embedding."""
        return next(p.dtype for p in self.trunk.parameters() if p.is_floating_point())

    def message(self, dtype: torch.dtype) -> Message:
        """Returns the shape of sent hidden states, and their format: that of the first rank."""
        width = self.causal.config.hidden_size
        return lambda inputs: ((*inputs["input_ids"].shape, width), dtype)

    def costs(self) -> list[float]:
        """Estimates each layer's work; norm, head and loss count in the last layer's.

        An embedding look-up is almost free compared with a product.
        """
        config = self.causal.config
        routed = getattr(config, "n_routed_experts", None) or getattr(config, "num_experts", None)
        active = config.num_experts_per_tok / routed if routed else 1.0
        each = [work_per_token(layer, active) for layer in self.trunk.layers]
        head = float(config.vocab_size * config.hidden_size) if self.head == "lm_head" else 0.0
        more = [] if self.ahead is None else self.ahead.modules_ahead.values()
        each[-1] += head + sum(work_per_token(module, active) + head for module in more)
        return each

    def stage(self, span: range) -> nn.Module:
        """Returns a stage; the one with layer 0 embeds, the one with the last computes the loss."""
        last = span.stop == self.layers
        every = enumerate(self.trunk.layers)
        layers = nn.ModuleList(layer if i in span else OtherStage() for i, layer in every)
        parts: dict[str, nn.Module] = {"layers": layers}
        if span.start > 0:
            parts["embed_tokens"] = (self.embedding if last else None) or OtherStage()
        if not last:
            of_loss = inspect.signature(type(self.loss).forward).parameters
            return TrunkStage(view(self.trunk, norm=OtherStage(), **parts), of_loss, self.dtype)
        prefix = self.causal.base_model_prefix
        causal = view(self.causal, **{prefix: view(self.trunk, **parts)})
        return LossStage(causal, self.loss, self.ahead)


class TrunkStage(nn.Module):
    """Layers of a language model that return hidden states.

    Inputs ``of_loss`` are left out.
    """

    def __init__(self, trunk: Any, of_loss: Collection[str], dtype: torch.dtype) -> None:
        super().__init__()
        self.trunk, self._of_loss, self._dtype = trunk, frozenset(of_loss), dtype

    def forward(self, hidden: Tensor | None, inputs: Inputs) -> Tensor:
        entering = _entering({k: v for k, v in inputs.items() if k not in self._of_loss}, hidden)
        out: Tensor = self.trunk(use_cache=False, **entering).last_hidden_state
        # Autocast may have returned another format, and adapters may have one of their own.
        return out.to(self._dtype if hidden is None else hidden.dtype)


class LossStage(nn.Module):
    """The last layers, norm, head and loss; returns the summed loss.

    With modules that predict further tokens the embedding is part of it too.
    """

    def __init__(self, model: Any, loss: Any, ahead: MultiToken | None) -> None:
        super().__init__()
        self.model, self.ahead = model, ahead
        self._loss = (loss,)  # in a tuple, because its full model isn't part of this stage

    def forward(self, hidden: Tensor | None, inputs: Inputs) -> Tensor:
        """Runs the job's loss itself on this stage's view, so counters of the loss see it."""
        (loss,) = self._loss
        entering = _entering(inputs, hidden)
        if self.ahead is not None and hidden is not None:
            entering["token_ids"] = inputs["input_ids"]
        full_model, loss.model = loss.model, self.model
        try:
            total: Tensor = type(loss).forward(loss, **entering)[0]
        finally:
            loss.model = full_model
        return total


class Layers:
    """The children of an ``nn.Sequential``, one after the other."""

    def __init__(self, model: nn.Sequential) -> None:
        self.model = model
        self.layers = len(model)

    def costs(self) -> list[float]:
        return [work_per_token(child) for child in self.model]

    def stage(self, span: range) -> nn.Module:
        return SequentialStage([self.model[i] for i in span], span.stop == self.layers)


class SequentialStage(nn.Module):
    """Some children of an ``nn.Sequential``; returns their output, or the loss from the last."""

    def __init__(self, children: Sequence[nn.Module], last: bool) -> None:
        super().__init__()
        self.run, self._last = nn.Sequential(*children), last

    def forward(self, hidden: Tensor | None, inputs: Inputs) -> Tensor:
        out: Tensor = self.run(inputs["x"] if hidden is None else hidden)
        return inputs["loss_fn"](out, inputs["y"]) if self._last else out


Cuttable = LanguageModel | Layers  # a model that can be cut between its layers


def stages_of(
    model: Cuttable, sizes: Sequence[int], homes: Sequence[int], rank: int | None
) -> dict[int, nn.Module]:
    """Returns the stages of a rank by number, or all; each maps hidden states and inputs."""
    places = enumerate(zip(ranges(sizes), homes, strict=True))
    return {i: model.stage(span) for i, (span, home) in places if rank in (None, home)}


def view(module: Any, **parts: nn.Module) -> Any:
    """Returns the module as another object: same parameters and code, some other submodules."""
    clone = copy.copy(module)
    clone._modules = {**module._modules, **parts}
    return clone


def _entering(inputs: Inputs, hidden: Tensor | None) -> dict[str, Any]:
    """Returns the inputs of a stage's model: ids for the first stage, hidden states later."""
    if hidden is None:
        return dict(inputs)
    return {"inputs_embeds": hidden, **{k: v for k, v in inputs.items() if k != "input_ids"}}


class Pruned:
    """A language model in place without the modules of other ranks: layers, embedding, norm, head.

    The remaining modules keep their names. Modules that predict further tokens are on the last
    stage's rank, with a copy of the embedding. In :meth:`all_modules` the others are back without
    memory, and :func:`send_to_first` brings the first rank one tensor at a time.
    """

    def __init__(
        self,
        model: LanguageModel,
        sizes: Sequence[int],
        homes: Sequence[int],
        group: dist.ProcessGroup,
    ) -> None:
        self._model, self._tied, self._group = model, model.tied, group
        rank, prefix = dist.get_rank(group), model.causal.base_model_prefix
        embed = f"{prefix}.embed_tokens"
        self._homes = {embed: homes[0], f"{prefix}.norm": homes[-1], model.head: homes[-1]}
        for home, span in zip(homes, ranges(sizes), strict=True):
            self._homes |= {f"{prefix}.layers.{layer}": home for layer in span}
        others = [name for name, home in self._homes.items() if home != rank]
        if rank != homes[-1] and getattr(model.loss, "ahead", None) is not None:
            model.loss.ahead.modules_ahead.clear()
        elif model.ahead is not None:
            model.embedding = model.trunk.embed_tokens
            if rank != homes[0] and model.tied:  # the state has the matrix under the head's name
                model.embedding = view(model.embedding)
                model.embedding._parameters = dict(model.embedding._parameters)
            elif embed in others:
                others.remove(embed)
        # Without memory, on the meta device.
        self._absent = {name: model.causal.get_submodule(name).to("meta") for name in others}
        self._remove()

    def _remove(self) -> None:
        for name in self._absent:
            self._model.causal.set_submodule(name, OtherStage())

    @contextmanager
    def all_modules(self) -> Iterator[dict[int, int]]:
        """Context in which the model has the modules of other ranks, without memory.

        Every rank of the group enters it. It yields the rank that holds each tensor, by id.
        """
        causal = self._model.causal
        for name, module in self._absent.items():
            causal.set_submodule(name, module)
        head = causal.get_submodule(self._model.head)
        if self._tied:
            own_head, head.weight = head.weight, self._model.trunk.embed_tokens.weight
        tensors: dict[str, tuple[int, Tensor]] = {}
        for name, home in self._homes.items():
            module = causal.get_submodule(name)
            for key, tensor in (*module.named_parameters(), *module.named_buffers()):
                tensors[f"{name}.{key}"] = home, tensor
        # Precision may have cast a module since its removal elsewhere.
        formats = gathered_objects({k: t.dtype for k, (_, t) in tensors.items()}, self._group)
        homes: dict[int, int] = {}
        for key, (home, tensor) in tensors.items():
            homes.setdefault(id(tensor), home)
            if tensor.is_meta:
                tensor.data = tensor.data.to(formats[home][key])
        try:
            yield homes
        finally:
            if self._tied:
                head.weight = own_head
            self._remove()


@torch.no_grad()
def send_to_first(
    weight: Tensor, dtype: torch.dtype, home: int, group: dist.ProcessGroup
) -> Tensor:
    """Returns a tensor of the rank ``home`` on the host of the group's first rank, in ``dtype``.

    Every rank of the group calls it; the return value of the others has no meaning.
    """
    rank, device = dist.get_rank(group), message_device(group)
    if rank == home == 0:
        return weight.detach().to("cpu", dtype)
    if rank == home and weight.numel():
        dist.send(weight.detach().to(device, dtype).contiguous(), group=group, group_dst=0)
    if rank:
        return weight
    received = torch.empty(weight.shape, dtype=dtype, device=device)
    if weight.numel():
        dist.recv(received, group=group, group_src=home)
    return received.cpu()


# The embedding on the last stage's rank too, as a tied head or for modules that predict further
# tokens: one weight on two ranks.
#
# Both ranks hold the full matrix, and each computes its own part of the gradient. After the
# backward passes the parts are added on both. Both then make the same update and stay equal,
# because a sum of two numbers doesn't depend on their order.

MARK = "embedding_on_two_ranks"  # attribute of a weight with a copy on another rank


class TiedEmbedding:
    """The embedding on this rank; nothing if only one rank has it.

    ``owner`` is the module that holds the weight.
    """

    def __init__(
        self, cuttable: Cuttable, homes: Sequence[int], group: dist.ProcessGroup | None
    ) -> None:
        self.weight: Tensor | None = None
        self.owner: Any = None
        self.counts = True  # True if this rank's copy counts in a sum over all weights
        self._before: Tensor | None = None
        self._peer: Any = {}
        if group is None or not isinstance(cuttable, LanguageModel):
            return
        first, last, rank = homes[0], homes[-1], dist.get_rank(group)
        if (cuttable.tied or cuttable.ahead) and first != last and rank in (first, last):
            self.counts = rank == first
            embeds = self.counts or not cuttable.tied
            self.owner = cuttable.trunk.embed_tokens if embeds else cuttable.causal.lm_head
            self.weight = self.owner.weight
            setattr(self.weight, MARK, True)
            self._peer = {"group": group, "group_peer": last if self.counts else first}

    def begin(self) -> None:
        """Begins a step: stores earlier gradients separately, because they are sums already."""
        if self.weight is not None:
            self._before, self.weight.grad = self.weight.grad, None

    def add(self, of: Tensor | None = None) -> None:
        """Adds the other copy's gradient to this one's; both ranks call it.

        ``of`` is the tensor that carries the gradient, where it isn't the weight itself (a master).
        """
        weight: Any = self.weight if of is None else of
        if self.weight is None or not weight.requires_grad:
            return
        local = (torch.zeros_like(weight) if weight.grad is None else weight.grad).contiguous()
        other = torch.empty_like(local)
        ways = (dist.isend, local), (dist.irecv, other)
        for request in dist.batch_isend_irecv([dist.P2POp(*way, **self._peer) for way in ways]):
            request.wait()
        total = local + other
        weight.grad = total if self._before is None else total + self._before
        self._before = None


def is_end(weight: Tensor) -> bool:
    """Returns True for an embedding on two ranks, or a master with its attributes."""
    return hasattr(weight, MARK)
