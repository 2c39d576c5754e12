"""Checks that each fidelity requires: requests, report rows, and bounds.

Bounds are relative L2 errors of one step's gradient against float64, fixed here before
any run. A float32 number has 24 bits, and a step of a small model loses two or three
digits in its sums. bf16 has 8 bits. With products that are summed in float32, the
relative error stays near 2^-8 per layer. If the bare job itself is less exact than the
bound (a deep model), a technique may deviate ``TIMES`` as much as the bare job.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hasten.core.plan import Plan
from hasten.core.technique import Fidelity, Technique
from hasten.core.timing import DESCRIPTIVE
from hasten.measure.quality.runner import CheckRequest, Perform
from hasten.measure.significance import NonInferiority, non_inferiority
from hasten.measure.workers import Reply

FLOAT32, HALF = 1e-4, 5e-2  # of the whole gradient
TENSOR = 10.0  # bound of a single tensor, as a multiple of the whole gradient's
TIMES, WIDEST = 4.0, 10.0  # greatest error: multiple of the bare job's own, and of the bound
LOSS_FLOAT32, LOSS_HALF = 1e-5, 1e-2  # of a loss
LEAK_FLOAT32, LEAK_HALF = 1e-5, 1e-3  # of a document's loss, by changes of its neighbours
UPDATE = 1e-3  # of what the weights moved by in three steps
COMMUNICATION = 4e-3  # of numbers that travel in 16 bits: 2^-9 for each of two roundings of bf16
FAILED = ("differs", "worse")  # the words for a technique that does harm


Row = dict[str, Any]


def invariance_row(
    what: str,
    verdict: str,
    text: str,
    measured: float | None = None,
    tolerance: float | None = None,
) -> Row:
    """One line of report.invariance; the verdict is equal, differs or not tested."""
    numbers = {"measured": measured, "tolerance": tolerance}
    return {"what": what, "verdict": verdict, **numbers, "text": text}


def verification_row(
    technique: Technique,
    test: str,
    verdict: str,
    text: str,
    measured: float | None = None,
    allowed: float | None = None,
    seeds: int | None = None,
) -> Row:
    """One line of report.verification.

    The verdict is equal, not worse, worse, differs, undecided or not tested.
    """
    return {
        "technique": technique.name(),
        "fidelity": technique.fidelity.name,
        "test": test,
        "verdict": verdict,
        "measured": measured,
        "allowed": allowed,
        "text": text,
        "seeds": seeds,
    }


def failures(report: Mapping[str, Any]) -> list[str]:
    """The failed rows of a verification report; with any of these, don't use the plan."""
    reasons = [f"{r['what']}: {r['text']}" for r in report["invariance"] if r["verdict"] in FAILED]
    return reasons + [
        f"{r['technique']}: {r['text']}" for r in report["verification"] if r["verdict"] in FAILED
    ]


@dataclass(frozen=True)
class Bound:
    """How far a gradient may be from float64: as a whole, in each tensor, and its loss."""

    gradient: float
    tensor: float
    loss: float

    def excess(self, answer: Mapping[str, Any]) -> float:
        """The largest error as a share of what is allowed; above 1 it fails."""
        shares = (
            answer["error"] / self.gradient,
            answer["worst"] / self.tensor,
            answer["loss_error"] / self.loss,
        )
        return math.inf if any(math.isnan(s) for s in shares) else max(shares)

    def errors_text(self, answer: Mapping[str, Any]) -> str:
        """The three errors, the one that fails first with what it may be."""
        checks = [
            (answer["loss_error"], self.loss, "loss off by"),
            (answer["error"], self.gradient, "gradient off by"),
            (answer["worst"], self.tensor, f"worst tensor {answer['name']} off by"),
        ]
        wrong = [f"{w} {e:.2g}, allowed {b:.2g}" for e, b, w in checks if not e <= b]
        return "; ".join(wrong) or ", ".join(f"{w} {e:.1g}" for e, _, w in checks)


def short(answer: Mapping[str, Any]) -> str:
    """The most important error of an answer."""
    return f"off by {answer['error']:.1g}"


