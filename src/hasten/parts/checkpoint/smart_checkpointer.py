"""SmartCheckpointer: saves objects as often as useful and restores them bit for bit.

    checkpointer = SmartCheckpointer(interval="dynamic", max_checkpoints=3, compression=True)
    checkpointer.protect(model=model, optimizer=optimizer, schedule=schedule)

    model = checkpointer.restore()           # restored, or unchanged on the first start
    for step in range(checkpointer.step + 1, steps + 1):
        ...                                  # train one step

        checkpointer.after_step(step)        # saves when due; save(step) saves now
    checkpointer.close()

On several ranks every rank makes the same calls, and the first one writes.
"""

from __future__ import annotations

import math
import operator
import statistics
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from hasten.errors import InputError, require_real
from hasten.parts.checkpoint.chunks import ChunkPosition
from hasten.parts.checkpoint.commit import verify
from hasten.parts.checkpoint.format import (
    DamagedCheckpointError,
    NewerFormatError,
    read_manifest,
    step_of,
)
from hasten.parts.checkpoint.saver import Found, Saver
from hasten.parts.checkpoint.state import (
    CheckpointedState,
    of_all_ranks,
    random_state,
    set_random_state,
)

DAY = 86400.0
DYNAMIC = "dynamic"
LARGEST_SHARE = 0.01  # of the wall time that saving may block
LONGEST_BLINK = 10  # steps from one look to the next, or those of a second
FIRST_LOOK = 3  # steps after which the time of a step is known well enough


def best_interval(cost: float, between_failures: float, recovery: float) -> float:
    """Seconds from save to save (Young, CACM 17, 1974; Daly, FGCS 22, 2006); all in seconds."""
    return cost + math.sqrt(2 * (between_failures + recovery) * cost + cost * cost)


@dataclass
class SaveInterval:
    """Which steps are saved. All ranks look at the same steps; the first rank decides there.

    What saving and failing were seen to cost corrects the prior, so ``dynamic`` follows the job
    and the machine.
    """

    every: int | str = DYNAMIC  # or a number of steps
    between_failures: float = DAY  # prior mean in seconds, weighed like one failure seen
    longest_loss: float = 1800.0  # seconds of work; it goes before the cost
    recovery: float = 30.0  # seconds from a failure to the next step, until it was seen
    failures: int = 0
    earlier_seconds: float = 0.0  # seconds of running before this process
    writing: float = 0.0  # seconds from the copy to the committed checkpoint, the last time
    blocked: deque[float] = field(default_factory=lambda: deque(maxlen=5))
    next_look: int = 0
    began: float = field(default_factory=lambda: time.monotonic())
    last_save: float = field(default_factory=lambda: time.monotonic())
    _first: tuple[int, float] | None = None  # a step, and when it was done

    def __post_init__(self) -> None:
        if not (self.every == DYNAMIC or (type(self.every) is int and self.every >= 1)):
            raise ValueError(
                f"interval is {self.every!r}; give 'dynamic' or a number of steps from 1 on"
            )
        require_real(between_failures=self.between_failures, longest_loss=self.longest_loss)
        if self.between_failures <= 0 or self.longest_loss <= 0:
            raise ValueError("between_failures and longest_loss must be above 0 seconds")

    def looks(self, step: int) -> bool:
        """Returns True if a decision is due after ``step``; the same on every rank."""
        if isinstance(self.every, int):
            return step % self.every == 0
        if self._first is None:
            self._first = step, time.monotonic()
            self.next_look = step + FIRST_LOOK
        return step >= self.next_look

    def decide(self, step: int, busy: bool) -> tuple[bool, int]:
        """Returns (save now, next step for a decision). ``busy``: a save is running."""
        if isinstance(self.every, int) or self._first is None:
            return True, step + 1
        first, then = self._first
        step_seconds = max((time.monotonic() - then) / max(step - first, 1), 1e-6)
        wanted = self.seconds()
        remaining_seconds = wanted - (time.monotonic() - self.last_save)
        due = remaining_seconds <= step_seconds / 2 and not busy
        ahead = wanted if due else max(remaining_seconds, 0.0)
        # A look is a word between ranks. Steps may become slower, so none lies far ahead.
        far = max(LONGEST_BLINK, 1 / step_seconds)
        return due, step + max(1, int(min(ahead / step_seconds / 2, far)))

    @property
    def mean_between_failures(self) -> float:
        """The prior and what was seen, in seconds."""
        return (self.between_failures + float(self.state_dict()["seen"])) / (1 + self.failures)

    def seconds(self) -> float:
        """From one save to the next; never so little that the writer can't follow."""
        cost = statistics.median(self.blocked) if self.blocked else 0.0
        best = best_interval(cost, self.mean_between_failures, self.recovery)
        return max(min(max(best, cost / LARGEST_SHARE), self.longest_loss), 2 * self.writing)

    def restarted(self, recovery: float) -> None:
        """Counts a failure and the recovery time when the run resumes."""
        self.failures += 1
        self.recovery = max(recovery, 1.0)

    def state_dict(self) -> dict[str, Any]:
        running = self.earlier_seconds + time.monotonic() - self.began
        return {"failures": self.failures, "seen": running, "recovery": self.recovery}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues with the counts of an earlier process; ValueError if it isn't such a state."""
        try:
            failures, observed_seconds = int(state["failures"]), float(state["seen"])
            recovery = float(state["recovery"])
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"the history of failures can't be read: {error!r}") from error
        if failures < 0 or not (0 <= observed_seconds < math.inf and 0 <= recovery < math.inf):
            raise ValueError(f"{state} can't be a history of failures")
        self.failures, self.earlier_seconds, self.recovery = failures, observed_seconds, recovery


