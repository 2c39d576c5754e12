"""In the terminal a run is a panel of what is known of it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from hasten.monitor.terminal import BARS, sparkline, watch_in_terminal
from hasten.monitor.watching import RunsReader
from watched import append, write_run


def drawn(folder: Path, width: int = 100, terminal: bool = False) -> str:
    text = io.StringIO()
    console = Console(file=text, width=width, force_terminal=terminal)
    watch_in_terminal(RunsReader([folder]), console)
    return text.getvalue()


def test_without_a_terminal_the_runs_are_printed_once(tmp_path: Path) -> None:
    write_run(tmp_path / "one", 20)
    write_run(tmp_path / "two", 10, finished=True)
    text = drawn(tmp_path)
    assert "one  running  step 20 of 40 (50%)" in text
    assert "two  done" in text
    assert "2,000 (2,000 to 2,000)" in text
    assert "not known" not in text


def test_on_a_terminal_it_draws_until_all_runs_are_finished(tmp_path: Path) -> None:
    assert "done" in drawn(write_run(tmp_path / "run", 5, finished=True), terminal=True)


@pytest.mark.parametrize("width", [20, 40, 200])
def test_any_width_will_do(tmp_path: Path, width: int) -> None:
    text = drawn(write_run(tmp_path / "run", 5), width)
    assert max(map(len, text.splitlines())) <= width


def test_texts_of_files_are_no_markup_and_no_control(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "[red]run", 5)
    append(folder / "restarts.jsonl", {"attempt": 1, "cause": "[bold]x\x1b[2J", "step": 1})
    text = drawn(folder)
    assert "[red]run" in text
    assert "[bold]x" in text
    assert "\x1b[2J" not in text


@given(st.lists(st.none() | st.floats(-1e9, 1e9)), st.integers(0, 50))
def test_a_sparkline_is_never_longer_than_wanted(values: list[float | None], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) <= min(width, len(values))
    assert set(line) <= {*BARS, " "}


def test_a_sparkline_rises_with_its_values() -> None:
    assert sparkline(list(map(float, range(8))), 8) == BARS
    assert sparkline([0.0, 0.0, 7.0, 7.0], 2) == BARS[0] + BARS[-1]
