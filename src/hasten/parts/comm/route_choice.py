"""Whether another route for gradients pays on this link: foretold, then tried, then kept or not.

    steps 1-2   as they are: DDP forms its buckets anew
    steps 3-6   as they are, with a clock: step time, exposed traffic, the window it can hide in
    then        rank 0 foretells each route's exposed time, max(0, wire + codec - window); the
                gentlest of those near the best is tried if it saves more than 5 % of a step
    12 steps    tried in turns, A B B A: whatever slows the machine slows both
    then        kept if the median step was more than 5 % shorter, else never asked again

All ranks do the same in the same step. What is decided, rank 0 decides by the clocks of all and
broadcasts: a step takes as long as it does on the slowest rank, and what the others wait for that
one is not the wire's. The decision is part of the state, so that a resumed run doesn't try again.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from hasten.parts.comm.collective_plan import Route, codec_model, codec_speed
from hasten.parts.comm.hierarchical import DENSE_STEPS, RoutedBuckets
from hasten.parts.comm.link_model import WORTH, CodecModel, Cost, break_even, flat, hierarchical
from hasten.parts.comm.topology import Topology

CODECS = ("bf16", "int8", "int4")  # from the gentlest
CLOCKED = 4  # steps
TURNS = (False, True, True, False) * 3  # whether the candidate takes the step
WARM = DENSE_STEPS


@dataclass(frozen=True)
class StepPace:
    """Seconds of a step with plain gradients: medians of the clocked steps of one rank."""

    step: float
    exposed: float
    window: float  # from the first bucket to the last


class WireChoice:
    """Chooses the route of a :class:`RoutedBuckets`; call ``step`` after each update."""

    def __init__(self, buckets: RoutedBuckets, codecs: Sequence[str] = CODECS) -> None:
        self.buckets = buckets
        self.reason = "not decided yet"
        self.decided = False
        self._codecs = tuple(codecs)
        self._steps = 0
        self._since = 0.0
        self._backwards = 0
        self._seconds: list[float] = []
        self._exposed: list[float] = []
        self._windows: list[float] = []
        self._trial: dict[bool, list[float]] = {False: [], True: []}
        self._candidate = Route()

    def attach(self, module: nn.Module) -> None:
        self.buckets.attach(module)

    @property
    def steps(self) -> int:
        return self.buckets.steps

    @property
    def sent_bytes(self) -> int:
        return self.buckets.sent_bytes

    @property
    def acts(self) -> bool:
        return self.decided

    def words(self) -> str:
        return self.reason

    def settle(self) -> None:
        """Ranks never differ, so nothing is to be done."""

    def step(self) -> None:
        """The weights have moved; every rank calls it."""
        self.buckets.step()
        if self.decided:
            return
        now = time.perf_counter()
        # A step that was skipped between two calls would count as part of the next.
        spent = now - self._since if self.buckets.steps == self._backwards + 1 else None
        self._since, self._backwards = now, self.buckets.steps
        self._steps += 1
        tried = self._steps - WARM - CLOCKED  # 1 after the first step of the trial
        if self._steps <= WARM or spent is None:
            pass
        elif tried <= 0:
            self._seconds.append(spent)
            self._exposed.append(self.buckets.last.exposed)
            self._windows.append(self.buckets.last.window)
        else:
            self._trial[TURNS[tried - 1]].append(spent)
        if tried == 0:
            self._foretell()
        elif tried == len(TURNS):
            self._judge()
        if not self.decided and 0 <= tried < len(TURNS):
            self.buckets.route = self._candidate if TURNS[tried] else Route()
        self._since = time.perf_counter()  # deciding isn't part of a step

    def _foretell(self) -> None:
        topology = self.buckets.collective.topology
        paces = of_all_ranks(self._pace())
        choice: list[Any] = [Route(), ""]
        if dist.get_rank() == 0:
            choice = list(self._best(topology, over_ranks(paces)))
        dist.broadcast_object_list(choice, 0)
        self._candidate, self.reason = choice[0], str(choice[1])
        self.decided = self._candidate == Route()

    def _pace(self) -> StepPace | None:
        """This rank's; None where no traffic could be timed, as on a GPU."""
        if not self._seconds or not any(self._exposed):
            return None
        median = statistics.median
        return StepPace(median(self._seconds), median(self._exposed), median(self._windows))

    def _best(self, topology: Topology, pace: StepPace | None) -> tuple[Route, str]:
        """The route to be tried and why, or the flat one."""
        if len(topology.hosts) == 1:
            return Route(), "nothing chosen: all ranks are on one host"
        if not topology.uniform:
            return Route(), "nothing chosen: hosts have different numbers of ranks"
        if pace is None:
            return Route(), "nothing chosen: the traffic of no step could be timed"
        step, exposed, window = pace.step, pace.exposed, pace.window
        numbers = self.buckets.last.numbers
        found = candidates(topology, numbers, self._codecs)
        # Only what the link explains can be saved; the rest of what is exposed stays.
        plain = flat(topology, numbers)
        saved = {r: plain.exposed(window) - cost.exposed(window) for r, cost in found.items()}
        gains = {r: min(exposed, seconds) / step for r, seconds in saved.items()}
        if not gains:
            return Route(), "nothing chosen: with one rank per host hierarchy is the plain ring"
        best = max(gains.values())
        share = f"{exposed / step:.0%} of a step is exposed traffic"
        if best <= WORTH:
            cheap = min(found.values(), key=lambda cost: cost.seconds)
            limit = break_even(plain, cheap) * 8 / 1e9
            return Route(), (
                f"nothing chosen: {share}; {_short(cheap)} would save {max(best, 0.0):.1%} of a "
                f"step, less than {WORTH:.0%}; it is shorter below {limit:.3g} Gbit/s per host"
            )
        route = next(r for r, value in gains.items() if value > best - WORTH)  # the gentlest
        return route, f"{share}; {route} is foretold to save {gains[route]:.0%}"

    def _judge(self) -> None:
        answer: list[Any] = [False, ""]
        trials = of_all_ranks(self._trial)
        if dist.get_rank() == 0:
            saved = share_saved(trials)
            kept = saved > WORTH
            verdict = "kept" if kept else f"given up, because less than {WORTH:.0%} came of it"
            answer = [
                kept,
                f"{self.reason}; tried in turns over {len(TURNS)} steps it saved {saved:.0%} of a "
                f"step: {verdict}",
            ]
        dist.broadcast_object_list(answer, 0)
        self.buckets.route = self._candidate if answer[0] else Route()
        if not answer[0]:
            self.buckets.forget()
        self.reason, self.decided = str(answer[1]), True

    def state_dict(self) -> dict[str, Any]:
        """The decision, and what ranks owe; every rank calls it."""
        return {
            "decided": self.decided,
            "reason": self.reason,
            "route": asdict(self.buckets.route) if self.decided else None,
            "buckets": self.buckets.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.buckets.load_state_dict(state["buckets"])
        self.decided = bool(state["decided"])
        if self.decided:  # a trial that was interrupted begins anew
            self.buckets.route, self.reason = Route(**state["route"]), state["reason"]


def of_all_ranks(mine: Any) -> list[Any]:
    """What every rank has noted; all call it."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def over_ranks(paces: Sequence[StepPace | None]) -> StepPace | None:
    """The step of the slowest rank, and the traffic of the one that waited least for others."""
    known = [pace for pace in paces if pace is not None]
    if len(known) < len(paces):
        return None
    last = min(known, key=lambda pace: pace.exposed)
    return StepPace(max(pace.step for pace in known), last.exposed, last.window)


def share_saved(trials: Sequence[Mapping[bool, Sequence[float]]]) -> float:
    """What the candidate's steps (True) take less than the plain ones, of the ranks' trials.

    A step counts as long as the rank took that took longest; 0 where all steps were skipped.
    """
    plain, other = (
        [max(ranks) for ranks in zip(*(t[kind] for t in trials), strict=True)]
        for kind in (False, True)
    )
    if not plain or not other:
        return 0.0
    saved: float = 1 - statistics.median(other) / statistics.median(plain)
    return saved


def _short(cost: Cost) -> str:
    return cost.way if cost.codec == "none" else f"{cost.codec} between hosts"


def candidates(topology: Topology, numbers: int, codecs: Sequence[str]) -> dict[Route, Cost]:
    """Routes that differ from the plain one and what they would take, from the gentlest on."""
    found: dict[Route, Cost] = {}
    if topology.ranks > len(topology.hosts):
        found[Route("hierarchical")] = hierarchical(topology, numbers)
    for name in codecs:
        model: CodecModel = codec_model(name, codec_speed(name))
        found[Route("hierarchical", between=name)] = hierarchical(topology, numbers, model)
    return found
