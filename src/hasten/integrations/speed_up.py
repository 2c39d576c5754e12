"""One line in a user's script: adds the techniques that the trainer supports.

trainer = hasten.speed_up(Trainer(model, arguments, train_dataset=rows))
trainer.train()

No trials run. The techniques come from a stored comparison of ``plan: auto`` with the
same model and data on this machine. If there is none, two things decide: the reasons
why a technique can't work, and the gain of its kernels here.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch import nn

from hasten.core.context import JobContext
from hasten.core.health import BusyMachine
from hasten.core.plan import Plan
from hasten.core.slot import Slot
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.integrations.adapt import TrainerAdapter, context_of, prepare_recognised
from hasten.integrations.batches import SizedRows
from hasten.integrations.checkpoints import StepLog, TokenCount
from hasten.machine import versions
from hasten.parts.nn.compressed_attention import ARCHITECTURE
from hasten.techniques import CATALOGUE
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.collate import Packed

if TYPE_CHECKING:
    from hasten.measure.choice import KeptChoice

AnyTrainer = TypeVar("AnyTrainer")
ALIKE = 0.1  # examples are of the same data if number and tokens differ by this share at most
WATCHED_STEPS, WARM_UP = 20, 10
REPLACED_FIT = "hasten_replaced_fit"  # the attribute of a Lightning trainer's changed ``fit``
_LOG = logging.getLogger(__name__)


def speed_up(trainer: AnyTrainer, plan: Iterable[Any] | None = None) -> AnyTrainer:
    """Returns the same trainer with the techniques that it supports.

    Call it before the trainer trains. Without a plan these are the techniques that
    ``plan: auto`` chose for this model and data on this machine. If it never ran for them,
    they are those that usually help and keep the mathematics. They also have to work on
    this model, machine and trainer. A warning of the logger ``hasten`` names them and their
    expected effect, with one line for each technique that is left out. Another warning
    gives the speed of the first 20 steps. In Lightning the techniques are added when
    ``fit`` is called.

    They hold for training passes alone. On the first step their losses and gradients are
    compared with the trainer's own (``HASTEN_PROOF=off`` skips that). A technique that
    differs is removed. Another call replaces the techniques of the first call.

    Args:
        trainer: of transformers, TRL or Lightning.
        plan: the user's techniques: objects, names, or ``{name: settings}``.

    Raises:
        InputError: a trainer of another kind, or a technique of the plan can't work here.
    """
    techniques = None if plan is None else list(_techniques(plan))
    kinds = [kind for kind in type(trainer).__mro__ if kind.__name__ == "Trainer"]
    if any(kind.__module__.partition(".")[0].endswith("lightning") for kind in kinds):
        _at_fit(trainer, techniques)
        return trainer
    from transformers import Trainer

    if not isinstance(trainer, Trainer):
        raise InputError(
            f"speed_up: {type(trainer).__name__} is no trainer of transformers, TRL or Lightning; "
            "hasten.integrations.loop has techniques for a loop of your own"
        )
    from hasten.integrations import transformers as host

    for callback in host.HostTrainer(trainer).evidence():
        if isinstance(callback.lines, SpeedNote):  # set by an earlier call
            trainer.remove_callback(callback)
    adapter = host.HostTrainer(trainer)
    chosen = _chosen(adapter) if techniques is None else techniques
    changed = host.with_techniques(trainer, chosen)
    changed.add_callback(host.StepEvidence(_note(adapter)))
    return changed


def _note(host: TrainerAdapter) -> SpeedNote:
    return SpeedNote(context_of(host.model(), host.run().device))


def _techniques(plan: Iterable[Any]) -> Iterable[Technique]:
    for entry in plan:
        if isinstance(entry, Technique):
            yield entry
        else:
            yield from Plan.from_list([entry], CATALOGUE)


def _chosen(host: TrainerAdapter) -> list[Technique]:
    """The techniques that a trainer supports together; a warning lists them and the others."""
    context = context_of(host.model(), host.run().device)
    # Otherwise ranks can't agree on techniques.
    agreeing = context.world.size == 1 or dist.is_initialized()
    kept_choice = _stored_choice(context, host.examples()) if agreeing else None
    chosen: list[Technique] = []
    left_out: list[str] = []
    for technique in _wanted(kept_choice):
        if _is_needless(technique, chosen, context, host):
            continue
        try:
            _refuse_mixed_documents(technique, context, host)
            prepare_recognised(host, [*chosen, technique])
        except InputError as error:
            left_out.append(str(error))
            continue
        gain = technique.gain(context) if agreeing else None
        if kept_choice is None and gain is not None and gain.lost:
            left_out.append(f"{technique.name()}: measured on this machine: {gain} the speed")
        else:
            chosen.append(technique)
    if context.world.size > 1 and agreeing:
        entries = [[technique.to_dict() for technique in chosen]]
        dist.broadcast_object_list(entries, src=0)
        chosen = list(Plan.from_list(entries[0], CATALOGUE))
    if context.world.is_main:
        outside = versions.untested()
        if outside is not None:
            _LOG.warning("speed_up: %s", outside)
        names = ", ".join(t.name() for t in chosen) or "no technique"
        promise = ""
        if kept_choice is not None:
            promise = f", as plan: auto chose for this model and data on {kept_choice.date}"
            stored_gain = (kept_choice.choice.gain or {}).get("median")
            if stored_gain and not left_out:
                promise += f": about {stored_gain:.2f} times its speed"
        lines = "".join(f"\n  left out: {reason}" for reason in left_out)
        _LOG.warning("speed_up: %s joined%s%s", names, promise, lines)
    return chosen


def _wanted(kept_choice: KeptChoice | None) -> Plan:
    """The techniques in question: those of the stored choice, or the usual ones."""
    if kept_choice is None:
        return Plan(kind() for kind in CATALOGUE if kind.auto == "usual")
    stored = Plan.from_list(kept_choice.choice.entries, CATALOGUE)
    return Plan(technique for technique in stored if technique.auto != "no")


def _is_needless(
    technique: Technique, chosen: Sequence[Technique], context: JobContext, host: TrainerAdapter
) -> bool:
    """True if there is nothing to gain: rows of one document, no experts, or it's done already."""
    if isinstance(technique, DocumentAttention):
        return not (any(isinstance(t, Packed) for t in chosen) or host.has_already(Packed()))
    no_experts = technique.slot is Slot.EXPERTS and not context.model.experts
    return no_experts or host.has_already(technique)