def bound_of(half: bool, usual: Mapping[str, Any] | None) -> Bound:
    """The bound of a number format, widened to what the plan's own way of counting already has."""
    gradient_bound, loss = (HALF, LOSS_HALF) if half else (FLOAT32, LOSS_FLOAT32)
    bounds = (gradient_bound, TENSOR * gradient_bound, loss)
    if usual is None or "failed" in usual:
        return Bound(*bounds)
    errors = (usual["error"], usual["worst"], usual["loss_error"])
    if not all(map(math.isfinite, errors)):
        return Bound(*bounds)
    allowed = zip(bounds, errors, strict=True)
    return Bound(*(max(fixed, min(TIMES * error, WIDEST * fixed)) for fixed, error in allowed))


# EXACT, proven: the plan's losses with the technique and without it, compared bit by bit.


def exact_orders(plan: Plan, steps: int) -> list[CheckRequest]:
    """The plan, and the plan without each of its EXACT techniques; nothing if it has none."""
    plans = [plan.without(t) for t in _exact(plan)]
    return [_order(p, steps) for p in (plan, *plans)] if plans else []


def exact_rows(plan: Plan, answers: Sequence[Reply], perform: Perform, steps: int) -> list[Row]:
    """One row for each EXACT technique of the plan; ``answers`` are for `exact_orders`.

    If a plan's own losses differ between runs, it can't show that a technique keeps their
    bits. This is only tested if a difference requires it.
    """
    exact = _exact(plan)
    if not exact:
        return []
    full_reply, *reduced_replies = answers
    differ = [_differs(full_reply, answer) for answer in reduced_replies]
    repeats = True
    if any(differ):
        again = perform([_order(plan, steps)])[0]
        repeats = not _differs(full_reply, again) and "failed" not in again
    return [
        _row(t, full_reply, answer, steps, repeats)
        for t, answer in zip(exact, reduced_replies, strict=True)
    ]


def _exact(plan: Plan) -> list[Technique]:
    return [t for t in plan if t.fidelity is Fidelity.EXACT]


def _order(plan: Plan, steps: int) -> CheckRequest:
    return CheckRequest("losses", plan, plan, {"steps": steps})


def _differs(one: Reply, other: Reply) -> bool:
    parts = ("losses", "weights")
    return "failed" not in one and "failed" not in other and any(one[k] != other[k] for k in parts)


def _row(
    technique: Technique, full_reply: Reply, reduced_reply: Reply, steps: int, repeats: bool
) -> Row:
    test = f"losses and weights of {steps} steps with and without it, bit by bit"
    failed = full_reply.get("failed") or reduced_reply.get("failed")
    if failed:
        return verification_row(technique, test, "not tested", failed)
    ours, theirs = _numbers(full_reply), _numbers(reduced_reply)
    if len(ours) != len(theirs) or not ours:
        text = "the job has fewer steps than were asked for"
        return verification_row(technique, test, "not tested", text)
    if not _differs(full_reply, reduced_reply):
        text = f"{len(ours)} losses and the weights after them are the same to the last bit"
        return verification_row(technique, test, "equal", text, 0.0, 0.0)
    pairs = list(zip(ours, theirs, strict=True))
    first = next((i for i, (a, b) in enumerate(pairs, start=1) if a != b), None)
    off = max(abs(a - b) / max(abs(b), 1e-300) for a, b in pairs if a != b) if first else 0.0
    if not repeats:
        text = "the plan itself doesn't repeat its bits, so nothing follows"
        return verification_row(technique, test, "undecided", text, off, 0.0)
    text = "the losses are the same, the weights after them aren't"
    if first:
        text = f"the loss of step {first} is the first to differ; by {off:.2g} at most"
    return verification_row(technique, test, "differs", text, off, 0.0)


def _numbers(answer: Reply) -> Sequence[float]:
    losses = [float.fromhex(text) for text in answer["losses"]]
    return [math.inf if math.isnan(v) else v for v in losses]  # NaN equals NaN here


# LOSSY, proven: the plan against the plan without the technique, seed by seed, at equal tokens.
#
# The eval loss must not be worse by more than the margin, nor any measure of the job's own; of
# those more is better, and worse means how many times as large the other's is.

ADVICE = 5  # seeds with which a first answer is likely
WORST_FIRST = ("worse", "undecided", "not worse")  # the least good measure decides


