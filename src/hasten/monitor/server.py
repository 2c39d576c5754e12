"""The monitor's web server: one page, one stream of events, one text for Prometheus.

    /          the page; it stands alone and asks for nothing but the stream
    /events    server-sent events: what the page lacks, twice a second where anything changed
    /metrics   where runs stand, for Prometheus

A path is compared with these three and used for nothing else, so no request reaches a file. All of
it is behind `hasten.monitor.gate`. Needs starlette and uvicorn, the extra ``monitor``.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import re
import socket
from collections.abc import AsyncIterator, Callable
from importlib import resources
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from hasten.errors import InputError
from hasten.monitor.gate import Gate, names_for
from hasten.monitor.prometheus import CONTENT_TYPE, exposition
from hasten.monitor.watching import Cursor, Watching, shown

EVERY_SECONDS = 0.5
ALIVE_SECONDS = 10.0  # a comment is sent so often, so that a lost connection is noticed
MOST_STREAMS = 16
MOST_CONNECTIONS = 64
LARGEST_HEADERS = 16 << 10


class Server:
    """The monitor at an address; ``run`` serves until it is stopped.

    Args:
        watching: the runs.
        address: where to listen.
        port: 0 takes any that is free.
        token: what a reader must know.

    Raises:
        InputError: the address can't be listened at.
    """

    def __init__(self, watching: Watching, address: str, port: int, token: str) -> None:
        self._watching = watching
        self._socket = _listen(address, port)
        self.port: int = self._socket.getsockname()[1]
        host = f"[{address}]" if ":" in address else address
        self.url = f"http://{host}:{self.port}/"
        app = application(watching, token, address, self.port, self._is_over)
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            access_log=False,
            log_level="error",
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MOST_CONNECTIONS,
            h11_max_incomplete_event_size=LARGEST_HEADERS,
            timeout_graceful_shutdown=3,
        )
        self._server = uvicorn.Server(config)

    def run(self) -> None:
        """Serve until Ctrl-C, which is how a monitor ends, or until `stop`."""
        try:
            with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again at its end
                self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()

    def stop(self) -> None:
        self._server.should_exit = True

    def _is_over(self) -> bool:
        return self._server.should_exit


def application(
    watching: Watching, token: str, address: str, port: int, is_over: Callable[[], bool]
) -> Gate:
    """The three answers behind the gate; streams end when it is over."""
    page, policy = page_and_policy()
    streams = 0

    async def index(request: Request) -> Response:
        return HTMLResponse(page, headers={"content-security-policy": policy})

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(
            await asyncio.to_thread(_standings, watching), media_type=CONTENT_TYPE
        )

    async def events(request: Request) -> Response:
        nonlocal streams
        if streams >= MOST_STREAMS:
            return PlainTextResponse("too many pages are open; close one\n", status_code=503)

        async def counted() -> AsyncIterator[str]:
            nonlocal streams
            streams += 1
            try:
                async for text in stream(watching, is_over):
                    yield text
            finally:
                streams -= 1

        return StreamingResponse(counted(), media_type="text/event-stream")

    routes = [Route("/", index), Route("/metrics", metrics), Route("/events", events)]
    app = Starlette(routes=routes)
    app.router.redirect_slashes = False
    return Gate(app, token, names_for(address), f"hasten_monitor_{port}")


async def stream(watching: Watching, is_over: Callable[[], bool]) -> AsyncIterator[str]:
    """What changed, as server-sent events; the first is everything."""
    cursors: dict[str, Cursor] = {}
    sent: dict[str, tuple[int, str]] = {}
    quiet = 0.0
    while not is_over():
        runs = []
        for run in watching.runs:
            cursor = cursors.setdefault(run.name, {})
            with run.lock:
                now = (run.version, run.standing()["words"])
            if sent.get(run.name) == now:
                continue
            sent[run.name] = now
            runs.append(shown(run, cursor))
            await asyncio.sleep(0)  # others may be answered between two runs
        if runs:
            quiet = 0.0
            yield f"data: {json.dumps({'runs': runs}, allow_nan=False, separators=(',', ':'))}\n\n"
        elif quiet >= ALIVE_SECONDS:
            quiet = 0.0
            yield ": still here\n\n"
        await asyncio.sleep(EVERY_SECONDS)
        quiet += EVERY_SECONDS


def _standings(watching: Watching) -> str:
    found: list[tuple[str, dict[str, Any]]] = []
    for run in watching.runs:
        with run.lock:
            found.append((run.name, run.standing()))
    return exposition(found)


def page_and_policy() -> tuple[str, str]:
    """The page, and a policy that allows its own script and style by their hashes, nothing else."""
    page = resources.files("hasten.monitor").joinpath("page.html").read_text(encoding="utf-8")
    script, style = (_hash(page, tag) for tag in ("script", "style"))
    policy = (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page, policy


def _hash(page: str, tag: str) -> str:
    [text] = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _listen(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(MOST_CONNECTIONS)  # whoever comes before the server is ready waits
    except (OSError, OverflowError) as error:
        listener.close()
        why = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"the monitor can't listen at {address}, port {port}: {why}; give another --port, "
            "or 0 for any that is free"
        ) from error
    return listener
