"""``hasten train`` before its first step, and the line that says where a run is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from hasten.cli import train
from hasten.cli.main import app
from hasten.cli.train import StepLine
from hasten.recipe.schema import Recipe
from material import small


@pytest.mark.parametrize("command", ["train", "profile"])
def test_the_transport_s_variables_stand_before_a_process_trains(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class BegunError(Exception):  # in the place of execve
        pass

    def again(words: list[str], missing: dict[str, str]) -> None:
        raise BegunError(words[0], missing)

    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(small(tmp_path, transport={"GLOO_SOCKET_IFNAME": "lo"})))
    monkeypatch.setattr(f"hasten.cli.{command}.again", again)
    found = CliRunner().invoke(app, [command, str(path)]).exception
    assert isinstance(found, BegunError)
    assert found.args == (command, {"GLOO_SOCKET_IFNAME": "lo"})


def test_the_money_so_far_counts_all_time_and_not_that_of_the_steps_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    price = {"currency": "EUR", "per_device_hour": 3.0}
    recipe = Recipe(model="m", dataset="d", max_steps=2, price=price)
    shown: list[str] = []
    display: Any = SimpleNamespace(begin=lambda: None, show=lambda text, share: shown.append(text))
    job = SimpleNamespace(schedule=SimpleNamespace(total_steps=2))
    known = SimpleNamespace(world=SimpleNamespace(size=2))
    session: Any = SimpleNamespace(setup=SimpleNamespace(job=job, facts=known))
    step: Any = SimpleNamespace(
        step=1,
        loss=2.0,
        tokens_per_second=100.0,
        padding_share=0.0,
        peak_memory_bytes=10**6,
        mfu=None,
        skipped=False,
        step_seconds=1.0,
    )
    clock = iter([0.0, 10.0, 10.0 + 1800.0])
    monkeypatch.setattr(train, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    line = StepLine(display, recipe)
    line.start(session)
    line.step(step)  # a second, and half an hour of evaluation before it
    assert "3.0000 EUR" in shown[0]  # two devices for half an hour
