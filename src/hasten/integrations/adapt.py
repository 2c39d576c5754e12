"""Techniques in a loop that isn't hasten's: which slots a host offers, and the model edited for it.

A host is a name, the slots it offers and, for each other slot, what to do instead. A technique
writes into the same :class:`~hasten.core.setup.Setup` as in hasten's own trainer; here the fields
of the offered slots are brought to where the host looks for them. What a host doesn't offer is
refused before anything is edited, because a technique that silently does nothing is worse.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hasten.core import facts
from hasten.core.facts import Facts, ModelFacts
from hasten.core.job import GlobalBatch, Job, NamedParameters, Stop, with_language_counts
from hasten.core.plan import Plan
from hasten.core.setup import Setup, obstacles, prepare
from hasten.core.slot import Slot
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.parts.data.collate import IGNORED, padded
from hasten.parts.nn.causal_lm import causal_lm, routed_experts
from hasten.parts.nn.head_form import plain_head_reason
from hasten.parts.nn.losses import WholeLogitsLoss
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.wire.compressed_wire import Compressed

EDITS = (Slot.EXPERTS, Slot.ATTENTION, Slot.LAYERS, Slot.LOSS, Slot.RECOMPUTE, Slot.THREADS)
HERE = "train with `hasten train` for it"


@dataclass(frozen=True)
class Host:
    """Somebody's loop: the slots it offers, and advice for the others."""

    name: str
    offers: frozenset[Slot]
    advice: Mapping[Slot, str]


@dataclass(frozen=True)
class HostRun:
    """What is known of the run that the host will make.

    Args:
        records: what a SAMPLER chooses from; empty where none is asked for.
        lengths: tokens of each record.
        batch: records of a step over all ranks.
        steps, epochs: how long the run is, one of the two; a wire's dense start is a share of it.
        folder: for checkpoints that name none.
    """

    device: str = "cpu"
    records: Sequence[Any] = ()
    lengths: Sequence[int] = ()
    batch: int = 1
    steps: int | None = None
    epochs: int | None = None
    seed: int = 0
    folder: Path | None = None


class HostOptimizer:
    """The optimizer that a host has built, for a technique to read its settings from."""

    def __init__(self) -> None:
        self.optimizer: Optimizer | None = None

    def __call__(self, named: NamedParameters) -> Optimizer:
        assert self.optimizer is not None  # optimizer_of() put it there
        return self.optimizer


def prepare_host(
    host: Host, model: nn.Module, techniques: Iterable[Technique], host_run: HostRun
) -> Setup:
    """The setup in which the techniques have put themselves; the model is as it was.

    Raises:
        InputError: a slot that the host doesn't offer, two techniques for one slot, or a reason
            why a technique can't work on this job.
    """
    plan = Plan(techniques)
    for technique in plan:
        if technique.slot not in host.offers:
            instead = host.advice.get(technique.slot, HERE)
            raise InputError(
                f"{technique.name()}: {host.name} doesn't let others decide "
                f"{technique.slot.value}; {instead}"
            )
    known = facts_of(model, host_run.device)
    if Slot.LOSS in plan and getattr(_config(model), "output_router_logits", False):
        raise InputError(
            "this model adds a loss of its routers to the other (output_router_logits), which a "
            "loss technique would leave out; set it to False in the config, or leave one of them"
        )
    reasons = obstacles(plan, known)
    if reasons:
        raise InputError("this model can't use " + "; ".join(reasons))
    whole = plan.with_(DDP()) if known.world.size > 1 and Slot.LAYOUT not in plan else plan
    setup = prepare(_job(model, host_run, known), whole, known, host_run.folder)
    if Slot.WIRE in plan and known.world.size > 1 and not isinstance(setup.wire, Compressed):
        name = next(t.name() for t in plan if t.slot is Slot.WIRE)
        raise InputError(
            f"{name}: it needs a step of hasten's own, which {host.name} isn't; {HERE}, or take "
            "half, quantised, topk or powersgd"
        )
    return setup


def facts_of(model: nn.Module, device: str) -> Facts:
    """What is known of the machine and of somebody's model; nothing of the data."""
    return replace(facts.seen_at_start(), device=device, model=_model_facts(model))


def edit_model(model: nn.Module, setup: Setup) -> None:
    """Replace what the setup says on this model instance, in the order of ``assemble``."""
    setup.threads()
    for change in (setup.experts, setup.attention, setup.layers):
        change(model)
    if Slot.LOSS in setup.plan:
        assert setup.loss is not None  # prepare() put the job's there
        bind_loss(model, setup.loss(model))
    setup.recompute(model)


