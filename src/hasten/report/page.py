"""The report: one measured job as report.json, as a standalone page, and as a table.

The input is plain data, described key by key in docs/reference/metrics.md.

1. The module schema.py makes it JSON and checks it against its shapes.
2. The module judgement.py derives the verdicts, formatting.py formats numbers, svg.py
   draws them.
3. The page is rendered from report.html.jinja and page/*.jinja, the table as Markdown.
4. Both files are rendered before either is written, and each appears by a rename. No
   reader can therefore open an incomplete report.
"""

from __future__ import annotations

import contextlib
import json
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from hasten.core.plan import name_of
from hasten.errors import InputError
from hasten.formatting import duration, flow, measure, number, number_text, outline, span
from hasten.machine.files import write_result
from hasten.measure.quality.requirements import FAILED
from hasten.recipe.write_back import plain_entry
from hasten.report.conclusions import (
    amount,
    any_known,
    compared,
    effect_words,
    lead_of,
    on_the_whole,
    reason_of,
    result_of,
    term_name,
    unpaid,
    variants_that_hurt,
)
from hasten.report.judgement import Row, cumulative_of, verdict_word
from hasten.report.markup import cell, markdown_table
from hasten.report.schema import SCHEMA, as_json, read_report
from hasten.report.svg import drawings, thin

# The report as one standalone page, rendered from page/*.jinja, of at most 500 kB.
#
# Its texts come from models and foreign files, so none is trusted. The templates escape all,
# `visible` shows hidden characters, and the page's policy forbids scripts and network. A report may
# have texts and lists of any length. If the page would be too large, it is rendered again with
# shorter ones and a note. report.json always has everything.

LARGEST = 490_000  # bytes of the page
_SAMPLES, _SAMPLE = 6, 2_000  # number of samples on the page, and characters of each
_EMBEDDED = 150_000  # bytes of JSON in it


@dataclass(frozen=True)
class PageLimits:
    """The shown part of a report: characters of a text, entries of a list, the recipe."""

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
    """Returns a report's page, from its JSON and from `read_report`'s result."""
    page = ""
    for limits in _LIMITS:
        page = _rendered(plain, _shortened(read, limits), limits)
        if len(page.encode()) <= LARGEST:
            break
    return page


def _rendered(plain: Mapping[str, Any], read: dict[str, Any], limits: PageLimits) -> str:
    data, complete = _embedded(plain)
    variants, lead = read["variants"], lead_of(read)
    judged, plan = compared(variants), _plain_plan(lead, read)
    return _template().render(
        report=read,
        base=variants[0],
        final=result_of(variants),
        machine=machine(read["hardware"]),
        drawings=drawings(read),
        cumulative=bool(cumulative_of(variants)),
        table=table_of(read),
        hurt=variants_that_hurt(variants),
        lead=lead,
        lead_plan=f"plan: {flow(plan)}" if plan else None,
        lead_word=on_the_whole(lead, read),
        proofs=proofs(variants),
        steady=steadiness(variants),
        step_terms=terms(variants, "step", "seconds"),
        memory_terms=terms(variants, "memory", "memory"),
        unpaid=unpaid(read),
        compared=len(judged),
        paid=sum(verdict_word(a["verdict"]) != "failed" for a in judged),  # if nothing is unpaid
        unmeasured=unmeasured(read),
        more_rounds=more_rounds,
        busy=load_of_others(variants),
        has_cost=has_cost(read["cost"]),
        recipe=_cut(outline(read["recipe"]) if read["recipe"] else "{}", limits.recipe),
        data=data,
        complete=complete,
    )


def recipe_plan(variant: Mapping[str, Any], report: Mapping[str, Any]) -> list[Any] | None:
    """Returns the variant's plan as in a recipe; None if the report's recipe has no such plan."""
    entries = report["recipe"].get("plan")
    names = {text.partition("(")[0] for text in variant["techniques"]}
    listed = entries if isinstance(entries, list) else []
    selected = [entry for entry in listed if name_of(entry) in names]
    return selected if len(selected) == len(names) else None


