"""The monitor in a terminal: a panel for each run, redrawn each second."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hasten.formatting import duration, size
from hasten.monitor.run import FINISHED, Run
from hasten.monitor.watching import RunsReader

# A run's state as lines of text

BARS = "▁▂▃▄▅▆▇█"
UNKNOWN = "not known"
Standing = dict[str, Any]


def progress(s: Standing) -> str:
    """Returns the progress as text: ``step 40 of 160 (25 %)``."""
    if s["step"] is None:
        return "no step yet"
    text = f"step {s['step']:,.0f}"
    if s["total_steps"]:
        text += f" of {s['total_steps']:,.0f} ({s['step'] / s['total_steps']:.0%})"
    return text


def rows(s: Standing) -> list[tuple[str, str]]:
    """Returns (label, value) of each shown number, in the order of the web page."""
    band, memory = UNKNOWN, s["peak_memory_bytes"]
    if s["tokens_per_second_median"] is not None:
        band = (
            f"{s['tokens_per_second_median']:,.0f} ({s['tokens_per_second_low']:,.0f} to "
            f"{s['tokens_per_second_high']:,.0f})"
        )
    slow = UNKNOWN
    if s["slowest_rank_ratio"] is not None:
        slow = f"rank {s['slowest_rank']}, {s['slowest_rank_ratio']:.2f} times the others"
    return [
        ("loss", _number(s["loss"], ".4f")),
        ("eval loss", _number(s["eval_loss"], ".4f")),
        *_rewards(s),
        *_indexers(s),
        ("tokens/s", band),
        ("MFU", _number(s["mfu"], ".1%")),
        ("peak memory", UNKNOWN if memory is None else size(memory)),
        ("device", device(s)),
        ("data stall", _number(s["data_stall_share"], ".1%")),
        ("exposed communication", _number(s["exposed_communication_share"], ".1%")),
        ("expert load", _number(s["expert_load_ratio"], ".2f")),
        ("slowest rank", slow),
        ("slower", s["slow"] or UNKNOWN),
        ("skipped steps", str(s["skipped_steps"])),
        ("cost so far", UNKNOWN if s["cost"] is None else f"{s['cost']:.4f} {s['currency']}"),
        ("ETA", eta(s)),
    ]


def _rewards(s: Standing) -> list[tuple[str, str]]:
    """Returns the rows of a training on preferences."""
    if s["reward_accuracy"] is None:
        return []
    return [
        ("reward accuracy", f"{s['reward_accuracy']:.1%}"),
        ("reward margin", _number(s["reward_margin"], ".4f")),
    ]


def _indexers(s: Standing) -> list[tuple[str, str]]:
    """Returns the rows of a training in which indexers learn."""
    if s["indexer_kl"] is None:
        return []
    return [
        ("indexers' KL", f"{s['indexer_kl']:.4f}"),
        ("attention captured", _number(s["indexer_captured"], ".1%")),
    ]


def eta(s: Standing) -> str:
    """Returns the remaining time, or the duration of a finished run."""
    if s["status"] in FINISHED:
        return f"finished in {duration(s['seconds'])} of steps"
    return UNKNOWN if s["eta_seconds"] is None else duration(s["eta_seconds"])


def device(s: Standing) -> str:
    """Returns the known readings of the device: ``87 %, 61 °C, 312 W``."""
    readings = []
    if s["device_utilisation"] is not None:
        readings.append(f"{s['device_utilisation']:.0%}")
    if s["device_temperature"] is not None:
        readings.append(f"{s['device_temperature']:.0f} °C")
    if s["device_power_watts"] is not None:
        readings.append(f"{s['device_power_watts']:.0f} W")
    return ", ".join(readings) or UNKNOWN


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Returns values as a row of bars; if there are more than fit, each bar is a mean."""
    numbers = [v for v in values if v is not None]
    if not numbers or width < 1:
        return ""
    low, high = min(numbers), max(numbers)
    share = max(len(values) / width, 1.0)
    bars = []
    for index in range(min(width, len(values))):
        bucket = values[int(index * share) : max(int((index + 1) * share), int(index * share) + 1)]
        bucket_numbers = [v for v in bucket if v is not None]
        if not bucket_numbers:
            bars.append(" ")
            continue
        height = (
            (sum(bucket_numbers) / len(bucket_numbers) - low) / (high - low) if high > low else 0.5
        )
        bars.append(BARS[min(int(height * len(BARS)), len(BARS) - 1)])
    return "".join(bars)


def _number(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else format(value, form)


EVERY_SECONDS = 1.0  # interval of drawing
COLOURS = {"running": "green", "done": "green", "silent": "yellow", "ended": "red"}
EVENTS = 4  # newest events in a panel


def watch_in_terminal(watching: RunsReader, console: Console | None = None) -> None:
    """Draws until Ctrl-C, or until all runs are finished; without a terminal, prints once."""
    console = console or Console()
    if not console.is_terminal:
        watching.read_all()
        console.print(_panels(watching, console.width))
        return
    with watching, Live(console=console, auto_refresh=False) as live:
        try:
            while True:
                live.update(_panels(watching, console.width), refresh=True)
                statuses = {standing["status"] for _, standing in watching.standings()}
                if statuses and statuses <= {*FINISHED}:
                    return
                time.sleep(EVERY_SECONDS)
        except KeyboardInterrupt:
            return


def _panels(watching: RunsReader, width: int) -> Group:
    return Group(*(_panel(run, width) for run in watching.runs))


def _panel(run: Run, width: int) -> Panel:
    with run.lock:
        standing = run.standing()
        columns = run.steps.since(0, 0)["columns"]
        events = run.events.newest(EVENTS)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for label, value in rows(standing):
        if value != UNKNOWN:
            table.add_row(label, Text(value))
    for label, name in (("loss", "loss"), ("tokens/s", "tokens_per_second")):
        if name in columns:
            line = sparkline(columns[name][0], max(min(width - 32, 100), 10))
            table.add_row(label, Text(line, style="cyan"))
    for event in events:
        where = "" if event["step"] is None else f"step {event['step']:.0f}: "
        table.add_row(event["kind"], Text(where + event["text"], style="red" * event["bad"]))
    colour = COLOURS.get(standing["status"], "default")
    title = Text.assemble(
        (run.name, "bold"), "  ", (standing["words"], colour), "  ", progress(standing)
    )
    return Panel(table, title=title, title_align="left")
