"""A trial seen from outside: an arm's processes, their orders and answers, how they failed if so.

Python alone takes seconds to import torch and transformers, so an arm's processes stay alive
between their turns, stopped (``crew``). A job on several ranks has a process for each; what they
answer becomes one answer here.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from hasten.core.plan import Plan
from hasten.measure.crew import ALONE, Answer, Crew, CrewFailedError, interpreter
from hasten.measure.nursery import Nursery

ENTRY = ("-m", "hasten.measure.trial_process")  # what the interpreter runs
PATIENCE_SECONDS = 1800.0  # for a start, of which nothing is known


class TrialFailedError(RuntimeError):
    """A process of the arm died, hung, or reported an error; the message says which."""


class Trial:
    """One arm's processes.

    Args:
        recipe: path of a resolved recipe whose data is ready.
        plan: the arm's techniques.
        environ: variables that the techniques want before a process starts.
        log: where the processes' own words go; those of rank R in a file of that name beside it.
        entry: the interpreter's arguments that name the program; for programs that speak as
            ``hasten.measure.trial_process`` does.
        ranks: for each rank the variables that tell it its place.
        nursery: forks the process of a job of one rank.
    """

    def __init__(
        self,
        recipe: Path,
        plan: Plan,
        environ: Mapping[str, str],
        log: Path,
        entry: Sequence[str] = ENTRY,
        ranks: Sequence[Mapping[str, str]] = ALONE,
        nursery: Nursery | None = None,
    ) -> None:
        self.log = log
        arm = [str(recipe), json.dumps(plan.to_list())]
        start = interpreter(lambda orders, answers: [*entry, *arm, str(orders), str(answers)])
        if nursery is not None and len(ranks) == 1:
            start = nursery.starting(arm)
        with contextlib.ExitStack() as stack:
            logs = [
                stack.enter_context(_log_of(log, rank).open("w+b")) for rank in range(len(ranks))
            ]
            self._crew = Crew(start, [{**place, **environ} for place in ranks], logs)
            self._files = stack.pop_all()

    def __enter__(self) -> Trial:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.end()

    def ask(self, what: str, patience: float = PATIENCE_SECONDS, **details: Any) -> Answer:
        """Give an order and wait for its answer, so many seconds at most.

        Raises:
            TrialFailedError: there is no answer to be had.
        """
        with _told():
            return one_answer(self._crew.ask({"do": what, **details}, patience))

    def answer(self, patience: float = PATIENCE_SECONDS) -> Answer:
        """The next answer (the first, after the start, says that the arm is ready)."""
        with _told():
            return one_answer(self._crew.answers(patience))

    def give(self, what: str, **details: Any) -> None:
        """Give an order, at which the arm works whenever it goes on (`go_on`).

        Raises:
            TrialFailedError: a process has ended.
        """
        with _told():
            self._crew.give({"do": what, **details})

    def go_on(self, seconds: float) -> Answer | None:
        """Work for so long, less if that is enough for an answer; None: it is still to come.

        Raises:
            TrialFailedError: there is no answer to be had.
        """
        with _told():
            found = self._crew.go_on(seconds)
            return None if found is None else one_answer(found)

    def end(self, at_once: bool = False) -> None:
        """End the processes, ``at_once`` if they hang; harmless when they have ended."""
        self._crew.end(at_once)
        self._files.close()


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """What a crew says of its failure, as that of the arm."""
    try:
        yield
    except CrewFailedError as error:
        raise TrialFailedError(str(error)) from error


def one_answer(answers: Sequence[Answer]) -> Answer:
    """What the ranks of an arm say together: the first rank's answer, its steps those of all.

    A step is as long as it was on the slowest rank, and its peak memory is that of the rank which
    needs most. Ranks that train apart count their own tokens times the number of ranks: the mean
    of these is the truth. They don't wait for each other in each step, so their turn is as long as
    that of the slowest rank, which is less than the sum of the slowest steps: ``turn_seconds``.
    """
    first, *others = answers
    if not others or "steps" not in first:
        return first
    together = zip(*(answer["steps"] for answer in answers), strict=True)
    found = {**first, "steps": [_one_step(steps) for steps in together]}
    if first.get("apart"):
        found["turn_seconds"] = max(map(_seconds, answers))
    return found


def _seconds(answer: Answer) -> float:
    return math.fsum(step["step_seconds"] for step in answer["steps"])


def _one_step(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found = dict(ranks[0])
    for name in ("step_seconds", "peak_memory_bytes"):
        found[name] = max(step[name] for step in ranks)
    for name in ("tokens", "slots"):
        found[name] = round(sum(step[name] for step in ranks) / len(ranks))
    found["tokens_per_second"] = found["tokens"] / found["step_seconds"]
    return found


def _log_of(log: Path, rank: int) -> Path:
    return log if not rank else log.with_name(f"{log.stem}-rank-{rank}{log.suffix}")
