"""Leaving: signals and notices stop between two steps, are repeated without harm, and end."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from hasten.core.loop import (
    HASTE,
    EvaluationSchedule,
    ShutdownNotice,
    defer_signals,
    fit,
    request_stop,
)
from hasten.core.setup import Session
from tiny import language_job, session_of


@pytest.fixture
def session() -> Session:
    return session_of(language_job(steps=50))


@pytest.mark.parametrize("number", HASTE)
def test_a_scheduler_s_signal_stops_without_evaluating_however_often_it_comes(
    session: Session, number: signal.Signals
) -> None:
    def ask(metrics: Any) -> None:
        if metrics.step == 3:
            for _ in range(5):
                os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    outcome = fit(session, EvaluationSchedule(on_step=ask))
    assert (outcome.stopped, session.progress.step, outcome.evaluations) == ("left", 3, [])
    assert signal.getsignal(number) is before
    assert outcome.summary(session)["eval_loss"] is None


def test_a_second_interrupt_ends_at_once(session: Session) -> None:
    def twice(metrics: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fit(session, EvaluationSchedule(on_step=twice))


def test_a_trained_run_is_not_disturbed_and_before_signals_act_as_they_did(
    session: Session,
) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with defer_signals(lambda: session):
            session.is_trained = True
            os.kill(os.getpid(), signal.SIGTERM)
            assert heard == []
            session.is_trained = False
            os.kill(os.getpid(), signal.SIGTERM)
            assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_thread_can_train_too_without_signals(session: Session) -> None:
    found: list[str] = []

    def work() -> None:
        with defer_signals(lambda: session):
            found.append(fit(session).stopped)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == ["done"]


def test_a_file_that_appears_is_a_notice(session: Session, tmp_path: Path) -> None:
    def write(metrics: Any) -> None:
        if metrics.step == 2:
            (tmp_path / "notice").touch()
            told.wait(60)

    told = threading.Event()

    def leave() -> None:
        request_stop(session, haste=True)
        told.set()

    with ShutdownNotice(leave, tmp_path / "notice", every=0.01):
        outcome = fit(session, EvaluationSchedule(on_step=write))
    assert (outcome.stopped, session.progress.step) == ("left", 2)


def test_a_file_that_can_not_be_looked_at_is_no_notice(tmp_path: Path) -> None:
    assert not ShutdownNotice(lambda: None, tmp_path / ("x" * 300)).arrived()


@pytest.mark.parametrize(
    ("command", "there"),
    [
        ([sys.executable, "-c", "pass"], True),
        ([sys.executable, "-c", "raise SystemExit(1)"], False),
        (["no such program"], False),
        ([], False),
    ],
)
def test_a_command_gives_notice_by_its_exit_code(command: list[str], there: bool) -> None:
    assert ShutdownNotice(lambda: None, command=command).arrived() is there


def test_a_command_runs_without_a_shell(tmp_path: Path) -> None:
    marker = tmp_path / "written"
    assert not ShutdownNotice(lambda: None, command=[f"touch {marker}; true"]).arrived()
    assert not marker.exists()
