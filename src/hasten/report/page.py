"""The report: one measured job as report.json, as a page that stands alone, and as a small table.

The input is plain data, described key by key in docs/report-schema.md.

1. schema.py makes it JSON and checks it against its shapes.
2. gains.py derives what several arms say together, formatting.py says numbers, svg.py draws them.
3. The page is rendered from report.html.jinja and page/*.jinja, the table as Markdown.
4. Both files are rendered before either is written, and each appears by a rename, so that no
   reader ever sees half a report.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from hasten.core.plan import name_of
from hasten.data.file_lock import replace_file
from hasten.errors import InputError
from hasten.formatting import measure, outline, span, words
from hasten.recipe.write_back import plain_entry
from hasten.report.gains import (
    GUILTY,
    amount,
    any_known,
    arms_that_hurt,
    compared,
    has_cost,
    ladder_of,
    lead_of,
    load_of_others,
    machine,
    more_rounds,
    on_the_whole,
    priced,
    proofs,
    result_of,
    steadiness,
    table_of,
    terms,
    unmeasured,
    unpaid,
)
from hasten.report.markup import LONGEST, cell, markdown_table
from hasten.report.schema import SCHEMA, as_json, read_report
from hasten.report.svg import drawings, thin
from hasten.report.verdicts import verdict_word

# The report as one page that stands alone: rendered from page/*.jinja, and kept below 500 kB.
#
# Its texts come from models and other people's files, so none is trusted: the templates escape them
# all, `visible` has shown what hides, and the page forbids itself scripts and network. A report may
# hold texts and lists of any length; where the page would grow too heavy it is rendered again with
# shorter ones, and says so. report.json always has everything.

LARGEST = 490_000  # bytes of the page
_SAMPLES, _SAMPLE = 6, 2_000  # how many samples the page shows, how many characters of each
_EMBEDDED = 150_000  # bytes of JSON in it


@dataclass(frozen=True)
class PageLimits:
    """How much of a report the page shows: characters of a text, entries of a list, the recipe."""

    text: int
    entries: int
    recipe: int


_LIMITS = (
    PageLimits(4_000, 400, 60_000),
    PageLimits(1_000, 60, 16_000),
    PageLimits(240, 40, 8_000),
    PageLimits(60, 16, 2_000),
    PageLimits(24, 5, 500),
)


def page_of(plain: Mapping[str, Any], read: dict[str, Any]) -> str:
    """The page of a report: as JSON, and as `read_report` gives it."""
    page = ""
    for limits in _LIMITS:
        page = _rendered(plain, _shortened(read, limits), limits)
        if len(page.encode()) <= LARGEST:
            break
    return page


def _rendered(plain: Mapping[str, Any], read: dict[str, Any], limits: PageLimits) -> str:
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
            table=table_of(read),
            hurt=arms_that_hurt(arms),
            lead=lead_of(read),
            lead_plan=_plan_lines(lead_of(read), read),
            lead_word=on_the_whole(lead_of(read), read),
            proofs=proofs(arms),
            steady=steadiness(arms),
            step_terms=terms(arms, "step", "seconds"),
            memory_terms=terms(arms, "memory", "memory"),
            unpaid=unpaid(read),
            compared=len(judged),
            paid=sum(
                verdict_word(arm["verdict"]) != "failed" for arm in judged
            ),  # if nothing is unpaid
            unmeasured=unmeasured(read),
            more_rounds=more_rounds,
            busy=load_of_others(arms),
            has_cost=has_cost(read["cost"]),
            recipe=_cut(outline(read["recipe"]) if read["recipe"] else "{}", limits.recipe),
            data=data,
            complete=complete,
        )
    )


def recipe_plan(arm: Mapping[str, Any], report: Mapping[str, Any]) -> list[Any] | None:
    """The arm's plan as a recipe has it; None where the report's recipe lists no such plan."""
    asked = report["recipe"].get("plan")
    names = {text.partition("(")[0] for text in arm["techniques"]}
    kept = [entry for entry in asked if name_of(entry) in names] if isinstance(asked, list) else []
    return kept if len(kept) == len(names) else None


def _plan_lines(arm: Mapping[str, Any], read: Mapping[str, Any]) -> str | None:
    """The arm's plan as lines of a recipe, without settings that are a technique's defaults."""
    entries = _plain_plan(arm, read)
    return outline({"plan": entries}) if entries else None


def _plain_plan(arm: Mapping[str, Any], read: Mapping[str, Any]) -> list[Any] | None:
    entries = recipe_plan(arm, read)
    with contextlib.suppress(InputError):  # techniques that this version doesn't know
        return entries and [plain_entry(entry) for entry in entries]
    return entries


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
    found.filters |= {
        "head": verdict_word,
        "priced": priced,
        "any_known": any_known,
        "measure": measure,
    }
    return found


def _shortened(read: dict[str, Any], limits: PageLimits) -> dict[str, Any]:
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
    return _inert(
        json.dumps({"schema": SCHEMA, "left_out": "too large here: see report.json"})
    ), False


def _inert(text: str) -> str:
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _thinned(arm: Mapping[str, Any], most: int) -> dict[str, Any]:
    curves = {key: thin(arm[key], most) for key in ("loss_curve", "held_out_curve") if arm.get(key)}
    return {**arm, **curves}


# The report in short, as Markdown that reads well in a terminal too.
#
# The table of arms; below it the reasons behind verdicts, the noise floor, what did not pay, where
# the guard objects, and the cost. The page has the rest.


def render_markdown(report: Mapping[str, Any]) -> str:
    """The arms as a Markdown table with notes below.

    A verdict with a reason stands in full below the table, and so does MFU. Raises InputError where
    `report` departs from docs/report-schema.md.
    """
    read = read_report(report)
    table = table_of(read)
    rows = [[cell(row[key]) for key in table.columns] for row in (table.columns, *table.rows)]
    notes = "".join(f"- {note}\n" for note in _notes(read))
    return f"{markdown_table(rows)}\n{notes}" if notes else markdown_table(rows)


def _notes(read: Mapping[str, Any]) -> Iterator[str]:
    arms: Sequence[Mapping[str, Any]] = read["arms"]
    rows = unpaid(read)
    listed = {row["name"] for row in rows}
    if (lead := lead_of(read)) is not result_of(arms):
        plan = f"({cell(', '.join(lead['techniques']))})"
        if entries := _plain_plan(lead, read):
            flow = yaml.safe_dump({"plan": entries}, default_flow_style=True, width=LONGEST)
            plan = f"`{' '.join(flow.strip()[1:-1].split())}`"
        ratio = span(lead["ratio"], "times")
        yield f"fastest at equal quality: {cell(lead['name'])}, {ratio}: {plan}"
    if (busy := load_of_others(arms)) is not None:
        yield busy
    for arm in arms:
        if arm["verdict"] != verdict_word(arm["verdict"]) and arm["name"] not in listed:
            yield f"{cell(arm['name'])}: {cell(arm['verdict'])}"
    for row in rows:
        word = "not shown to pay" if row["word"] == "undecided" else "did not pay"
        yield f"{word}: {cell(row['name'])}: {cell(row['why'])}"
    for arm in arms:
        if (more := more_rounds(arm, read["design"])) is not None:
            yield f"{cell(arm['name'])}: would be decided by {more}"
    if read["mfu"]:
        some = arms if len(arms) <= 4 else [arms[0], result_of(arms)]
        shares = ", ".join(f"{cell(a['name'])} {words(a['mfu'], 'percent')}" for a in some)
        yield f"{shares} {cell(read['mfu'])}"
    yield from _noise(read)
    for row in read["invariance"]:
        if verdict_word(row["verdict"]) in GUILTY:
            yield f"not invariant: {cell(row['what'])}: {cell(row['text'] or row['verdict'])}"
    yield from _money(read)


def _noise(read: Mapping[str, Any]) -> Iterator[str]:
    noise, together = read["noise"], read["interaction"]
    if noise["text"] or noise["ratio"]:
        copies = span(noise["ratio"], "times") if noise["ratio"] else "not measured"
        floor = (
            "" if noise["floor"] is None else f", noise floor {words(noise['floor'], 'percent')}"
        )
        yield cell(noise["text"] or f"two copies of the baseline: {copies}{floor}")
    if together["text"] or together["ratio"]:
        yield cell(
            together["text"] or f"all over the single ones: {span(together['ratio'], 'times')}"
        )


def _money(read: Mapping[str, Any]) -> Iterator[str]:
    cost = read["cost"]
    prices = cost["per_million_tokens"]
    if prices is not None:
        ends = [read["arms"][0], result_of(read["arms"])]
        said = " → ".join(words(priced(prices, arm), "price") for arm in ends[: len(read["arms"])])
        yield f"{cell(cost['currency'] or 'cost')} per million tokens: {said}"
    experiment = cost["experiment"]
    if experiment["money"] is not None:
        spent = words(experiment["money"], "price")
        yield f"the experiment cost {spent} {cell(cost['currency'] or '')}"
    if cost["payback"]["text"]:
        yield cell(cost["payback"]["text"])


def write_report(report: Mapping[str, Any], folder: Path) -> Path:
    """Write report.json and report.html into `folder` (made if missing); the path of the page.

    Raises InputError where `report` departs from docs/report-schema.md, with no file changed, or
    where the folder can't be written.
    """
    plain, read = as_json(report, "report"), read_report(report)
    page = page_of(plain, read)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / "report.json", json.dumps(plain) + "\n")
        replace_file(folder / "report.html", page)
    except OSError as error:
        why = error.strerror or error
        raise InputError(
            f"The report can't be written to {folder} ({why}): name another folder."
        ) from error
    return folder / "report.html"
