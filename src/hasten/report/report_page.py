"""The report as one page that stands alone: rendered from page/*.jinja, and kept below 500 kB.

Its texts come from models and other people's files, so none is trusted: the templates escape them
all, `visible` has shown what hides, and the page forbids itself scripts and network. A report may
hold texts and lists of any length; where the page would grow too heavy it is rendered again with
shorter ones, and says so. report.json always has everything.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from hasten.formatting import measure, outline, span, words
from hasten.report.charts_svg import thin
from hasten.report.figures import drawings
from hasten.report.report_gains import (
    amount,
    any_known,
    compared,
    head,
    ladder_of,
    result_of,
    rungs,
    slower_than_above,
    unmeasured,
    unpaid,
)
from hasten.report.report_rows import fastest, has_cost, machine, priced, proofs, steadiness, terms

LARGEST = 490_000  # bytes of the page
_SAMPLES, _SAMPLE = 6, 2_000  # how many samples the page shows, how many characters of each
_EMBEDDED = 150_000  # bytes of JSON in it


@dataclass(frozen=True)
class Limits:
    """How much of a report the page shows: characters of a text, entries of a list, the recipe."""

    text: int
    entries: int
    recipe: int


_LIMITS = (
    Limits(4_000, 400, 60_000),
    Limits(1_000, 60, 16_000),
    Limits(240, 40, 8_000),
    Limits(60, 16, 2_000),
    Limits(24, 5, 500),
)


def page_of(plain: Mapping[str, Any], read: dict[str, Any]) -> str:
    """The page of a report: as JSON, and as `read_report` gives it."""
    page = ""
    for limits in _LIMITS:
        page = _rendered(plain, _shortened(read, limits), limits)
        if len(page.encode()) <= LARGEST:
            break
    return page


def _rendered(plain: Mapping[str, Any], read: dict[str, Any], limits: Limits) -> str:
    data, complete = _embedded(plain)
    arms = read["arms"]
    judged = compared(arms)
    return (
        _environment()
        .get_template("report.html.jinja")
        .render(
            report=read,
            base=arms[0],
            final=result_of(arms),
            machine=machine(read["hardware"]),
            drawings=drawings(read),
            ladder=bool(ladder_of(arms)),
            rungs=rungs(arms),
            slower=slower_than_above(arms),
            fastest=fastest(arms),
            proofs=proofs(arms),
            steady=steadiness(arms),
            step_terms=terms(arms, "step", "seconds"),
            memory_terms=terms(arms, "memory", "memory"),
            unpaid=unpaid(read),
            compared=len(judged),
            paid=sum(head(arm["verdict"]) != "failed" for arm in judged),  # if nothing is unpaid
            unmeasured=unmeasured(read),
            has_cost=has_cost(read["cost"]),
            recipe=_cut(outline(read["recipe"]) if read["recipe"] else "{}", limits.recipe),
            data=data,
            complete=complete,
        )
    )


@lru_cache(maxsize=1)
def _environment() -> Environment:
    found = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {"words": words, "span": span, "outline": outline, "amount": amount}
    found.filters |= {"head": head, "priced": priced, "any_known": any_known, "measure": measure}
    return found


def _shortened(read: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """The report with long texts and lists cut; `cut` says of what. Numbers stay as they are."""
    counts: list[str] = []
    arms = read["arms"]
    if len(arms) > limits.entries:  # the baseline and the result stay
        final = result_of(arms)
        kept = [arm for arm in arms[1:] if arm is not final][: limits.entries - 2]
        counts.append(f"{len(arms) - len(kept) - 2} arms aren't shown")
        arms = [arms[0], *kept, final]

    def cut(value: Any) -> Any:
        if isinstance(value, str):
            short = _cut(value, limits.text)
            if short != value and not counts:
                counts.append("long texts and lists end early")
            return short
        if isinstance(value, dict):
            items = list(value.items())[: max(limits.entries, 20)]  # a shape has up to 20 keys
            return {_cut(key, limits.text): cut(item) for key, item in items}
        if isinstance(value, list):
            numbers = bool(value) and not isinstance(value[0], str | dict)
            if not numbers and len(value) > limits.entries:
                counts.append("long texts and lists end early")
            return [cut(item) for item in (value if numbers else value[: limits.entries])]
        return value

    names = [arm["name"] for arm in arms]
    plain = read | {"arms": [], "cost": _of_arms(read["cost"], names)}
    samples = read["samples"][:_SAMPLES]
    plain["samples"] = [{k: _cut(text, _SAMPLE) for k, text in one.items()} for one in samples]
    short = {key: cut(value) for key, value in plain.items()}
    short["more_samples"] = len(read["samples"]) - len(samples)
    short["arms"] = [{key: cut(value) for key, value in arm.items()} for arm in arms]
    kept_as_it_is = {key: read[key] for key in ("created", "created_words")}
    return short | kept_as_it_is | {"cut": "; ".join(dict.fromkeys(counts))}


def _of_arms(cost: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """The prices of those arms alone, so that no list of prices ends before its arm."""

    def some(prices: Mapping[str, Any] | None) -> dict[str, Any] | None:
        if prices is None:
            return None
        return {name: prices[name] for name in names if name in prices}

    key = "kwh_per_million_tokens"
    energy = {**cost["energy"], key: some(cost["energy"][key])}
    return {**cost, "per_million_tokens": some(cost["per_million_tokens"]), "energy": energy}


def _cut(text: str, most: int) -> str:
    return (
        text
        if len(text) <= most
        else f"{text[:most]}… ({len(text) - most} more characters in report.json)"
    )


def _embedded(plain: Mapping[str, Any]) -> tuple[str, bool]:
    """The report as JSON that can't end its script element, and whether nothing was left out.

    Where the whole would make the page too heavy, curves become means; report.json keeps all.
    """
    for most in (None, 200, 50):
        arms = plain["arms"] if most is None else [_thinned(arm, most) for arm in plain["arms"]]
        text = _inert(json.dumps({**plain, "arms": arms}))
        if len(text) <= _EMBEDDED:
            return text, most is None
    return _inert(json.dumps({"schema": 1, "left_out": "too large here: see report.json"})), False


def _inert(text: str) -> str:
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _thinned(arm: Mapping[str, Any], most: int) -> dict[str, Any]:
    curves = {key: thin(arm[key], most) for key in ("loss_curve", "held_out_curve") if arm.get(key)}
    return {**arm, **curves}
