"""Techniques in another trainer's loop: what a host answers, and the model edited for it.

A host has a name and the slots that it offers; for each other slot it names what to do instead.
Its adapter (:class:`TrainerAdapter`) has no code for single techniques. A technique writes into the
same :class:`~hasten.core.setup.Setup` as in hasten's own trainer. Here the fields of the offered
slots are moved to where the host reads them.

What isn't a library's own code is left alone, and named. What is recognised joins, and the check
of the first step decides. Other refusals are only for what that check can't see. That is harm after
the first step, state that another object holds, and the order of the data.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from hasten.core import context as facts
from hasten.core.context import JobContext, ModelFacts
from hasten.core.job import GlobalBatch, Job, NamedParameters, Stop, with_language_counts
from hasten.core.plan import Plan
from hasten.core.setup import Setup, prepare, unsupported_reasons
from hasten.core.slot import CHANGES_A_PASS, Slot
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.integrations.batches import SizedRows, StepBatches, StepLoader
from hasten.integrations.module_edits import ModuleEdits, configs_of
from hasten.integrations.scored_labels import (
    ScoredCalls,
    fused_head,
    score_labels,
    without_fused_head,
)
from hasten.measure.quality.preserved import HOOKS, LIBRARIES, library_of
from hasten.models.adapters import merged_weights
from hasten.parts.data.collate import IGNORED, padded
from hasten.parts.nn import rebind
from hasten.parts.nn.attention import usual_of
from hasten.parts.nn.causal_lm import causal_lm, routed_experts
from hasten.parts.nn.head_form import plain_head_reason
from hasten.parts.nn.losses import WholeLogitsLoss
from hasten.techniques.collate import Packed
from hasten.techniques.communication.compressed import Compressed
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.optimizer import FusedAdamW

EDITS = tuple(slot for slot in CHANGES_A_PASS if slot is not Slot.COLLATE)  # changes of the model
USE_HASTEN_TRAIN = "train with `hasten train` for it"
NoContext = contextlib.nullcontext
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class HostSlots:
    """A foreign training loop: the slots that it offers, and advice for the others.

    ``is_ordered`` is True if the order of the examples is hasten's even without a SAMPLER.
    """

    name: str
    offers: frozenset[Slot]
    advice: Mapping[Slot, str]
    is_ordered: bool = False


@dataclass(frozen=True)
class HostRun:
    """Facts about the run of the host.

    Args:
        batch: examples of a step over all ranks.
        steps, epochs: length of the run, one of the two; a communication method's dense
            start is a share of it.
        folder: for checkpoints that name none.
    """

    device: str = "cpu"
    batch: int = 1
    steps: int | None = None
    epochs: int | None = None
    seed: int = 0
    folder: Path | None = None


class LoopAdapter(Protocol):
    """The answers that a plan needs of any loop."""

    slots: HostSlots

    def model(self) -> Any:
        """The module that is trained, unwrapped."""

    def run(self) -> HostRun:
        """Facts about the run."""

    def examples(self) -> Any:
        """The data set that a SAMPLER chooses from."""

    def reason(self, technique: Technique) -> str:
        """Why a technique is left out for what the first step can't show; empty if it isn't."""


class TrainerAdapter(LoopAdapter, Protocol):
    """A host's answers while it trains; a host of another kind has the same members."""

    trainer: Any

    def replicas(self) -> Any:
        """The module that the host calls: the model, or DDP around it."""

    def has_already(self, technique: Technique) -> bool:
        """True if the host does by itself what the technique does."""

    def autocast(self) -> AbstractContextManager[Any] | None:
        """The host's autocast around the model's call; None without one."""

    def loss(self) -> Callable[[Any, bool], Tensor] | None:
        """The loss of a micro-batch as the library computes it; None if the user's code runs in it.

        Its second argument is True for the batch of the pass that has just ended.
        """

    def packs_calls(self) -> bool:
        """True if rows are laid out in calls of the model, because the loss reads padded rows."""

    def reference(self) -> TrainerAdapter | None:
        """A second model that the loss compares the first one with, as a host."""

    def step(self) -> int:
        """The number of steps that are done."""

    def steps(self) -> float:
        """The number of steps at which the training ends."""

    def evidence(self) -> Sequence[Any]:
        """The host's callbacks that count tokens (``count``) and log steps (``lines``)."""


