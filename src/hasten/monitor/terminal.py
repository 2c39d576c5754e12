"""The monitor in a terminal: a panel for each run, drawn again each second; elsewhere one text."""

from __future__ import annotations

import time

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hasten.monitor.run import Run
from hasten.monitor.standing import FINISHED
from hasten.monitor.watching import Watching
from hasten.monitor.words import UNKNOWN, progress, rows, sparkline

EVERY_SECONDS = 1.0
COLOURS = {"running": "green", "done": "green", "silent": "yellow", "ended": "red"}
EVENTS = 4


def watch_in_terminal(watching: Watching, console: Console | None = None) -> None:
    """Draw until Ctrl-C, or until all runs are finished; without a terminal, print once."""
    console = console or Console()
    if not console.is_terminal:
        watching.read_all()
        console.print(_panels(watching, console.width))
        return
    with watching, Live(console=console, auto_refresh=False) as live:
        try:
            while True:
                live.update(_panels(watching, console.width), refresh=True)
                if _all_finished(watching):
                    return
                time.sleep(EVERY_SECONDS)
        except KeyboardInterrupt:
            return


def _all_finished(watching: Watching) -> bool:
    runs = watching.runs
    for run in runs:
        with run.lock:
            if run.standing()["status"] not in FINISHED:
                return False
    return bool(runs)


def _panels(watching: Watching, width: int) -> Group:
    return Group(*(_panel(run, width) for run in watching.runs))


def _panel(run: Run, width: int) -> Panel:
    with run.lock:
        found = run.standing()
        columns = run.steps.since(0, 0)["columns"]
        happened = run.events.newest(EVENTS)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for label, value in rows(found):
        if value != UNKNOWN:
            table.add_row(label, Text(value))
    for label, name in (("loss", "loss"), ("tokens/s", "tokens_per_second")):
        if name in columns:
            line = sparkline(columns[name][0], max(min(width - 32, 100), 10))
            table.add_row(label, Text(line, style="cyan"))
    for event in happened:
        where = "" if event["step"] is None else f"step {event['step']:.0f}: "
        table.add_row(event["kind"], Text(where + event["text"], style="red" * event["bad"]))
    colour = COLOURS.get(found["status"], "default")
    title = Text.assemble((run.name, "bold"), "  ", (found["words"], colour), "  ", progress(found))
    return Panel(table, title=title, title_align="left")
