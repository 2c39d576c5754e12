"""A recipe's learning rate, warm-up and batch, chosen by the eval loss of whole trainings.

  1. The recipe's own values are trained first; then Optuna's TPE proposes (Akiba et al.
     2019).
  2. Every training is evaluated after equal shares of the same tokens. Its lowest loss
     so far is compared with the median of the finished trainings at that point. If it
     is above, the training is stopped (Optuna's MedianPruner; Golovin et al. 2017,
     "Google Vizier").
  3. The best one and the recipe's own are trained again in pairs, from new seeds. The
     best of many trials looks better than it is, and only the pairs measure the
     difference.

Losses are compared at equal tokens. Speed isn't compared; that is the task of another
study. Every result is written to a record at once, and a killed study resumes from it. What a
training is: `whole_trainings`; the files: `study_folder`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hasten.errors import InputError
from hasten.measure.budget import rounded_up
from hasten.measure.recipe_experiment import prepared
from hasten.measure.record import ExperimentRecord
from hasten.measure.schedule import OutOfTimeError
from hasten.measure.statistics import Interval, paired_ratio
from hasten.measure.workers import WorkerError
from hasten.progress import Audience, SilentProgress
from hasten.recipe.schema import Recipe
from hasten.recipe.suggest import recipe_text
from hasten.recipe.yaml_reader import read_duration
from hasten.tune.report import SCHEMA
from hasten.tune.samplers import OptunaProposer, TriedPoint
from hasten.tune.space import Point, Space, changes_text
from hasten.tune.study_folder import StudyFolder, StudyResult
from hasten.tune.surrogate import importance
from hasten.tune.whole_trainings import LOOKS, RecipeTrainings, TrainingProcess

FIRST_LOOKS = 3  # before which none is given up: warm-ups differ in length
STARTUP = 3  # trainings that must be over before one is given up
RANDOM = 4  # points drawn before TPE believes in anything
Tell = Callable[[str, float], None]
FEWEST_PAIRS, MOST_PAIRS = 3, 6
PROOF_SHARE = 1 / 3  # of the budget is kept for the pairs, at least
SLACK = 1.1  # of a training's expected time


@dataclass
class LearningResult:
    """Results of a study: trainings in their order, and the pairs of start and best."""

    rows: list[dict[str, Any]]
    best: Point | None = None
    pairs: list[dict[str, Any]] = field(default_factory=list)
    ended: str = ""
    unproven: str | None = None  # why there are too few pairs

    @property
    def ratio(self) -> Interval | None:
        """The start's eval loss over the best one's, seed by seed; above 1 is better."""
        if not self.pairs:
            return None
        return paired_ratio([p["best"] for p in self.pairs], [p["start"] for p in self.pairs])

    @property
    def better(self) -> bool:
        """Returns True if the best is significantly better."""
        ratio = self.ratio
        return len(self.pairs) >= FEWEST_PAIRS and ratio is not None and ratio.low > 1


class Learning:
    """A running study.

    Args:
        space: the choices; it starts at the recipe's own values.
        train: begins a training of a point with a seed.
        record: earlier results, and the file for new ones.
        budget_seconds: time for all, the pairs included.
        looks: number of evaluations of a training.
        most: maximum number of trainings, the first included and the pairs not.
        seed: seed of the recipe; the pairs use the ones after it.
        ``tell``: receives progress messages, and the used share of the budget.
        on_training: called after every training.
        began: start of the budget, on the clock; default: now.
        clock: returns the time, in seconds.
    """

    def __init__(
        self,
        space: Space,
        train: Callable[[Point, int], TrainingProcess],
        record: ExperimentRecord,
        *,
        budget_seconds: float,
        looks: int = LOOKS,
        most: int | None = None,
        seed: int = 0,
        tell: Tell = lambda text, share: None,
        on_training: Callable[[LearningResult], None] = lambda learnt: None,
        began: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        import optuna

        self._space, self._train, self._record = space, train, record
        self._budget, self._looks, self._most, self._seed = budget_seconds, looks, most, seed
        self._say, self._found, self._clock = tell, on_training, clock
        self._began = clock() if began is None else began
        pruner = optuna.pruners.MedianPruner(
            n_startup_trials=STARTUP, n_warmup_steps=min(FIRST_LOOKS, looks)
        )
        self._sampler = OptunaProposer("tpe", space, seed, RANDOM, pruner)
        self._full = 0.0  # seconds of a training that isn't given up

    def run(self) -> LearningResult:
        """Search, then prove.

        Raises:
            InputError: the budget is too short, or the recipe's own training fails.
        """
        self._record.append("run")
        learnt = LearningResult(
            [
                {k: v for k, v in event.items() if k not in ("event", "at")}
                for event in self._record.events
                if event["event"] == "trained"
            ]
        )
        for row in learnt.rows:
            self._sampler.tell(self._tried(row))
        if not learnt.rows:
            self._first(learnt)
        self._full = max(learnt.rows[0]["seconds"], 0.01)
        learnt.ended = self._search(learnt)
        start_loss = learnt.rows[0]["loss"]
        fine = [r for r in learnt.rows if r["state"] == "ok" and r["loss"] < start_loss]
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

    def _first(self, learnt: LearningResult) -> None:
        """Trains the recipe unchanged; refuses a short budget after its first two evaluations."""
        self._tell("training with the recipe's own values")
        try:
            row = self._trained(self._space.start, self._seed, self._end, watch=self._afford)
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
            if self._most is not None and len(learnt.rows) >= self._most:
                return f"{len(learnt.rows)} trainings were done"
            if self._end - self._clock() - SLACK * self._full < self._reserve:
                return "the budget's time for trainings was used"
            point = self._sampler.ask()
            if point is None:
                return "everything that may be tried was tried"
            changed = changes_text(self._space.changes(point))
            self._tell(f"training {len(learnt.rows) + 1}: {changed}")
            try:
                row = self._trained(
                    point, self._seed, self._end - self._reserve, self._sampler.hopeless
                )
            except OutOfTimeError:
                return "the budget's time for trainings was used"
            self._take(learnt, row)

    def _take(self, learnt: LearningResult, row: dict[str, Any]) -> None:
        self._record.append("trained", **row)
        learnt.rows.append(row)
        self._sampler.tell(self._tried(row))
        self._found(learnt)

    def _tried(self, row: dict[str, Any]) -> TriedPoint:
        """For the sampler, more is better: losses change their sign."""
        loss, curve = row["loss"], tuple(-loss for loss in row["losses"])
        value = None if loss is None else -float(loss)
        return TriedPoint(self._space.point(row["settings"]), row["state"], value, curve=curve)

    def _prove(self, learnt: LearningResult, best: Point) -> None:
        """Pairs of the start and the best, as many as fit; how many is settled before the first."""
        settings = self._space.settings(best)
        recorded_pairs = [e for e in self._record.events if e["event"] == "pair"]
        names = ("seed", "start", "best")
        learnt.pairs = [
            {n: e[n] for n in names} for e in recorded_pairs if e["settings"] == settings
        ]
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
        pair: dict[str, Any] = {"seed": seed}
        for name, point in (("start", self._space.start), ("best", best)):
            row = self._trained(point, seed, self._end)
            if row["state"] != "ok":
                raise WorkerError(row["why"])
            pair[name] = row["loss"]
        return pair

    def _trained(
        self,
        point: Point,
        seed: int,
        deadline: float,
        hopeless: Callable[[Point, int, float], bool] = lambda point, look, value: False,
        watch: Callable[[Sequence[float]], None] = lambda looks: None,
    ) -> dict[str, Any]:
        """Runs a training to its end, or until it is ``hopeless``.

        Raises:
            OutOfTimeError: the deadline came first; the point has no result.
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
                    state, why = "failed", "its eval loss is not a finite number"
                    break
                losses.append(loss)
                if hopeless(point, number, -loss) and number < self._looks:
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
        remaining_seconds = deadline - self._clock()
        if remaining_seconds <= 0:
            raise OutOfTimeError
        return remaining_seconds

    def _tell(self, text: str) -> None:
        self._say(text, min((self._clock() - self._began) / self._budget, 1.0))