class HostOptimizer:
    """The optimizer that a host has built, for a technique to read its settings from."""

    def __init__(self) -> None:
        self.optimizer: Optimizer | None = None

    def __call__(self, named: NamedParameters) -> Optimizer:
        assert self.optimizer is not None  # optimizer_of() put it there
        return self.optimizer


def prepare_host(host: LoopAdapter, techniques: Iterable[Technique]) -> Setup:
    """The setup in which the techniques have put themselves; the model is as it was.

    Raises:
        InputError: a slot that the host doesn't offer, two techniques for one slot, or a reason
            why a technique can't work on this job.
    """
    plan, slots = Plan(techniques), host.slots
    for technique in plan:
        reason = host.reason(technique)
        if technique.slot not in slots.offers:
            instead = slots.advice.get(technique.slot, USE_HASTEN_TRAIN)
            reason = f"{slots.name} doesn't let others decide {technique.slot.value}; {instead}"
        if reason:
            raise InputError(f"{technique.name()}: {reason}")
    run, model, rows = host.run(), host.model(), None
    if slots.is_ordered or Slot.SAMPLER in plan:
        if not hasattr(host.examples(), "__len__"):
            raise InputError("a sampler needs a dataset with a length; this one is a stream")
        rows = SizedRows(host.examples())
    context = context_of(model, run.device)
    reasons = unsupported_reasons(plan, context)
    if reasons:
        raise InputError("; ".join(reasons))
    full_plan = plan.with_(DDP()) if context.world.size > 1 and Slot.LAYOUT not in plan else plan
    setup = prepare(_job(model, run, rows, context), full_plan, context, run.folder)
    if (
        Slot.COMMUNICATION in plan
        and context.world.size > 1
        and not isinstance(setup.communication, Compressed)
    ):
        name = next(t.name() for t in plan if t.slot is Slot.COMMUNICATION)
        raise InputError(
            f"{name}: it needs a step of hasten's own, which {slots.name} isn't; "
            f"{USE_HASTEN_TRAIN}, or take half, quantised, topk or powersgd"
        )
    return setup


def ordered_loader(
    setup: Setup, collate: Any, passes: int, *, weighted: bool, epoch: int = 0, **settings: Any
) -> StepLoader:
    """This rank's batches in the order of the SAMPLER technique.

    Args:
        passes: of a step on each rank.
        weighted: for a host that takes the mean of its passes' losses: the collator gets what
            makes that mean the mean over the step's trained tokens.
        settings: of ``DataLoader``.
    """
    rows, world = setup.job.examples, setup.context.world
    assert setup.sampler is not None
    assert isinstance(rows, SizedRows)  # prepare_host() put it there
    trained = rows.trained if weighted else None
    order = StepBatches(setup.sampler, passes, world.rank, world.size, trained)
    order.set_epoch(epoch)
    return StepLoader(rows, order, collate, **settings)


def context_of(model: nn.Module, device: str) -> JobContext:
    """Returns facts about the machine and a user's model; none about the data.

    An initialized process group decides about ranks, since a script may have numbered them.
    """
    context = replace(facts.seen_at_start(), device=device, model=_model_facts(model))
    if not (dist.is_available() and dist.is_initialized()):
        return context
    joined = replace(context.world, rank=dist.get_rank(), size=dist.get_world_size())
    return replace(context, world=joined)


