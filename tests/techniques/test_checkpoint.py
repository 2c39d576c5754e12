"""Checkpoints on whole jobs: bit-identical resumes on ranks, stops that lose nothing, settings."""

from __future__ import annotations

import contextlib
import random
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_rank_jobs import saved_and_resumed
from hasten.core.plan import read_technique
from hasten.core.state import state_of
from hasten.core.step import training
from hasten.errors import InputError
from hasten.parts import checkpoint
from hasten.parts.checkpoint import STATE, SmartCheckpointer
from hasten.parts.checkpoint.saver import LateCopies
from hasten.parts.checkpoint.state import moments_to_come
from hasten.techniques.checkpoint import Checkpoints
from ranks import on_ranks
from saved import save
from tiny import language_job, restore, run, session_of


def test_two_ranks_go_on_bit_for_bit_each_with_its_own_random_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ranks = on_ranks(saved_and_resumed, tmp_path)
    for rank in ranks:
        assert rank["from"] == "step-00000003"
        assert rank["begun"] == rank["whole"][:5]
        assert rank["rest"] == rank["whole"][3:]
        assert rank["stopped"] == 4
    assert ranks[0]["saved"] == ["step-00000003", "step-00000004"]
    assert ranks[0]["draws"][0] != ranks[1]["draws"][0]
    assert ranks[0]["draws"][1] != ranks[1]["draws"][1]


def test_a_run_that_is_asked_to_stop_loses_no_step(tmp_path: Path) -> None:
    whole = [m.loss for m in run(session_of(language_job(steps=6)))]
    for last in (1, 2, 5):
        folder = tmp_path / str(last)
        first = session_of(language_job(steps=6), Checkpoints(50), folder=folder)
        for metrics in training(first):
            first.stop_requested = metrics.step == last
        second = session_of(language_job(steps=6), Checkpoints(50), folder=folder)
        assert second.setup.checkpoint.resume(second) == folder / f"step-{last:08d}"
        assert [m.loss for m in run(second)] == whole[last:]


def test_a_named_checkpoint_is_gone_back_to_and_later_ones_are_set_aside(tmp_path: Path) -> None:
    whole = [m.loss for m in run(session_of(language_job(steps=6)))]
    run(session_of(language_job(steps=6), Checkpoints(2), folder=tmp_path))
    second = session_of(language_job(steps=5), Checkpoints(2), folder=tmp_path)
    second.setup.checkpoint.resume(second, tmp_path / "step-00000002")
    with pytest.warns(UserWarning, match="set aside"):
        assert [m.loss for m in run(second)] == whole[2:5]
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == [
        "step-00000002",
        "step-00000004",
    ]


def test_a_state_of_another_loop_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = save(tmp_path, 3, {"w": torch.ones(3)}, {"objects": {}})
    session = session_of(language_job(steps=4), Checkpoints(2), folder=tmp_path)
    with pytest.raises(InputError, match=r"not the state of a run .*choose another folder"):
        session.setup.checkpoint.resume(session, path)


