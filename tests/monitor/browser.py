"""A real browser for tests: Chromium without a window, spoken to over a pipe (DevTools protocol).

``browser()`` skips the test where no Chromium is installed.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 60.0
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-extensions", "--hide-scrollbars", "--remote-debugging-pipe"),
)


class Browser:
    """One page. ``complaints`` are errors on its console, uncaught ones among them."""

    def __init__(self, process: subprocess.Popen[bytes], reading: int, writing: int) -> None:
        self._process, self._reading, self._writing = process, reading, writing
        self._number, self._session = 0, ""
        self._buffer = b""
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol, and its result."""
        found = self._answer(method, **parameters)
        assert "error" not in found, found["error"]
        result: dict[str, Any] = found["result"]
        return result

    def _answer(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + SECONDS
        while True:
            found = self._message(deadline)
            if found.get("id") == self._number:
                return found

    def open(self, url: str) -> None:
        """A page; what the one before it complains of is forgotten."""
        self.call("Page.navigate", url="about:blank")
        self.until("document.readyState === 'complete' && location.href === 'about:blank'")
        self.complaints.clear()
        found = self.call("Page.navigate", url=url)
        assert "errorText" not in found, found
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def reload(self) -> None:
        """Load the page anew; when it returns, the old one is gone."""
        self.value("document.isOld = true")
        self.call("Page.reload")
        self.until("document.readyState === 'complete' && !document.isOld")

    def size(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def dark(self, on: bool) -> None:
        value = "dark" if on else "light"
        features = [{"name": "prefers-color-scheme", "value": value}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def value(self, script: str) -> Any:
        """What an expression of JavaScript gives."""
        found = self._evaluated(script)
        assert "error" not in found, found
        assert "exceptionDetails" not in found["result"], found
        return found["result"]["result"].get("value")

    def until(self, script: str, seconds: float = SECONDS) -> None:
        """Wait until an expression is true; a page on its way to another has no value for it."""
        deadline = time.monotonic() + seconds
        while "error" in (found := self._evaluated(script)) or not self._is_true(found):
            assert time.monotonic() < deadline, f"never true: {script}"
            time.sleep(0.05)

    def _evaluated(self, script: str) -> dict[str, Any]:
        return self._answer(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )

    def _is_true(self, found: dict[str, Any]) -> bool:
        assert "exceptionDetails" not in found["result"], found
        return bool(found["result"]["result"].get("value"))

    def press(self, key: str) -> None:
        codes = {"Tab": 9, "ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, " ": 32}
        text = {"text": " "} if key == " " else {}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code="Space" if key == " " else key,
                windowsVirtualKeyCode=codes[key],
                **(text if kind == "keyDown" else {}),
            )

    def picture(self, path: Path, whole: bool = True) -> None:
        """A picture of the page as PNG."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def _message(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            ready = select.select([self._reading], [], [], max(left, 0))[0]
            assert ready, "no answer"
            data = os.read(self._reading, 1 << 20)
            assert data, "the browser is gone"
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        self._note(found)
        return found

    def _note(self, found: dict[str, Any]) -> None:
        parameters = found.get("params", {})
        if found.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(parameters["exceptionDetails"]))
        elif found.get("method") == "Runtime.consoleAPICalled" and parameters["type"] == "error":
            self.complaints.append(json.dumps(parameters["args"]))
        elif found.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.complaints.append(json.dumps(parameters["entry"]))


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A browser with one empty page; it ends with the block."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("needs Chromium")
    to_child, writing = os.pipe()
    reading, from_child = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [found, *FLAGS, f"--user-data-dir={folder}", "about:blank"],
            pass_fds=(3, 4),
            preexec_fn=_as_3_and_4(to_child, from_child),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_child)
        os.close(from_child)
        try:
            yield Browser(process, reading, writing)
        finally:
            process.kill()
            process.wait()
            os.close(reading)
            os.close(writing)


def _as_3_and_4(reads: int, writes: int) -> Callable[[], None]:
    """The browser reads commands from descriptor 3 and writes answers to 4."""

    def renumber() -> None:
        high_reads = fcntl.fcntl(reads, fcntl.F_DUPFD, 100)  # neither is 3 or 4 from here on
        high_writes = fcntl.fcntl(writes, fcntl.F_DUPFD, 100)
        os.dup2(high_reads, 3, inheritable=True)
        os.dup2(high_writes, 4, inheritable=True)

    return renumber