def lossy_rows(
    plan: Plan,
    perform: Perform,
    seeds: int,
    tokens: int,
    margin: float,
    time_left: Callable[[], float] = lambda: math.inf,
) -> list[Row]:
    """One line for each LOSSY technique of the plan; without seeds they are not tested.

    With little time ``time_left`` (seconds) there are fewer seeds: each is trained by all plans
    before the next one, as long as one more fits.
    """
    lossy = [t for t in plan if t.fidelity is Fidelity.LOSSY]
    if not seeds or not tokens:
        text, test = f"takes trainings with several seeds: --seeds {ADVICE}", _test(margin)
        return [verification_row(t, test, "not tested", text, allowed=margin) for t in lossy]
    if not lossy:
        return []
    plans = [plan, *(plan.without(t) for t in lossy)]
    hurried, longest = math.isfinite(time_left()), 0.0
    runs: list[list[Reply]] = [[] for _ in plans]
    for some in [[s] for s in range(1, seeds + 1)] if hurried else [list(range(1, seeds + 1))]:
        if runs[0] and time_left() < longest:
            break
        before = time_left()
        details = [{"seed": seed, "tokens": tokens} for seed in some]
        answers = perform([CheckRequest("train", p, p, each) for p in plans for each in details])
        longest = max(longest, before - time_left()) if hurried else 0.0
        for i, run in enumerate(runs):
            run += answers[i * len(some) : (i + 1) * len(some)]
    return [_lossy_row(t, runs[0], runs[i], margin) for i, t in enumerate(lossy, start=1)]


def _lossy_row(technique: Technique, ours: list[Reply], theirs: list[Reply], margin: float) -> Row:
    pairs = list(zip(theirs, ours, strict=True))
    usable = [(a, b) for a, b in pairs if _loss(a) is not None and _loss(b) is not None]
    broken = next((b for a, b in pairs if _loss(a) is not None and _diverged(b)), None)
    if broken is not None:
        text = f"training with it ended without a finite loss: {broken.get('failed', 'NaN')}"
        return verification_row(
            technique, _test(margin), "worse", text, allowed=margin, seeds=len(pairs)
        )
    if not usable:
        why = next((a["failed"] for pair in pairs for a in pair if "failed" in a), "")
        text = why or "nothing is held out: give eval_data"
        return verification_row(technique, _test(margin), "not tested", text, allowed=margin)
    without, with_ = ([float(pair[i]["eval_loss"]) for pair in usable] for i in (0, 1))
    measures = [_Measure("eval loss", without, with_), *_own_measures(usable)]
    outcomes = [m.judged(margin) for m in measures]
    verdict = min((f.verdict for f in outcomes), key=WORST_FIRST.index)
    upper = max(f.upper for f in outcomes) - 1
    tokens = f"{usable[0][0]['tokens']:,} and {usable[0][1]['tokens']:,} tokens"
    descriptions = [m.outcome_text(f) for m, f in zip(measures, outcomes, strict=True)]
    text = f"after {tokens}, {len(usable)} seeds: {'; '.join(descriptions)}"
    test = _test(margin, [m.name for m in measures])
    return verification_row(technique, test, verdict, text, upper, margin, len(usable))


@dataclass(frozen=True)
class _Measure:
    """One measure of quality, seed by seed; of ``rises`` more is better, of the others less."""

    name: str
    without: list[float]
    with_: list[float]
    rises: bool = False

    def judged(self, margin: float) -> NonInferiority:
        if not self.rises:
            return non_inferiority(self.without, self.with_, margin)
        without, with_ = ([1 / value for value in values] for values in (self.without, self.with_))
        return non_inferiority(without, with_, margin)

    def outcome_text(self, outcome: NonInferiority) -> str:
        """Means with and without, by how much it is worse, and how sure that is."""
        mean = sum(self.without) / len(self.without), sum(self.with_) / len(self.with_)
        change = f"{100 * (outcome.ratio - 1):+.2f} %{' worse' if self.rises else ''}"
        text = f"{self.name} {mean[0]:.4f} without and {mean[1]:.4f} with it, {change}"
        if math.isfinite(outcome.upper):
            text += f", at most {100 * (outcome.upper - 1):+.2f} % (95 %)"
        if outcome.verdict != "undecided":
            return text
        if outcome.more is None:
            return f"{text}; no number of seeds would separate it from the margin"
        return f"{text}; about {outcome.more} more seeds would decide it"


