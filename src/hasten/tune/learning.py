"""A study of hyper-parameters: which learning rate, warm-up and batch leave a lower held-out loss.

  1. the recipe's own values are trained first; then Optuna's TPE proposes (Akiba et al. 2019)
  2. every training is looked at after equal shares of the same tokens; one whose lowest loss so far
     is above the median of the finished ones there is given up (Optuna's MedianPruner; Golovin et
     al. 2017, "Google Vizier")
  3. the best one and the recipe's own are trained again in pairs, from seeds that neither has seen:
     the best of many trials looks better than it is, and only the pairs say by how much

Losses are compared at equal tokens and nothing else is: what is faster is another study's business.
Everything goes into a record as soon as it is known; a study that was killed goes on from there.
"""

from __future__ import annotations

import math
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hasten.errors import InputError
from hasten.measure.budget import rounded_up
from hasten.measure.record import ExperimentRecord
from hasten.measure.schedule import OutOfTimeError
from hasten.measure.statistics import Interval, paired_ratio
from hasten.measure.workers import WorkerError
from hasten.tune.space import Point, Space

if TYPE_CHECKING:
    import optuna


# Who proposes hyper-parameters, and who is given up: Optuna's TPE and its median rule.
#
# All dimensions have an order (rates, sizes), so they are whole numbers to Optuna. What was given
# up or failed is told as worse than all that finished, the later the better.

FIRST_LOOKS = 3  # before which none is given up: warm-ups differ in length
STARTUP = 3  # trainings that must be over before one is given up
RANDOM = 4  # points drawn before TPE believes in anything
REPEATED = 8  # proposals that were trained before, until one is drawn at random


def hopeless(trial: optuna.trial.Trial, number: int, loss: float, looks: int) -> bool:
    """Whether a training is to be given up after this look."""
    trial.report(loss, number)
    return number < looks and trial.should_prune()


class LearningSampler:
    """Optuna's TPE and median rule over a space whose dimensions all have an order."""

    def __init__(self, space: Space, looks: int, seed: int) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        with warnings.catch_warnings():  # "experimental": multivariate
            warnings.simplefilter("ignore")
            sampler = optuna.samplers.TPESampler(
                multivariate=True, seed=seed, n_startup_trials=RANDOM
            )
        pruner = optuna.pruners.MedianPruner(
            n_startup_trials=STARTUP, n_warmup_steps=min(FIRST_LOOKS, looks)
        )
        self._optuna, self._space = optuna, space
        self._study = optuna.create_study(direction="minimize", sampler=sampler, pruner=pruner)
        self._kinds: dict[str, Any] = {
            d.name: optuna.distributions.IntDistribution(0, len(d.values) - 1)
            for d in space.dimensions
        }
        self._known: dict[Point, dict[str, Any]] = {}
        self._open: dict[Point, optuna.trial.Trial] = {}
        self._points = space.points()
        random.Random(seed).shuffle(self._points)

    def of(self, point: Point) -> optuna.trial.Trial:
        """A trial of just that point."""
        self._study.enqueue_trial(self._params(point))
        trial = self._study.ask(self._kinds)
        self._open[point] = trial
        return trial

    def ask(self) -> tuple[optuna.trial.Trial, Point] | None:
        """What TPE proposes and was not trained; None when all was."""
        for _ in range(REPEATED):
            trial = self._study.ask(self._kinds)
            point = tuple(int(trial.params[d.name]) for d in self._space.dimensions)
            if point not in self._known:
                self._open[point] = trial
                return trial, point
            self._close(trial, self._known[point])
        rest = next((p for p in self._points if p not in self._known), None)
        return None if rest is None else (self.of(rest), rest)

    def tell(self, point: Point, row: dict[str, Any]) -> None:
        """What came of the trial of a point."""
        self._known[point] = row
        self._close(self._open.pop(point), row)

    def add(self, point: Point, row: dict[str, Any]) -> None:
        """A training of an earlier start."""
        trial = self.of(point)
        for number, loss in enumerate(row["losses"], start=1):
            trial.report(loss, number)
        self.tell(point, row)

    def _close(self, trial: optuna.trial.Trial, row: dict[str, Any]) -> None:
        """Finished with its loss; given up or failed: worse than all that finished."""
        if row["state"] == "ok":
            self._study.tell(trial, row["loss"])
        else:
            self._study.tell(trial, state=self._optuna.trial.TrialState.PRUNED)

    def _params(self, point: Point) -> dict[str, int]:
        names = [d.name for d in self._space.dimensions]
        return dict(zip(names, point, strict=True))


# The study.

Tell = Callable[[str, float], None]
LOOKS = 8  # of a training at its held-out loss
FEWEST_PAIRS, MOST_PAIRS = 3, 6
PROOF_SHARE = 1 / 3  # of the budget is kept for the pairs, at least
SLACK = 1.1  # of a training's expected time


