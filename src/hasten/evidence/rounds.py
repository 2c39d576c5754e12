"""From an experiment's record to its arms: which rounds count, which are missing, what each showed.

A **sitting** is a set of arms in fresh processes that take turns. A round is known by its sitting
and its number, and is complete when every arm of the sitting that hadn't failed has had its turn.
It counts unless others took more of the machine than the design allows. Where too few were calm,
those with the least foreign load make up the number: chosen by the load, never by the speed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence, Set
from typing import Any

from hasten.core.plan import Plan
from hasten.evidence.ablation import Arm, Design, Kind
from hasten.evidence.record import Event

Key = tuple[int, int]  # sitting, round


class Rounds:
    """What a record says of the rounds.

    Args:
        events: of one record.
        base: the baseline's name.
        design: as it was asked for; ``rounds`` events change the number of rounds.
    """

    def __init__(self, events: Sequence[Event], base: str, design: Design) -> None:
        self.events, self.base = events, base
        told = [e["rounds"] for e in events if e["event"] == "rounds"]
        self.wanted: int = told[-1] if told else design.rounds
        self.most = self.wanted * (1 if design.foreign_load is None else 2)
        self.limit = math.inf if design.foreign_load is None else design.foreign_load
        self.failed = {e["arm"]: e["why"] for e in events if e["event"] == "failed"}
        self.members = {e["sitting"]: e["members"] for e in events if e["event"] == "sitting"}
        self.ended = {e["sitting"] for e in events if e["event"] == "sat"}
        self.turns: dict[Key, dict[str, Event]] = {}
        for e in events:
            if e["event"] == "turn":
                self.turns.setdefault((e["sitting"], e["round"]), {})[e["arm"]] = e
        warm: dict[tuple[int, str], int] = {}
        for e in events:
            if e["event"] == "warmup":
                at = (e["sitting"], e["arm"])
                warm[at] = warm.get(at, 0) + len(e["steps"])
        self.warmup = max(warm.values(), default=0)  # steps before the first round of a sitting
        self._dropped = {n for e in events if e["event"] == "dropped" for n in e["arms"]}
        self._failed_in = {e["arm"]: e["sitting"] for e in events if e["event"] == "failed"}

    def load(self, key: Key) -> float:
        """The heaviest foreign load of a round's turns."""
        return max(float(turn["load"]) for turn in self.turns[key].values())

    def complete(self, arm: str) -> list[Key]:
        """An arm's rounds in which nobody's turn is missing, in their order."""
        return [key for key, turns in self.turns.items() if arm in turns and self._whole(key)]

    def counting(self, arm: str) -> list[Key]:
        """The rounds from which an arm's numbers are taken."""
        keys = self.complete(arm)
        if arm == self.base:  # its rounds in other groups stand beside those groups' arms
            first = self._companion()
            keys = [key for key in keys if first is None or first in self.members[key[0]]]
        calm = [key for key in keys if self.load(key) <= self.limit]
        rest = sorted((k for k in keys if self.load(k) > self.limit), key=self.load)
        return sorted((calm + rest)[: self.wanted])

    def missing(self, arm: str, share: float = 1.0) -> int:
        """Rounds that an arm still needs for a share of those wanted."""
        if arm in self.failed:
            return 0
        keys = self.complete(arm)
        calm = sum(self.load(key) <= self.limit for key in keys)
        return max(0, min(math.ceil(self.wanted * share) - calm, self.most - len(keys)))

    def redone(self) -> int:
        """Rounds beyond those wanted, done because others had disturbed as many."""
        names = {name for members in self.members.values() for name in members} - {self.base}
        return max(0, *(len(self.complete(n)) - self.wanted for n in names or {self.base}), 0)

    def sat(self, arm: str) -> int:
        """Sittings that an arm has taken part in to their end."""
        return sum(arm in self.members[sitting] for sitting in self.ended)

    def _whole(self, key: Key) -> bool:
        turns = self.turns[key]
        return all(
            name in turns or name in self._dropped or self._failed_in.get(name, math.inf) <= key[0]
            for name in self.members[key[0]]
        )

    def _companion(self) -> str | None:
        """The arm in whose sittings the baseline's own rounds are counted: the first measured."""
        names = [n for members in self.members.values() for n in members if n != self.base]
        return next((n for n in names if self.complete(n)), None)