# What a study of hyper-parameters leaves: its JSON and its result in a sentence.
#
# The JSON has the shape of a study of speed (docs/how-to/tune.md), so that the same page draws
# both: a trial's ``log_rate`` is the logarithm of the start's eval loss over its own.

CHOICES = ("learning_rate", "warmup", "batch")
SEED_NOISE = 0.003  # of a loss between seeds, as a logarithm, for the importance alone


def document(learnt: LearningResult, space: Space, about: Mapping[str, Any]) -> dict[str, Any]:
    """The study as plain values."""
    start_loss, ratio = float(learnt.rows[0]["loss"]), learnt.ratio
    winner = None
    if learnt.best is not None and ratio is not None and learnt.better and not learnt.unproven:
        winner = {
            "settings": space.settings(learnt.best),
            "changes": space.changes(learnt.best),
            "ratio": ratio.summary(),
        }
    trials = [
        {
            **row,
            "log_rate": None
            if row["loss"] is None
            else round(math.log(start_loss / row["loss"]), 6),
        }
        for row in learnt.rows
    ]
    fine = [
        (space.point(t["settings"]), t["log_rate"]) for t in trials if t["log_rate"] is not None
    ]
    return {
        "schema": SCHEMA,
        "study": "learning",
        **about,
        "ended": learnt.ended,
        "space": [{"name": d.name, "values": list(d.values)} for d in space.dimensions],
        "start": {"settings": space.settings(space.start), "loss": start_loss},
        "trials": trials,
        "final_comparison": _final_comparison(learnt),
        "pairs": learnt.pairs,
        "unproven": learnt.unproven,
        "winner": winner,
        "importance": importance(space, fine, SEED_NOISE),
    }