def edit_model(
    model: nn.Module,
    setup: Setup,
    context: Callable[[], AbstractContextManager[Any]] = NoContext,
    trains_alone: bool = False,
    packs_calls: bool = False,
) -> None:
    """Applies the setup's edits to this model instance, in the order of ``assemble``.

    The loss takes the place of the causal LM's own in its ``forward``, if the model trains
    and labels are passed. So it is computed inside the model's wrappers (adapters, DDP).
    Their hooks receive every parameter, and their additions to the loss are kept. The
    output has no logits: the purpose is to avoid them. The model's own ``forward`` runs in
    ``eval`` mode, without labels, and if a caller requests other outputs or another loss.

    Args:
        context: the host's autocast, within which the loss is computed.
        trains_alone: the edits hold for training passes alone. So a model in ``eval`` mode trains
            too, as Lightning leaves what ``from_pretrained`` returns.
        packs_calls: COLLATE acts in calls of the model.
    """
    for change in (setup.experts, setup.attention, setup.layers):
        change(model)
    with plain_forward(model):
        head = fused_head(model)
    with plain_forward(model), without_fused_head(model):
        loss = setup.loss(model) if Slot.LOSS in setup.plan and setup.loss is not None else None
    packed = next((t for t in setup.plan if isinstance(t, Packed)), None) if packs_calls else None
    if head is not None and (loss is not None or packed is not None):
        share = math.inf if packed is None else packed.least_share
        calls = ScoredCalls(head, packed is not None, share, loss, context)
        rebind.bind(causal_lm(model), score_labels, calls)
    elif loss is not None:
        rebind.bind(causal_lm(model), _loss_forward, (loss, context, trains_alone))
    setup.recompute(model)


def take_off_loss(model: nn.Module) -> None:
    """Gives the model its own loss again, if :func:`edit_model` has replaced it."""
    for module in model.modules():
        rebind.unbind(module, _loss_forward)


@contextlib.contextmanager
def plain_forward(model: Any) -> Iterator[None]:
    """Inside, the model's ``forward`` is what it was before accelerate put autocast around it.

    Hooks of hasten's own, which count tokens, are off inside.
    """
    attributes = vars(model)
    wrapped, original = attributes.get("forward"), attributes.get("_original_forward")
    pairs = [(attributes[name], dict(attributes[name])) for name in HOOKS]
    if wrapped is not None and original is not None:
        del attributes["forward"]
        if getattr(original, "__func__", None) is not type(model).forward:
            attributes["forward"] = original
    for hooks, _ in pairs:
        for key in [k for k, hook in hooks.items() if library_of(hook) == "hasten"]:
            del hooks[key]
    try:
        yield
    finally:
        if wrapped is not None:
            attributes["forward"] = wrapped
        for hooks, before in pairs:
            hooks.clear()
            hooks.update(before)