def _plain_plan(variant: Mapping[str, Any], read: Mapping[str, Any]) -> list[Any] | None:
    """Returns the variant's plan as in a recipe, without default settings."""
    entries = recipe_plan(variant, read)
    with contextlib.suppress(InputError):  # techniques that this version doesn't have
        return entries and [plain_entry(entry) for entry in entries]
    return entries


@lru_cache(maxsize=1)
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    functions = (span, outline, amount, priced, any_known, measure)
    environment.filters |= {function.__name__: function for function in functions}
    environment.filters |= {"words": number_text, "head": verdict_word}
    # Name and text of each section's heading; both come from the templates.
    environment.filters["headings"] = re.compile(r'<h2 id="([a-z]+)">(.*?)</h2>').findall
    return environment.get_template("report.html.jinja")


def _shortened(read: dict[str, Any], limits: PageLimits) -> dict[str, Any]:
    """Returns the report with long texts and lists cut; `cut` lists the cuts.

    Numbers don't change.
    """
    counts: list[str] = []
    variants = read["variants"]
    if len(variants) > limits.entries:  # the baseline and the result stay
        final = result_of(variants)
        others = [variant for variant in variants[1:] if variant is not final]
        shown = others[: limits.entries - 2]
        counts.append(f"{len(others) - len(shown)} variants aren't shown")
        variants = [variants[0], *shown, final]

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

    names = [variant["name"] for variant in variants]
    plain = read | {"variants": [], "cost": _of_variants(read["cost"], names)}
    samples = read["samples"][:_SAMPLES]
    plain["samples"] = [{k: _cut(text, _SAMPLE) for k, text in one.items()} for one in samples]
    short = {key: cut(value) for key, value in plain.items()}
    short["more_samples"] = len(read["samples"]) - len(samples)
    short["variants"] = [{key: cut(value) for key, value in a.items()} for a in variants]
    unchanged = {key: read[key] for key in ("created", "created_words")}
    return short | unchanged | {"cut": "; ".join(dict.fromkeys(counts))}