def _own_measures(pairs: list[tuple[Reply, Reply]]) -> list[_Measure]:
    """The job's own measures, of which more is better, where every training has one above 0."""
    measures = []
    for name in (n for n in pairs[0][0].get("metrics") or {} if n not in DESCRIPTIVE):
        without, with_ = (
            [float((pair[i].get("metrics") or {}).get(name) or 0.0) for pair in pairs]
            for i in (0, 1)
        )
        if all(0 < value < math.inf for value in (*without, *with_)):
            measures.append(_Measure(name, without, with_, rises=True))
    return measures


def _loss(answer: Reply) -> float | None:
    value = answer.get("eval_loss")
    return value if value is not None and math.isfinite(value) and value > 0 else None


def _diverged(answer: Reply) -> bool:
    """Returns True if the loss isn't finite; a process that died otherwise doesn't count."""
    if "failed" in answer:
        return str(answer["failed"]).startswith("NotFiniteError")
    value = answer.get("eval_loss")
    return value is not None and not math.isfinite(value)


def _test(margin: float, names: Sequence[str] = ("eval loss",)) -> str:
    measures = " and ".join(names)
    return f"{measures} at equal tokens, paired seeds, margin {100 * margin:g} % fixed before"


# What ranks add to a verification's rows: examples dealt to them, and gradients that travel between
# them.
#
# A communication method of ROUNDING may send numbers in 16 bits, each rounded on its way there and
# back. So it is not among the techniques that are tested together, whose bound is that of float32,
# but beside them.

ONE_PROCESS = "needs several ranks, and one process ran; nproc: 2 in the recipe runs two"
Replies = Mapping[str, Reply]  # of `planned`, `communication` on all ranks, `one process`


def split_row(ranks: int, replies: Replies, bound: Bound) -> Row:
    """The row for splitting a step's examples over ranks: both runs must match float64."""
    if ranks == 1:
        return invariance_row("split over ranks", "not tested", ONE_PROCESS)
    what, planned, alone = f"split over {ranks} ranks", replies["planned"], replies["one process"]
    failed = _failed(ranks, planned, alone)
    if failed:
        return invariance_row(what, "not tested", failed)
    good, alone_good = (bound.excess(answer) <= 1 for answer in (planned, alone))
    verdict, error = "differs", planned["error"]
    if good and alone_good:
        verdict = "equal"
        text = f"on {ranks} ranks the gradient is {short(planned)}, in one process {short(alone)}"
    elif good:
        error = alone["error"]
        text = f"in one process {bound.errors_text(alone)}; not so on {ranks} ranks"
    else:
        in_one_process = "not so" if alone_good else "nor is it equal"
        text = f"{bound.errors_text(planned)}; {in_one_process} in one process"
    return invariance_row(what, verdict, text, error, bound.gradient)


def communication_row(technique: Technique, ranks: int, replies: Replies, bound: Bound) -> Row:
    """The row for communication: gradients must arrive equal, except for rounding."""
    test = f"gradient of one step on {ranks} ranks against float64, with all that isn't lossy"
    if ranks == 1:
        test = "gradient of one step against float64"
        return verification_row(technique, test, "not tested", ONE_PROCESS)
    answer, without = replies["communication"], replies["planned"]
    failed = _failed(ranks, answer, without)
    if failed:
        return verification_row(technique, test, "not tested", failed)
    if bound.excess(without) > 1:
        text = f"without it, too: {bound.errors_text(without)}"
        return verification_row(technique, test, "undecided", text)
    allowed = Bound(
        max(COMMUNICATION, bound.gradient),
        max(TENSOR * COMMUNICATION, bound.tensor),
        max(LOSS_FLOAT32, bound.loss),
    )
    verdict = "equal" if allowed.excess(answer) <= 1 else "differs"
    text = f"{allowed.errors_text(answer)}; without it the gradient is {short(without)}"
    return verification_row(technique, test, verdict, text, answer["error"], allowed.gradient)


def _failed(ranks: int, planned: Reply, other: Reply) -> str | None:
    for answer in (planned, other):
        if "failed" in answer:
            return str(answer["failed"])
    if planned["ranks"] != ranks:
        return f"{planned['ranks']} of {ranks} ranks took part"
    return None
