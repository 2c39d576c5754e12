"""COMPILE: compiled only where it pays, rows of few lengths, and the same training."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from hasten.core.context import JobContext
from hasten.core.job import Stop
from hasten.techniques.activation_checkpointing import ActivationCheckpointing
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.collate import Packed
from hasten.techniques.compile import COMPILE_SECONDS, Compiled, seconds_expected
from hasten.techniques.precision import Autocast
from tiny import examples, job_context, language_job, run, session_of

TRACED = Compiled(bucket=64, share=1.0, backend="aot_eager")
PACKED = (Packed(), DocumentAttention())


def test_a_short_run_is_left_as_it_is_and_the_probe_says_why() -> None:
    session = session_of(language_job(), Compiled())
    run(session)
    proof = Compiled().check_effect(session)
    assert not proof.effective
    assert "left off: compiling takes about 60 s, more than 10%" in proof.evidence
    assert session.progress.positions % 256  # rows keep their lengths too


def test_a_long_run_is_expected_to_take_long() -> None:
    job = language_job()
    context = job_context(job)
    short = seconds_expected(job, context)
    long = seconds_expected(language_job(stop=Stop(tokens=10**9)), context)
    assert short is not None
    assert long is not None
    assert short < 10 * COMPILE_SECONDS < long
    assert seconds_expected(job, JobContext(context.hardware)) is None


def test_it_trains_alike_beside_other_techniques() -> None:
    torch._dynamo.reset()
    others = (*PACKED, ActivationCheckpointing(), Autocast())
    job = language_job(data=examples(8, longest=8))  # a row of 64 in each step: one graph
    plain = [m.loss for m in run(session_of(job, *others))]
    session = session_of(job, *others, TRACED)
    assert [m.loss for m in run(session)] == pytest.approx(plain, rel=2e-2)
    for technique in (*others, TRACED):
        assert technique.check_effect(session).effective, technique.check_effect(session)
    assert session.progress.positions % 64 == 0


def test_a_cache_that_others_may_write_to_is_an_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    context = job_context(language_job())
    tmp_path.chmod(0o700)
    assert not any("TORCHINDUCTOR_CACHE_DIR" in r for r in Compiled().unsupported_reasons(context))
    tmp_path.chmod(0o707)
    assert any("TORCHINDUCTOR_CACHE_DIR" in r for r in Compiled().unsupported_reasons(context))


def test_a_path_with_a_space_is_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's command has no quotes: the linker looks for half of the path."""
    monkeypatch.setattr(torch, "__path__", ["/opt/my programs/torch"])
    found = Compiled().unsupported_reasons(job_context(language_job()))
    assert any("/opt/my programs/torch" in reason for reason in found)


def test_what_is_missing_to_compile_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    context = job_context(language_job())
    graphs = Compiled(mode="reduce-overhead")
    assert "CUDA graphs" in graphs.unsupported_reasons(context)[0]
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "C++ compiler" in Compiled().unsupported_reasons(context)[0]
    one = dataclasses.replace(context.model, layers=1)
    assert any(
        "one block" in r
        for r in TRACED.unsupported_reasons(dataclasses.replace(context, model=one))
    )