class Training(Protocol):
    """One training from its beginning, in a process of its own; ``seconds`` its steps took."""

    seconds: float

    def loss_at(self, look: int, patience: float) -> float:
        """Train on to that look, counted from 1; its held-out loss. Raises WorkerError."""

    def end(self, at_once: bool = False) -> None:
        """End the process; harmless when it has ended."""


@dataclass
class LearningResult:
    """What was found: trainings in their order, and the pairs of start and best."""

    rows: list[dict[str, Any]]
    best: Point | None = None
    pairs: list[dict[str, Any]] = field(default_factory=list)
    ended: str = ""
    unproven: str | None = None  # why there are too few pairs

    @property
    def ratio(self) -> Interval | None:
        """The start's held-out loss over the best one's, seed by seed; above 1 is better."""
        if not self.pairs:
            return None
        return paired_ratio([p["best"] for p in self.pairs], [p["start"] for p in self.pairs])

    @property
    def better(self) -> bool:
        """Whether the best is better beyond doubt."""
        ratio = self.ratio
        return len(self.pairs) >= FEWEST_PAIRS and ratio is not None and ratio.low > 1

    def __len__(self) -> int:
        return len(self.rows)


class Learning:
    """A study while it goes on.

    Args:
        space: what may be chosen; it starts at the recipe's own values.
        train: begins a training of a point with a seed.
        record: what was found before, and where everything goes.
        budget_seconds: for all, the pairs included.
        looks: at a training.
        most: trainings at most, the first included and the pairs not.
        seed: of the recipe; the pairs take the ones after it.
        tell: is told what happens, and which share of the budget is used.
        found: is called after every training.
        began: when the budget began, by the clock; now, if left out.
        clock: tells the time, in seconds.
    """

    def __init__(
        self,
        space: Space,
        train: Callable[[Point, int], Training],
        record: ExperimentRecord,
        *,
        budget_seconds: float,
        looks: int = LOOKS,
        most: int | None = None,
        seed: int = 0,
        tell: Tell = lambda text, share: None,
        found: Callable[[LearningResult], None] = lambda learnt: None,
        began: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._space, self._train, self._record = space, train, record
        self._budget, self._looks, self._most, self._seed = budget_seconds, looks, most, seed
        self._say, self._found, self._clock = tell, found, clock
        self._began = clock() if began is None else began
        self._sampler = LearningSampler(space, looks, seed)
        self._full = 0.0  # seconds of a training that isn't given up

    def run(self) -> LearningResult:
        """Search, then prove.

        Raises:
            InputError: the budget is too short, or the recipe's own training fails.
        """
        self._record.append("run")
        learnt = LearningResult(list(self._earlier()))
        for row in learnt.rows:
            self._sampler.add(self._space.point(row["settings"]), row)
        if not learnt.rows:
            self._first(learnt)
        self._full = max(learnt.rows[0]["seconds"], 0.01)
        learnt.ended = self._search(learnt)
        own = learnt.rows[0]["loss"]
        fine = [r for r in learnt.rows if r["state"] == "ok" and r["loss"] < own]
        if fine:
            chosen = min(fine, key=lambda r: float(r["loss"]))
            learnt.best = self._space.point(chosen["settings"])
            self._prove(learnt, learnt.best)
        return learnt

    @property
    def _end(self) -> float:
        return self._began + self._budget

    @property
    def _reserve(self) -> float:
        """Seconds that are kept for the pairs."""
        return max(PROOF_SHARE * self._budget, 2 * FEWEST_PAIRS * SLACK * self._full)

    def _earlier(self) -> Iterator[dict[str, Any]]:
        for event in self._record.events:
            if event["event"] == "trained":
                yield {k: v for k, v in event.items() if k not in ("event", "at")}

    def _first(self, learnt: LearningResult) -> None:
        """The recipe as it is; refuses a budget as soon as its first two looks tell its length."""
        self._tell("training with the recipe's own values")
        trial = self._sampler.of(self._space.start)
        try:
            row = self._trained(self._space.start, self._seed, self._end, trial, self._afford)
        except OutOfTimeError:
            raise InputError(
                f"budget: {rounded_up(self._budget)} is too short: the recipe's own training alone "
                "isn't over by then; give many times as much, or shorten it (max_steps=N)"
            ) from None
        if row["state"] != "ok":
            raise InputError(f"tune: the job fails as it is, before any change: {row['why']}")
        self._take(learnt, row)

    def _afford(self, looks: Sequence[float]) -> None:
        """Refuse a budget without room for one more training and three pairs."""
        if len(looks) != 2:
            return
        self._full = looks[0] + (self._looks - 1) * (looks[1] - looks[0])
        before = self._clock() - self._began - looks[-1]  # data, tokens
        least = before + self._full * (1 + SLACK * (1 + 2 * FEWEST_PAIRS))
        if least > self._budget:
            raise InputError(
                f"budget: {rounded_up(self._budget)} is too short: the recipe's training, "
                f"another one and {FEWEST_PAIRS} pairs that prove the result take about "
                f"{rounded_up(least)} on this job and machine; or shorten the training "
                "(max_steps=N)"
            )

    def _search(self, learnt: LearningResult) -> str:
        """Train until something ends it; what did."""
        while True:
            if self._most is not None and len(learnt) >= self._most:
                return f"{len(learnt)} trainings were done"
            if self._end - self._clock() - SLACK * self._full < self._reserve:
                return "the budget's time for trainings was used"
            proposed = self._sampler.ask()
            if proposed is None:
                return "everything that may be tried was tried"
            trial, point = proposed
            changed = ", ".join(f"{k}={v}" for k, v in self._space.changes(point).items())
            self._tell(f"training {len(learnt) + 1}: {changed}")
            try:
                row = self._trained(point, self._seed, self._end - self._reserve, trial)
            except OutOfTimeError:
                return "the budget's time for trainings was used"
            self._take(learnt, row)

    def _take(self, learnt: LearningResult, row: dict[str, Any]) -> None:
        self._record.append("trained", **row)
        learnt.rows.append(row)
        self._sampler.tell(self._space.point(row["settings"]), row)
        self._found(learnt)

    def _prove(self, learnt: LearningResult, best: Point) -> None:
        """Pairs of the start and the best, as many as fit; how many is settled before the first."""
        settings = self._space.settings(best)
        known = [e for e in self._record.events if e["event"] == "pair"]
        names = ("seed", "start", "best")
        learnt.pairs = [{n: e[n] for n in names} for e in known if e["settings"] == settings]
        fit = int((self._end - self._clock()) / (2 * SLACK * self._full)) + len(learnt.pairs)
        planned = [e for e in self._record.events if e["event"] == "proving"]
        wanted = next((e["pairs"] for e in planned if e["settings"] == settings), None)
        if wanted is None:
            wanted = min(max(fit, FEWEST_PAIRS), MOST_PAIRS)
            self._record.append("proving", settings=settings, pairs=wanted)
        while len(learnt.pairs) < wanted:
            number = len(learnt.pairs) + 1
            self._tell(f"pair {number} of {wanted}: the recipe's own values and the best again")
            try:
                pair = self._pair(best, self._seed + number)
            except OutOfTimeError:
                break
            except WorkerError as error:
                learnt.unproven = f"a training of the pairs failed: {error}"
                return
            self._record.append("pair", settings=settings, **pair)
            learnt.pairs.append(pair)
        if len(learnt.pairs) < FEWEST_PAIRS:
            learnt.unproven = f"{len(learnt.pairs)} of {FEWEST_PAIRS} pairs were done in time"

    def _pair(self, best: Point, seed: int) -> dict[str, Any]:
        found: dict[str, Any] = {"seed": seed}
        for name, point in (("start", self._space.start), ("best", best)):
            row = self._trained(point, seed, self._end)
            if row["state"] != "ok":
                raise WorkerError(row["why"])
            found[name] = row["loss"]
        return found

    def _trained(
        self,
        point: Point,
        seed: int,
        deadline: float,
        trial: optuna.trial.Trial | None = None,
        watch: Callable[[Sequence[float]], None] = lambda looks: None,
    ) -> dict[str, Any]:
        """A training to its end, or until it is given up; with a trial it may be.

        Raises:
            OutOfTimeError: the deadline came first; nothing is said of the point.
        """
        began = self._clock()
        training, losses, looks = self._train(point, seed), list[float](), list[float]()
        why: str | None = None
        state, sound = "ok", False
        try:
            while len(losses) < self._looks and state == "ok":
                number = len(losses) + 1
                loss = training.loss_at(number, self._left(deadline))
                looks.append(self._clock() - began)
                watch(looks)
                if not math.isfinite(loss):
                    state, why = "failed", "its held-out loss is not a finite number"
                    break
                losses.append(loss)
                if trial is not None and hopeless(trial, number, loss, self._looks):
                    state, why = "pruned", f"given up after {number} of {self._looks} looks"
            sound = True
        except WorkerError as error:
            self._left(deadline)  # a process that was cut off by the end of time didn't fail
            state, why = "failed", str(error)
        finally:
            training.end(at_once=not sound)
        return {
            "settings": self._space.settings(point),
            "changes": self._space.changes(point),
            "seed": seed,
            "state": state,
            "losses": losses,
            "loss": losses[-1] if state == "ok" else None,
            "seconds": round(self._clock() - began, 2),
            "why": why,
        }

    def _left(self, deadline: float) -> float:
        left = deadline - self._clock()
        if left <= 0:
            raise OutOfTimeError
        return left

    def _tell(self, text: str) -> None:
        self._say(text, min((self._clock() - self._began) / self._budget, 1.0))
