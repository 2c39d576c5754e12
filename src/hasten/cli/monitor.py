"""``hasten monitor``: a page, or panels in the terminal, on runs that go on or are over."""

from __future__ import annotations

import importlib.util
import re
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from hasten.errors import InputError, pip_install
from hasten.monitor.alerts import AlertLimits, Alerts, Command, checked_command
from hasten.monitor.watching import RunsReader, check_places
from hasten.recipe.yaml_reader import read_yaml

FEWEST = 16  # characters of a token: fewer could be guessed


def monitor(
    places: Sequence[Path],
    terminal: bool,
    where: tuple[str, int, str | None],
    alert: str | None,
    limits: AlertLimits,
) -> None:
    """Watch until interrupted; ``where`` is address, port and token."""
    host, port, token = where
    if token is not None and not re.fullmatch(rf"[A-Za-z0-9_.~-]{{{FEWEST},200}}", token):
        raise InputError(
            f"--token must be {FEWEST} to 200 letters, digits, or - _ . ~; without it "
            "there is a new one each time"
        )
    check_places(places)
    command = None if alert is None else Command(checked_command(read_yaml(alert, "--alert")))
    told = (lambda run: None) if command is None else Alerts(command, limits).look
    watching = RunsReader(places, told)
    if terminal:
        from hasten.monitor.terminal import watch_in_terminal

        watch_in_terminal(watching)
        if command is not None:  # a single look may have found something to tell
            command.wait()
        return
    _serve(watching, host, port, token or secrets.token_urlsafe(24))


def _serve(watching: RunsReader, host: str, port: int, token: str) -> None:
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            f"the page needs {' and '.join(missing)}: {pip_install('monitor')}, or use --terminal"
        )
    from hasten.monitor.server import MonitorServer

    server = MonitorServer(watching, host, port, token)
    with watching:
        print(f"{server.url}?token={token}", flush=True)
        print("Ctrl-C ends it; the runs go on without it.", file=sys.stderr)
        server.run()
