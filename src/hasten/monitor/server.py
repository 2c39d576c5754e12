"""The monitor's web server: a page, an event stream, Prometheus text, access checks.

  - /: the page; it is self-contained and requests only the stream
  - /events: server-sent events with new data, at most twice a second
  - /metrics: the state of runs, for Prometheus
  - /report?run=NAME: the run's report.html, as it was last read
  - /stop?run=NAME, by POST: the run saves and stops

No request can choose a file. A path must be one of these five, and NAME one of the runs
that were found. ``CheckedRequests`` checks every request first. The module requires
starlette and uvicorn, the extra ``monitor``.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import ipaddress
import json
import platform
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import psutil
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from hasten.errors import InputError
from hasten.monitor.run import ACTIVE, Run
from hasten.monitor.watching import Cursor, RunsReader, page_update

# The state of runs in the text format of Prometheus (exposition format 0.0.4).

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "hasten_"
# Description by field of a run's state. All are gauges, because values fall when a run restarts.
HELP: dict[str, str] = json.loads(Path(__file__).with_name("metrics.json").read_text("utf-8"))


def exposition(runs: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Returns Prometheus' text for runs given as (name, state); unknown values are left out."""
    lines = []
    for field, meaning in HELP.items():
        rows = [
            (name, standing[field]) for name, standing in runs if standing.get(field) is not None
        ]
        if rows:
            lines.append(f"# HELP {PREFIX}{field} {meaning}")
            lines.append(f"# TYPE {PREFIX}{field} gauge")
            lines += [f'{PREFIX}{field}{{run="{escaped(n)}"}} {float(v)!r}' for n, v in rows]
    lines.append(f"# HELP {PREFIX}status 1 for the run's status just now")
    lines.append(f"# TYPE {PREFIX}status gauge")
    for name, standing in runs:
        labels = f'run="{escaped(name)}",status="{escaped(standing["status"])}"'
        lines.append(f"{PREFIX}status{{{labels}}} 1.0")
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """Returns a label's value with backslash, quote and line feed escaped."""
    text = decodable(text)
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def decodable(name: str) -> str:
    """Returns a file's name with U+FFFD for each byte that isn't UTF-8."""
    return re.sub("[\ud800-\udfff]", "\ufffd", name)