def test_a_new_run_in_an_old_folder_keeps_its_own_and_deletes_nothing(tmp_path: Path) -> None:
    run(session_of(language_job(steps=6), Checkpoints(2), folder=tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(session_of(language_job(steps=2), Checkpoints(2), folder=tmp_path))
    names = [p.name for p in tmp_path.iterdir()]
    assert [n for n in names if not n.startswith(".")] == ["step-00000002"]
    assert sum(n.startswith(".aside-") for n in names) == 3


def test_damage_is_named_in_the_report(tmp_path: Path) -> None:
    run(session_of(language_job(steps=4), Checkpoints(2), folder=tmp_path))
    (tmp_path / "step-00000004" / STATE).write_bytes(b"x")
    second = session_of(language_job(steps=4), Checkpoints(2), folder=tmp_path)
    with pytest.warns(UserWarning, match="is damaged"):
        second.setup.checkpoint.resume(second)
    assert second.progress.step == 2
    run(second)
    assert "step-00000004 is damaged" in Checkpoints().check_effect(second).evidence


def test_the_state_of_pythons_random_comes_back(tmp_path: Path) -> None:
    first, second = session_of(language_job()), session_of(language_job())
    random.gauss(0, 1)  # the second of its pair is part of the state
    saved = state_of(first)
    wanted = [random.gauss(0, 1), random.random(), torch.rand(1).item()]
    restore(second, *saved)
    assert [random.gauss(0, 1), random.random(), torch.rand(1).item()] == wanted


def test_settings_are_read_from_a_plan() -> None:
    known = {"checkpoints": Checkpoints}
    settings = {"interval": 500, "compression": False, "folder": "s3://bucket/run"}
    assert read_technique({"checkpoints": settings}, known) == Checkpoints(
        500, compression=False, folder="s3://bucket/run"
    )
    with pytest.raises(InputError, match="interval is True"):
        read_technique({"checkpoints": {"interval": True}}, known)


def test_a_folder_of_its_own_is_used(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    technique = Checkpoints(1, folder=str(elsewhere))
    run(session_of(language_job(steps=2), technique, folder=tmp_path / "run"))
    assert len(checkpoint.checkpoints(elsewhere)) == 2
    assert not (tmp_path / "run").exists()


class Dealt(torch.Tensor):
    """As weights that lie on several ranks: of a shape, without memory of its own."""

    @staticmethod
    def __new__(cls, size: int) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (size,))

    @classmethod
    def __torch_dispatch__(cls, *given: Any) -> Any:
        raise NotImplementedError


def test_room_is_asked_for_all_weights_that_are_dealt_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_of(language_job(), Checkpoints(), folder=tmp_path)
    dealt = {"a": Dealt(30), "b": Dealt(50)}
    dealt["tied"] = dealt["a"]
    asked: list[int] = []
    monkeypatch.setattr(session.loss_module, "state_dict", lambda **settings: dealt)
    monkeypatch.setattr(SmartCheckpointer, "open", lambda self, size: asked.append(size))
    kept: Any = session.setup.checkpoint
    kept._open(session)
    own = 4 * 80 + moments_to_come(session.optimizer)
    assert asked == [own]
    monkeypatch.setattr(kept, "_of_ranks", lambda mine: [mine, mine, (1, 7)])
    with contextlib.suppress(InputError):  # as ranks say it of problems
        kept._open(session)
    assert asked == [own, own + 7], "of all stages, each once"


def test_two_runs_in_one_folder_are_refused_before_a_step(tmp_path: Path) -> None:
    first = training(session_of(language_job(), Checkpoints(1), folder=tmp_path))
    next(first)
    second = session_of(language_job(), Checkpoints(1), folder=tmp_path)
    with pytest.raises(InputError, match="is in use by another run"):
        run(second)
    assert second.progress.step == 0
    first.close()


def copied_slowly(monkeypatch: pytest.MonkeyPatch, begins: threading.Event) -> None:
    """The copies in the writer's thread begin when they are allowed to, and a moment later."""
    usual = LateCopies.take

    def take(self: LateCopies) -> dict[str, torch.Tensor]:
        begins.wait(60)
        time.sleep(0.2)
        return usual(self)

    monkeypatch.setattr(LateCopies, "take", take)


def test_an_update_waits_for_the_copies_of_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begins = threading.Event()
    copied_slowly(monkeypatch, begins)
    session = session_of(language_job(steps=2), Checkpoints(1), folder=tmp_path)
    steps = training(session)
    next(steps)  # step 1 is saved, and nothing of it is copied yet
    weights = {n: p.detach().clone() for n, p in session.loss_module.named_parameters()}
    moments = [s["exp_avg"].clone() for s in session.optimizer.state.values()]
    begins.set()
    for _ in steps:
        pass
    tensors, _ = checkpoint.load(tmp_path / "step-00000001")
    saved_weights = {n: w for n, w in weights.items() if f"model/{n}" in tensors}  # a tied one once
    assert len(saved_weights) >= len(weights) - 1
    assert all(torch.equal(tensors[f"model/{n}"], w) for n, w in saved_weights.items())
    saved = [t for n, t in tensors.items() if n.endswith("exp_avg")]
    assert sorted(m.sum().item() for m in moments) == sorted(t.sum().item() for t in saved)
    now = dict(session.loss_module.named_parameters())
    assert not all(torch.equal(weight, now[name]) for name, weight in weights.items())


def test_weights_that_change_while_they_are_copied_cost_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begins = threading.Event()
    copied_slowly(monkeypatch, begins)
    session = session_of(language_job(steps=2), Checkpoints(1), folder=tmp_path)
    steps = training(session)
    next(steps)
    with torch.no_grad():
        next(session.loss_module.parameters()).mul_(2)
    begins.set()
    with pytest.warns(UserWarning, match="weights were changed while they were copied"):
        for _ in steps:
            pass
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-00000002"]
