"""The report's drawings by name: which arms each one shows, in which colours, with which words.

Drawings with a row per arm exist twice, for wide and for narrow screens. Which of the drawings of
speed there are depends on the arms: a waterfall where they are a ladder, pairs of bars (alone, and
beside all the others) where switches were measured apart, plain bars for all other arms.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from hasten.formatting import NOT_MEASURED, UNITS, span, words
from hasten.measure.statistics import Interval
from hasten.report.gains import (
    Arm,
    SwitchGain,
    against,
    any_known,
    head,
    ladder_of,
    result_of,
    said,
    switches,
    word_of,
)
from hasten.report.svg import (
    Bar,
    Curve,
    Stack,
    Strip,
    bar_chart,
    line_chart,
    stack_chart,
    strip_chart,
)

WIDTHS = (800, 324)  # pixels of a drawing for wide and for narrow screens
_CURVES = (390, 250)  # pixels, width and height
_HUES = {"held": "gain", "fell short": "gain", "harmed": "harm"}
Drawings = dict[str, list[str]]
Draw = Callable[[int], str]  # a drawing by its width


def drawings(report: Mapping[str, Any]) -> Drawings:
    """Every drawing that this report has something to show for."""
    arms = report["arms"]
    draws: dict[str, Draw] = {
        **_speeds(arms, report["noise"]["floor"]),
        **_ledgers(arms),
        "memory": _memory(arms),
        "rounds": _rounds(arms),
        **_loads(arms),
    }
    found = {name: [draw(width) for width in WIDTHS] for name, draw in draws.items()}
    shown = [arm for arm in arms if arm["kind"] != "again"]
    ordered = sorted(shown, key=lambda a: (a is not arms[0], a is not result_of(arms)))
    for name, key in (("held_out", "held_out_curve"), ("training", "loss_curve")):
        if any(arm[key] for arm in arms):
            title = f"{'Held-out' if name == 'held_out' else 'Training'} loss"
            curves = [Curve(arm["name"], arm[key], _tone(arm, arms)) for arm in ordered]
            found[name] = [line_chart(title, curves, _CURVES, UNITS["tokens"])]
    return found


def _speeds(arms: Sequence[Arm], floor: float | None) -> dict[str, Draw]:
    """The waterfall, the pairs, and bars for the arms that neither of them shows."""
    ladder, apart = ladder_of(arms), switches(arms)
    pairs = _pairs(apart, floor) if any(switch.beside for switch in apart) else []
    shown = {arm["name"] for arm in ladder}
    if pairs:
        shown |= {switch.alone["name"] for switch in apart if switch.alone}
        shown |= {arm["name"] for arm in arms if arm["kind"] == "left out"}
    rest = [arm for arm in arms if arm["name"] not in shown and arm["kind"] != "again"]
    found: dict[str, Draw] = {}
    if ladder:
        steps = _waterfall(ladder, floor)
        found["waterfall"] = _bars("Speed against the baseline, one more at a time", steps, floor)
    if pairs:
        found["pairs"] = _bars("What each switch gains, alone and with the others", pairs, floor)
    if any(arm is not arms[0] for arm in rest) or not found:
        found["ratio"] = _bars("Speed against the baseline", [_speed(arm) for arm in rest], floor)
    return found


def _bars(title: str, bars: Sequence[Bar], floor: float | None) -> Draw:
    return lambda width: bar_chart(title, bars, width, 1, lambda v: f"{v:.3g}×", floor)


def _speed(arm: Arm) -> Bar:
    tone = _HUES.get(head(arm["verdict"]), "other")
    ratio = arm["ratio"]
    text = span(ratio, "times")
    return Bar(arm["name"], text, ratio["median"], ratio["low"], ratio["high"], tone)


def _waterfall(ladder: Sequence[Arm], floor: float | None) -> list[Bar]:
    """Each rung's bar begins where the last known one ended; its whiskers are its own interval."""
    bars, height = [_speed(ladder[0])], ladder[0]["ratio"]["median"]
    for below, arm in pairwise(ladder):
        found, ratio = _speed(arm), against(below, arm, ladder[0])
        tone = _hue(ratio, floor) if found.tone != "harm" else "harm"
        bars.append(replace(found, tone=tone, start=height))
        height = found.value if found.value is not None else height
    return bars


