"""``hasten monitor``: a page, or panels in the terminal, on active and finished runs."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import Annotated

import typer

from hasten.cli.arguments import check_token
from hasten.cli.output import say
from hasten.errors import require_packages


def monitor(
    places: Annotated[
        list[Path], typer.Argument(help="folders of runs, or with runs in them", metavar="RUN...")
    ],
    terminal: Annotated[
        bool, typer.Option("--terminal", help="show panels in the terminal, not a page")
    ] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="port to listen on; 0: any free port")
    ] = 8470,
    host: Annotated[
        str, typer.Option(help="address to listen on: any other one exposes it to the network")
    ] = "127.0.0.1",
    token: Annotated[
        str | None, typer.Option(help="access token: default: a new random one")
    ] = None,
    alert: Annotated[
        str | None,
        typer.Option(help='command for alerts, a list of arguments: \'["notify-send", "hasten"]\''),
    ] = None,
    stall_seconds: Annotated[
        float, typer.Option(min=1, help="seconds without a step before an alert")
    ] = 300.0,
    slow_rank: Annotated[
        float, typer.Option(min=1, help="time of a rank / median time that raises an alert")
    ] = 1.5,
    disk_gb: Annotated[
        float, typer.Option(min=0, help="free disk space in GB below which an alert is raised")
    ] = 5.0,
) -> None:
    """Show live and finished runs in a browser or terminal."""
    from hasten.monitor.alerts import AlertLimits, Alerts, Command, checked_command
    from hasten.monitor.watching import RunsReader, check_places
    from hasten.recipe.yaml_reader import read_yaml

    check_token(token)
    check_places(places)
    command = None if alert is None else Command(checked_command(read_yaml(alert, "--alert")))
    limits = AlertLimits(stall_seconds, slow_rank=slow_rank, disk_bytes=disk_gb * 1e9)
    notify = (lambda run: None) if command is None else Alerts(command, limits).look
    watching = RunsReader(places, notify)
    if terminal:
        from hasten.monitor.terminal import watch_in_terminal

        watch_in_terminal(watching)
        if command is not None:  # an alert may still be running
            command.wait()
        return
    instead = ", or use --terminal"
    require_packages("the page", "monitor", "starlette", "uvicorn", instead=instead)
    from hasten.monitor.server import MonitorServer

    token = token or secrets.token_urlsafe(24)
    server = MonitorServer(watching, host, port, token)
    with watching:
        say(f"{server.url}?token={token}", flush=True)
        say("Ctrl-C ends it; the runs continue without it.", file=sys.stderr)
        server.run()
