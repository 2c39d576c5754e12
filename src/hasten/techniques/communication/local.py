"""COMMUNICATION: ranks train separately and send weights instead of gradients."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from torch import Tensor, nn

from hasten.core.context import JobContext
from hasten.core.job import WorkCounts
from hasten.core.layout import CommTiming, Communication
from hasten.core.setup import Session, Setup
from hasten.core.slot import Slot
from hasten.core.technique import EffectCheck, Fidelity, Forecast, Technique, knob, setting
from hasten.core.timing import OPTIMIZER
from hasten.errors import InputError
from hasten.parts.comm import local_sgd, streaming_local_sgd
from hasten.parts.comm.codecs import codec
from hasten.parts.comm.local_sgd import Buffers, LocalTraining, same_start
from hasten.techniques.layout.ranks import StepCounts, no_torch_distributed, of_the_same_plan

AUTO = "auto"
ON_LINK = "number format of the differences that travel"
DDP_BYTES = 8.0  # bytes of gradients that a ring of many ranks sends per weight: 2 x float32
Parameters = Sequence[Tensor]
Build = Callable[[Parameters], LocalTraining]


class TrainsApart(Technique):
    """A technique under which ranks train alone and exchange weights."""

    slot = Slot.COMMUNICATION
    fidelity = Fidelity.LOSSY

    def unsupported_reasons(self, context: JobContext) -> tuple[str, ...]:
        return no_torch_distributed(context)

    def check_effect(self, session: Session) -> EffectCheck:
        communication = session.setup.communication
        part = (
            communication.part
            if isinstance(communication, LocalCommunication) and communication.kind == self.name()
            else None
        )
        if part is None:
            return EffectCheck(False, "ranks did not train apart")
        pieces, kind = len(part.drift.edges), "float32" if part.codec is None else part.codec.name
        return EffectCheck(
            part.exchanges > 0,
            f"{part.exchanges} exchanges among {part.drift.size} ranks, {part.message_bytes:,} "
            f"bytes each, {pieces} fragment(s) in {kind}; waited {part.waited_seconds:.2f} s for "
            "them",
        )


@dataclass(frozen=True)
class LocalSteps(TrainsApart):
    """Ranks train alone for some steps, then average their weights (local SGD, DiLoCo)."""

    every: int = knob(20, "steps between two averages", low=1, high=500, log=True)
    outer: str = knob("mean", "mean, or nesterov (DiLoCo) for long runs", choices=local_sgd.OUTER)
    codec: str = knob("int4", ON_LINK, choices=("none", "bf16", "int8", "int4", "sign"))
    timeout_seconds: int = setting(600, "how long a rank waits for the others", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        local_sgd.check(self.every, self.outer)
        codec(self.codec)  # raises ValueError for unknown keys

    def apply(self, setup: Setup) -> None:
        limit = datetime.timedelta(seconds=self.timeout_seconds)

        def build(parameters: Parameters) -> local_sgd.LocalSteps:
            return local_sgd.LocalSteps(
                parameters, self.every, self.outer, codec(self.codec), timeout=limit
            )

        enable_local_steps(setup, self, build)

    def forecast(self, context: JobContext) -> Forecast:
        copies = 2 if self.outer == "nesterov" else 1
        return _forecast(context, self.codec, self.every, copies)


@dataclass(frozen=True)
class Stream(TrainsApart):
    """Ranks train alone; each step sends and averages a fragment of their weights."""

    fragments: str | int = knob(
        AUTO, "fragments of the weights; auto: by the measured link", choices=(AUTO, 2)
    )
    codec: str = knob(
        AUTO,
        f"{ON_LINK}; auto: int4, signs on a slow link",
        choices=(AUTO, "bf16", "int8", "int4", "sign"),
    )
    timeout_seconds: int = setting(600, "how long a rank waits for the others", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.fragments, str) and self.fragments != AUTO:
            raise ValueError(f"fragments is {self.fragments!r}; it is auto or a number")
        streaming_local_sgd.check(self._count)
        if self.codec != AUTO:
            codec(self.codec)  # raises ValueError for unknown keys

    @property
    def _count(self) -> int | None:
        return None if isinstance(self.fragments, str) else self.fragments

    def apply(self, setup: Setup) -> None:
        limit = datetime.timedelta(seconds=self.timeout_seconds)

        def build(parameters: Parameters) -> streaming_local_sgd.Stream:
            chosen = None if self.codec == AUTO else codec(self.codec)
            return streaming_local_sgd.Stream(parameters, chosen, self._count, timeout=limit)

        enable_local_steps(setup, self, build)

    def forecast(self, context: JobContext) -> Forecast:
        name = streaming_local_sgd.USUAL if self.codec == AUTO else self.codec
        return _forecast(context, name, self._count or 2, copies=1)


class LocalCommunication(Communication):
    """A run's communication and rank sync: each step uses only this rank's values."""

    diverged = True

    def __init__(self, setup: Setup, kind: str, build: Build) -> None:
        self.setup, self.kind, self._build = setup, kind, build
        self.part: LocalTraining | None = None
        self._module = nn.Module()
        self._buffers: Buffers | None = None
        self._counts: StepCounts | None = None
        self._units, self._stop = 0, False

    def attach(self, module: nn.Module) -> None:
        self._module = module
        same_start(module)

    def after_update(self, parameters: Parameters) -> None:
        self._done(self._units)

    def skipped(self) -> None:
        self._done(0)

    def counts(
        self, local_counts: WorkCounts, stop: bool, passes: int
    ) -> tuple[WorkCounts, bool, int]:
        """Returns this rank's counts times the ranks; True if an exchange had a stop request."""
        part = self._running()
        self._units, self._stop = local_counts.units, stop
        size = self.setup.layout.size
        return WorkCounts(*(size * value for value in astuple(local_counts))), part.stop, passes

    def sum(self, values: Tensor) -> Tensor:
        return values * self.setup.layout.size

    def synchronize(self) -> None:
        if self.part is None or self._buffers is None:
            return  # no step was started, so all ranks are equal
        if self.part.synchronize():
            self.setup.precision.update_model_weights()
            self._buffers.average()
        if self._counts is not None:
            self._counts.take()  # this wait belongs to no step

    def traffic(self) -> CommTiming | None:
        """Returns the timing of the step's exchange; None before the first."""
        if self._counts is None:
            return None
        waited, hidden, sent = self._counts.take()
        return CommTiming(waited, hidden, sent, OPTIMIZER)

    def state_dict(self) -> dict[str, Any]:
        return {"technique": self.kind, "part": self._running().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with of_the_same_plan(state, self.kind):
            self._running().load_state_dict(state["part"])

    def _running(self) -> LocalTraining:
        """Returns the part, built at the first step on all ranks, after weights were restored."""
        if self.part is None:
            self.part = self._build(self.setup.precision.parameters())
            self._buffers = Buffers(self._module, self.part.drift)
            part = self.part
            self._counts = StepCounts(
                lambda: [part.waited_seconds, part.hidden_seconds, part.sent_bytes]
            )
        return self.part

    def _done(self, tokens: int) -> None:
        if self._running().after_step(tokens, self._stop):
            self.setup.precision.update_model_weights()


def enable_local_steps(setup: Setup, technique: Technique, build: Build) -> None:
    """Makes a part the communication method of a run on several ranks; no effect on one rank.

    Raises:
        InputError: the plan or the job needs values that ranks training apart don't have.
    """
    if setup.context.world.size == 1:
        return
    name = technique.name()
    if setup.job.stop.tokens is not None:
        raise InputError(
            f"plan: {name} can't stop after a number of tokens, since ranks that train apart don't "
            "add up their tokens; give max_steps or epochs instead of max_tokens"
        )
    if Slot.AVERAGE in setup.plan:
        raise InputError(
            f"plan: {name} and a running average of the weights don't go together, since each rank "
            "would average weights of its own; leave weight_average out"
        )
    setup.communication = LocalCommunication(setup, name, build)


def _forecast(context: JobContext, name: str, rarer: int, copies: int) -> Forecast:
    """Each rank's message goes to all others, once in ``rarer`` steps; DDP's ring sends float32."""
    numbers = max(context.model.parameters, 1)
    per_weight = codec(name).message_bytes(numbers) / numbers
    volume = per_weight * context.world.size / DDP_BYTES if name != "none" else 1.0
    share = volume / rarer
    return Forecast(comm_bytes=share, resident_bytes=4.0 * copies * context.model.parameters)
