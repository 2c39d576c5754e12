"""Settings tried while a run goes on: what pays is kept, and the run learns the same."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hasten.core.setup import Session
from hasten.core.technique import LiveSetting
from hasten.core.timing import StepMetrics
from hasten.errors import InputError
from hasten.machine.environment import World
from hasten.recipe.schema import Recipe
from hasten.training import auto_adjust
from hasten.training.auto_adjust import BLOCK, Candidate, LiveTuning, adjusted, sentence
from hasten.training.run import train
from sample_data import small
from told import json_lines

VALUES = (1, 2, 4, 8)


class Run:
    """A run whose speed is a function of its settings, with noise; no model."""

    def __init__(
        self,
        speed: Callable[[dict[str, Any]], float],
        start: dict[str, Any],
        noise: float = 0.01,
        seed: int = 0,
        delay: int = 0,
    ) -> None:
        self.settings, self.speed, self.noise = dict(start), speed, noise
        self.draw, self.notes = random.Random(seed), list[dict[str, Any]]()
        self.felt = [dict(start)] * (delay + 1)  # what steps under way still have
        self.steps = 0
        switches = tuple(self._switch(name, delay) for name in start)
        technique = SimpleNamespace(live_settings=lambda session: switches)
        setup = SimpleNamespace(
            rank_sync=SimpleNamespace(diverged=False, sum=lambda values: values),
            layout=SimpleNamespace(all_reduce_world=lambda values: values),
            context=SimpleNamespace(world=World()),
            plan=[technique] if start else [],
        )
        self.session: Any = SimpleNamespace(setup=setup)
        self.live = LiveTuning(self.session, seed, self.notes.append)

    def _switch(self, name: str, delay: int) -> LiveSetting:
        def change(value: Any) -> None:
            self.settings[name] = value

        return LiveSetting(name, VALUES, lambda: self.settings[name], change, lambda: delay)

    def go(self, steps: int, skipped: Callable[[int], bool] = lambda step: False) -> None:
        for _ in range(steps):
            self.steps += 1
            self.felt = [*self.felt[1:], dict(self.settings)]
            rate = self.speed(self.felt[0]) * (1 + self.draw.gauss(0, self.noise))
            lost = skipped(self.steps)
            self.live.after_step(
                SimpleNamespace(  # type: ignore[arg-type]
                    step=self.steps,
                    tokens=1000,
                    step_seconds=1000 / rate * (50 if lost else 1),
                    skipped=lost,
                )
            )


def test_a_faster_value_is_climbed_to_and_written_down() -> None:
    run = Run(lambda s: 100 * {1: 1.0, 2: 1.2, 4: 1.4, 8: 1.1}[s["size"]], {"size": 1})
    run.go(400)
    assert run.settings == {"size": 4}
    assert run.live.changed == {"size": 4}
    kept = [(n["from"], n["to"]) for n in run.notes if n.get("kept")]
    assert kept == [(1, 2), (2, 4)]
    back = next(n for n in run.notes if n["setting"] and not n["kept"])
    assert (back["from"], back["to"], back["why"]) == (4, 8, "hurt")
    assert run.live.at_rest
    assert run.notes[-1] == {
        "step": run.notes[-1]["step"],
        "setting": None,
        "why": "nothing is left to try",
    }


@pytest.mark.parametrize("seed", range(20))
def test_what_makes_no_difference_is_taken_back(seed: int) -> None:
    run = Run(lambda s: 100.0, {"size": 2, "rows": 4}, noise=0.03, seed=seed)
    run.go(2000)
    assert run.live.at_rest
    assert run.settings == {"size": 2, "rows": 4}
    assert run.live.changed == {}


def test_a_value_that_is_much_slower_is_given_up_after_two_tries() -> None:
    run = Run(lambda s: 100 if s["size"] == 8 else 50, {"size": 8})
    run.go(60)
    [note] = [n for n in run.notes if n["setting"]]
    assert (note["tries"], note["kept"], run.settings["size"]) == (2, False, 8)
    assert run.steps >= 2 * 2 * BLOCK


def test_steps_under_way_with_the_old_value_are_left_out() -> None:
    run = Run(lambda s: 100 * s["size"] ** 0.2, {"size": 4}, delay=5)
    run.go(600)
    assert run.settings == {"size": 8}
    up = next(n for n in run.notes if n.get("kept"))
    assert up["ratio"]["mean"] == pytest.approx(2**0.2, rel=0.02)


def test_steps_that_were_given_up_say_nothing() -> None:
    run = Run(lambda s: 100 * s["size"] ** 0.1, {"size": 4}, noise=0.001)
    run.go(400, skipped=lambda step: step % 7 == 0)
    assert run.settings == {"size": 8}


def test_two_switches_are_tried_and_each_stands_while_the_other_is_tried() -> None:
    run = Run(
        lambda s: 100 * {1: 1.3, 2: 1.2, 4: 1.0, 8: 0.8}[s["a"]] * (1.1 if s["b"] == 8 else 1.0),
        {"a": 4, "b": 4},
    )
    run.go(1500)
    assert run.settings == {"a": 1, "b": 8}


def test_a_resumed_run_begins_with_what_was_kept() -> None:
    first = Run(lambda s: 100 * s["size"] ** 0.2, {"size": 2})
    first.go(400)
    again = Run(lambda s: 100 * s["size"] ** 0.2, {"size": 2})
    again.live.load_state_dict(first.live.state_dict())
    again.go(4)
    assert again.live.changed == {"size": 8}
    odd = Run(lambda s: 100.0, {"size": 2})
    odd.live.load_state_dict({"standing": {"size": 3, "gone": 1}})
    odd.go(4)
    assert odd.live.changed == {}


def test_a_plan_without_switches_says_so_once() -> None:
    run = Run(lambda s: 100.0, {})
    run.go(20)
    [note] = run.notes
    assert sentence(note) == (
        "step 3: live_tuning: no technique of this plan has a setting that may change while it "
        "trains"
    )


def test_ranks_take_the_same_decisions_by_the_mean_of_their_clocks() -> None:
    """One of two ranks sees a gain, the other, more noisy, none."""
    runs = [
        Run(lambda s: 100 * s["size"] ** 0.4, {"size": 2}, noise=0.005),
        Run(lambda s: 100.0, {"size": 2}, noise=0.02, delay=3),
    ]
    meeting, said = threading.Barrier(2, timeout=120), [torch.zeros(1), torch.zeros(1)]

    def join(rank: int) -> None:
        def total(values: torch.Tensor) -> torch.Tensor:
            said[rank] = values
            meeting.wait()
            found = said[0] + said[1]
            meeting.wait()
            return found

        setup = runs[rank].session.setup
        setup.context.world = World(rank=rank, size=2)
        setup.rank_sync.sum = setup.layout.all_reduce_world = total

    for rank in (0, 1):
        join(rank)
    threads = [threading.Thread(target=run.go, args=(900,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert runs[0].notes == runs[1].notes
    assert runs[0].settings == runs[1].settings == {"size": 8}
    assert runs[0].live.at_rest


def test_ranks_that_train_apart_and_compiled_blocks_are_refused() -> None:
    run = Run(lambda s: 100.0, {"size": 2})
    run.session.setup.rank_sync.diverged = True
    with pytest.raises(InputError, match="train apart"):
        LiveTuning(run.session, 0, lambda line: None)


def test_a_candidate_is_judged_at_its_looks_alone() -> None:
    candidate = Candidate(SimpleNamespace(name="x"), 1, [0.1, 0.11, 0.1])  # type: ignore[arg-type]
    assert candidate.verdict(0.05) is None
    candidate.ratios.append(0.105)
    assert candidate.verdict(0.05) == "helped"


PLAN = ["packed", {"gradient_accumulation": {"micro_batch_size": 2}}, "activation_checkpointing"]


def run(folder: Path, **changes: Any) -> tuple[dict[str, Any], list[str], Session]:
    """Trains 16 steps; a step's seconds are computed: the larger the micro-batch, the fewer."""
    told: list[str] = []
    sessions: list[Session] = []
    values = small(folder, plan=PLAN, max_steps=16, global_batch_size=4, **changes)

    def start(session: Session) -> None:
        sessions.append(session)
        tuner: Any = session.setup.live_tuner
        if tuner is None:
            return
        after_step = tuner.after_step

        def after_computed_seconds(metrics: StepMetrics) -> None:
            live = [s for t in session.setup.plan for s in t.live_settings(session)]
            size = {s.name: s.now() for s in live}["gradient_accumulation.micro_batch_size"]
            after_step(replace(metrics, step_seconds=metrics.tokens / (1000 * size)))

        tuner.after_step = after_computed_seconds

    return train(Recipe(**values), tell=told.append, on_start=start), told, sessions[0]