class HostedTechniques:
    """Techniques that edit a host's model, for its training passes alone.

    The model is plain now, and between passes.
    """

    def __init__(self, host: TrainerAdapter) -> None:
        self.model: nn.Module = host.model()
        self._host, self._is_float32 = host, False
        self._edits: dict[tuple[Technique, ...], ModuleEdits] = {}
        self._structure: list[Any] = []
        self.packs_calls = host.packs_calls()  # while no edit covers the model's forward
        reference = host.reference()
        self._reference = None if reference is None else HostedTechniques(reference)

    @property
    def models(self) -> list[nn.Module]:
        """The models that a pass calls; the first one is trained."""
        return [self.model, *([] if self._reference is None else self._reference.models)]

    def _autocast(self) -> AbstractContextManager[Any]:
        return (None if self._is_float32 else self._host.autocast()) or NoContext()

    @contextlib.contextmanager
    def in_float32(self) -> Iterator[None]:
        """Inside, the host's autocast is off."""
        self._is_float32 = True
        second = NoContext() if self._reference is None else self._reference.in_float32()
        try:
            with plain_forward(self.model), second:
                yield
        finally:
            self._is_float32 = False

    def edits(self, techniques: Sequence[Technique]) -> ModuleEdits:
        """Returns the changes of these techniques to the model as it is now.

        Raises:
            InputError: one of them can't work here.
        """
        chosen = tuple(t for t in techniques if t.slot in (*EDITS, Slot.COLLATE))
        edits = self._edits.get(chosen)
        if edits is None or not edits.fits:
            with plain_forward(self.model):  # which facts of the model are read from
                setup = prepare_host(self._host, chosen)
            edit = functools.partial(
                edit_model,
                setup=setup,
                context=self._autocast,
                trains_alone=True,
                packs_calls=self.packs_calls,
            )
            edits = self._edits[chosen] = ModuleEdits(self.model, edit)
        return edits

    @contextlib.contextmanager
    def active(self, techniques: Sequence[Technique]) -> Iterator[None]:
        """The techniques' edits hold inside."""
        second = NoContext() if self._reference is None else self._reference.active(techniques)
        with self.edits(techniques).active(), second:
            yield

    def fitting(
        self, techniques: Sequence[Technique], report: Callable[[str], None]
    ) -> list[Technique]:
        """Returns the techniques that fit the model as it is now; ``report`` gets other reasons.

        It looks again if other code has changed a module, weight, hook, ``forward``, loss or
        setting since the last call. Numbers in the weights don't count.
        """
        structure = []
        for model in self.models:
            with plain_forward(model):
                structure += _parts(model)
        former, self._structure = self._structure, structure
        if len(former) == len(structure) and all(map(operator.is_, former, structure)):
            return list(techniques)
        self._edits.clear()
        if self._reference is not None:
            self._reference._edits.clear()
        remaining = []
        for technique in techniques:
            try:
                self.require_recognised(technique)
            except InputError as error:
                report(str(error))
            else:
                remaining.append(technique)
        return remaining

    def require_recognised(self, technique: Technique) -> None:
        """Refuses to replace code that isn't the library's own.

        Raises:
            InputError: a module's class or ``forward`` isn't the library's, or it has hooks
                which the technique's code would not call.
        """
        if self._reference is not None:
            self._reference.require_recognised(technique)
        if technique.slot in (Slot.COLLATE, Slot.LOSS):
            reason = model_loss_reason(self.model)
            if reason:
                raise InputError(f"{technique.name()}: {reason}; it is left as it is")
        if technique.slot not in EDITS:
            return
        with plain_forward(self.model):
            edits = self.edits([technique])
            reasons = [_foreign(module) for module in edits.modules]
        for reason in reasons:
            if reason:
                raise InputError(f"{technique.name()}: {reason}; it is left as it is")
        hooked = _hooked(edits.modules) if technique.slot in BYPASSES else ""
        if hooked:
            raise InputError(f"{technique.name()}: {hooked}, which its code would not call")


def prepare_recognised(host: TrainerAdapter, techniques: Iterable[Technique]) -> Setup:
    """Works like :func:`prepare_host`, and refuses to replace code that isn't the library's."""
    setup = prepare_host(host, techniques)
    hosted = HostedTechniques(host)
    for technique in setup.plan:
        hosted.require_recognised(technique)
    return setup


def _parts(model: nn.Module) -> list[Any]:
    """Returns what a technique was fitted to, to be compared by identity."""
    visited: set[int] = set()
    waiting: list[Any] = [model]
    parts: list[Any] = []
    while waiting:  # as modules(), without a generator for each level: it runs before each step
        module = waiting.pop()
        if module is None or id(module) in visited:
            continue
        visited.add(id(module))
        attributes = module.__dict__
        parts += (module, type(module), attributes.get("forward"))
        for name in ("_parameters", *HOOKS):
            if attributes[name]:
                parts += attributes[name].values()
        if attributes["_modules"]:
            waiting += attributes["_modules"].values()
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = getattr(inner, "config", None)
    for settings in (vars(inner), *map(vars, configs_of(config))):
        for key, setting in settings.items():
            if key != "training" and (isinstance(setting, SETTINGS) or callable(setting)):
                parts += (key, setting)
    return parts


SETTINGS = (bool, int, float, str, type(None))


