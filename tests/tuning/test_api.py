"""Tuning as a user calls it: real processes of loops that wait, and what is left on the disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hasten.errors import InputError
from hasten.machine.files import write_atomic
from hasten.planner import tune
from hasten.tune.api import _Tuning
from hasten.tune.subjects import TuneOptions

pytestmark = pytest.mark.waits

JOBS = f"{Path(__file__).parent / 'loop_jobs.py'}"
SPACE = {"batch": [1, 2, 3], "fused": [False, True]}
# A tuning that stands still as soon as two trials are over and noted.
TWO_TRIALS = """
import sys, time
from hasten.progress import SilentProgress
from hasten.planner import tune
from hasten.tune.subjects import TuneOptions

class StandsStill(SilentProgress):
    def show(self, text, share):
        if text.startswith("trial 3:"):
            print("two trials", flush=True)
            time.sleep(600)

space = {"batch": [1, 2, 3], "fused": [False, True]}
options = TuneOptions(trials=5, steps=2)
tune(sys.argv[1], 600, options, space=space, folder=sys.argv[2], audience=StandsStill())
"""


def test_a_loop_is_tuned_proven_and_answered_at_once_the_second_time(tmp_path: Path) -> None:
    options = TuneOptions(trials=3, steps=2)
    found = tune(f"{JOBS}:job", 300, options, space=SPACE, folder=tmp_path)
    assert found.better, str(found)
    ratio = found.report["winner"]["ratio"]
    assert 1 < ratio["low"] < ratio["high"]
    assert ratio["median"] > 1
    assert json.loads(found.text).items() >= found.settings.items()
    assert found.settings != {"batch": 1, "fused": False}
    kept = json.loads((found.folder / "study.json").read_text())
    assert kept["winner"] == found.report["winner"]
    assert len(kept["trials"]) == 3
    assert "<svg" in (found.folder / "study.html").read_text()
    again = tune(f"{JOBS}:job", 300, options, space=SPACE, folder=tmp_path)
    assert again.report == kept


def test_settings_that_change_nothing_are_not_called_better(tmp_path: Path) -> None:
    space = {"batch": [1, 2]}
    found = tune(f"{JOBS}:alike", 300, TuneOptions(trials=1), space=space, folder=tmp_path)
    if found.report["duel"] is not None:  # by luck the trial may lie below the start
        assert not found.better or found.report["winner"]["ratio"]["low"] < 1.1
    assert found.settings["batch"] in (1, 2)


def test_what_runs_out_of_memory_is_a_constraint(tmp_path: Path) -> None:
    space = {"batch": [1, 2, 4]}
    found = tune(
        f"{JOBS}:greedy", 300, TuneOptions(trials=2, steps=2), space=space, folder=tmp_path
    )
    states = {t["settings"]["batch"]: t["state"] for t in found.report["trials"]}
    assert states.get(4, "out of memory") == "out of memory"
    assert found.settings["batch"] != 4


def test_a_loop_that_fails_in_every_trial_says_the_reason(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"all 1 trials failed.*no kernel for 2"):
        tune(f"{JOBS}:failing", 300, space={"batch": [1, 2]}, folder=tmp_path)


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_its_trials_and_the_best_settings(tmp_path: Path) -> None:
    program = tmp_path / "two_trials.py"
    program.write_text(TWO_TRIALS)
    command = [sys.executable, str(program), f"{JOBS}:job", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"two trials\n"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    (record,) = tmp_path.glob("*/record.jsonl")
    assert record.read_text().count('"trial"') == 2
    best = json.loads((record.parent / "best.yaml").read_text())
    assert set(best) == {"_measured", "batch", "fused"}
    found = tune(f"{JOBS}:job", 600, TuneOptions(trials=5, steps=2), space=SPACE, folder=tmp_path)
    assert len(found.report["trials"]) == 5
    places = [json.dumps(t["settings"]) for t in found.report["trials"]]
    assert len(set(places)) == 5


@pytest.mark.parametrize(
    ("budget", "options", "said"),
    [
        ("soon", {}, "budget: can't read 'soon'"),
        ("0.02s", {}, "is too short"),  # no process starts in that
        (0, {}, "is no time"),
        (-5.0, {}, "budget: can't read"),
        ("60s", {"sampler": "tpee"}, "did you mean 'tpe'"),
        ("60s", {"objective": "speed"}, "objective: there is no 'speed'"),
        ("60s", {"objective": "memory"}, "only its speed is known"),
        ("60s", {"trials": 0}, "trials is 0"),
    ],
)
def test_bad_input_is_a_sentence(
    budget: str | float, options: dict, said: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=said):
        tune(f"{JOBS}:job", budget, TuneOptions(**options), space=SPACE, folder=tmp_path)


def test_a_loop_without_a_space_and_a_recipe_with_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="which arguments"):
        tune(f"{JOBS}:job", folder=tmp_path)
    with pytest.raises(InputError, match="leave it out"):
        tune("recipe.yaml", space=SPACE)


def test_for_less_memory_a_slower_arm_may_win_and_a_worse_model_may_not() -> None:
    def row(verdict: str, peak: int, quality: str | None = "not worse") -> dict:
        return {"verdict": verdict, "quality": quality, "peak_memory_bytes": peak}

    rows = [row("baseline", 100, None), row("baseline: a second copy, for the noise", 100, None)]
    rows += [
        row("helped", 50, "worse: held-out loss 2.0000 → 2.1000"),
        row("failed: killed", 50, None),
        {**row("helped", 50), "refused": "lossy: nobody was asked to prove it"},
        row("hurt: recompute did not act", 70),
        row("hurt", 80),
    ]
    study: Any = SimpleNamespace(objective="memory", memory=None)
    place = _Tuning._best_arm(cast(Any, None), study, rows)
    assert place == 5


def test_a_file_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "best.yaml"
    write_atomic(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["best.yaml"]