def _pairs(apart: Sequence[SwitchGain], floor: float | None) -> list[Bar]:
    """Two rows per technique: a full bar for it alone, a hollow one beside all the others."""
    bars = []
    for switch in apart:
        if switch.alone:
            alone = _speed(switch.alone)
            bars.append(replace(alone, label=switch.technique))
        label = "beside the others" if switch.alone else switch.technique
        ratio = switch.beside
        found = ratio.summary() if ratio else dict.fromkeys(("median", "low", "high"))
        ends = found["median"], found["low"], found["high"]
        bars.append(Bar(f"↳ {label}", said(ratio), *ends, f"{_hue(ratio, floor)} hollow"))
    return bars


def _hue(ratio: Interval | None, floor: float | None) -> str:
    return "other" if ratio is None else _HUES.get(word_of(ratio, floor), "other")


def _memory(arms: Sequence[Arm]) -> Draw:
    unit, sign = _byte_unit([arm["peak_memory_bytes"] for arm in arms])
    bars = []
    for arm in (arm for arm in arms if arm["kind"] != "again"):
        used = arm["peak_memory_bytes"]
        value = None if used is None else used / unit
        bars.append(Bar(arm["name"], _used(arm, arms[0]), value, tone=_tone(arm, arms)))
    return lambda width: bar_chart("Peak memory", bars, width, 0, lambda v: f"{v:g} {sign}")


def _byte_unit(values: Sequence[float | None]) -> tuple[float, str]:
    return (1e9, "GB") if max((v or 0 for v in values), default=0) >= 1e9 else (1e6, "MB")


def _rounds(arms: Sequence[Arm]) -> Draw:
    strips = [Strip(a["name"], _reach(a["rounds"]), a["rounds"], _tone(a, arms)) for a in arms]
    return lambda width: strip_chart("Speed in each round", strips, width)


def _loads(arms: Sequence[Arm]) -> dict[str, Draw]:
    """What others took of the machine in each round, for the arms that say so."""
    strips = []
    for arm in (arm for arm in arms if any(v is not None for v in arm["foreign_load"])):
        known = [value for value in arm["foreign_load"] if value is not None]
        text = f"most {words(max(known), 'percent')}"
        strips.append(Strip(arm["name"], text, known, _tone(arm, arms)))
    title = "Processor time used by others in each round"
    return {"load": lambda width: strip_chart(title, strips, width, True)} if strips else {}


def _ledgers(arms: Sequence[Arm]) -> dict[str, Draw]:
    """The stacks of a step's time and of memory, before and after."""
    ends = [arms[0]] if len(arms) == 1 else [arms[0], result_of(arms)]
    found: dict[str, Draw] = {}
    for name, part, title in (
        ("step_stack", "step", "Where a step's time goes"),
        ("memory_stack", "memory", "What memory holds"),
    ):
        if any(any_known(arm["ledger"][part]) for arm in ends):
            found[name] = _stacks(title, ends, part)
    return found


def _stacks(title: str, arms: Sequence[Arm], part: str) -> Draw:
    """The parts of some arms in the unit that suits the largest."""
    values = [arm["ledger"][part].values() for arm in arms]
    sums = [sum(value for value in some if value is not None) for some in values]
    unit, sign = _byte_unit(sums) if part == "memory" else _second_unit(sums)
    stacks = []
    for arm, whole in zip(arms, sums, strict=True):
        terms = arm["ledger"][part].items()
        parts = {name: None if value is None else value / unit for name, value in terms}
        said = words(whole, "memory" if part == "memory" else "seconds")
        stacks.append(Stack(arm["name"], said if any_known(parts) else NOT_MEASURED, parts))
    return lambda width: stack_chart(title, stacks, width, lambda v: f"{v:.3g} {sign}")


def _second_unit(values: Sequence[float]) -> tuple[float, str]:
    return (1, "s") if max(values, default=0) >= 1 else (1e-3, "ms")


def _tone(arm: Arm, arms: Sequence[Arm]) -> str:
    return "base" if arm is arms[0] else "final" if arm is result_of(arms) else "other"


def _used(arm: Arm, base: Arm) -> str:
    """An arm's peak memory with its change from the baseline."""
    used, before = arm["peak_memory_bytes"], base["peak_memory_bytes"]
    known = arm is not base and used is not None and before
    return words(used, "memory") + (f" ({words(used / before - 1, 'change')})" if known else "")


def _reach(rounds: Sequence[float | None]) -> str:
    """How far an arm's rounds lie from their median."""
    known = [value for value in rounds if value]
    middle = statistics.median(known) if known else 0
    if not middle:
        return NOT_MEASURED
    return " to ".join(words(end / middle - 1, "change") for end in (min(known), max(known)))