def arms_of(
    events: Sequence[Event], plans: Mapping[str, Plan], kinds: Mapping[str, Kind], design: Design
) -> list[Arm]:
    """The arms as the record shows them, in the order of ``plans``; the first is the baseline."""
    base = next(iter(plans))
    found = Rounds(events, base, design)
    dropped = {name for e in events if e["event"] == "dropped" for name in e["arms"]}
    names = [name for name in plans if name not in dropped]
    return [_arm(Arm(n, plans[n], kind=kinds.get(n, "other")), found) for n in names]


def _arm(arm: Arm, found: Rounds) -> Arm:
    mine = [e for e in found.events if e.get("arm") == arm.name]
    keys = found.counting(arm.name)
    turns = [found.turns[key][arm.name] for key in keys]
    arm.rounds = [rate(turn) for turn in turns]
    others = [found.turns[key].get(found.base) for key in keys]
    known = [rate(turn) for turn in others if turn is not None]
    arm.beside = known if len(known) == len(keys) else []
    arm.steps = [step for turn in turns for step in turn["steps"]]
    arm.foreign_load = [turn["load"] for turn in turns]
    order = sorted({key[0] for key in keys})  # a sitting is a fresh build
    arm.builds = [order.index(key[0]) for key in keys]
    arm.failed = found.failed.get(arm.name)
    _curves(arm, mine, found.ended)
    arm.warmup = _warmup([e for e in mine if e["event"] == "warmup"])
    for e in mine:
        if e["event"] == "start" and not arm.startup_seconds:
            arm.startup_seconds = e["startup_seconds"]
        elif e["event"] == "finish":
            arm.acted, arm.samples, arm.ledger = e["acted"], e["samples"], e.get("ledger")
        elif e["event"] == "unfinished":
            arm.unfinished = e["why"]
    return arm


def _warmup(pieces: Sequence[Event]) -> dict[str, float | None]:
    """Of the arm's first sitting; it comes in pieces where other arms needed more steps."""
    first = [e for e in pieces if e["sitting"] == pieces[0]["sitting"]]
    if not first:
        return {}
    return {
        "steps": sum(len(e["steps"]) for e in first),
        "seconds": sum(e["seconds"] for e in first),
        "compile_seconds": sum(e["compile_seconds"] for e in first),
    }


def _curves(arm: Arm, mine: Sequence[Event], ended: Set[int]) -> None:
    """Losses of one sitting: in each the arm began again from its seed.

    It is the one that trained longest, of those that came to their end, with a last look at the
    held-out loss: one that was killed stopped at another point in every arm.
    """
    sittings: dict[int, list[Event]] = {}
    for e in mine:
        if "sitting" in e:
            sittings.setdefault(e["sitting"], []).append(e)
    if not sittings:
        return
    whole = {number: events for number, events in sittings.items() if number in ended}
    longest = max((whole or sittings).values(), key=_tokens)  # the first of equals
    before = 0
    for e in longest:
        for step in e.get("steps", ()):
            before += step["tokens"]
            arm.losses.append((before, step["loss"]))
        if e["event"] == "evaluate" and e["held_out_loss"] is not None:
            arm.held_out.append((e["tokens"], e["held_out_loss"]))
    peaks = [step["peak_memory_bytes"] for e in mine for step in e.get("steps", ())]
    arm.peak_memory_bytes = max(peaks, default=None)


def _tokens(events: Sequence[Event]) -> int:
    return sum(step["tokens"] for e in events for step in e.get("steps", ()))


def rate(turn: Mapping[str, Any]) -> float:
    """A turn's value: the median of its steps' tokens per second."""
    return float(statistics.median(step["tokens_per_second"] for step in turn["steps"]))
