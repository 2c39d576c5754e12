"""What the tests of commands share: a command run in this process."""

from __future__ import annotations

import sys

import pytest

from finished_runs import full_run, lora_run
from told import Hasten

__all__ = ["full_run", "lora_run"]


@pytest.fixture
def hasten(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Hasten:
    """Run a command in this process; (exit code, standard output, standard error)."""
    from hasten.cli.main import run

    def command(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hasten", *map(str, words)])
        code = 0
        try:
            run()
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 0
        out, err = capfd.readouterr()
        return code, out, err

    return command
