"""SmartCheckpointer in a plain loop: what it protects comes back as it was, by itself."""

from __future__ import annotations

import copy
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from checkpoint_rank_jobs import plain_loop
from hasten import SmartCheckpointer
from hasten.parts.checkpoint import checkpoints, load
from hasten.parts.checkpoint.format import json_without_tensors
from hasten.parts.checkpoint.saver import CheckpointWriter, Saver, Staging
from hasten.parts.checkpoint.state import CheckpointedState, random_state, set_random_state
from ranks import on_ranks


class Loop:
    """A model with dropout, an optimizer with groups, a schedule, and a sampler's position."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 2))
        groups = [{"params": [p], "lr": 1e-2} for p in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.99))
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 40)

    def step(self) -> str:
        x = torch.randn(8, 6) + random.random() + float(np.random.rand())
        loss = self.model(x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return f"{loss.item().hex()} {self.schedule.get_last_lr()[0].hex()}"

    def protected(self, folder: Path, **settings: Any) -> SmartCheckpointer:
        keeper = SmartCheckpointer(**{"interval": 4, "folder": folder, **settings})
        return keeper.protect(model=self.model, optimizer=self.optimizer, schedule=self.schedule)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("compression", [True, False, "shuffle"])
def test_a_loop_goes_on_bit_for_bit(compression: Any, asynchronous: bool, tmp_path: Path) -> None:
    first, losses = Loop(), []
    keeper = first.protected(tmp_path, compression=compression, asynchronous=asynchronous)
    assert keeper.restore() is first.model
    for step in range(1, 15):
        losses.append(first.step())
        assert keeper.after_step(step) == (step % 4 == 0)
    keeper.close()
    assert [p.name for p in keeper.list()] == [f"step-{n:08d}" for n in (4, 8, 12)]
    second = Loop(seed=5)
    again = second.protected(tmp_path)
    assert again.restore() is second.model
    assert again.step == 12
    assert [second.step() for _ in range(2)] == losses[12:]
    again.close()
    third = Loop(seed=6)
    with third.protected(tmp_path) as back:
        back.restore(tmp_path / "step-00000004")
        assert [third.step() for _ in range(10)] == losses[4:]


def test_a_save_holds_the_state_of_its_moment(tmp_path: Path) -> None:
    loop = Loop()
    with loop.protected(tmp_path, max_checkpoints=30) as keeper:
        weights = []
        for step in range(1, 21):
            loop.step()
            weights.append(loop.model[0].weight.detach().clone())
            keeper.save(step)
            with torch.no_grad():
                loop.model[0].weight.fill_(float("nan"))  # the writer must not see it
            loop.model[0].weight.data.copy_(weights[-1])
    for step, path in enumerate(checkpoints(tmp_path), start=1):
        assert torch.equal(load(path)[0]["model/0.weight"], weights[step - 1])


def on_weights_of(keeper: SmartCheckpointer, kind: Any) -> torch.optim.Optimizer:
    weights = keeper._protected.objects["model"].parameters()
    optimizer: torch.optim.Optimizer = kind([{"params": [p]} for p in weights])
    return optimizer


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda k: k.protect(more=nn.Linear(2, 2)), "protect the same objects by the same names"),
        (lambda k: k.protect(model=nn.Linear(6, 17)), "is of another model: .* differs"),
        (
            lambda k: k.protect(model=Loop().model.bfloat16()),
            r"is of another model: 0\.bias differs \(4 in all\)",
        ),
        (
            lambda k: k.protect(optimizer=torch.optim.AdamW([torch.zeros(3, requires_grad=True)])),
            "is of another optimizer: groups of",
        ),
        # Adam would decouple its decay from then on; NAdam would lack settings.
        (lambda k: k.protect(optimizer=on_weights_of(k, torch.optim.Adam)), "of AdamW.* is Adam;"),
        (lambda k: k.protect(optimizer=on_weights_of(k, torch.optim.NAdam)), "this one is NAdam;"),
        (
            lambda k: k.protect(schedule=torch.optim.SGD([torch.zeros(3, requires_grad=True)])),
            "is of another schedule: it holds the state of CosineAnnealingLR, and this one is SGD",
        ),
    ],
    ids=["objects", "model", "format", "optimizer", "Adam", "NAdam", "kinds"],
)
def test_a_state_of_something_else_is_refused_and_nothing_is_changed(
    change: Any, sentence: str, tmp_path: Path
) -> None:
    with Loop().protected(tmp_path) as keeper:
        keeper.save(3)
    other = Loop(seed=1)
    before = other.model[0].weight.clone()
    again = other.protected(tmp_path)
    change(again)
    with pytest.raises(ValueError, match=sentence):
        again.restore()
    assert torch.equal(other.model[0].weight, before)


@pytest.mark.parametrize(
    "change", [lambda moment: moment.t().contiguous(), lambda moment: moment[:, :1]]
)
def test_an_optimizer_state_of_another_shape_is_refused_and_nothing_is_changed(
    change: Any, tmp_path: Path
) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["exp_avg"] = change(state["state"][0]["exp_avg"])
    kept = CheckpointedState()
    kept.add({"optimizer": optimizer})
    tensors: dict[str, torch.Tensor] = {}
    state = json_without_tensors(state, "optimizer", tensors)
    saved = {"optimizer": {"kind": "AdamW", "state": state}}
    before = optimizer.state[model.weight]["exp_avg"].clone()
    with pytest.raises(ValueError, match=r"weight 0 has exp_avg of shape .* weight has \[2, 3\]"):
        kept.load(tensors, saved, tmp_path)
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], before)
    tensors, right = kept.state()
    kept.load(tensors, right, tmp_path)


def test_what_can_not_be_protected_is_named(tmp_path: Path) -> None:
    keeper = SmartCheckpointer(folder=tmp_path)
    with pytest.raises(ValueError, match="data is a list without state_dict"):
        keeper.protect(data=[1])

    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"when": {1, 2}}

        load_state_dict = state_dict

    with pytest.raises(TypeError, match="the state at odd/when is a set"):
        keeper.protect(odd=Odd()).save(1)


@pytest.mark.parametrize("key", [(0, 1), np.int64(3)], ids=str)
def test_a_key_that_would_not_come_back_is_refused_when_it_is_saved(key: Any) -> None:
    with pytest.raises(TypeError, match=r"the state at object/of has the key .* of type"):
        json_without_tensors({"of": {key: 1}}, "object", {})


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"interval": 0}, "give 'dynamic' or a number of steps"),
        ({"max_checkpoints": 0}, "at least 1 checkpoint is kept"),
        ({"compression": "zip"}, "compression is 'zip'"),
        ({"folder": "nowhere://x/y"}, "nowhere://x/y can't be used"),
    ],
)
def test_settings_that_are_none_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        SmartCheckpointer(**settings)


def test_the_newest_is_verified_with_both_hashes(tmp_path: Path) -> None:
    with Loop().protected(tmp_path) as keeper:
        with pytest.raises(ValueError, match="holds no checkpoint"):
            keeper.verify()
        keeper.save(1)
    found = keeper.verify()
    assert found["step"] == 1
    assert len(found["files"]["rank-00000.safetensors"]["sha256"]) == 64


def test_the_second_save_says_whether_packing_pays(tmp_path: Path) -> None:
    with Loop().protected(tmp_path) as keeper:
        keeper.protect(large=nn.Linear(200, 200))
        assert keeper.compression == "compression: not yet measured"
        keeper.save(1)
        keeper.save(2)
    assert "times" in keeper.compression


def test_the_history_of_failures_is_kept(tmp_path: Path) -> None:
    for life in range(3):
        with Loop().protected(tmp_path) as keeper:
            keeper.restore()
            assert keeper.interval.failures == life
            keeper.save(keeper.step + 1)
    assert keeper.interval.mean_between_failures < 86400 / 2


def test_going_back_on_the_way_is_no_failure(tmp_path: Path) -> None:
    with Loop().protected(tmp_path) as keeper:
        keeper.save(1)
        keeper.restore()
        assert keeper.interval.failures == 0


def test_a_loop_that_begins_anew_keeps_its_own_saves(tmp_path: Path) -> None:
    with Loop().protected(tmp_path) as keeper:
        for step in (3, 8, 12):
            keeper.save(step)
    other = Loop(seed=2)
    with other.protected(tmp_path) as keeper, pytest.warns(UserWarning, match="set aside"):
        keeper.save(3)
    assert [p.name for p in keeper.list()] == ["step-00000003"]
    assert torch.equal(load(keeper.list()[0])[0]["model/0.weight"], other.model[0].weight)
    assert len([p for p in tmp_path.iterdir() if p.name.startswith(".aside-")]) == 3


def test_a_rank_saves_when_the_first_one_does(tmp_path: Path) -> None:
    """Or it would wait for the others in a save that they don't begin."""
    first_rank = iter([True, False, True])
    with SmartCheckpointer(
        1, folder=tmp_path, of_ranks=lambda own: [(next(first_rank), 0), own]
    ) as keeper:
        assert [keeper.due(step) for step in (1, 2, 3)] == [True, False, True]


