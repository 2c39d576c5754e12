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
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from hasten.core.context import ExampleStats, JobContext
from hasten.core.health import BusyMachine
from hasten.core.plan import Plan
from hasten.core.slot import Slot
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.integrations.adapt import TrainerAdapter, context_of, prepare_recognised
from hasten.integrations.batches import row_sizes
from hasten.integrations.checkpoints import StepLog, TokenCount
from hasten.machine import versions
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
        if isinstance(callback.lines, SpeedNote):  # of an earlier call
            trainer.remove_callback(callback)
    chosen, note = _plan(host.HostTrainer(trainer), techniques)
    changed = host.with_techniques(trainer, chosen)
    changed.add_callback(host.StepEvidence(note))
    return changed


def _techniques(plan: Iterable[Any]) -> Iterable[Technique]:
    for entry in plan:
        if isinstance(entry, Technique):
            yield entry
        else:
            yield from Plan.from_list([entry], CATALOGUE)


def _plan(
    host: TrainerAdapter, techniques: list[Technique] | None
) -> tuple[list[Technique], SpeedNote]:
    """The user's techniques, or those that are chosen for this host."""
    context = context_of(host.model(), host.run().device)
    if techniques is not None:
        return techniques, SpeedNote(None, None, context)
    return _chosen(context, host)


def _chosen(context: JobContext, host: TrainerAdapter) -> tuple[list[Technique], SpeedNote]:
    """The techniques that a trainer supports together; a warning lists them and the others."""
    # Otherwise ranks can't agree on techniques.
    agreeing = context.world.size == 1 or dist.is_initialized()
    kept_choice = _stored_choice(context, host.examples()) if agreeing else None
    chosen: list[Technique] = []
    left_out: dict[Technique, str] = {}
    for technique in _wanted(kept_choice):
        if _is_needless(technique, chosen, context, host):
            continue
        try:
            prepare_recognised(host, [*chosen, technique])
        except InputError as error:
            left_out[technique] = f"{error}{_more(technique, context, kept_choice)}"
            continue
        gain = technique.gain(context) if agreeing else None
        if kept_choice is None and gain is not None and gain.lost:
            left_out[technique] = f"{technique.name()}: measured on this machine: {gain} the speed"
        else:
            chosen.append(technique)
    note = SpeedNote(kept_choice, _expected(kept_choice, left_out), context)
    if context.world.size > 1 and agreeing:
        entries = [[technique.to_dict() for technique in chosen]]
        dist.broadcast_object_list(entries, src=0)
        chosen = list(Plan.from_list(entries[0], CATALOGUE))
    if context.world.is_main:
        _report(chosen, left_out, note)
    return chosen, note


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


def _report(chosen: list[Technique], left_out: dict[Technique, str], note: SpeedNote) -> None:
    outside = versions.untested()
    if outside is not None:
        _LOG.warning("speed_up: %s", outside)
    names = ", ".join(t.name() for t in chosen) or "no technique"
    lines = "".join(f"\n  left out: {reason}" for reason in left_out.values())
    _LOG.warning("speed_up: %s joined%s%s", names, note.promise, lines)


def _stored_choice(context: JobContext, rows: Any) -> KeptChoice | None:
    """The stored choice for this machine, model and data; None without one."""
    from hasten.measure.choice import kept_choices

    choices = kept_choices(context)
    if not choices or not hasattr(rows, "__len__"):
        return None
    try:
        lengths, trained = row_sizes(rows)
    except InputError:  # rows of text, which the trainer tokenises
        return None
    count, tokens = len(lengths), sum(lengths)
    stats = ExampleStats(count, tokens, max(lengths, default=0), sum(trained) / max(tokens, 1))
    return next((choice for choice in choices if _alike(choice.examples, stats)), None)


def _alike(one: ExampleStats, other: ExampleStats) -> bool:
    """Returns True for examples of the same data, but for an eval part or a template."""
    pairs = ((one.count, other.count), (one.tokens, other.tokens))
    return all(a and b and abs(math.log(a / b)) <= math.log(1 + ALIKE) for a, b in pairs)


def _without(kept_choice: KeptChoice, technique: Technique) -> float | None:
    """The speed of the chosen plan without one of its techniques, over the plan's."""
    rows = {row.name: row.ratio for row in kept_choice.choice.rows}
    ratio = rows.get(f"without {technique.name()}")
    return None if ratio is None else ratio["median"]


def _expected(kept_choice: KeptChoice | None, left_out: Iterable[Technique]) -> float | None:
    """Returns the measured gain without the techniques that a trainer doesn't support."""
    if (
        kept_choice is None
        or kept_choice.choice.gain is None
        or kept_choice.choice.gain["median"] is None
    ):
        return None
    gain = kept_choice.choice.gain["median"]
    for technique in left_out:
        gain *= min(_without(kept_choice, technique) or 1.0, 1.0)
    return gain


