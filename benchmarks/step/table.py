"""The printed tables: variants side by side with intervals, and where hasten's time goes."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from hasten.measure.statistics import Interval, paired_ratio, spread

REFERENCE = "hasten"
COLUMNS = (
    *(
        "variant",
        "tokens/s [95 %]",
        "of hasten [95 %]",
        "median step",
        "whole run",
        "first step, s",
    ),
    *("compile, s", "peak MB", "MFU", "eval loss", "tokens"),
)


def variants_table(found: dict[str, Any]) -> list[str]:
    """A line per variant: steady tokens/s and its ratio to hasten's, paired by round."""
    runs, chosen = found["runs"], found["variants"]
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    for variant in chosen:
        mine = {
            run["round"]: run for run in runs if run["variant"] == variant and "error" not in run
        }
        if variant in found["not_installed"]:
            lines.append(
                f"| {variant} | not installed: {', '.join(found['not_installed'][variant])} |"
            )
        elif not mine:
            errors = [run["error"] for run in runs if run["variant"] == variant]
            lines.append(f"| {variant} | {'failed: ' + errors[-1] if errors else 'no run yet'} |")
        else:
            lines.append(_row(variant, mine, _reference(runs), found))
    return lines


def profile_table(groups: dict[str, float]) -> list[str]:
    """Milliseconds per step and their share; the profiler's own cost is in them."""
    whole = sum(groups.values())
    lines = ["| part of the step | ms | share |", "|---|---|---|"]
    for group, seconds in groups.items():
        lines.append(f"| {group} | {1e3 * seconds:.1f} | {seconds / whole:.1%} |")
    return lines


def remarks(found: dict[str, Any]) -> list[str]:
    """What a reader has to know of this table: unequal runs, techniques that were left out."""
    runs = [run for run in found["runs"] if "error" not in run]
    left_out = {text for run in runs for text in run.get("skipped", ())}
    idle = {n for r in runs for n, p in r.get("effective", {}).items() if not p["effective"]}
    return [
        *(f"NOT COMPARABLE: {line}" for line in mismatches(found)),
        *sorted(left_out),
        *(f"{name} DID NOT ACT" for name in sorted(idle)),
    ]


def circumstances(found: dict[str, Any]) -> list[str]:
    """Machine, versions, load, number of runs."""
    loads = [run["load_before"] for run in found["runs"]] or [0.0]
    ceiling, settings = found["ceiling"], found["settings"]
    rate = f"; best bf16 product {ceiling / 1e12:.2f} TFLOP/s" if ceiling else ""
    flops = f"; {found['flops_per_token'] / 1e6:.0f} MFLOP/token"
    rounds = 1 + max((run["round"] for run in found["runs"]), default=-1)
    return [
        f"{found['machine']['short']}, {found['threads']} threads, allocator {found['allocator']}, "
        f"load before runs {min(loads):.1f}-{max(loads):.1f}{rate}{flops}",
        *found["instruction_sets"],
        ", ".join(f"{name} {version}" for name, version in found["versions"].items()),
        f"{rounds} rounds, {settings['steps']} steps of which {settings['warmup']} warm up"
        + ("; seconds are CPU seconds" if settings["cpu_time"] else ""),
    ]


def mismatches(found: dict[str, Any]) -> list[str]:
    """What should be equal and isn't: token counts of steps, and the first loss where matched."""
    said = []
    reference = next(
        (r for r in found["runs"] if r["variant"] == REFERENCE and "error" not in r), None
    )
    for run in found["runs"]:
        if reference is None or "error" in run or run["chose_records"]:
            continue
        if run["step_tokens"] != found["step_tokens"]:
            said.append(
                f"{run['variant']}, round {run['round']}: other tokens than hasten's order has"
            )
        first, theirs = run["losses"][0], reference["losses"][0]
        if abs(first - theirs) > 0.005 * theirs:
            said.append(f"{run['variant']}: first loss {first:.4f}, hasten's {theirs:.4f}")
    return said


def _reference(runs: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {r["round"]: r for r in runs if r["variant"] == REFERENCE and "error" not in r}


def _row(
    variant: str, mine: dict[int, dict[str, Any]], base: dict[int, dict[str, Any]], found: Any
) -> str:
    runs = list(mine.values())
    rate = spread([run["steady_tokens_per_second"] for run in runs])
    rounds = sorted(mine.keys() & base.keys())
    ratio = "-"
    if rounds:
        pairs = [[side[r]["steady_tokens_per_second"] for r in rounds] for side in (base, mine)]
        if found["settings"]["abreast"] and not runs[0]["chose_records"]:
            pairs = [
                [1 / s for r in rounds for s in side[r]["step_seconds"][side[r]["warmup"] :]]
                for side in (base, mine)
            ]
        ratio = _words(paired_ratio(pairs[0], pairs[1]), "{:.2f}")
    compiled = [r["compile_seconds"] for r in runs if r["compile_seconds"] is not None]
    flops, ceiling = found["flops_per_token"], found["ceiling"]
    other = " (other examples)" if runs[0]["chose_records"] else ""
    cells = (
        variant,
        _words(rate, "{:,.0f}"),
        ratio,
        f"{_middle(runs, 'median_tokens_per_second'):,.0f}",
        f"{_middle(runs, 'whole_tokens_per_second'):,.0f}",
        f"{_middle(runs, 'first_step_seconds'):.1f}",
        f"{max(compiled):.1f}" if compiled else "-",
        f"{max(_middle(runs, 'peak_bytes'), _middle(runs, 'device_peak_bytes')) / 1e6:,.0f}",
        f"{rate.median * flops / ceiling:.1%}" if ceiling else "-",
        f"{_middle(runs, 'eval_loss'):.4f}{other}",
        f"{_middle(runs, 'tokens'):,.0f}",
    )
    return "| " + " | ".join(cells) + " |"


def _middle(runs: Sequence[dict[str, Any]], key: str) -> float:
    return float(median(run[key] for run in runs))


def _words(interval: Interval, form: str) -> str:
    known = interval.summary()
    if known["low"] is None:
        return form.format(interval.median)
    low, high = (form.format(known[key]) for key in ("low", "high"))
    return f"{form.format(interval.median)} [{low}, {high}]"
