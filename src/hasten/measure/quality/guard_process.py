"""Proofs made in processes of their own: orders go out, answers come back, one by one.

Threads, allocators and the variables a process starts with can't be taken back, so orders that
differ in them are obeyed by different processes. A job on several ranks has a process for each, and
the orders that it needs ranks for go to all. A process that dies has answered what it had done; the
order that ended it is answered with the reason, and the rest goes on in fresh ones. So it is where
one rank fails and the others may be anywhere.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hasten.core.plan import Plan
from hasten.core.slot import Slot
from hasten.measure.crew import ALONE, Answer, Crew, CrewFailedError, interpreter

ENTRY = ("-m", "hasten.measure.quality")  # what the interpreter runs
PROCESS_WIDE = (Slot.THREADS, Slot.ALLOCATOR)
ERRORS = ("error", "worst", "loss_error", "change")  # of an answer; the rank that is furthest off


@dataclass(frozen=True)
class CheckRequest:
    """One proof to be made of a plan.

    Args:
        do: which.
        plan: of what.
        start: the plan that its process is started for.
        details: what else it is told.
        alone: one process makes it, however many ranks the job has.
    """

    do: str
    plan: Plan
    start: Plan
    details: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {"do": self.do, "plan": self.plan.to_list(), **self.details}


Perform = Callable[[Sequence[CheckRequest]], list[Answer]]


class Processes:
    """Obeys orders on a recipe's job.

    Args:
        recipe: a resolved recipe whose data lies ready.
        folder: for logs, and what proofs write.
        environ: variables that a plan wants before its process starts.
        patience_seconds: longest wait for one answer.
        ranks: for a new folder in which the job's ranks meet, what tells each its place.
        entry: the interpreter's arguments that name the program.
    """

    def __init__(
        self,
        recipe: Path,
        folder: Path,
        environ: Callable[[Plan], Mapping[str, str]],
        patience_seconds: float = 1800.0,
        ranks: Callable[[Path], Sequence[Mapping[str, str]]] = lambda folder: ALONE,
        entry: Sequence[str] = ENTRY,
    ) -> None:
        self._recipe, self._folder, self._environ = recipe, folder, environ
        self._patience, self._ranks, self._entry = patience_seconds, ranks, entry
        self._crews = 0
        self.broken = False  # a process died or hung: another attempt may find more

    def __call__(self, orders: Sequence[CheckRequest]) -> list[Answer]:
        """The answers, in the order of the orders."""
        groups: dict[tuple[Any, ...], list[int]] = {}
        for index, order in enumerate(orders):
            groups.setdefault(self._kind(order), []).append(index)
        found: list[Answer] = [{} for _ in orders]
        for members in groups.values():
            answers = self._obeyed([orders[i] for i in members])
            for index, answer in zip(members, answers, strict=True):
                found[index] = answer
        return found

    def _kind(self, order: CheckRequest) -> tuple[Any, ...]:
        """What decides whether two orders may share processes."""
        wide = tuple(str(t) for t in order.start if t.slot in PROCESS_WIDE)
        return (order.alone, *sorted(self._environ(order.start).items()), *wide)

    def _obeyed(self, orders: Sequence[CheckRequest]) -> list[Answer]:
        found: list[Answer] = []
        while len(found) < len(orders):
            with self._started(orders[0]) as crew:
                found += self._asked(crew, orders[len(found) :])
        return found

    def _asked(self, crew: Crew, orders: Sequence[CheckRequest]) -> list[Answer]:
        """The answers of one crew; where it failed, the last of them says how."""
        found: list[Answer] = []
        try:
            crew.answers(self._patience)  # they are ready
        except CrewFailedError as error:
            self.broken = True
            crew.end(at_once=True)
            return [{"failed": str(error)} for _ in orders]  # so would the next one
        try:
            for order in orders:
                found.append(together(crew.ask(order.to_dict(), self._patience)))
        except CrewFailedError as error:
            self.broken = True
            crew.end(at_once=True)
            found.append({"failed": str(error)})
        return found

    @contextlib.contextmanager
    def _started(self, order: CheckRequest) -> Iterator[Crew]:
        """Fresh processes for orders like this one."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._crews += 1
        meeting = tempfile.TemporaryDirectory(dir=self._folder, prefix=".ranks-")
        with contextlib.ExitStack() as stack:
            place = Path(stack.enter_context(meeting))
            ranks = ALONE if order.alone else self._ranks(place)
            paths = [self._folder / f"{self._crews}-log-{rank}" for rank in range(len(ranks))]
            logs = [stack.enter_context(path.open("w+b")) for path in paths]
            wanted = self._environ(order.start)
            crew = Crew(interpreter(self._arguments), [{**rank, **wanted} for rank in ranks], logs)
            stack.callback(crew.end)
            yield crew

    def _arguments(self, orders: int, answers: int) -> Sequence[str]:
        given = [str(self._recipe), str(self._folder), str(orders), str(answers)]
        return [*self._entry, *given]


def together(answers: Sequence[Answer]) -> Answer:
    """What all ranks say: the first one's answer, with the errors of the one that is furthest off.

    Each has looked at its own gradients, and weights; an order that one refuses is refused.
    """
    refused = next((str(a["refused"]) for a in answers if "refused" in a), None)
    if refused is not None:
        return {"failed": refused}
    found = dict(answers[0])
    judged = [a for a in answers if any(name in a for name in ERRORS)]
    if judged:
        furthest = max(judged, key=_furthest)
        found |= furthest
    if "weights" in found:
        found["weights"] = [answer["weights"] for answer in answers]
    return found


def _furthest(answer: Answer) -> float:
    errors = [float(answer[name]) for name in ERRORS if name in answer]
    return math.inf if any(map(math.isnan, errors)) else max(errors)
