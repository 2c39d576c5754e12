"""Draw docs/images/gains.svg from the recorded tables, with the drawings of the report.

    python scripts/gains_picture.py

Three charts, one below the other: tokens per second on a GPU (benchmarks/results/gpu.md), hasten
against other trainers (gpu.md and speed-up.md), and the demo's table on a CPU (between the markers
``<!-- demo table -->`` of demo.md). Every bar is a row of a table; its whisker is the interval.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from hasten.report.svg import Bar, bar_chart, px, svg_text

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "images" / "gains.svg"
WIDTH = 800  # CSS pixels
HEADING, GAP = 26, 18  # pixels above a chart, and below it
STYLE = """
svg { --page: #fff; --ink: #16191d; --muted: #565e68; --rule: #dcdfe3; --gain: #1f5fbf;
  --base: #4f5761; --other: #8b939c; background: var(--page); }
@media (prefers-color-scheme: dark) { svg { --page: #14171a; --ink: #e6e9ec; --muted: #a2abb5;
  --rule: #343a41; --gain: #7fb0ff; --base: #b4bcc5; --other: #68717b; } }
text { font: 13px system-ui, sans-serif; fill: var(--ink); stroke: var(--page); stroke-width: 4px;
  paint-order: stroke; }
.heading { font-weight: 600; }
.tick { font-size: 12px; fill: var(--muted); } .middle { text-anchor: middle; }
.end { text-anchor: end; } .grid { stroke: var(--rule); } .origin { stroke: var(--muted); }
.whisker { stroke: var(--ink); stroke-width: 1.5; } .bar.gain { fill: var(--gain); }
.bar.base { fill: var(--base); } .bar.other { fill: var(--other); }
"""
GPU_ROWS = {
    "trainer-1b": "all weights, 1 B",
    "lora-v2-lite": "LoRA, DeepSeek-V2-Lite",
    "lora-qwen-2.5-7b": "LoRA, Qwen2.5-7B",
    "lora-llama-3-8b": "LoRA, Llama-3-8B",
    "full-8b-bf16": "all weights, Llama-3-8B, bf16",
    "full-8b-fp8": "all weights, Llama-3-8B, float8",
}
TRAINER_ROWS = {
    "Trainer of transformers": "CPU: Trainer, padded batches",
    "SFTTrainer of TRL 1.16, `packing=False`": "CPU: SFTTrainer, no packing",
    "SFTTrainer of TRL 1.16, `packing=True`": "CPU: SFTTrainer, packing",
}


class Chart(NamedTuple):
    """One chart of the picture; ``origin`` is where its bars begin, if they don't say so."""

    heading: str
    bars: list[Bar]
    origin: float
    formatter: Callable[[float], str]


def cells_of(table: str) -> list[list[str]]:
    """The cells of each row of the Markdown tables in a text."""
    lines = (line for line in table.splitlines() if line.startswith("|"))
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def interval_of(text: str) -> tuple[float, float, float]:
    """A value and the ends of its interval, as in ``15,639 [15,610, 15,655]``."""
    value, low, high = (float(n.replace(",", "")) for n in re.findall(r"\d[\d,.]*\b", text))
    return value, low, high


def row_of(page: str, name: str) -> list[str]:
    """The cells of the only row of a page whose first cell begins with a name."""
    rows = [row for row in cells_of(page) if row[0].startswith(name)]
    wide = max(map(len, rows))  # other tables of a page have the same rows with fewer cells
    (row,) = (row for row in rows if len(row) == wide)
    return row


def gpu_bars(page: str) -> list[Bar]:
    """Tokens per second of each row that trains."""
    bars = []
    for name, label in GPU_ROWS.items():
        speed = row_of(page, name)[2]
        bars.append(Bar(label, speed, *interval_of(speed), "gain"))
    return bars


def trainer_bars(gpu: str, speed_up: str) -> list[Bar]:
    """Ratios to other trainers: on the GPU against Transformers' own, on a CPU in them."""
    ratio = row_of(gpu, "trainer-1b")[3].partition(":")[2]
    ratios = {"H200: Trainer in bf16, 1 B": ratio.strip()}
    ratios |= {label: row_of(speed_up, name)[1] for name, label in TRAINER_ROWS.items()}
    return [
        Bar(label, text.replace(" [", "× [", 1), *interval_of(text), "gain")
        for label, text in ratios.items()
    ]


def demo_bars(page: str) -> list[Bar]:
    """Bars of the demo's table: each begins at the ratio of the row above, baseline first."""
    table = page.split("<!-- demo table -->\n")[1].split("<!-- /demo table -->")[0]
    bars = [Bar("baseline", "1.00×", 1.0, tone="base")]
    for name, _, effect, ratio, *_ in (row for row in cells_of(table) if row[0].startswith("+")):
        median, low, high = interval_of(ratio)
        tone = "gain" if effect == "helped" else "other"
        bars.append(Bar(name, ratio, median, low, high, tone, start=bars[-1].value))
    return bars


def charts() -> list[Chart]:
    """The picture's charts, read from the recorded tables, processors included."""
    gpu, speed_up, demo = (
        (RESULTS / f"{name}.md").read_text(encoding="utf-8") for name in ("gpu", "speed-up", "demo")
    )
    (host,) = re.findall(r"bench_hosts\.py`, [^,]*, ([^,]*, 2 cores),", speed_up)
    demo_machine = re.findall(r"^`hasten demo`, [^,]*, ([^,]*),", demo, re.MULTILINE)[0]
    return [
        Chart(
            "One NVIDIA H200: tokens per second",
            gpu_bars(gpu),
            0,
            lambda value: f"{value:,.0f}",
        ),
        Chart(
            f"Speed ratio to other trainers alone: one H200; {host}",
            trainer_bars(gpu, speed_up),
            1,
            lambda value: f"{value:.3g}×",
        ),
        Chart(
            f"hasten demo, each row with one technique more: {demo_machine}",
            demo_bars(demo),
            1,
            lambda value: f"{value:.3g}×",
        ),
    ]


def drawing_of(parts: Sequence[Chart]) -> str:
    """The SVG file: the charts one below the other, each with its heading."""
    body, account, top = [], [], 0.0
    for heading, bars, origin, formatter in parts:
        chart = bar_chart(heading, bars, WIDTH, origin, formatter)
        height = float(chart.split('height="', 1)[1].split('"', 1)[0])
        body.append(svg_text("heading", 0, top + 16, heading))
        body.append(chart.replace("<svg ", f'<svg y="{px(top + HEADING)}" ', 1))
        account += [f"{heading}: " + ", ".join(f"{bar.label} {bar.text}" for bar in bars)]
        top += HEADING + height + GAP
    size = f'viewBox="0 0 {WIDTH} {px(top)}" width="{WIDTH}" height="{px(top)}"'
    words = "<title>Speed of hasten</title><desc>" + "; ".join(account) + ".</desc>"
    start = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>{words}'
    return f"{start}<style>{STYLE}</style>{''.join(body)}</svg>\n"


if __name__ == "__main__":
    PICTURE.write_text(drawing_of(charts()), encoding="utf-8")
