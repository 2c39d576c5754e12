"""A technique is one switch: a frozen dataclass whose fields are its settings.

The instance is its own configuration. It prints, hashes, compares, round-trips through JSON, and is
swept with ``dataclasses.replace``. It edits a :class:`~hasten.core.setup.Setup` in ``apply`` and
never sees the training step; the algorithm itself lives in ``hasten.parts``.
"""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hasten.core.slot import Slot

if TYPE_CHECKING:
    from hasten.core.context import JobContext
    from hasten.core.session import Session
    from hasten.core.setup import Setup
    from hasten.machine.gain import Gain

# Settings that may change while a run goes on, between two steps, and who changes them.
#
# What is offered has to be safe: the same mathematics with every value (other rounding at most),
# and no value that could end the run. Whoever offers a switch answers for both.


def at_once() -> int:
    """The default delay: the next step has the new value."""
    return 0


@dataclass(frozen=True)
class LiveSetting:
    """One setting of a running session.

    Args:
        name: ``technique.setting``, as a recipe has it.
        values: what it may be, in an order in which neighbours are alike.
        now: the value that it has.
        set: gives it another one of the values; called between two steps.
        delay: steps that are under way with the old value when a new one is set.
    """

    name: str
    values: tuple[Any, ...]
    now: Callable[[], Any]
    set: Callable[[Any], None]
    delay: Callable[[], int] = at_once


# The technique.


class Fidelity(Enum):
    """How far a technique may move the mathematics, and so which proof it owes."""

    EXACT = "same bits: identical losses"
    ROUNDING = "same mathematics, other rounding: one-step gradients agree within a tolerance"
    LOSSY = "other mathematics: eval loss not worse than a margin fixed before the run"


@dataclass(frozen=True)
class Claim:
    """What somebody promised of a technique; the report sets the measurement beside it.

    ``ratio`` is with / without, so 1.15 on ``tokens_per_second`` means 15 % more.
    """

    metric: str
    ratio: float
    source: str


@dataclass(frozen=True)
class Forecast:
    """Expected change of the ledger's terms, never of speed: a cost model turns terms into time.

    Factors are with / without; ``resident_bytes`` is a difference in bytes on one device.
    """

    positions: float = 1.0
    flops: float = 1.0
    bytes: float = 1.0
    comm_bytes: float = 1.0
    resident_bytes: float = 0.0


@dataclass(frozen=True)
class EffectCheck:
    """What a technique was seen to do in a running session, in one line with its figures."""

    effective: bool
    evidence: str


@dataclass(frozen=True)
class Knob:
    """The values a tuner may try for one setting: a list, or a range."""

    choices: tuple[Any, ...] = ()
    low: float | None = None
    high: float | None = None
    log: bool = False


def knob(
    default: Any,
    doc: str,
    *,
    choices: Sequence[Any] = (),
    low: float | None = None,
    high: float | None = None,
    log: bool = False,
) -> Any:
    """Declare a setting that a tuner may change, documented where it stands."""
    metadata = {"doc": doc, "knob": Knob(tuple(choices), low, high, log)}
    return field(default=default, metadata=metadata)


def setting(default: Any, doc: str, *, may_change: bool = False) -> Any:
    """Declare a setting that only the user changes (a path, a seed, a target list).

    ``may_change``: a run that goes on from a checkpoint may have another value.
    """
    return field(default=default, metadata={"doc": doc, "may_change": may_change})


class Technique(ABC):
    """One switch of the catalogue: a final frozen dataclass; a base may share what it does."""

    slot: ClassVar[Slot]
    # What `plan: auto` does with it: "usual" is in its first plan wherever nothing is in the way,
    # "try" only where it was measured to help; "no" serves something else than speed.
    auto: ClassVar[Literal["no", "usual", "try"]] = "no"

    @property
    @abstractmethod
    def fidelity(self) -> Fidelity:
        """The proof this instance owes before a gain counts."""

    @property
    def claims(self) -> tuple[Claim, ...]:
        """What was promised of it, with the source."""
        return ()

    @abstractmethod
    def apply(self, setup: Setup) -> None:
        """Put yourself into your slot; nothing runs yet."""

    def environment(self, context: JobContext) -> Mapping[str, str]:
        """Variables to set before the process starts."""
        return {}

    def unsupported_reasons(self, context: JobContext) -> tuple[str, ...]:
        """Why this can't work on this job, one sentence each; empty when nothing is in the way."""
        return ()

    def forecast(self, context: JobContext) -> Forecast:
        """The expected change of the ledger's terms on this job."""
        return Forecast()

    def gain(self, context: JobContext) -> Gain | None:
        """How many times as fast its kernels are on this machine, where that was measured.

        The first question for it may take some seconds. None: it isn't measured.
        """
        return None

    @abstractmethod
    def check_effect(self, session: Session) -> EffectCheck:
        """What you did in this session, after at least one step."""

    def live_settings(self, session: Session) -> tuple[LiveSetting, ...]:
        """What of you may change between two steps of this session, which has done some."""
        return ()

    @classmethod
    def name(cls) -> str:
        """The class name as recipes write it: ``LabelledTokenLoss`` is ``labelled_token_loss``.

        A word begins with a capital before a small letter, so that ``LoRA`` is ``lora``.
        """
        return re.sub(r"(?<=[A-Za-z0-9])(?=[A-Z][a-z])", "_", cls.__name__).lower()

    @classmethod
    def knobs(cls) -> dict[str, Knob]:
        """The settings a tuner may change, by field name."""
        return {f.name: f.metadata["knob"] for f in cls._fields() if "knob" in f.metadata}

    @classmethod
    def may_change(cls) -> list[str]:
        """The settings that may be others when a run goes on from a checkpoint."""
        return [f.name for f in cls._fields() if f.metadata.get("may_change")]

    @classmethod
    def _fields(cls) -> tuple[dataclasses.Field[Any], ...]:
        return dataclasses.fields(cls)  # type: ignore[arg-type]  # every subclass is a dataclass

    def settings(self) -> dict[str, Any]:
        """The settings as plain JSON values; a nested technique becomes its own dictionary."""
        return {f.name: _plain(getattr(self, f.name)) for f in self._fields()}

    def to_dict(self) -> dict[str, Any]:
        """``{"technique": name, **settings}``, the form that plans store."""
        return {"technique": self.name(), **self.settings()}

    def __str__(self) -> str:
        changed = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in self._fields()
            if getattr(self, f.name) != f.default
        ]
        return f"{self.name()}({', '.join(changed)})" if changed else self.name()


def _plain(value: Any) -> Any:
    if isinstance(value, Technique):
        return value.to_dict()
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value
