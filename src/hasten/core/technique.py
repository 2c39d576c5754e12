"""Techniques: each is a frozen dataclass, and its fields are its settings.

The instance is its own configuration. It prints, hashes, compares, and converts to JSON
and back. Its settings are swept with ``dataclasses.replace``. In ``apply`` it edits a
:class:`~hasten.core.setup.Setup`; it never has access to the training step. The
algorithm itself is in ``hasten.parts``.
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
    from hasten.machine.gain import Gain

# Settings that may change between two steps of a run.
#
# A technique offers only safe settings. Every value gives the same mathematics, with another
# rounding at most. No value can end the run.


def at_once() -> int:
    """Returns 0, the default delay: the next step has the new value."""
    return 0


@dataclass(frozen=True)
class LiveSetting:
    """One setting of a running session.

    Args:
        name: ``technique.setting``, as a recipe has it.
        values: permitted values, ordered so that neighbours are similar.
        now: returns the present value.
        set: sets another one of the values; called between two steps.
        delay: returns the number of further steps with the old value after ``set``.
    """

    name: str
    values: tuple[Any, ...]
    now: Callable[[], Any]
    set: Callable[[Any], None]
    delay: Callable[[], int] = at_once


# Techniques


class Fidelity(Enum):
    """How far a technique may change the mathematics, which decides the check that it requires."""

    EXACT = "same bits: identical losses"
    ROUNDING = "same mathematics, other rounding: one-step gradients agree within a tolerance"
    LOSSY = "other mathematics: eval loss not worse than a margin fixed before the run"


@dataclass(frozen=True)
class Claim:
    """A published claim about a technique; the report prints the measurement next to it.

    ``ratio`` is with / without, so 1.15 on ``tokens_per_second`` means 15 % more.
    """

    metric: str
    ratio: float
    source: str


@dataclass(frozen=True)
class Forecast:
    """Expected change of a step's counts. A cost model turns counts into time.

    Factors are with / without. ``resident_bytes`` is a difference in bytes on one device;
    ``passing_bytes`` are added within a step.
    """

    positions: float = 1.0
    flops: float = 1.0
    bytes: float = 1.0
    comm_bytes: float = 1.0
    resident_bytes: float = 0.0
    passing_bytes: float = 0.0


@dataclass(frozen=True)
class EffectCheck:
    """The measured effect of a technique in a running session: one line with its figures."""

    effective: bool
    evidence: str


@dataclass(frozen=True)
class Knob:
    """The values that a tuner may try for one setting: a list, or a range."""

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
    only: Sequence[Any] = (),
    least: float | None = None,
) -> Any:
    """Declares a setting that a tuner may change, with its documentation.

    Args:
        choices: values that a tuner tries; default: all permitted ones, of a bool both.
        only: permitted values; empty: any.
        least: the smallest permitted number.
    """
    both = (True, False) if isinstance(default, bool) else ()
    values = Knob(tuple(choices or only or both), low, high, log)
    metadata = {"doc": doc, "knob": values, "only": tuple(only), "least": least}
    return field(default=default, metadata=metadata)


def setting(
    default: Any,
    doc: str,
    *,
    may_change: bool = False,
    only: Sequence[Any] = (),
    least: float | None = None,
) -> Any:
    """Declares a setting that only the user changes (a path, a seed, a target list).

    ``may_change``: a run that resumes from a checkpoint may have another value. ``only`` and
    ``least`` are as in :func:`knob`.
    """
    metadata = {"doc": doc, "may_change": may_change, "only": tuple(only), "least": least}
    return field(default=default, metadata=metadata)


class Technique(ABC):
    """One technique of the catalogue: a final frozen dataclass; abstract bases may share code.

    ``setup`` is a :class:`~hasten.core.setup.Setup` and ``session`` a
    :class:`~hasten.core.setup.Session`. Both hold a plan of techniques, so this file can't import
    them; techniques annotate them.
    """

    slot: ClassVar[Slot]
    # For `plan: auto`. "usual": in the initial plan if it is supported. "try": only if a
    # measurement shows a gain. "no": never, since it serves another purpose than speed.
    auto: ClassVar[Literal["no", "usual", "try"]] = "no"

    def __post_init__(self) -> None:
        """Checks each setting by its declaration; subclasses add checks over several settings.

        Raises:
            ValueError: a setting has a value that isn't permitted.
        """
        for declared in self._fields():
            name, chosen = declared.name, getattr(self, declared.name)
            only, least = declared.metadata.get("only"), declared.metadata.get("least")
            if only and chosen not in only:
                raise ValueError(f"{name} is {chosen!r}; it is one of {', '.join(map(str, only))}")
            if None not in (least, chosen) and chosen < least:
                raise ValueError(f"{name} is {chosen}; it must be at least {least}")

    @property
    @abstractmethod
    def fidelity(self) -> Fidelity:
        """Returns the fidelity, which decides the check that this instance requires."""

    @property
    def claims(self) -> tuple[Claim, ...]:
        """Returns the published claims about this technique, with their source."""
        return ()

    @abstractmethod
    def apply(self, setup: Any) -> None:
        """Sets the field of its slot in the setup; nothing runs yet."""

    def environment(self, context: JobContext) -> Mapping[str, str]:
        """Returns variables that must be set by the code that starts the process."""
        return {}

    def unsupported_reasons(self, context: JobContext) -> tuple[str, ...]:
        """Returns reasons why it can't work on this job, a sentence each; empty if supported."""
        return ()

    def forecast(self, context: JobContext) -> Forecast:
        """Returns the expected change of a step's counts on this job."""
        return Forecast()

    def gain(self, context: JobContext) -> Gain | None:
        """Returns its kernels' measured speed-up here, or None; the first call may take seconds."""
        return None

    @abstractmethod
    def check_effect(self, session: Any) -> EffectCheck:
        """Returns the effect of this technique in this session, after at least one step."""

    def live_settings(self, session: Any) -> tuple[LiveSetting, ...]:
        """Returns the settings that may change between two steps of this running session."""
        return ()

    @classmethod
    def name(cls) -> str:
        """The class name as recipes write it: ``LabelledTokenLoss`` is ``labelled_token_loss``.

        A word begins with a capital before a small letter, so that ``LoRA`` is ``lora``.
        """
        return re.sub(r"(?<=[A-Za-z0-9])(?=[A-Z][a-z])", "_", cls.__name__).lower()

    @classmethod
    def knobs(cls) -> dict[str, Knob]:
        """Returns the settings that a tuner may change, by field name."""
        return {f.name: f.metadata["knob"] for f in cls._fields() if "knob" in f.metadata}

    @classmethod
    def may_change(cls) -> list[str]:
        """Returns the settings that may differ when a run resumes from a checkpoint."""
        return [f.name for f in cls._fields() if f.metadata.get("may_change")]

    @classmethod
    def _fields(cls) -> tuple[dataclasses.Field[Any], ...]:
        return dataclasses.fields(cls)  # type: ignore[arg-type]  # every subclass is a dataclass

    def settings(self) -> dict[str, Any]:
        """Returns the settings as JSON values; a nested technique becomes its own dictionary."""
        return {f.name: _plain(getattr(self, f.name)) for f in self._fields()}

    def to_dict(self) -> dict[str, Any]:
        """Returns ``{"technique": name, **settings}``, the form that plans store."""
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