def test_two_ranks_save_the_same_steps_and_each_gets_its_own_random_state_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = on_ranks(plain_loop, tmp_path)
    assert first["saved"] == second["saved"] != []
    for rank in (first, second):
        assert rank["restored"]
        assert rank["step"] == 41
        assert rank["again"] == rank["after"]
        assert rank["sharded"].startswith("model is sharded over ranks")
    assert first["after"] != second["after"]


def test_a_random_state_of_another_kind_is_a_sentence() -> None:
    for wrong in ({"torch": "00"}, {"torch": "no"}, {"python": [3, [1], None]}, {"numpy": 3}):
        with pytest.raises(ValueError, match="random state of the checkpoint"):
            set_random_state({**random_state(), **wrong})


@pytest.mark.parametrize("compression", [False, "shuffle"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_a_view_of_other_numbers_is_saved_as_what_it_says(
    asynchronous: bool, compression: Any, tmp_path: Path
) -> None:
    turned = torch.randn(1000, dtype=torch.complex64).conj()
    saver = Saver(tmp_path, compression=compression, asynchronous=asynchronous)
    saver.save(1, {"z": turned}, {})
    saver.close()
    assert torch.equal(load(tmp_path / "step-00000001")[0]["z"], turned.resolve_conj())


def test_staging_keeps_its_memory_and_copies() -> None:
    staging, source = Staging(), {"a": torch.ones(3), "b": torch.arange(4)[::2]}
    first = staging.take(source)
    source["a"].fill_(2)
    assert first["a"].tolist() == [1, 1, 1]
    second = staging.take({**source, "b": torch.ones(5)})
    assert second["a"] is first["a"]
    assert second["a"].tolist() == [2, 2, 2]
    assert second["b"].shape == (5,)


def test_staging_waits_for_the_devices_its_tensors_are_on_in_any_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[str] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *d: waited.append(str(*d)))

    class Elsewhere(torch.Tensor):
        device = torch.device("xpu:1")  # so it says; its numbers are here

    state = {"a": torch.ones(3).as_subclass(Elsewhere), "b": torch.ones(1)}
    thread = threading.Thread(target=Staging().take, args=(state,))
    thread.start()
    thread.join()
    assert waited == ["xpu:1"]


def test_a_writer_does_one_thing_at_a_time_and_keeps_its_error() -> None:
    done: list[int] = []
    writer = CheckpointWriter()
    for number in range(3):
        writer.start(lambda number=number: (time.sleep(0.01), done.append(number)))  # type: ignore[misc]
    writer.wait()
    assert done == [0, 1, 2]
    writer.start(lambda: done[99] and None)
    writer.wait()
    assert isinstance(writer.error(), IndexError)
    assert writer.error() is None


def test_a_restore_of_nothing_is_an_error_and_leaves_no_folder(tmp_path: Path) -> None:
    keeper = SmartCheckpointer(folder=tmp_path / "run")
    for call in (keeper.restore, keeper.save):
        with pytest.raises(ValueError, match=r"nothing is protected, so .*call protect\(model="):
            call()
    assert not (tmp_path / "run").exists()


def test_a_first_start_is_told_that_there_is_no_checkpoint(tmp_path: Path) -> None:
    loop = Loop()
    with (
        pytest.warns(UserWarning, match=r"no checkpoint in .*: the model is as it was"),
        loop.protected(tmp_path) as keeper,
    ):
        assert keeper.restore() is loop.model


def test_a_model_given_to_save_is_protected_and_steps_count_by_themselves(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    with SmartCheckpointer(folder=tmp_path) as keeper:
        keeper.save(model)
        saved = model.weight.detach().clone()
        keeper.save()
        nn.init.zeros_(model.weight)
        assert keeper.restore() is model
        assert [p.name for p in keeper.list()] == ["step-00000001", "step-00000002"]
        assert torch.equal(model.weight, saved)
        with pytest.raises(ValueError, match=r"a Linear and another model is protected"):
            keeper.save(nn.Linear(3, 1))


def test_a_wrong_step_is_refused_where_it_is_given(tmp_path: Path) -> None:
    with SmartCheckpointer(folder=tmp_path).protect(model=nn.Linear(3, 1)) as keeper:
        for step in ("3", 3.5, {}):
            with pytest.raises(TypeError, match="give the number of the step, or a model"):
                keeper.save(step)  # type: ignore[arg-type]
        keeper.save(np.int64(3))  # type: ignore[arg-type]
        assert keeper.step == 3


@pytest.mark.parametrize("then", ["restore", "list", "verify", "save", "after_step", "close"])
def test_an_error_of_the_writing_thread_comes_out_of_the_next_call(
    then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = SmartCheckpointer(1, folder=tmp_path).protect(model=nn.Linear(3, 1))

    def fails(*given: Any, **more: Any) -> None:
        raise TypeError("this state can't be written")

    monkeypatch.setattr("hasten.parts.checkpoint.saver.write_part", fails)
    keeper.save(1)
    keeper.saver.writer.wait()
    with pytest.raises(TypeError, match="this state can't be written"):
        getattr(keeper, then)(*[2] * (then == "after_step"))
    keeper.saver.close()
