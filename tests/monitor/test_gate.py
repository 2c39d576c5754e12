"""Nobody without token, name and origin is answered, and no request of any kind opens a file."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hasten.monitor.server import MOST_STREAMS, MonitorServer, names_for
from watched import TOKEN, get, serving, write_run

SECRET = "nobody-may-see-this-run"
PATHS = (
    "/../../etc/passwd",
    "/..%2f..%2fetc/passwd",
    "/%2e%2e/%2e%2e/etc/passwd",
    "//etc/passwd",
    "/etc/passwd%00.html",
    "/page.html",
    "/runs/metrics.jsonl",
    "/static/../page.html",
    "\\..\\..\\windows\\win.ini",
    "/events/../metrics.jsonl",
    "/?file=/etc/passwd",
    "/" + "a/" * 2000,
    "/metrics/",
    "/.git/config",
    "file:///etc/passwd",
    "http://169.254.169.254/latest/meta-data",
)
METHODS = (
    "POST",
    "PUT",
    "DELETE",
    "PATCH",
    "OPTIONS",
    "TRACE",
    "CONNECT",
    "HEAD",
    "PROPFIND",
    "GETX",
)
HOSTS = (
    "evil.example",
    "127.0.0.1.evil.example",
    "localhost@evil.example",
    "evil.example#localhost",
    "localhost.evil.example:8470",
    "169.254.169.254",
    "[::2]",
    "127.0.0.1:port",
    "",
    "localhost/",
    "0x7f000001",
    "localhost localhost",
)
ORIGINS = (
    "http://evil.example",
    "null",
    "http://localhost.evil.example",
    "https://127.0.0.1.evil.example",
    "file://",
    "http://127.0.0.1:1",
    "http://localhost",
    "chrome-extension://abcdef",
    "",
)
TOKENS = (
    "",
    "x" * 31,
    TOKEN[:-1],
    TOKEN + "x",
    TOKEN.upper(),
    "x" * 12_000,
    "' OR 1=1 --",
    "../../etc/passwd",
    "Bearer",
    "\xff\xfe",
)


@pytest.fixture(scope="module")
def strangers() -> list[threading.Thread]:
    """Threads that are no part of the server: this one, and what other tests have left."""
    return threading.enumerate()


@pytest.fixture(scope="module")
def server(
    strangers: list[threading.Thread], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MonitorServer]:
    """Its runs are read before, and nothing of it needs a file from then on."""
    folder = write_run(tmp_path_factory.mktemp("runs") / SECRET)
    with serving([folder], live=False) as found:
        get(found.port, "/")
        get(found.port, "/", authorization="Bearer wrong")
        get(found.port, "/nothing")
        yield found


def request(host: str, path: str = "/", method: str = "GET", *more: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", *more, "Connection: close", "", ""]
    return "\r\n".join(lines).encode("latin-1")


def hostile(port: int) -> list[bytes]:
    """At least 200 requests of which none may be answered with a run's data."""
    here = f"127.0.0.1:{port}"
    good = f"Authorization: Bearer {TOKEN}"
    cookie = f"Cookie: hasten_monitor_{port}="
    found = [request(here, path, "GET", good) for path in PATHS if path != "/?file=/etc/passwd"]
    found += [request(here, path) for path in PATHS]
    found += [request(here, f"{path}?token={TOKEN}") for path in PATHS if "?" not in path]
    answered = ("/", "/events", "/metrics")
    found += [request(here, p, m, good) for p, m in itertools.product(answered, METHODS)]
    found += [request(host, p, "GET", good) for p, host in itertools.product(answered, HOSTS)]
    found += [
        request(here, p, "GET", good, f"Origin: {o}")
        for p, o in itertools.product(answered, ORIGINS)
    ]
    found += [
        request(here, p, "GET", f"Authorization: Bearer {t}")
        for p, t in itertools.product(answered, TOKENS)
    ]
    found += [request(here, "/", "GET", cookie + token) for token in TOKENS]
    found += [request(here, f"/?token={token.encode().hex()}") for token in TOKENS]
    found += [
        request(here, "/", "GET", good, "X-Large: " + "x" * 200_000),
        request(here, "/", "GET", good, *(f"X-{i}: y" for i in range(20_000))),
        request(here, "/", "GET", f"Basic: {TOKEN}", f"Authorization: Basic {TOKEN}"),
        request(here, "/", "GET", good, "Host: evil.example"),
        request(here, "/events", "GET", "Upgrade: websocket", "Connection: Upgrade"),
        request(here, "/", "POST", good, "Transfer-Encoding: chunked", "Content-Length: 5"),
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /\r\n\r\n",
        b"\x16\x03\x01\x02\x00" + b"\x00" * 100,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x00" * 5000,
        b"GET " + b"a" * 100_000,
    ]
    return found