def bind_loss(model: nn.Module, loss: nn.Module) -> None:
    """Let the model's ``forward`` return ``loss``'s mean where it trains and labels are given.

    The loss is then computed inside what DDP wraps, so that its hooks see every parameter. There
    are no logits in the answer: not to have them is what the loss is for. In ``eval`` mode, and
    without labels, the model does what it always did.
    """
    usual = model.forward

    @functools.wraps(usual)  # the Trainer reads the signature to know which columns to keep
    def forward(*args: Any, **given: Any) -> Any:
        if not model.training or given.get("labels") is None:
            return usual(*args, **given)
        if len(args) > 1:
            raise InputError(
                "a model with a technique for its loss takes its inputs by name: give "
                "attention_mask=..., and so on, in place of the second argument"
            )
        inputs = dict(zip(("input_ids",), args, strict=False)) | given
        labels, aligned = inputs.pop("labels"), inputs.pop("shift_labels", None)
        items = inputs.pop("num_items_in_batch", None)
        for name in ("use_cache", "return_dict"):
            inputs.pop(name, None)
        total, count = loss(labels=_shifted(labels) if aligned is None else aligned, **inputs)
        return _Output(loss=total / (count.clamp(min=1) if items is None else items))

    model.forward = forward  # this instance alone


class _Output(dict[str, Any]):
    """What a model returns, by key as the Trainer reads it and by name as people do."""

    def __init__(self, loss: Tensor) -> None:
        super().__init__(loss=loss)
        self.loss = loss


def optimizer_of(setup: Setup, model: nn.Module, usual: Optimizer) -> Optimizer:
    """OPTIMIZER: the technique's with the usual one's settings; without a technique, the usual.

    Raises:
        InputError: the technique reads an AdamW, and this is another, or has been stepped.
    """
    handed = setup.job.optimizer
    if Slot.OPTIMIZER not in setup.plan or not isinstance(handed, HostOptimizer):
        return usual
    handed.optimizer = usual
    assert setup.optimizer is not None  # prepare() put the job's there
    return setup.optimizer([(n, p) for n, p in model.named_parameters() if p.requires_grad])


def attach_wire(setup: Setup, module: nn.Module) -> None:
    """WIRE: hook into the replicas; with one process nothing travels.

    Raises:
        InputError: several ranks that are not DDP's, or a wire that has had its training.
    """
    if Slot.WIRE not in setup.plan or setup.facts.world.size == 1:
        return
    if not isinstance(module, DistributedDataParallel):
        raise InputError(
            f"gradients of {setup.facts.world.size} ranks go over a wire of DDP's, and this loop "
            f"runs a {type(module).__name__}; start it with DDP, or leave the wire out"
        )
    try:
        setup.wire.attach(module)
    except ValueError as error:
        raise InputError(f"{error}; build model and wire anew for another training") from error


def _shifted(labels: Tensor) -> Tensor:
    """Labels as Transformers takes them, moved to the position that predicts them; (B, T)."""
    return F.pad(labels[..., 1:], (0, 1), value=IGNORED)


def _job(model: nn.Module, host_run: HostRun, known: Facts) -> Job:
    sampled = len(host_run.records) > 0
    stop = Stop(steps=host_run.steps, epochs=host_run.epochs if not host_run.steps else None)
    return Job(
        model=model,
        loss=WholeLogitsLoss,
        optimizer=HostOptimizer(),
        stop=stop,
        collate=with_language_counts(padded),
        records=host_run.records,
        lengths=host_run.lengths,
        stream=None if sampled else lambda epoch: iter(()),
        batch=GlobalBatch(records=host_run.batch),
        seed=host_run.seed,
        device=known.device,
    )


def _model_facts(model: nn.Module) -> ModelFacts:
    config = _config(model)
    return ModelFacts(
        architecture=config.model_type,
        parameters=sum(p.numel() for p in model.parameters()),
        hidden_size=getattr(config, "hidden_size", 0) or 0,
        layers=getattr(config, "num_hidden_layers", 0) or 0,
        vocabulary=getattr(config, "vocab_size", 0) or 0,
        tied_head=bool(getattr(config, "tie_word_embeddings", False)),
        experts=routed_experts(config),
        sliding_window=bool(getattr(config, "use_sliding_window", False)),
        heads=getattr(config, "num_attention_heads", 0) or 0,
        key_value_heads=getattr(config, "num_key_value_heads", 0) or 0,
        head_reason=plain_head_reason(model) or "",
    )


def _config(model: nn.Module) -> Any:
    """Of a Hugging Face causal language model; of any other module, its class as architecture."""
    try:
        return causal_lm(model).config
    except ValueError:
        return SimpleNamespace(model_type=type(model).__name__)
