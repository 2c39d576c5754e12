"""A loss that shoots up: the state before it, a lower rate, other data; and never by accident."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hasten.core.health import SpikeError, SpikePolicy, SpikeWatch, check_policy
from hasten.core.setup import Session
from hasten.core.step import training
from hasten.errors import InputError
from hasten.techniques.checkpoint import Checkpoints
from tiny import examples, language_job, run, session_of
from told import json_lines

POLICY = SpikePolicy(sigmas=4, window=8, in_a_row=2, lower=0.5, at_most=2)


def spoil(session: Session) -> None:
    """What a bad update does: the head is far from where it was."""
    model: Any = session.model
    with torch.no_grad():
        model.lm_head.weight.mul_(40)


def watched(folder: Path, policy: SpikePolicy = POLICY, steps: int = 30) -> Session:
    job = language_job(steps=steps, data=examples(80), lr=1e-3)
    session = session_of(job, Checkpoints(interval=3), folder=folder / "checkpoints")
    session.setup.spike_policy = SpikeWatch(policy, folder / "spikes.jsonl")
    return session


def test_a_spike_goes_back_learns_more_slowly_and_leaves_the_data_out(tmp_path: Path) -> None:
    session, seen = watched(tmp_path), []
    for metrics in training(session):
        seen.append((metrics.step, metrics.loss, metrics.learning_rate))
        if len(seen) == 13:
            spoil(session)
    steps = [step for step, _, _ in seen]
    assert steps == [*range(1, 16), *range(13, 31)]  # 14 and 15 were high; 12 was the newest saved
    assert max(loss for _, loss, _ in seen[15:]) < seen[13][1]
    assert {rate for _, _, rate in seen[:15]} == {1e-3}
    assert {rate for _, _, rate in seen[15:]} == {5e-4}
    (line,) = json_lines(tmp_path / "spikes.jsonl")
    assert line["did"] == "went back to step-00000012, left out 3 steps of data"
    assert (line["step"], line["rate"]) == (15, 0.5)
    # 30 steps were trained and three more were left out, of ten in an epoch.
    assert (session.progress.epoch, session.progress.step_in_epoch) == (3, 3)


def test_without_skip_data_the_same_records_are_seen_again(tmp_path: Path) -> None:
    policy = SpikePolicy(sigmas=4, window=8, in_a_row=2, lower=1.0, skip_data=False)
    session, losses = watched(tmp_path, policy, steps=20), []
    for metrics in training(session):
        losses.append(metrics.loss)
        if len(losses) == 13:
            spoil(session)
    plain = [m.loss for m in run(session_of(session.setup.job))]
    assert losses[:13] + losses[16:] == plain[:13] + plain[13:]
    assert losses[15:] == plain[12:]


def test_no_checkpoint_is_written_while_losses_are_high(tmp_path: Path) -> None:
    policy = SpikePolicy(sigmas=4, window=8, in_a_row=50)
    session = watched(tmp_path, policy)
    for metrics in training(session):
        if metrics.step == 13:
            spoil(session)
    newest = max(p.name for p in (tmp_path / "checkpoints").glob("step-*"))
    assert newest == "step-00000012"


def test_a_spike_before_the_first_checkpoint_lowers_the_rate_alone(tmp_path: Path) -> None:
    job = language_job(steps=14, data=examples(80), lr=1e-3)
    session = session_of(job, Checkpoints(interval=100), folder=tmp_path / "checkpoints")
    session.setup.spike_policy = SpikeWatch(POLICY, tmp_path / "spikes.jsonl")
    rates = []
    for metrics in training(session):
        rates.append(metrics.learning_rate)
        if metrics.step == 9:
            spoil(session)
    assert rates == [1e-3] * 11 + [5e-4] * 2 + [2.5e-4]  # it didn't help, and is seen again
    assert "no checkpoint yet" in json_lines(tmp_path / "spikes.jsonl")[0]["did"]


def test_spikes_beyond_the_allowed_number_end_the_run(tmp_path: Path) -> None:
    session = watched(tmp_path, steps=90)

    def spoilt_again_and_again() -> None:
        for count, _ in enumerate(training(session), start=1):
            if count % 14 == 13:
                spoil(session)

    with pytest.raises(SpikeError, match="after 2 restarts by loss_spike") as told:
        spoilt_again_and_again()
    assert told.value.code == 5
    assert [line["did"].split()[0] for line in json_lines(tmp_path / "spikes.jsonl")] == [
        "went",
        "went",
        "stopped",
    ]


def test_what_the_policy_remembers_is_resumed(tmp_path: Path) -> None:
    session = watched(tmp_path)
    for count, metrics in enumerate(training(session), start=1):
        if count == 13:
            spoil(session)
        if count > 16 and metrics.step == 18:
            break
    fresh = watched(tmp_path)
    session.setup.checkpoint.keeper.close()  # type: ignore[attr-defined]
    assert fresh.setup.checkpoint.resume(fresh) is not None
    found: Any = fresh.setup.spike_policy
    assert (found.rate, found.times) == (0.5, 1)
    first = next(iter(training(fresh)))
    assert first.learning_rate == 5e-4


def test_an_ordinary_noisy_loss_that_falls_is_no_spike() -> None:
    for seed in range(8):
        draw, watch = np.random.default_rng(seed), SpikeWatch(SpikePolicy())
        for step in range(2000):
            loss = 2 + 8 * np.exp(-step / 300) + draw.normal(0, 0.3)
            high = loss > watch.limit()
            watch._high = [*watch._high, loss] if high else []
            if not high:
                watch._losses.append(loss)
            assert len(watch._high) < 3


@pytest.mark.parametrize(
    "wrong", [{"sigmas": 0}, {"window": 2}, {"in_a_row": 0}, {"lower": 0}, {"lower": 1.5}]
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"lower is|sigmas must"):
        SpikePolicy(**wrong)


def test_a_policy_without_checkpoints_is_refused() -> None:
    with pytest.raises(InputError, match="loss_spike goes back to a checkpoint"):
        check_policy(session_of(language_job(steps=3)))
