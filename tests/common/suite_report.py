"""What the suite says at its end: its slowest tests, and why each failure failed.

A test over ``LIMIT`` seconds needs the mark ``slow``, so that nobody makes the suite slower without
saying so. Seconds and reasons are kept in pytest's cache for scripts/quick.py and run_tests.py.
"""

from __future__ import annotations

from typing import Any

import pytest

LIMIT = 10.0  # seconds
SHOWN = 10
KEPT_SECONDS, KEPT_REASONS = "hasten/seconds", "hasten/reasons"  # places in pytest's cache


class SuiteReport:
    """Collects what all processes report; seconds of a test include its set-up and tear-down."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._seconds: dict[str, float] = {}
        self._reasons: dict[str, str] = {}
        self._allowed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid
        self._seconds[name] = self._seconds.get(name, 0.0) + report.duration
        if {"slow", "long"} & set(report.keywords):
            self._allowed.add(name)
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message if crash else str(report.longrepr)
            self._reasons[name] = " ".join(message.split())[:300]

    def pytest_sessionfinish(self) -> None:
        cache = getattr(self._config, "cache", None)  # absent under -p no:cacheprovider
        if cache is not None and self._seconds:
            rounded = {name: round(taken, 2) for name, taken in self._seconds.items()}
            cache.set(KEPT_SECONDS, {**cache.get(KEPT_SECONDS, {}), **rounded})
            cache.set(KEPT_REASONS, {**cache.get(KEPT_REASONS, {}), **self._reasons})

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        longest = sorted(self._seconds.items(), key=lambda item: -item[1])
        if len(longest) > SHOWN:
            _table(terminalreporter, f"the {SHOWN} slowest tests", longest[:SHOWN])
        over = [(n, s) for n, s in longest if s > LIMIT and n not in self._allowed]
        if over:
            _table(terminalreporter, f"over {LIMIT:.0f} s without the mark slow", over)


def _table(terminalreporter: Any, title: str, rows: list[tuple[str, float]]) -> None:
    terminalreporter.section(title)
    for name, seconds in rows:
        terminalreporter.write_line(f"{seconds:6.1f} s  {name}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SuiteReport(config))