# Access checks of every request, before the path is used:
#
# 1. Method: GET, and POST for /stop, the only request that changes anything.
# 2. Host: a name of this machine. In an attack by DNS rebinding, a foreign name resolves to this
# machine, and the browser still sends the foreign name.
# 3. Origin, if a browser sends one: the same as Host, so pages of other sites can't read.
# 4. Token, as cookie, ``Authorization: Bearer``, or ``?token=`` once, compared in constant time.
#
# Refusals are short texts without information on runs.

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LONGEST = 2_000  # characters of a token, a Host, an Origin, a query
COMMON = (  # headers of every response
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


class CheckedRequests:
    """Checks requests, and passes the allowed ones to an application."""

    def __init__(self, app: App, token: str, names: frozenset[str], cookie: str) -> None:
        self._app, self._token, self._names, self._cookie = app, token, names, cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":  # web sockets aren't used
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._http(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        hosts = _header_values(headers, b"host")
        if scope["method"] != ("POST" if scope["path"] == "/stop" else "GET"):
            await refuse(send, 405, "only GET, and POST for /stop")
        elif len(hosts) != 1 or _host_name(hosts[0]) not in self._names:
            await refuse(send, 421, "this name is not the monitor's; use the address it printed")
        elif not is_same_origin(headers):
            await refuse(send, 403, "other pages may not read the monitor")
        elif self._has_token(headers):

            async def sending(message: MutableMapping[str, Any]) -> None:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message.get("headers", []), *COMMON]
                await send(message)

            await self._app(scope, receive, sending)
        elif scope["path"] == "/" and self._token_in(scope["query_string"]):
            await self._welcome(send)
        else:
            await refuse(send, 401, "the token is missing or wrong; open the address with ?token=")

    def _has_token(self, headers: list[tuple[bytes, bytes]]) -> bool:
        tokens = [
            value[len("bearer ") :].strip()
            for value in _header_values(headers, b"authorization")
            if value[: len("bearer ")].lower() == "bearer "
        ]
        for cookies in _header_values(headers, b"cookie"):
            for cookie in cookies.split(";"):
                name, _, value = cookie.strip().partition("=")
                if name == self._cookie:
                    tokens.append(value)
        return any(is_token(word, self._token) for word in tokens)

    def _token_in(self, query: bytes) -> bool:
        if len(query) > LONGEST:
            return False
        tokens = parse_qs(query.decode("latin-1"), max_num_fields=8).get("token", [])
        return len(tokens) == 1 and is_token(tokens[0], self._token)

    async def _welcome(self, send: Send) -> None:
        """Redirects to / with the token as a cookie, because browsers store addresses."""
        cookie = f"{self._cookie}={self._token}; HttpOnly; SameSite=Lax; Path=/"
        headers = [(b"location", b"/"), (b"set-cookie", cookie.encode()), *COMMON]
        await send({"type": "http.response.start", "status": 303, "headers": headers})
        await send({"type": "http.response.body", "body": b""})


def is_same_origin(headers: list[tuple[bytes, bytes]]) -> bool:
    """Returns False if a browser sends the request from a page of another origin."""
    origins = _header_values(headers, b"origin")
    if not origins:
        return True
    scheme, separator, host = origins[0].partition("://")
    is_origin = separator and scheme in ("http", "https") and len(origins) == 1
    return bool(is_origin) and host.lower() == _header_values(headers, b"host")[0].lower()


def is_token(text: str, token: str) -> bool:
    """Returns True if the text is the token; compares in constant time."""
    return len(text) <= LONGEST and hmac.compare_digest(text.encode(), token.encode())


async def refuse(send: Send, status: int, sentence: str) -> None:
    """Answers with one sentence and nothing else."""
    body = f"hasten monitor: {sentence}\n".encode()
    headers = [
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
        *COMMON,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def names_for(address: str) -> frozenset[str]:
    """Returns the names under which a server at an address may be requested."""
    local_names = {"localhost", "127.0.0.1", "[::1]"}
    try:
        bound = ipaddress.ip_address(address)
    except ValueError:
        return frozenset({*local_names, address.lower()})
    if not bound.is_unspecified:
        return frozenset({*local_names, _as_host(bound)})
    node = platform.node().lower()
    names = {*local_names, node, node.partition(".")[0]} - {""}
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            text = each.address.partition("%")[0]
            try:
                names.add(_as_host(ipaddress.ip_address(text)))
            except ValueError:  # a network card's hardware address
                continue
    return frozenset(names)


def _as_host(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    return f"[{address}]" if address.version == 6 else str(address)


def _host_name(host: str) -> str:
    """Returns the name in a Host header without its port; empty if it isn't valid.

    The port may differ: a tunnel has another one at its other end.
    """
    try:
        parts = urlsplit(f"//{host}")
        port = parts.port
    except ValueError:
        return ""
    if not parts.hostname or parts.netloc != host or parts.path or "@" in host:
        return ""
    name = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return name.lower() if host.lower() in (name, f"{name}:{port}") else ""


def _header_values(headers: list[tuple[bytes, bytes]], name: bytes) -> list[str]:
    return [v.decode("latin-1")[: LONGEST + 1] for k, v in headers if k.lower() == name]


EVERY_SECONDS = 0.5  # interval at which a stream looks for changes
ALIVE_SECONDS = 10.0  # interval of comments in a stream, by which a lost connection is detected
MOST_STREAMS = 16
MOST_CONNECTIONS = 64
MOST_WAITING = 16  # connections without a request; with more, the oldest is closed
REQUEST_SECONDS = 5.0  # time limit for a complete request
LARGEST_HEADERS = 16 << 10  # bytes
# A report comes from a run's folder: styles are allowed, scripts aren't.
REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; sandbox"


class MonitorServer:
    """The monitor at an address, with limits on connections; ``run`` serves until it is stopped.

    Args:
        watching: the runs.
        address: address to listen on.
        port: 0: any free port.
        token: secret that requests must contain.

    Raises:
        InputError: the address or port can't be used.
    """

    def __init__(self, watching: RunsReader, address: str, port: int, token: str) -> None:
        self._socket = listen(address, port)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://{f'[{address}]' if ':' in address else address}:{self.port}/"
        config = uvicorn.Config(
            application(watching, token, address, self.port, lambda: self._server.should_exit),
            http=CheckedConnection,
            ws="none",
            lifespan="off",
            limit_concurrency=MOST_CONNECTIONS,
            h11_max_incomplete_event_size=LARGEST_HEADERS,
            timeout_graceful_shutdown=3,
            access_log=False,
            log_level="error",
            server_header=False,
            proxy_headers=False,
        )
        self._server = uvicorn.Server(config)

    def run(self) -> None:
        """Serves until Ctrl-C, or until `stop`."""
        try:
            with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again at its end
                self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()

    def stop(self) -> None:
        self._server.should_exit = True


class CheckedConnection(H11Protocol):
    """A connection that is closed if it sends no complete request in time.

    uvicorn limits only the time after a response, so silent connections could use up all
    connections.
    """

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._began = self.loop.time()
        self._handled: object = None  # the last request that was received completely
        self._timer = self.loop.call_later(REQUEST_SECONDS, self._look)
        # The type check is for mypy: this server has no other protocol.
        waiting = [
            c for c in self.connections if isinstance(c, CheckedConnection) and c.is_waiting()
        ]
        for connection in sorted(waiting, key=lambda c: c._began)[:-MOST_WAITING]:
            connection.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def is_waiting(self) -> bool:
        """Returns True if no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _look(self) -> None:
        if self.is_waiting() and self.cycle is self._handled:
            self.transport.close()
            return
        self._handled = self.cycle
        self._timer = self.loop.call_later(REQUEST_SECONDS, self._look)


def application(
    watching: RunsReader, token: str, address: str, port: int, is_over: Callable[[], bool]
) -> CheckedRequests:
    """Returns the application behind the checks; streams end when ``is_over``."""
    page, policy = page_and_policy()
    streams = 0

    async def index(request: Request) -> Response:
        return HTMLResponse(page, headers={"content-security-policy": policy})

    async def metrics(request: Request) -> Response:
        text = await asyncio.to_thread(lambda: exposition(watching.standings()))
        return PlainTextResponse(text, media_type=CONTENT_TYPE)

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

    routes = [
        *(Route("/", index), Route("/metrics", metrics), Route("/events", events)),
        Route("/report", partial(_report, watching)),
        Route("/stop", partial(_stop, watching), methods=["POST"]),
    ]
    app = Starlette(routes=routes)
    app.router.redirect_slashes = False
    return CheckedRequests(app, token, names_for(address), f"hasten_monitor_{port}")


async def stream(watching: RunsReader, is_over: Callable[[], bool]) -> AsyncIterator[str]:
    """Yields changes as server-sent events: the states of new runs, then the data of each run.

    States are small, so on a slow link a page can show them before the first curve arrives.
    """
    cursors: dict[str, Cursor] = {}
    sent: dict[str, tuple[int, str]] = {}
    quiet = 0.0
    while not is_over():
        before, changed = dict(sent), []
        for run in watching.runs:
            with run.lock:
                sent[run.name] = (run.version, run.standing()["words"])
            if before.get(run.name) != sent[run.name]:
                changed.append(run)
        if new := [_update_text(run, None) for run in changed if run.name not in before]:
            yield f'data: {{"runs":[{",".join(new)}]}}\n\n'
        for run in changed:
            quiet = 0.0
            yield f'data: {{"runs":[{_update_text(run, cursors.setdefault(run.name, {}))}]}}\n\n'
            await asyncio.sleep(0)  # lets other requests run between two runs' data
        if quiet >= ALIVE_SECONDS:
            quiet = 0.0
            yield ": still here\n\n"
        await asyncio.sleep(EVERY_SECONDS)
        quiet += EVERY_SECONDS


def _update_text(run: Run, cursor: Cursor | None) -> str:
    """Returns the new data of a run as JSON."""
    return json.dumps(page_update(run, cursor), allow_nan=False, separators=(",", ":"))


def _requested_run(watching: RunsReader, request: Request) -> Run | None:
    name = request.query_params.get("run", "")
    matching = [run for run in watching.runs if decodable(run.name) == name]
    return matching[0] if len(matching) == 1 else None


async def _report(watching: RunsReader, request: Request) -> Response:
    run = _requested_run(watching, request)
    if run is None or not run.report:
        return PlainTextResponse("There is no such run, or it has no report.\n", 404)
    headers = {"content-security-policy": REPORT_POLICY}
    return Response(run.report, media_type="text/html", headers=headers)


async def _stop(watching: RunsReader, request: Request) -> Response:
    run = _requested_run(watching, request)
    if run is None:
        return PlainTextResponse("There is no such run.\n", 404)
    with run.lock:
        status = run.standing()["status"]
    if status not in ACTIVE:
        return PlainTextResponse(f"The run doesn't train: {status}.\n", 409)
    try:
        await asyncio.to_thread(run.request_stop)
    except OSError as error:
        reason = error.strerror or str(error)
        return PlainTextResponse(f"The run's folder can't be written: {reason}.\n", 409)
    return PlainTextResponse("The run saves and stops after its step.\n", 202)


def page_and_policy() -> tuple[str, str]:
    """Returns the page, and a policy that allows only its own script and style, by hash."""
    page = resources.files("hasten.monitor").joinpath("page.html").read_text(encoding="utf-8")

    def digest(tag: str) -> str:
        [text] = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    script, style = digest("script"), digest("style")
    policy = (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page, policy


def listen(address: str, port: int) -> socket.socket:
    """Returns a socket that listens at an address.

    Raises:
        InputError: the address or port can't be used.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(MOST_CONNECTIONS)  # connections before the server is ready wait
    except (OSError, OverflowError) as error:
        listener.close()
        why = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"the monitor can't listen at {address}, port {port}: {why}; give another --port, or "
            "0 for any that is free"
        ) from error
    return listener
