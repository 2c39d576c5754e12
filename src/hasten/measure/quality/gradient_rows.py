"""Checks of one step: gradients against float64, leaks, an optimizer's update.

Every layout of the plan is compared with the same reference, the bare job in float64, one example
at a time. So each layout is compared with each. On a job of several ranks the plan's layouts run on
all of them, and the plan once in one process. If the plan fails, techniques are left out one at a
time: those without which it passes are the cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hasten.core.plan import Plan
from hasten.core.slot import Slot
from hasten.core.technique import Fidelity, Technique
from hasten.measure.quality.requirements import (
    LEAK_FLOAT32,
    LEAK_HALF,
    ONE_PROCESS,
    TIMES,
    UPDATE,
    Bound,
    Row,
    bound_of,
    communication_row,
    invariance_row,
    short,
    split_row,
    verification_row,
)
from hasten.measure.quality.runner import CheckRequest, Perform
from hasten.measure.workers import Reply

LAYOUTS = {  # name -> (what it is in words, cut, rows as without a technique)
    "planned": ("micro-batches as planned", "planned", False),
    "whole": ("all examples in one micro-batch", "whole", False),
    "single": ("each example in a micro-batch", "single", False),
    "padded": ("rows padded, whatever the plan's collator", "whole", True),
}

LATER = 3  # step: DDP forms its buckets after the first, communication may begin with the next


class Gradients:
    """Checks of one step: gradients of several layouts, leaks, the optimizer's update."""

    def __init__(self, plan: Plan, perform: Perform, ranks: int = 1) -> None:
        self.plan, self._perform, self.ranks = plan, perform, ranks
        # An adapter decides which parameters there are, so the reference has it too.
        self.base = Plan(t for t in plan if t.slot is Slot.ADAPTER)
        excluded_slots = (Slot.ADAPTER, Slot.PRECISION, Slot.OPTIMIZER, Slot.COMMUNICATION)
        rounding = [t for t in plan if t.fidelity is not Fidelity.LOSSY]
        self.close = self.base.with_(*(t for t in rounding if t.slot not in excluded_slots))
        self.single = Plan(t for t in self.close if t.slot is not Slot.LAYOUT)  # for one process
        communications = [t for t in rounding if t.slot is Slot.COMMUNICATION]
        self.communication = next(
            (t for t in communications if t.fidelity is Fidelity.ROUNDING), None
        )
        self.precision = next((t for t in rounding if t.slot is Slot.PRECISION), None)
        self.optimizer = next((t for t in rounding if t.slot is Slot.OPTIMIZER), None)
        self.without_precision = Plan(t for t in plan if t.slot is not Slot.PRECISION)
        self.layouts = [n for n in LAYOUTS if n != "padded" or Slot.COLLATE in plan]
        self.replies: dict[str, Reply] = {}
        self.guilty: dict[str, list[str]] = {}  # what failed -> names, where it is known

    def make(self, others: Sequence[CheckRequest] = ()) -> list[Reply]:
        """Runs all checks of the plan, then those that find the cause of a failure.

        Those that the techniques require come first, and ``others`` with them: a budget may end
        before the invariances. The result is the answers to ``others``.
        """
        names = (name for name in self.layouts if name != "planned")
        orders = {name: self._gradient(self.close, name) for name in names}
        orders["leak"] = self._order("leak", self.without_precision)
        if Slot.PRECISION in self.plan:
            alone = self.base.with_(*(t for t in self.plan if t.slot is Slot.PRECISION))
            orders["half leak"] = self._order("leak", self.plan)
            orders["half leak bare"] = self._order("leak", alone)  # rows apart: rounding alone
        required, invariances = self._required(), orders
        answers = self._perform([*required.values(), *others, *invariances.values()])
        self.replies |= zip(required, answers, strict=False)
        self.replies |= zip(invariances, answers[len(required) + len(others) :], strict=True)
        self.bound = bound_of(False, self.replies["bare"])
        self.half_bound = bound_of(True, self.replies.get("half bare"))
        self._blame()
        return answers[len(required) : len(required) + len(others)]

    def _required(self) -> dict[str, CheckRequest]:
        orders = {"reference": self._order("reference", self.base, alone=True)}
        orders["bare"] = self._gradient(self.base, "whole", alone=True)
        orders["planned"] = self._gradient(self.close, "planned")
        if self.ranks > 1:
            orders["one process"] = self._gradient(self.single, "planned", alone=True)
        if self.ranks > 1 and self.communication is not None:
            orders["communication"] = self._gradient(
                self.close.with_(self.communication), "planned", step=LATER
            )
        if self.precision is not None:
            bare = self.base.with_(self.precision)
            orders["half bare"] = self._gradient(bare, "whole", alone=True)
            orders["half"] = self._gradient(self.close.with_(self.precision), "planned")
        if self.optimizer is not None:
            with_it, without = self.single.with_(self.optimizer), self.single.to_list()
            orders["update"] = self._order("update", with_it, alone=True, without=without)
        return orders

    def _order(self, do: str, plan: Plan, alone: bool = False, **details: Any) -> CheckRequest:
        return CheckRequest(do, plan, self.plan, details, alone and self.ranks > 1)

    def _gradient(
        self, plan: Plan, layout: str, alone: bool = False, step: int = 1
    ) -> CheckRequest:
        _, cut, padded = LAYOUTS[layout]
        return self._order("gradient", plan, alone, cut=cut, padded=padded, step=step)

    def _blame(self) -> None:
        """Leave techniques out one at a time wherever the plan failed as a whole."""
        # The reference is there already: the orders run in the same folder.
        wanted: dict[str, CheckRequest] = {}
        for name in self._failed():
            plan = self._plan_of(name)
            for technique in plan:
                if technique in self.base and "leak" not in name:
                    continue
                reduced_plan = plan.without(technique)
                if "leak" in name:
                    order = self._order("leak", reduced_plan)
                else:
                    order = self._gradient(reduced_plan, "planned" if name == "half" else name)
                wanted[f"{name} without {technique.name()}"] = order
        if wanted:
            self.replies |= zip(wanted, self._perform(list(wanted.values())), strict=True)
        for name in self._failed():
            self.guilty[name] = [
                t.name()
                for t in self._plan_of(name)
                if (key := f"{name} without {t.name()}") in self.replies and self._passes(name, key)
            ]

    def _plan_of(self, name: str) -> Plan:
        if name == "half":
            return self.close.with_(*([self.precision] if self.precision else []))
        return {"leak": self.without_precision, "half leak": self.plan}.get(name, self.close)

    def _failed(self) -> list[str]:
        names = [n for n in (*self.layouts, "half", "leak", "half leak") if n in self.replies]
        return [n for n in names if "failed" not in self.replies[n] and not self._passes(n, n)]

    def _passes(self, name: str, key: str) -> bool:
        answer = self.replies[key]
        if "failed" in answer:
            return False
        if "leak" in name:
            return bool(answer["change"] <= self._leak_allowed(name))
        return (self.half_bound if name == "half" else self.bound).excess(answer) <= 1

    def _leak_allowed(self, name: str) -> float:
        """Experts sort the tokens of all rows, so that even rows apart may differ by rounding."""
        if name == "leak":
            return LEAK_FLOAT32
        usual = float(self.replies["half leak bare"].get("change", 0.0))
        return max(LEAK_HALF, min(TIMES * usual, 10 * LEAK_HALF))

    def invariance(self) -> list[Row]:
        rows = []
        for name in self.layouts:
            what, answer = LAYOUTS[name][0], self.replies[name]
            if "failed" in answer:
                rows.append(invariance_row(what, "not tested", self._why(answer)))
                continue
            passes, text = self._passes(name, name), self.bound.errors_text(answer)
            text += f" ({self._taken()})" if passes else f"; {self._blamed(name)}"
            verdict = "equal" if passes else "differs"
            rows.append(invariance_row(what, verdict, text, answer["error"], self.bound.gradient))
        rows += [self._leak_row(name) for name in ("leak", "half leak") if name in self.replies]
        return [*rows, split_row(self.ranks, self.replies, self.bound)]

    def _leak_row(self, name: str) -> Row:
        what = "a document among changed neighbours"
        what += ", in the plan's number format" if name == "half leak" else ""
        answer = self.replies[name]
        if "failed" in answer:
            return invariance_row(what, "not tested", answer["failed"])
        change, passes = answer["change"], self._passes(name, name)
        text = f"{answer['documents']} documents, each keeps its loss to {change:.1g}"
        if not passes:
            text = (
                f"document {answer['document'] + 1} of {answer['documents']} changes its loss by "
                f"{change:.2g} when the others change; {self._blamed(name)}"
            )
        verdict = "equal" if passes else "differs"
        return invariance_row(what, verdict, text, change, self._leak_allowed(name))

    def _blamed(self, name: str) -> str:
        guilty = self.guilty.get(name, [])
        if guilty:
            return f"not so without {' or without '.join(guilty)}"
        return "no single technique is to blame: it stays so whichever is left out"

    def _why(self, answer: Reply) -> str:
        """Why there is no gradient to judge: without a reference there is none at all."""
        return str(self.replies["reference"].get("failed", answer["failed"]))

    def _taken(self) -> str:
        reference = self.replies["reference"]
        if "failed" in reference:
            return str(reference["failed"])
        return (
            f"{reference['examples']} examples, {reference['tokens']:,} tokens, "
            f"{reference['layers']} layers"
        )

    def verification(self) -> list[Row]:
        """The rows of techniques that require a gradient check."""
        rows = [self._rounding(t) for t in self.close if t.fidelity is Fidelity.ROUNDING]
        if self.precision is not None:
            rows.append(self._precision(self.precision))
        if self.optimizer is not None and self.optimizer.fidelity is Fidelity.ROUNDING:
            rows.append(self._moved(self.optimizer))
        if self.communication is not None:
            rows.append(communication_row(self.communication, self.ranks, self.replies, self.bound))
        return rows

    def _rounding(self, technique: Technique) -> Row:
        test = "gradient of one step against float64, with the plan's other techniques"
        if technique.slot is Slot.LAYOUT and self.ranks == 1:
            return verification_row(technique, test, "not tested", ONE_PROCESS)
        answers = {n: self.replies[n] for n in ("planned", "half") if n in self.replies}
        failed = next((a["failed"] for a in answers.values() if "failed" in a), None)
        if failed:
            return verification_row(technique, test, "not tested", self._why({"failed": failed}))
        bounds = {"planned": self.bound, "half": self.half_bound}
        wrong = [name for name in answers if not self._passes(name, name)]
        for name in wrong:
            guilty, answer = self.guilty[name], answers[name]
            if technique.name() in guilty or not guilty:
                text = f"{bounds[name].errors_text(answer)}; {self._blamed(name)}"
                return _judged(technique, test, "differs", text, answer, bounds[name])
        if wrong:
            text = f"the plan fails, but not by it: {self._blamed(wrong[0])}"
            return verification_row(technique, test, "undecided", text)
        text = f"in float32 the gradient is {short(answers['planned'])}"
        if "half" in answers:
            text += f", in the plan's number format {short(answers['half'])}"
        return _judged(technique, test, "equal", text, answers["planned"], self.bound)

    def _precision(self, technique: Technique) -> Row:
        test, answer = "gradient of one step against float64, alone", self.replies["half bare"]
        if "failed" in answer:
            return verification_row(technique, test, "not tested", self._why(answer))
        bound = bound_of(True, None)
        verdict = "equal" if bound.excess(answer) <= 1 else "differs"
        text = f"{bound.errors_text(answer)} ({self._taken()})"
        return _judged(technique, test, verdict, text, answer, bound)

    def _moved(self, technique: Technique) -> Row:
        test, answer = "the same gradients through both update rules", self.replies["update"]
        if "failed" in answer:
            return verification_row(technique, test, "not tested", answer["failed"])
        allowed = max(UPDATE, 4 * answer["floor"])
        verdict = "equal" if answer["error"] <= allowed else "differs"
        text = f"after {answer['steps']} steps the weights have moved {answer['error']:.2g} apart"
        return verification_row(technique, test, verdict, text, answer["error"], allowed)


def _judged(
    technique: Technique, test: str, verdict: str, text: str, answer: Reply, bound: Bound
) -> Row:
    return verification_row(technique, test, verdict, text, answer["error"], bound.gradient)
