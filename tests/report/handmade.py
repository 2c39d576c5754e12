"""Hand-made variants, whose ratios, losses and prices are known without measuring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hasten.core.plan import Plan
from hasten.core.slot import Slot
from hasten.core.technique import Claim, EffectCheck, Fidelity, Technique
from hasten.measure.ablation import Variant
from hasten.report.build import report_of
from hasten.report.schema import read_report

WEATHER = (1.0, 0.5, 1.6, 0.8, 1.2)  # a machine that is busy in some rounds
SPEED, MEMORY = "tokens_per_second", "peak_memory_bytes"


@dataclass(frozen=True)
class Fake(Technique):
    """A technique that only promises."""

    slot = Slot.COLLATE
    promises: tuple[tuple[str, float], ...] = ()

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.ROUNDING

    @property
    def claims(self) -> tuple[Claim, ...]:
        return tuple(Claim(metric, ratio, "an article") for metric, ratio in self.promises)

    def apply(self, setup: Any) -> None:
        raise NotImplementedError

    def check_effect(self, session: Any) -> EffectCheck:
        raise NotImplementedError


@dataclass(frozen=True)
class Other(Fake):
    """Another one, in a slot of its own."""

    slot = Slot.LOSS


def variant(
    *techniques: Technique,
    speed: float = 1.0,
    noise: Sequence[float] = (1.01, 0.99, 1.0, 1.005, 0.995),
    loss: float = 2.0,
    memory: float = 4e9,
    **changes: Any,
) -> Variant:
    """A variant that has the weather of the others and a noise of its own."""
    settings: dict[str, Any] = {
        "name": "+".join(t.name() for t in techniques) or "baseline",
        "plan": Plan(techniques),
        "rounds": [1000 * speed * w * n for w, n in zip(WEATHER, noise, strict=True)],
        "steps": [
            {"step_seconds": s, "positions": 100, "tokens": 80} for s in (0.1, 0.2, 0.3, 0.4, 0.9)
        ],
        "losses": [(80, 3.0), (160, loss)],
        "eval_data": [(0, 4.0), (160, loss)],
        "peak_memory_bytes": int(memory),
        "effective": [
            {"technique": t.name(), "effective": True, "evidence": "seen"} for t in techniques
        ],
    }
    return Variant(**settings | changes)


def findings(*variants: Variant, **more: Any) -> dict[str, Any]:
    return report_of(
        variants,
        title="t",
        command="c",
        hardware={},
        versions={},
        recipe={"seed": 7},
        **more,
    )


def report(*variants: Variant, **more: Any) -> dict[str, Any]:
    """The findings as the page reads them, so that every test also checks the schema."""
    return read_report(findings(*variants, **more))


def baseline(**changes: Any) -> Variant:
    return variant(noise=(1, 1, 1, 1, 1), **changes)


def verdict_of(*variants: Variant) -> str:
    word: str = report(*variants)["variants"][-1]["verdict"]
    return word