HISTORY = "history"  # of failures, among the meta
PROTECT = "call protect(model=model, optimizer=optimizer) before training"
# Errors of one rank that all ranks raise, the most special first.
KINDS = (InputError, DamagedCheckpointError, NewerFormatError, ValueError, MemoryError, OSError)
OfRanks = Callable[[Any], list[Any]]
T = TypeVar("T")


class SmartCheckpointer:
    """Protects objects that have ``state_dict`` and ``load_state_dict``.

    Args:
        interval: ``dynamic`` computes it from the cost of saves and the rate of failures; a
            number is a number of steps.
        max_checkpoints: verified checkpoints that stay.
        compression: pack them if that is faster, measured at the first save.
        folder: a local path, or an address that fsspec supports.
        longest_loss: seconds of work that may be lost at most, with ``dynamic``.
        between_failures: mean seconds between failures, estimated in advance.
        asynchronous: write in a thread; takes host memory for one more state.
        of_ranks: gives all ranks each rank's object; default ``torch.distributed``.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        interval: str | int = "dynamic",
        max_checkpoints: int = 3,
        compression: bool | str = True,
        folder: str | Path = "checkpoints",
        *,
        longest_loss: float = 1800.0,
        between_failures: float = DAY,
        asynchronous: bool = True,
        of_ranks: OfRanks | None = None,
    ) -> None:
        self.interval = SaveInterval(interval, between_failures, longest_loss)
        self.saver = Saver(folder, max_checkpoints, compression, asynchronous)
        self.step = 0  # of the state that was saved or restored last
        self._protected = CheckpointedState()
        self._of_ranks = of_ranks or of_all_ranks
        self._opened = self._resumed = False
        self._way: int | None = 0  # the step that the next save is the first after

    def protect(self, **objects: Any) -> SmartCheckpointer:
        """Add objects by name; they come back by it.

        Raises:
            ValueError: one has no ``state_dict`` and ``load_state_dict``.
        """
        self._protected.add(objects)
        return self

    @property
    def alarms(self) -> list[str]:
        """Returns the problems so far that didn't end the run, one sentence each."""
        return self.saver.alarms

    @property
    def compression(self) -> str:
        """Describes if and why checkpoints are packed, with the figures."""
        return self.saver.packing.reason

    def open(self, expected_bytes: int = 0) -> None:
        """Take the folder on the first rank; by itself at the first call that needs it.

        Raises:
            FolderInUseError: another run writes into it.
            ValueError: it can't be written, or two checkpoints don't fit.
        """
        expected = expected_bytes or self._protected.expected_bytes()  # on all: it may be gathered
        if _rank() == 0:
            self.saver.open(expected)
        self._opened = True

    def after_step(self, step: int) -> bool:
        """Save if it is time; whether it was."""
        due = self.due(step)
        if due:
            self.save(step)
        return due

    def due(self, step: int) -> bool:
        """Returns True if a save is due after ``step``; the same on every rank.

        A disk error of the last save gives a warning; an error of a state is raised.
        """
        if not self._opened:
            self.open()
        self.saver.look()
        if not self.interval.looks(step):
            return False
        decisions = self._of_ranks(self.interval.decide(step, self.saver.writer.busy))
        due, self.interval.next_look = decisions[0]
        return bool(due)

    def save(self, step: int | nn.Module | None = None) -> None:
        """Saves the protected objects now; returns once they are copied to host memory.

        Args:
            step: number of trained steps; default: one more than at the last save. A model
                instead of a number is protected as ``model`` first.

        Raises:
            TypeError: it is neither a step nor a model.
            ValueError: nothing is protected, or another model is.
        """
        if isinstance(step, nn.Module):
            self._take_in(step)
            step = None
        if not self._protected.objects:
            raise ValueError(f"nothing is protected, so nothing can be saved; {PROTECT}")
        try:
            step = self.step + 1 if step is None else operator.index(step)
        except TypeError:
            raise TypeError(
                f"save was given a {type(step).__name__}; give the number of the step, or a model"
            ) from None
        began = time.perf_counter()
        ranks = of_all_ranks(random_state())
        tensors, objects = self._protected.state()
        if self.ready():
            self.save_state(step, tensors, {"objects": objects, "random": ranks})
            self.interval.blocked.append(time.perf_counter() - began)
        else:
            self.passed(step)

    def ready(self) -> bool:
        """Returns True on the first rank if a save can begin.

        Later checkpoints of an earlier run are set aside before the first one. Otherwise they would
        block this run's saves and be the newest at the next start.
        """
        if _rank():
            return False
        if not self._opened:
            self.saver.open()
            self._opened = True
        if self._way is not None:
            try:
                self.saver.wait_for_writer()
                self.saver.discard_after(self._way)
            except OSError as error:
                self.saver.alarm(
                    f"nothing is saved, as checkpoints after step {self._way} can't be set aside: "
                    f"{error}; the next save tries again"
                )
                return False
            self._way = None
        return True

    def save_state(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        positions: Mapping[str, ChunkPosition] | None = None,
        later: Collection[str] = (),
    ) -> None:
        """Saves named tensors and JSON of the caller's own; see ``Saver.save``."""
        history = {HISTORY: self.interval.state_dict()}
        self.saver.save(step, tensors, {**meta, **history}, positions, later)
        self.interval.writing = self.saver.writing_seconds
        self.passed(step)

    def passed(self, step: int) -> None:
        """Notes that a save of this step has begun, or can't."""
        self.interval.last_save = time.monotonic()
        self.step, self._resumed = step, True

    def restore(self, path: str | Path | None = None) -> Any:
        """Bring the protected objects to the newest state that verifies, or to that of ``path``.

        Returns:
            What is protected as ``model``, in place; without a checkpoint it is as it was, with a
            warning, and ``step`` is 0.

        Raises:
            ValueError: nothing is protected, or the checkpoint is of other objects; nothing was
                changed. An error of the save under way is raised as well.
        """
        if not self._protected.objects:
            raise ValueError(
                f"nothing is protected, so nothing was saved and nothing can come back; {PROTECT}"
            )
        self.saver.wait_for_writer()
        self.open()
        checkpoint = self.load_state(Path(path) if path is not None else None)
        if checkpoint is not None:
            tensors, meta, source_path = checkpoint
            self._protected.load(tensors, meta.get("objects"), source_path)
            ranks = meta.get("random", [])
            if _rank() < len(ranks):
                set_random_state(ranks[_rank()])
        elif _rank() == 0:
            message = f"no checkpoint in {self.saver.address}: the model is as it was"
            warnings.warn(message, stacklevel=2)
        return self._protected.objects.get("model")

    def load_state(self, path: Path | None = None) -> Found | None:
        """Tensors, meta and path of the newest state that verifies; the same on every rank.

        Each rank compares its share of the files.

        Raises:
            DamagedCheckpointError: on every rank: ``path`` isn't as it was written.
            ValueError, OSError: on every rank: it can't be read.
        """
        self.saver.wait_for_writer()
        share, before = (_rank(), len(self._of_ranks(None))), math.inf
        while True:
            chosen = path or self._newest(before)
            if chosen is None:
                return None
            try:
                checkpoint = self.together(partial(self.saver.read, chosen, share))
                break
            except DamagedCheckpointError as error:
                if path is not None:
                    raise
                if _rank() == 0:
                    self.saver.set_aside(chosen, str(error))
                before = step_of(chosen.name)
        _, meta, path_read = checkpoint
        if HISTORY in meta and not self._resumed:
            self.interval.load_state_dict(meta[HISTORY])
            self.interval.restarted(time.monotonic() - self.interval.began)
        self._resumed = True  # a run that goes back on its way hasn't failed
        self.step = self._way = read_manifest(path_read)["step"]
        return checkpoint

    def _newest(self, before: float) -> Path | None:
        """Returns the newest checkpoint before a step that the first rank finds."""
        paths = self.together(self.saver.paths if _rank() == 0 else list)
        names = [path.name for path in self._of_ranks(paths)[0]]
        names = [name for name in names if step_of(name) < before]
        return self.saver.folder / names[-1] if names else None

    def together(self, work: Callable[[], T]) -> T:
        """Returns what ``work`` returns; each rank raises the first problem that any rank has."""
        problem = None
        try:
            result = work()
        except KINDS as error:
            problem = next(kind for kind in KINDS if isinstance(error, kind)), str(error)
        for found in self._of_ranks(problem):
            if found is not None:
                kind, reason = found
                raise kind(reason)
        return result

    def list(self) -> list[Path]:
        """Returns the checkpoints in the folder, oldest first; at an address, their names in it.

        A disk error of the last save gives a warning; an error of a state is raised.
        """
        self.saver.look()
        return self.saver.paths()

    def verify(self, path: str | Path | None = None) -> dict[str, Any]:
        """The manifest of a checkpoint, the newest if left out, every byte of it compared.

        Raises:
            DamagedCheckpointError: it isn't as it was written.
            ValueError: there is none.
        """
        self.saver.wait_for_writer()
        paths = self.saver.paths() if path is None else [Path(path)]
        if not paths:
            raise ValueError(f"{self.saver.folder} holds no checkpoint")
        return verify(self.saver.read(paths[-1])[2], thorough=True)

    def _take_in(self, model: nn.Module) -> None:
        protected = self._protected.objects
        if all(model is not existing for existing in protected.values()):
            if "model" in protected:
                raise ValueError(
                    f"save was given a {type(model).__name__} and another model is protected; "
                    "protect both by names of their own, and save() alone"
                )
            self._protected.add({"model": model}, trained=True)

    def close(self) -> None:
        """Wait for the save under way, and leave the folder to others."""
        self._opened = False
        self.saver.close()

    def __enter__(self) -> SmartCheckpointer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