def _of_variants(cost: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Returns the prices of these variants only, so that every price has its variant."""

    def some(prices: Mapping[str, Any] | None) -> dict[str, Any] | None:
        if prices is None:
            return None
        return {name: prices[name] for name in names if name in prices}

    key = "kwh_per_million_tokens"
    energy = {**cost["energy"], key: some(cost["energy"][key])}
    return {**cost, "per_million_tokens": some(cost["per_million_tokens"]), "energy": energy}


def _cut(text: str, most: int) -> str:
    more = len(text) - most
    return text if more <= 0 else f"{text[:most]}… ({more} more characters in report.json)"


def _embedded(plain: Mapping[str, Any]) -> tuple[str, bool]:
    """Returns the report as JSON that can't end its script element; True if it is complete.

    Where the whole would make the page too heavy, curves become means; report.json keeps all.
    """

    def thinned(variant: Mapping[str, Any], most: int) -> dict[str, Any]:
        curves = [key for key in ("loss_curve", "eval_curve") if variant.get(key)]
        return {**variant, **{key: thin(variant[key], most) for key in curves}}

    for most in (None, 200, 50):
        variants = [a if most is None else thinned(a, most) for a in plain["variants"]]
        text = _inert({**plain, "variants": variants})
        if len(text) <= _EMBEDDED:
            return text, most is None
    return _inert({"schema": SCHEMA, "left_out": "too large here: see report.json"}), False


def _inert(value: Mapping[str, Any]) -> str:
    text = json.dumps(value)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


# Rows of the page from several variants.
#
# Only `hardware` has no fixed form, so its entries are used only if they have the expected type.


@dataclass(frozen=True)
class ReportTable:
    """The variants as text: a heading for each column, and the cells of each variant."""

    columns: dict[str, str]
    rows: list[dict[str, str]]


def table_of(report: Mapping[str, Any]) -> ReportTable:
    """Returns the table of variants: own effect, then ratio to the baseline, then quality.

    If every effect is relative to the baseline, there is no second column for it.
    """
    variants, base = report["variants"], report["variants"][0]["name"]
    cumulative = bool(cumulative_of(variants))
    others = list(dict.fromkeys(variant["against"] for variant in variants if variant["against"]))
    against_ = "the row above" if cumulative else " or ".join(others) or base
    columns = {
        "name": "variant",
        "effect": f"against {against_} [95 %]",
        "verdict": "effect",
        "ratio": f"against {base} [95 %]",
        "speed": "tokens/s",
        "quality": "quality",
        "memory": "peak memory",
        "loss": "eval loss",
    }
    if set(others) <= {base} and not cumulative:
        del columns["ratio"]
    rows = []
    for index, variant in enumerate(variants):
        usual = variants[index - 1]["name"] if cumulative and index else base
        rows.append(
            {
                "name": variant["name"],
                "effect": effect_words(variant, usual),
                "verdict": verdict_word(variant["verdict"]),
                "ratio": span(variant["ratio"], "times"),
                "speed": number_text(variant["tokens_per_second"]["median"], "amount"),
                "quality": verdict_word(variant["quality"]) or "–",
                "memory": number_text(variant["peak_memory_bytes"], "memory"),
                "loss": number_text(variant["eval_loss"], "loss"),
            }
        )
    return ReportTable(columns, rows)


def machine(hardware: Mapping[str, Any]) -> str:
    """Returns the machine in one line: accelerators if used, texts, cores, memory."""
    used = [] if hardware.get("device") == "cpu" else hardware.get("accelerators")
    every = [a.get("name") for a in used if isinstance(a, dict)] if isinstance(used, list) else []
    names = Counter(name for name in every if isinstance(name, str))
    parts = [f"{count} × {name}" for name, count in names.items()]
    parts += [v for key, v in hardware.items() if isinstance(v, str) and v and key != "device"]
    cores, memory = hardware.get("usable_cores"), hardware.get("memory_limit_bytes")
    parts += [f"{cores} cores"] if isinstance(cores, int) else []
    return " · ".join([*parts, number_text(memory, "memory")] if isinstance(memory, int) else parts)


def proofs(variants: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns effects of each technique, in order; variants with equal evidence share a row."""
    uses = [(variant["name"], row) for variant in variants for row in variant["effective"]]
    users = Counter(row["technique"] for _, row in uses)
    names_by_proof: dict[tuple[str, bool | None, str], list[str]] = {}
    for technique in users:
        for name, row in uses:
            if row["technique"] == technique:
                proof = (technique, row["effective"], row["evidence"])
                names_by_proof.setdefault(proof, []).append(name)
    rows = []
    for (technique, effective, evidence), names in names_by_proof.items():
        every_user = len(names) == users[technique] > 1
        users_text = f"all {len(names)} with it" if every_user else ", ".join(names)
        row = {"technique": technique, "effective": effective, "evidence": evidence}
        rows.append({**row, "variants": users_text})
    return rows


def terms(variants: Sequence[Row], part: str, unit: str) -> list[dict[str, Any]]:
    """Returns the ledger's `part` before and after: a row per term measured in either variant."""
    first, last = variants[0]["ledger"][part], result_of(variants)["ledger"][part]
    rows = []
    for index, name in enumerate(first, start=1):
        pair = first[name], last[name]
        if pair != (None, None):
            before, after = (number_text(value, unit) for value in pair)
            row = {"name": term_name(name), "number": index, "before": before, "after": after}
            rows.append(row)
    return rows


def steadiness(variants: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns how even each variant's steps were, with the ledger's figures if available."""
    rows = []
    for variant in variants:
        step, stability = variant["step_seconds"], variant["ledger"]["stability"]
        load = [value for value in variant["foreign_load"] if value is not None]
        rows.append(
            {
                "name": variant["name"],
                "p50": step["p50"] if stability["p50"] is None else stability["p50"],
                "p99": step["p99"] if stability["p99"] is None else stability["p99"],
                "spread": stability["relative_spread"],
                "stalls": stability["stalls"],
                "load": max(load, default=None),
                "warmup": variant["warmup"]["seconds"],
                "compile": variant["warmup"]["compile_seconds"],
                "mfu": variant["mfu"],
            }
        )
    return rows


def has_cost(cost: Mapping[str, Any]) -> bool:
    """Returns True if any money or energy value is known."""
    parts = (cost["experiment"], cost["payback"], cost["energy"])
    return cost["per_million_tokens"] is not None or any(map(any_known, parts))


def priced(prices: Mapping[str, Any] | None, variant: Row) -> float | None:
    """Returns a variant's entry in an object from variant names to numbers."""
    return number((prices or {}).get(variant["name"]))


def unmeasured(report: Mapping[str, Any]) -> list[str]:
    """Lists dropped variants, failed variants, and sections of the page without content."""
    variants = report["variants"]
    sentences = list(report["design"]["dropped"])

    def of(rows: Sequence[Row], word: str) -> Iterator[Row]:
        return (row for row in rows if verdict_word(row["verdict"]) == word)

    sentences += [f"{a['name']}: {a['verdict']}" for a in of(variants, "failed")]
    untested = of(report["verification"], "not tested")
    sentences += [f"Equal quality of {row['technique']}: {reason_of(row)}" for row in untested]
    lines = of(report["invariance"], "not tested")
    sentences += [f"Invariance, {row['what']}: {reason_of(row)}" for row in lines]
    ledgers = [variant["ledger"] for variant in (variants[0], result_of(variants))]
    absent = {
        "noise: no second copy of the baseline ran": report["noise"]["ratio"] is None,
        "the proof of equal quality that each switch needs": not report["verification"],
        "independence of the loss from packing, splits and neighbours": not report["invariance"],
        "where a step's time goes": not any(any_known(x["step"]) for x in ledgers),
        "what memory holds": not any(any_known(x["memory"]) for x in ledgers),
        "MFU": not any(variant["mfu"] is not None for variant in variants),
        "what else the machine did": not any(variant["foreign_load"] for variant in variants),
        "energy": not report["cost"]["energy"]["kwh_per_million_tokens"],
        "cost: no price was given": report["cost"]["per_million_tokens"] is None,
    }
    return sentences + [f"Not measured: {what}" for what, missing in absent.items() if missing]


def more_rounds(variant: Mapping[str, Any], design: Mapping[str, Any]) -> str | None:
    """Returns how many more rounds would decide a verdict, and their time; None: decided.

    By the variance that was seen (`hasten.measure.significance.rounds_needed`).
    """
    needed, seconds = variant["rounds_needed"], design["round_seconds"]
    if needed is None:
        return None
    rounds = "1 more round" if needed == 1 else f"{amount(needed)} more rounds"
    if not isinstance(needed, int) or seconds is None:
        return rounds
    return f"{rounds}, about {duration(needed * seconds)}"


def load_of_others(variants: Sequence[Row]) -> str | None:
    """Returns the processor's share used by others during the turns; None: not measured."""
    load = [value for variant in variants for value in variant["foreign_load"] if value is not None]
    if not load:
        return None
    mean, most = number_text(statistics.fmean(load), "percent"), number_text(max(load), "percent")
    return f"others used {mean} of the processor during the rounds, {most} at most"


# The report in short, as Markdown that is readable in a terminal too.
#
# It has the table of variants, then reasons of verdicts, the noise floor, techniques without gain,
# objections of the verification, and the cost. The page has everything.


def render_markdown(report: Mapping[str, Any]) -> str:
    """Returns the variants as a Markdown table with notes below.

    The full text of a verdict with a reason is below the table, and so is MFU. Raises
    InputError if `report` departs from docs/reference/metrics.md.
    """
    read = read_report(report)
    table = table_of(read)
    rows = [[cell(row[key]) for key in table.columns] for row in (table.columns, *table.rows)]
    notes = "".join(f"- {note}\n" for note in _notes(read))
    return f"{markdown_table(rows)}\n{notes}" if notes else markdown_table(rows)


def _notes(read: Mapping[str, Any]) -> Iterator[str]:  # noqa: C901  # a clause for each note
    variants: Sequence[Mapping[str, Any]] = read["variants"]
    rows = unpaid(read)
    listed = {row["name"] for row in rows}
    if (lead := lead_of(read)) is not result_of(variants):
        plan = f"({cell(', '.join(lead['techniques']))})"
        if entries := _plain_plan(lead, read):
            plan = f"`plan: {flow(entries)}`"
        ratio = span(lead["ratio"], "times")
        yield f"fastest at equal quality: {cell(lead['name'])}, {ratio}: {plan}"
    if (busy := load_of_others(variants)) is not None:
        yield busy
    for variant in variants:
        if variant["verdict"] != verdict_word(variant["verdict"]) and variant["name"] not in listed:
            yield f"{cell(variant['name'])}: {cell(variant['verdict'])}"
    for row in rows:
        word = "not shown to pay" if row["word"] == "undecided" else "did not pay"
        yield f"{word}: {cell(row['name'])}: {cell(row['why'])}"
    for variant in variants:
        if (more := more_rounds(variant, read["design"])) is not None:
            yield f"{cell(variant['name'])}: would be decided by {more}"
    if read["mfu"]:
        some = variants if len(variants) <= 4 else [variants[0], result_of(variants)]
        shares = ", ".join(f"{cell(a['name'])} {number_text(a['mfu'], 'percent')}" for a in some)
        yield f"{shares} {cell(read['mfu'])}"
    yield from _noise(read)
    for row in read["invariance"]:
        if verdict_word(row["verdict"]) in FAILED:
            yield f"not invariant: {cell(row['what'])}: {cell(row['text'] or row['verdict'])}"
    yield from _money(read)


def _noise(read: Mapping[str, Any]) -> Iterator[str]:
    noise, together = read["noise"], read["interaction"]
    if noise["text"] or noise["ratio"]:
        copies = span(noise["ratio"], "times") if noise["ratio"] else "not measured"
        floor = number_text(noise["floor"], "percent")
        copies += "" if noise["floor"] is None else f", noise floor {floor}"
        yield cell(noise["text"] or f"two copies of the baseline: {copies}")
    if together["text"] or together["ratio"]:
        text = together["text"] or f"all over the single ones: {span(together['ratio'], 'times')}"
        yield cell(text)


def _money(read: Mapping[str, Any]) -> Iterator[str]:
    cost = read["cost"]
    prices = cost["per_million_tokens"]
    if prices is not None:
        ends = [read["variants"][0], result_of(read["variants"])][: len(read["variants"])]
        texts = [number_text(priced(prices, variant), "price") for variant in ends]
        yield f"{cell(cost['currency'] or 'cost')} per million tokens: {' → '.join(texts)}"
    experiment = cost["experiment"]
    if experiment["money"] is not None:
        spent = number_text(experiment["money"], "price")
        yield f"the experiment cost {spent} {cell(cost['currency'] or '')}"
    if cost["payback"]["text"]:
        yield cell(cost["payback"]["text"])


def write_report(report: Mapping[str, Any], folder: Path) -> Path:
    """Writes report.json and report.html into `folder`, created if missing; returns the path.

    Raises InputError where `report` departs from docs/reference/metrics.md, with no file changed,
    or where the folder can't be written.
    """
    plain = as_json(report, "report")
    page = page_of(plain, read_report(report))
    write_result(folder / "report.json", json.dumps(plain) + "\n")
    write_result(folder / "report.html", page)
    return folder / "report.html"