def ask(port: int, data: bytes) -> bytes:
    """All that comes back until the server closes; of silence, nothing."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        found = b""
        connection.settimeout(2)
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(65536):
                found += piece
        except OSError:  # refused, cut, or shut before it was read: no answer
            pass
        return found


class Opened:
    """Files that threads other than the strangers open, seen by the interpreter itself."""

    def __init__(self, strangers: list[threading.Thread]) -> None:
        self.on = False
        self.names: list[Any] = []
        self._strangers = strangers
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        watched = event in ("open", "os.listdir", "os.scandir", "subprocess.Popen", "exec")
        if self.on and watched and not self._by_a_stranger():
            self.names.append((event, arguments[0]))

    def _by_a_stranger(self) -> bool:
        own = threading.get_ident()  # which may have been an ended thread's before
        return any(thread.ident == own and thread.is_alive() for thread in self._strangers)


def test_200_hostile_requests_get_no_data_and_reach_no_file(
    server: MonitorServer, strangers: list[threading.Thread]
) -> None:
    requests = hostile(server.port)
    assert len(requests) >= 200
    opened = Opened(strangers)
    opened.on = True
    answers = [ask(server.port, data) for data in requests]
    there = opened.names[:]
    control = threading.Thread(target=Path(__file__).read_bytes)
    control.start()
    control.join()
    opened.on = False
    assert there == []
    assert opened.names  # the hook does see what another thread opens
    for data, answer in zip(requests, answers, strict=True):
        place = data[:120]
        assert SECRET.encode() not in answer, place
        assert b"hasten_loss" not in answer, place
        assert b"root:" not in answer, place
        assert not answer.startswith(b"HTTP/1.1 200"), place
    assert get(server.port, "/metrics")[0] == 200  # it's still there


def test_the_token_is_taken_by_header_cookie_and_once_by_address(server: MonitorServer) -> None:
    assert get(server.port, "/")[0] == 200
    status, headers, _ = get(server.port, f"/?token={TOKEN}", authorization="")
    assert (status, headers["location"]) == (303, "/")
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite" in cookie
    value = cookie.partition(";")[0]
    assert get(server.port, "/metrics", authorization="", cookie=f"other=1; {value}")[0] == 200
    assert get(server.port, f"/metrics?token={TOKEN}", authorization="")[0] == 401


def test_a_run_is_stopped_by_post_with_the_token_from_the_own_page_alone(tmp_path: Path) -> None:
    active = write_run(tmp_path / "runs" / "active")
    write_run(tmp_path / "runs" / "over", finished=True)
    outside = tmp_path / "outside"
    with serving([tmp_path / "runs"]) as server:
        own, evil = f"http://127.0.0.1:{server.port}", "http://evil.example"
        asked = "/stop?run=active"
        assert get(server.port, asked)[0] == 405
        assert get(server.port, asked, "POST", authorization="Bearer wrong")[0] == 401
        assert get(server.port, asked, "POST", authorization="", origin=own)[0] == 401
        assert get(server.port, asked, "POST", origin=evil)[0] == 403
        assert get(server.port, asked, "POST", host="evil.example")[0] == 421
        for name in ("", "../outside", "active/../active", str(active), "nothing"):
            assert get(server.port, f"/stop?run={name}", "POST")[0] == 404, name
        assert get(server.port, "/stop?run=over", "POST")[0] == 409
        assert [p.name for p in tmp_path.rglob("stop")] == []
        (active / "stop").symlink_to(outside)
        assert get(server.port, asked, "POST")[0] == 409
        (active / "stop").unlink()
        assert get(server.port, asked, "POST", origin=own)[0] == 202
    assert (active / "stop").read_bytes() == b""
    assert not outside.exists()
    assert list(tmp_path.rglob("stop")) == [active / "stop"]


def test_its_own_page_and_a_tunnel_may_ask(server: MonitorServer) -> None:
    for host in (
        f"localhost:{server.port}",
        "127.0.0.1:9999",
        "localhost",
        "[::1]:80",
        "LOCALHOST",
    ):
        assert get(server.port, "/", host=host)[0] == 200
        assert get(server.port, "/", host=host, origin=f"http://{host}")[0] == 200


def test_answers_may_not_be_framed_kept_or_run_other_scripts(server: MonitorServer) -> None:
    _, headers, body = get(server.port, "/")
    assert headers["x-frame-options"] == "DENY"
    assert headers["cache-control"] == "no-store"
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert b"http://" not in body.replace(b"http://www.w3.org", b"")
    assert b"https://" not in body


def test_names_follow_the_address() -> None:
    assert names_for("127.0.0.1") == {"localhost", "127.0.0.1", "[::1]"}
    assert "10.1.2.3" in names_for("10.1.2.3")
    assert "127.0.0.1" in names_for("0.0.0.0")
    assert "train.example" in names_for("train.example")
    assert "evil.example" not in names_for("0.0.0.0")


def test_only_so_many_pages_get_the_stream_and_a_closed_one_makes_room(
    server: MonitorServer,
) -> None:
    def opened() -> tuple[int, http.client.HTTPConnection]:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("GET", "/events", headers={"Authorization": f"Bearer {TOKEN}"})
        return connection.getresponse().status, connection

    pages = [opened() for _ in range(MOST_STREAMS)]
    assert {status for status, _ in pages} == {200}
    status, more = opened()
    assert status == 503
    for _, connection in (*pages, (0, more)):
        connection.close()
    deadline = time.monotonic() + 60
    while True:
        status, connection = opened()
        connection.close()
        if status == 200:
            break
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_silent_and_slow_connections_are_closed_and_hold_up_nobody(server: MonitorServer) -> None:
    def connected(data: bytes = b"") -> socket.socket:
        found = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        found.sendall(data)
        return found

    began = time.monotonic()
    slow = [connected(b"GET / HTTP/1.1\r\nHost: ") for _ in range(40)]
    idle = [connected() for _ in range(60)]
    assert get(server.port, "/metrics")[0] == 200
    assert time.monotonic() - began < 4, "less than the time limit of a request"
    for connection in (*slow, *idle):  # the end of the stream, or a reset
        with contextlib.suppress(ConnectionError):
            assert connection.recv(10) == b""
        connection.close()


def test_a_connection_may_ask_again_within_the_time_limit(
    server: MonitorServer,
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    for _ in range(3):
        connection.request("GET", "/metrics", headers=headers)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200
        time.sleep(0.2)
    connection.close()
