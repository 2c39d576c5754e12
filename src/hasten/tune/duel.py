"""The duel: the best few against the start, interleaved, until the time for it is used.

For a loop of anybody's. Of a recipe's plans `hasten.measure.recipe_experiment` measures the same
way, with a record, groups where memory is short, held-out losses and proofs of what acted. Both end
in the evidence's words: noise floor from a second copy of the start, paired intervals, Holm's
correction.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hasten.core.plan import Plan
from hasten.errors import InputError
from hasten.measure.ablation import AGAIN, BASELINE, Arm
from hasten.measure.significance import with_luck
from hasten.measure.turns import Runner
from hasten.measure.workers import WorkerError
from hasten.report.verdicts import floor_of, head, idle, judge, ratio_to
from hasten.tune.space import Point

MOST_ROUNDS, FEWEST_ROUNDS = 20, 3
WARMUP = 3


def duel(
    start: Callable[[Point], Runner],
    first: Point,
    leaders: Sequence[Point],
    deadline: float,
    steps: int = 4,
    seed: int = 0,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Arm]:
    """Arms with their rounds: the start, the start again, and the leaders in their order.

    Raises:
        InputError: the start fails.
    """
    names = [BASELINE, AGAIN, *(f"choice {n}" for n in range(1, len(leaders) + 1))]
    points = [first, first, *leaders]
    kinds = ["baseline", "again", *("other" for _ in leaders)]
    arms = [Arm(n, Plan(), kind=k) for n, k in zip(names, kinds, strict=True)]  # type: ignore[arg-type]
    alive: dict[int, Runner] = {}
    draw = random.Random(seed)
    try:
        for place, point in enumerate(points):
            runner = start(point)
            alive[place] = runner
            _attempt(arms, alive, place, lambda r: _begin(r, deadline))
        for number in range(MOST_ROUNDS):
            if 0 not in alive:
                raise InputError(f"tune: the job as it is failed in the duel: {arms[0].failed}")
            if number >= FEWEST_ROUNDS and time.monotonic() >= deadline:
                break
            tell(f"duel, round {number + 1}")
            for place in draw.sample(list(alive), len(alive)):
                _attempt(arms, alive, place, lambda r, a=arms[place]: _turn(r, a, steps))  # type: ignore[misc]
    finally:
        for runner in alive.values():
            runner.end()
    whole = len(arms[0].rounds)
    for arm in arms:
        arm.beside = arms[0].rounds if len(arm.rounds) == whole else []
    return with_luck(arms)


def judged(arms: Sequence[Arm]) -> dict[str, Any]:
    """The duel as the study's JSON has it; places of ``rows`` follow the arms."""
    words = judge(arms)
    rows = []
    for arm, said in zip(arms, words, strict=True):
        ratio = ratio_to(arm, arms[0])
        rows.append(
            {
                "name": arm.name,
                "verdict": said.verdict,
                "quality": said.quality,
                "p_value": said.p_value,
                "ratio": None if ratio is None else ratio.summary(),
                "rounds": arm.rounds,
                "peak_memory_bytes": arm.peak_memory_bytes,
                "failed": arm.failed,
                "idle": idle(arm),
            }
        )
    return {"noise_floor": round(floor_of(arms), 4), "arms": rows}


def is_fit(row: Mapping[str, Any]) -> bool:
    """Whether an arm could be taken if it is better: it ran, its model isn't worse, as proven."""
    bad = head(row["verdict"]) == "failed" or head(row.get("quality")) == "worse"
    return not bad and row.get("refused") is None


def says_of(row: Mapping[str, Any]) -> str:
    """An arm's verdict in words, with what else speaks against it."""
    words = [row["verdict"]]
    words += [f"quality {row['quality']}"] if head(row.get("quality")) == "worse" else []
    words += [f"not taken: {row['refused']}"] if row.get("refused") is not None else []
    return "; ".join(words)


def winner_of(rows: Sequence[dict[str, Any]]) -> int | None:
    """The place of the arm with the largest ratio among those that are better beyond doubt."""
    better = [
        i
        for i, row in enumerate(rows)
        if head(row["verdict"]) == "helped" and row["ratio"]["median"] is not None and is_fit(row)
    ]
    return max(better, key=lambda i: rows[i]["ratio"]["median"], default=None)


def _begin(runner: Runner, deadline: float) -> None:
    patience = max(deadline - time.monotonic(), 60.0)
    runner.begin(patience)
    runner.steps(WARMUP, patience)


def _turn(runner: Runner, arm: Arm, steps: int) -> None:
    found = runner.steps(steps, 600.0)
    arm.rounds.append(statistics.median(s.items / s.seconds for s in found))


def _attempt(
    arms: Sequence[Arm], alive: dict[int, Runner], place: int, act: Callable[[Runner], None]
) -> None:
    try:
        act(alive[place])
    except WorkerError as error:
        arms[place].failed = str(error)
        alive.pop(place).end(at_once=True)