def _refuse_mixed_documents(
    technique: Technique, context: JobContext, host: TrainerAdapter
) -> None:
    """Raises InputError if the trainer packs rows of documents for a model that mixes them."""
    if (
        isinstance(technique, DocumentAttention)
        and context.model.architecture == ARCHITECTURE
        and host.has_already(Packed())
    ):
        raise InputError(
            "document_attention: this trainer packs rows, and transformers' deepseek_v4 mixes "
            "documents of a row; give it padded rows, which packed lays out with documents apart"
        )


def _stored_choice(context: JobContext, rows: Any) -> KeptChoice | None:
    """The stored choice for this machine, model and data; None without one."""
    from hasten.measure.choice import kept_choices

    choices = kept_choices(context)
    if not choices or not hasattr(rows, "__len__"):
        return None
    try:
        sized = SizedRows(rows)
    except InputError:  # rows of text, which the trainer tokenises
        return None
    size = (len(sized), sum(sized.lengths))
    return next((c for c in choices if _alike((c.examples.count, c.examples.tokens), size)), None)


def _alike(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Returns True for sizes of the same data, but for an eval part or a template."""
    pairs = zip(one, other, strict=True)
    return all(a and b and abs(math.log(a / b)) <= math.log(1 + ALIKE) for a, b in pairs)


class SpeedNote(StepLog):
    """Reports the speed of a host's first steps; the second runs without techniques.

    The first step is slower than others: it also starts threads and fills caches.
    """

    steps_to_compare = WATCHED_STEPS

    def __init__(self, context: JobContext) -> None:
        super().__init__(context.device)
        self._is_alone = context.world.size == 1
        self._speeds: list[float | None] = []  # speed of each step in tokens a second
        self._is_checked = False
        self._machine = BusyMachine(_LOG.warning) if self._is_alone else None

    def exclude(self, seconds: float) -> None:
        super().exclude(seconds)
        self._is_checked = True  # so the first two steps run without techniques

    def step(self, step: int, count: TokenCount, loss: float | None = None) -> None:
        """Records a step; at the last of the measured steps, reports the speed."""
        if self._machine is not None:
            self._machine.look()
        if len(self._speeds) >= WATCHED_STEPS:
            return
        seconds, tokens, _ = self.take(count)
        self._speeds.append(None if tokens is None else tokens / seconds)
        watched = [speed for speed in self._speeds[WARM_UP:] if speed is not None]
        if len(self._speeds) < WATCHED_STEPS or not watched:
            return
        where = "" if self._is_alone else " on this rank"
        text = f"at {statistics.median(watched):,.0f} tokens/s{where}"
        if self._is_checked and self._speeds[1] is not None:
            text += f"; step 2, without hasten, at {self._speeds[1]:,.0f} tokens/s"
        _LOG.warning("speed_up: steps %d to %d ran %s", WARM_UP + 1, WATCHED_STEPS, text)

    def close(self) -> None:
        """The training has ended: idle threads wait as before it."""
        if self._machine is not None:
            self._machine.idle_threads.sleep_sooner = False


def _at_fit(trainer: Any, techniques: list[Technique] | None) -> None:
    """Adds the techniques in ``fit``, where Lightning's trainer receives model and loader."""
    usual = getattr(trainer.fit, REPLACED_FIT, trainer.fit)  # not that of an earlier call

    def fit(model: nn.Module, train_dataloaders: Any = None, *args: Any, **more: Any) -> Any:
        from torch.utils.data import DataLoader

        from hasten.integrations import lightning as host

        trainer.fit = usual  # a second fit uses the module as it is
        loader: Any = train_dataloaders
        try:
            if not isinstance(loader, DataLoader):
                raise InputError(
                    "give fit the module and a torch DataLoader; other sources of batches "
                    "aren't changed"
                )
            adapter = host.HostModule(trainer, model, loader)
            chosen = _chosen(adapter) if techniques is None else techniques
        except InputError as error:
            if techniques is not None:
                raise InputError(f"speed_up: {error}") from error
            _LOG.info("speed_up: nothing joined: %s", error)
            return usual(model, train_dataloaders, *args, **more)
        trainer.callbacks.append(host.step_evidence(_note(adapter)))
        module, loader = host.with_techniques(trainer, model, loader, chosen)
        return usual(module, loader, *args, **more)

    setattr(fit, REPLACED_FIT, usual)
    trainer.fit = fit  # this instance alone