def model_loss_reason(model: nn.Module) -> str:
    """Why the loss isn't the mean over labels that a library's model computes; empty if it is."""
    with plain_forward(model):
        try:
            inner = causal_lm(model)
        except ValueError:
            return ""  # the technique's own reasons name it
        loss = getattr(inner, "loss_function", None)
        name = "ForCausalLMLoss" if loss is None else getattr(loss, "__name__", str(loss))
        if name != "ForCausalLMLoss":
            return f"the model's loss function is {name}"
        if library_of(vars(inner).get("forward")) == "trl":  # in chunks, and the same mean
            return ""
        return plain_head_reason(model) or ""


BYPASSES = (Slot.EXPERTS, Slot.LAYERS, Slot.LOSS)  # these techniques read weights of inner modules


def _foreign(module: nn.Module) -> str:
    """Why a module isn't what the technique takes it for; empty if it is."""
    kind = type(module)
    if "forward" in vars(module) and fused_head(module) is None:
        return f"the forward of a {kind.__name__} was replaced by other code"
    library = kind.__module__.partition(".")[0]
    if library not in LIBRARIES or library_of(kind.forward) not in LIBRARIES:
        return f"{kind.__name__} of {kind.__module__} is no class of the supported libraries"
    return ""


def _hooked(modules: Iterable[nn.Module]) -> str:
    """A foreign hook or forward on one of these modules or inside it; empty if there is none."""
    for outer in modules:
        for name, module in outer.named_modules():
            if name and "forward" in vars(module):
                return f"{type(outer).__name__}.{name} has a forward of its own"
            for hooks in HOOKS:
                for hook in getattr(module, hooks).values():
                    if library_of(hook) not in LIBRARIES or "neftune" in str(hook):
                        where = f"{type(outer).__name__}.{name}" if name else type(outer).__name__
                        return f"{where} has a hook"
    return ""


# What a caller may ask of a forward that a loss without logits can't return.
MORE_OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")
OTHER_LOSS = ("logits_to_keep", "ignore_index", "label_smoothing")