@pytest.mark.slow
def test_a_run_tries_its_settings_and_learns_as_one_that_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("BLOCK", 1), ("VERDICT_TRIES", (2,)), ("MOST_TRIES", 2)):
        monkeypatch.setattr(auto_adjust, name, value)
    plain, _, _ = run(tmp_path / "plain")
    summary, told, session = run(tmp_path / "auto", live_tuning=True)
    assert summary["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-4)
    assert plain["adjusted"] == {}
    assert summary["adjusted"] == adjusted(session)
    path = tmp_path / "auto" / "run" / "adjustments.jsonl"
    lines = json_lines(path)
    assert lines
    assert all(line["setting"] is None or line["tries"] >= 2 for line in lines)
    assert [t for t in told if t.startswith("step ")] == [
        auto_adjust.sentence(line) for line in lines
    ]
    kept = {line["setting"]: line["to"] for line in lines if line.get("kept")}
    assert summary["adjusted"] == kept


def test_a_resumed_run_goes_on_with_what_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the earlier part had kept smaller micro-batches."""
    values = small(tmp_path, plan=PLAN, live_tuning=True, max_steps=2, checkpoint_every=2)
    values["lr_schedule"] = "constant"  # a longer run has another cosine

    def keep(session: Session) -> None:
        assert isinstance(session.setup.live_tuner, auto_adjust.LiveTuning)
        session.setup.live_tuner.load_state_dict(
            {"standing": {"gradient_accumulation.micro_batch_size": 1}}
        )

    train(Recipe(**values), tell=lambda text: None, on_start=keep)
    sessions: list[Session] = []
    again = Recipe(**{**values, "max_steps": 6, "resume": "auto"})
    summary = train(again, tell=lambda text: None, on_start=sessions.append)
    assert summary["steps"] == 6
    assert summary["adjusted"] == {"gradient_accumulation.micro_batch_size": 1}


def test_compiled_blocks_are_refused_before_a_step_is_made(tmp_path: Path) -> None:
    values = small(tmp_path, plan=[{"compiled": {"backend": "aot_eager"}}], live_tuning=True)
    with pytest.raises(InputError, match="leave live_tuning out, or compiled"):
        train(Recipe(**values), tell=lambda text: None)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