def _more(technique: Technique, context: JobContext, kept_choice: KeptChoice | None) -> str:
    """Returns the measured gain of a technique in ``hasten train``; empty without one."""
    ratio = None if kept_choice is None else _without(kept_choice, technique)
    if kept_choice is not None and ratio is not None and ratio < 1:
        speed = f"{1 / ratio:.2f} times the speed"
        return f" (hasten train: {speed} by it, measured on {kept_choice.date})"
    if technique.unsupported_reasons(context):
        return ""
    gain = technique.gain(context)
    if gain is None or not gain.sure:
        return ""
    return f" (hasten train: its kernels have {gain} the speed, measured on this machine)"


class SpeedNote(StepLog):
    """Reports the speed of a host's first steps and of the job without techniques.

    A trainer runs once, with its techniques. So the references are its second step, which runs
    without them, and the comparison of ``plan: auto`` that chose them, in hasten's own loop. The
    first step is slower than others: it also starts threads and fills caches.
    """

    steps_to_compare = WATCHED_STEPS

    def __init__(
        self, kept_choice: KeptChoice | None, expected: float | None, context: JobContext
    ) -> None:
        self._expected, self._context = expected, context
        self._date = "" if kept_choice is None else kept_choice.date
        self._plain: float | None = None  # tokens per second without techniques
        speed = None if kept_choice is None else kept_choice.choice.tokens_per_second
        gain = None if kept_choice is None else kept_choice.choice.gain
        if speed is not None and gain is not None and gain["median"]:
            self._plain = speed / gain["median"]
        self._speeds: list[float] = []
        self._second_speed: float | None = None  # of a step without techniques
        self._is_checked = False
        self._steps, self._last = 0, time.perf_counter()
        self._machine = BusyMachine(_LOG.warning) if context.world.size == 1 else None

    @property
    def promise(self) -> str:
        """The origin of the plan and its expected gain, as text after its techniques."""
        if not self._date:
            return ""
        about = "" if self._expected is None else f": about {self._expected:.2f} times its speed"
        return f", as plan: auto chose for this model and data on {self._date}{about}"

    def begin(self) -> None:
        self._last = time.perf_counter()

    def exclude(self, seconds: float) -> None:
        self._last += seconds
        self._is_checked = True  # so the first two steps run without techniques

    def step(self, step: int, count: TokenCount, loss: float | None = None) -> None:
        """Records a step; at the last of the measured steps, reports the speed."""
        if self._machine is not None:
            self._machine.look()
        if self._steps >= WATCHED_STEPS:
            return
        if self._context.on_gpu:
            torch.accelerator.synchronize(self._context.device)  # a step's time is its own
        seconds = time.perf_counter() - self._last
        tokens, _ = count.take()
        self._steps += 1
        speed = None if tokens is None else tokens / max(seconds, 1e-9)
        if self._steps == 2 and self._is_checked:
            self._second_speed = speed
        elif speed is not None and self._steps > WARM_UP:
            self._speeds.append(speed)
        if self._steps == WATCHED_STEPS and self._speeds:
            _LOG.warning("%s", self._speed_text(statistics.median(self._speeds)))
        self.begin()

    def close(self) -> None:
        """The training has ended: idle threads wait as before it."""
        if self._machine is not None:
            self._machine.idle_threads.sleep_sooner = False

    def _speed_text(self, speed: float) -> str:
        sentence = f"speed_up: steps {WARM_UP + 1} to {WATCHED_STEPS} ran at {speed:,.0f} tokens/s"
        if self._context.world.size > 1:
            sentence += " on this rank"
        if self._second_speed is not None:
            sentence += f"; step 2, without hasten, at {self._second_speed:,.0f} tokens/s"
        if self._plain is None or self._context.world.size > 1:
            return sentence
        expected = "" if self._expected is None else f" ({self._expected:.2f} was expected)"
        return (
            f"{sentence}. That is {speed / self._plain:.2f} times{expected} the "
            f"{self._plain:,.0f} tokens/s that plan: auto measured on {self._date} without "
            "techniques, in hasten's own loop"
        )


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
            chosen, note = _plan(host.HostModule(trainer, model, loader), techniques)
        except InputError as error:
            if techniques is not None:
                raise InputError(f"speed_up: {error}") from error
            _LOG.info("speed_up: nothing joined: %s", error)
            return usual(model, train_dataloaders, *args, **more)
        trainer.callbacks.append(host.step_evidence(note))
        module, loader = host.with_techniques(trainer, model, loader, chosen)
        return usual(module, loader, *args, **more)

    setattr(fit, REPLACED_FIT, usual)
    trainer.fit = fit  # this instance alone
