"""The loop of every search for a faster plan: propose, measure in turns, decide.

A proposer has the rules of one search. The first variant of a proposal is the reference
of the others, and all of them take turns on the same examples:

- `hasten.measure.choose`: ``plan: auto``, one change each, then several together
- `hasten.report.speedup.Greedy`: one technique more at a time, for ``hasten speedup
  --design greedy`` and `hasten.gradual_optimize`
- `hasten.tune.study`: points that a sampler proposes, for ``hasten tune``
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from hasten.measure.ablation import Design, Variant

Subject = TypeVar("Subject")  # a plan, or a point of a space of plans


@dataclass(frozen=True)
class Proposal(Generic[Subject]):
    """Variants to compare next, by name; the first is the reference of the others."""

    variants: Mapping[str, Subject]
    design: Design


class SearchRules(Protocol[Subject]):
    """The rules of one search."""

    def propose(self) -> Proposal[Subject] | None:
        """The next comparison; None ends the search."""

    def decide(self, variants: Sequence[Variant]) -> None:
        """Receives the results of the last proposal."""


def search(
    rules: SearchRules[Subject], measure: Callable[[Proposal[Subject]], Sequence[Variant]]
) -> None:
    """Runs a search to its end; its rules have the result."""
    while (proposal := rules.propose()) is not None:
        rules.decide(measure(proposal))