def _loss_forward(module: Any, usual: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    asks = [key for key in (*MORE_OUTPUTS, *OTHER_LOSS) if kwargs.get(key)]
    state = rebind.state_of(module, _loss_forward)
    if (
        state is None
        or not (module.training or (state[2] and torch.is_grad_enabled()))
        or kwargs.get("labels") is None
        or asks
        or len(args) > 1
        or kwargs.get("return_dict") is False
    ):
        return usual(*args, **kwargs)
    from transformers.modeling_outputs import CausalLMOutputWithPast

    loss, context, _ = state
    inputs = dict(zip(("input_ids",), args, strict=False)) | kwargs
    labels, aligned = inputs.pop("labels"), inputs.pop("shift_labels", None)
    items = inputs.pop("num_items_in_batch", None)
    use_cache = inputs.pop("use_cache", None)
    for name in ("return_dict", *MORE_OUTPUTS, *OTHER_LOSS):
        inputs.pop(name, None)
    if inputs.get("position_ids") is not None and inputs.get("attention_mask") is None:
        # Transformers takes positions that restart for documents, but not if it fills a cache.
        inputs["use_cache"] = use_cache
    if aligned is None:  # Transformers' labels, moved to the position that predicts them; (B, T)
        aligned = F.pad(labels[..., 1:], (0, 1), value=IGNORED)
    with context():
        mean = loss.mean(aligned, items, **inputs)
    return CausalLMOutputWithPast(loss=mean)


def optimizer_of(setup: Setup, model: nn.Module, usual: Optimizer) -> Optimizer:
    """OPTIMIZER: the technique's with the usual one's settings; without a technique, the usual.

    An optimizer that the technique doesn't recognise is kept, and a warning names it. A Lightning
    module or a schedule may still hold the usual one, so both share their parameter groups.
    """
    handed = setup.job.optimizer
    if Slot.OPTIMIZER not in setup.plan or not isinstance(handed, HostOptimizer):
        return usual
    technique = next(t for t in setup.plan if t.slot is Slot.OPTIMIZER)
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    reason = optimizer_reason(technique, usual, [p for _, p in named])
    if not reason:
        handed.optimizer = usual
        assert setup.optimizer is not None  # prepare() put the job's there
        try:
            optimizer = setup.optimizer(named)
            # Schedules with a least rate read the peak there.
            shared = usual.defaults.keys() & optimizer.defaults.keys()
            optimizer.defaults.update({key: usual.defaults[key] for key in shared})
            follow = functools.partial(_share, usual)
            follow(optimizer)
            optimizer.register_load_state_dict_post_hook(follow)  # which makes new groups
            return optimizer
        except (InputError, ValueError, RuntimeError) as error:
            reason = str(error)
    _LOG.warning("speed_up: %s is left out: %s", technique.name(), reason)
    return usual


def _share(former: Optimizer, optimizer: Optimizer) -> None:
    """Whoever reads or changes rates, groups or moments of the former one has the other's."""
    former.param_groups, former.state = optimizer.param_groups, optimizer.state


PLAIN_ADAMW = {"amsgrad": False, "maximize": False, "capturable": False, "differentiable": False}


def optimizer_reason(
    technique: Technique, usual: Optimizer | None, parameters: Iterable[nn.Parameter]
) -> str:
    """Why an optimizer technique must not take the place of ``usual``; empty if it may.

    Techniques read the settings of torch's own AdamW, not of a class that is derived from it.
    """
    if usual is not None and type(usual) is not AdamW:
        return f"the optimizer is {type(usual).__name__}, and the technique reads torch's AdamW"
    if usual is not None:
        groups = usual.param_groups
        other = [k for k, v in PLAIN_ADAMW.items() if any(g.get(k, v) != v for g in groups)]
        if other:
            return f"the AdamW has {' and '.join(other)} set, which the technique doesn't have"
        if any("initial_lr" in g for g in groups):
            return "a schedule was built on the AdamW; build it on the optimizer that replaces it"
        if usual._optimizer_step_pre_hooks or usual._optimizer_step_post_hooks:
            return "the AdamW has hooks around its step, which the technique would not call"
    kinds = {p.dtype for p in parameters if p.requires_grad} - {torch.float32}
    if kinds and isinstance(technique, FusedAdamW):
        names = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        return f"the weights are {names}, and it updates float32 weights"
    return ""


def attach_communication(setup: Setup, module: nn.Module) -> None:
    """COMMUNICATION: hook into the replicas; with one process nothing travels.

    Raises:
        InputError: several ranks that are not DDP's.
        ValueError: the communication method has had its training.
    """
    if Slot.COMMUNICATION not in setup.plan or setup.context.world.size == 1:
        return
    if not isinstance(module, DistributedDataParallel):
        raise InputError(
            f"gradients of {setup.context.world.size} ranks go over a communication method of "
            f"DDP's, and this loop runs a {type(module).__name__}; start it with DDP, or leave the "
            "communication method out"
        )
    setup.communication.attach(module)


def _job(model: nn.Module, run: HostRun, rows: SizedRows | None, context: JobContext) -> Job:
    stop = Stop(steps=run.steps, epochs=run.epochs if not run.steps else None)
    return Job(
        model=model,
        loss=WholeLogitsLoss,
        optimizer=HostOptimizer(),
        stop=stop,
        collate=with_language_counts(padded),
        examples=rows or (),
        lengths=rows.lengths if rows else (),
        stream=None if rows else lambda epoch: iter(()),
        batch=GlobalBatch(examples=run.batch),
        seed=run.seed,
        device=context.device,
    )


def _model_facts(model: nn.Module) -> ModelFacts:
    config = _config(model)
    with without_fused_head(model):
        head_reason = plain_head_reason(model) or ""
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
        attention=usual_of(config) if hasattr(config, "_attn_implementation") else "",
        head_reason=head_reason,
        merged_weights=merged_weights(model),
    )


def _config(model: nn.Module) -> Any:
    """Returns a Hugging Face model's config; of other modules one that names their class."""
    try:
        return causal_lm(model).config
    except ValueError:
        return SimpleNamespace(model_type=type(model).__name__)
