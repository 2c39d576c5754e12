"""The options of ``hasten monitor``; the command and its server are imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def monitor(
    places: Annotated[
        list[Path], typer.Argument(help="folders of runs, or with runs in them", metavar="RUN...")
    ],
    terminal: Annotated[bool, typer.Option(help="show it here instead of as a page")] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="where to listen; 0: any that is free")
    ] = 8470,
    host: Annotated[
        str, typer.Option(help="address to listen at; others than this one let others in")
    ] = "127.0.0.1",
    token: Annotated[
        str | None, typer.Option(help="what a reader must know; a new one if left out")
    ] = None,
    alert: Annotated[
        str | None,
        typer.Option(help='command for alerts, a list of arguments: \'["notify-send", "hasten"]\''),
    ] = None,
    stall_seconds: Annotated[
        float, typer.Option(min=1, help="alert when no step is done for so long")
    ] = 300.0,
    slow_rank: Annotated[
        float, typer.Option(min=1, help="alert when a rank takes so many times as long as others")
    ] = 1.5,
    disk_gb: Annotated[
        float, typer.Option(min=0, help="alert when less than so many GB are free")
    ] = 5.0,
) -> None:
    """Watch runs live, or look at finished ones: as a page in a browser, or in the terminal."""
    from hasten.cli.monitor import monitor as command
    from hasten.monitor.alerts import AlertLimits

    limits = AlertLimits(stall_seconds, slow_rank=slow_rank, disk_bytes=disk_gb * 1e9)
    command(places, terminal, (host, port, token), alert, limits)