def learning_sentence(document: Mapping[str, Any]) -> str:
    """The result in a sentence or two."""
    states = [t["state"] for t in document["trials"]]
    pruned, failed = (states.count(s) for s in ("pruned", "failed"))
    count = f"{len(states)} trainings"
    count += f", {pruned} given up early" if pruned else ""
    count += f", {failed} failed" if failed else ""
    count += f"; {document['ended']}."
    winner = document["winner"]
    if winner is not None:
        ratio, pairs = winner["ratio"], document["pairs"]
        low, high = (f"{100 * (1 - 1 / ratio[k]):.2f}" for k in ("low", "high"))
        changed = changes_text(winner["changes"])
        mean = {k: math.fsum(p[k] for p in pairs) / len(pairs) for k in ("start", "best")}
        return (
            f"Eval loss {mean['start']:.4f} -> {mean['best']:.4f}, lower by {low} to {high} % "
            f"(95 %, {len(pairs)} fresh seeds, equal tokens) with {changed}. {count}"
        )
    if document["unproven"]:
        return f"Not proven ({document['unproven']}): the best so far is in best.yaml. {count}"
    if document["final_comparison"] is None:
        return f"No training had a lower loss: keep the values as they are. {count}"
    return f"No significant difference: keep the values as they are. {count}"


def _final_comparison(learnt: LearningResult) -> dict[str, Any] | None:
    if learnt.best is None:
        return None
    ratio = learnt.ratio
    if learnt.unproven is not None:
        verdict = f"undecided: {learnt.unproven}"
    elif learnt.better:
        verdict = "helped: a lower loss from fresh seeds"
    else:
        worse = ratio is not None and ratio.high < 1
        verdict = "hurt: a higher loss" if worse else "undecided: no certainly lower loss"
        verdict += " from fresh seeds"
    row = {
        "name": "the best again",
        "ratio": None if ratio is None else ratio.summary(),
        "verdict": verdict,
        "rounds": [p["start"] / p["best"] for p in learnt.pairs],
    }
    return {"variants": [row]}


# The study on a recipe.


def learn(
    recipe: Recipe | Path | str,
    budget: str | float = "1h",
    only: Sequence[str] = (),
    trials: int | None = None,
    fresh: bool = False,
    *,
    audience: Audience | None = None,
) -> StudyResult:
    """Searches for a lower eval loss at the same tokens within a time budget.

    Args:
        recipe: a recipe or its path; it decides the length of each training.
        budget: 30m, 2h or seconds, for trainings and pairs together.
        only: learning_rate, warmup, batch: the values to tune; default: all.
        trials: maximum number of trainings, without the pairs; None: as many as the budget
            holds.
        fresh: train again, even if results of an earlier start are stored.
        audience: receives the progress.

    Raises:
        InputError: an unknown name in ``only``, no trial, a budget that is too short, no eval
            data, or an unchanged job that fails.
    """
    for name in only:
        if name not in CHOICES:
            raise InputError(f"only: there is no {name!r} to learn; there are {', '.join(CHOICES)}")
    if trials is not None and trials < 2:
        raise InputError(f"trials is {trials}; the recipe's own training and one other are 2")
    began = time.monotonic()
    audience, seconds = audience or SilentProgress(), read_duration(str(budget))
    subject = prepared(recipe if isinstance(recipe, Recipe) else Path(recipe), audience)
    job = RecipeTrainings(subject, only)
    folder = StudyFolder(subject.recipe.output, job.key(), audience)

    def text_of(settings: Mapping[str, Any], comment: str) -> str:
        return recipe_text(job.recipe_at(job.space.point(settings)), subject.plan, comment)

    def keep(learnt: LearningResult) -> None:
        """The best so far, on the disk before the next training begins."""
        last = learnt.rows[-1]
        losses = [r["loss"] for r in learnt.rows if r["loss"] is not None]
        if last["loss"] is not None and last["loss"] <= min(losses):
            comment = f"Best of {len(learnt.rows)} trainings so far, not proven by pairs."
            folder.keep_best(text_of(last["settings"], comment))

    def study(record: ExperimentRecord) -> dict[str, Any]:
        audience.begin()
        search = Learning(
            job.space,
            job.begin,
            record,
            budget_seconds=seconds,
            looks=job.looks,
            most=trials,
            seed=subject.recipe.seed,
            tell=audience.show,
            on_training=keep,
            began=began,
        )
        with job.opened(folder.path):
            learnt = search.run()
        about = {
            "title": f"Learning of {subject.recipe.model}",
            "budget_seconds": seconds,
            "seconds": round(time.monotonic() - began, 1),
        }
        result = document(learnt, job.space, about)
        return {**result, "said": learning_sentence(result)}

    result = folder.run(fresh, study, lambda one: one["unproven"] is None)
    settings = (result["winner"] or result["start"])["settings"]
    text = text_of(settings, learning_sentence(result))
    if not result["unproven"]:  # else best.yaml keeps what the trainings found
        folder.keep_best(text)
    return StudyResult(result, settings, text, folder.path)
