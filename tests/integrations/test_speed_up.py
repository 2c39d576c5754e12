"""``hasten.speed_up``: what a trainer can carry joins by itself, with the same losses."""

from __future__ import annotations

import json
import logging
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import DataCollatorWithFlattening, Trainer

import hasten
from hasten.core.context import ExampleStats, ModelFacts
from hasten.errors import InputError
from hasten.integrations import lightning as lightning_host
from hasten.integrations.adapt import context_of
from hasten.integrations.batches import SizedRows
from hasten.integrations.speed_up import WATCHED_STEPS, SpeedNote
from hasten.integrations.transformers import TrainerTechniques
from hasten.machine.environment import World
from hasten.machine.gain import Gain
from hasten.measure import choice
from hasten.measure.choice import Choice, store_choice
from hasten.parts.nn import kernel_variants
from hasten.recipe.schema import AutoPlan
from hasten.techniques.collate import Packed
from integrations.test_first_step import left_padded
from integrations.test_techniques_in_the_trainer import STEPS, compiles, losses_of, trainer_of
from tiny import tiny_model


@pytest.fixture(autouse=True)
def choices(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where races are kept: none of this user's, which would decide."""
    folder: Path = tmp_path_factory.mktemp("choices")
    monkeypatch.setattr(choice, "FOLDER", folder)
    return folder


@compiles
def test_the_same_trainer_has_the_techniques_it_can_carry_and_the_same_losses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = losses_of(trainer_of(tmp_path / "a"))
    trainer = trainer_of(tmp_path / "b")
    with caplog.at_level(logging.WARNING):
        assert hasten.speed_up(trainer) is trainer
    (line,) = said(caplog)
    joined, *left_out = line.split("\n  left out: ")
    for name in ("packed", "document_attention", "fused_layers", "labelled_token_loss"):
        assert name in joined
    assert [line.partition(":")[0] for line in left_out] == ["bf16_master_weights"]
    assert "the Trainer doesn't let others decide" in left_out[0]
    assert losses_of(trainer) == pytest.approx(plain, rel=2e-3)


@pytest.mark.parametrize("plan", [None, ["packed"]], ids=str)
def test_v4s_padded_rows_are_packed_with_documents_apart(
    plan: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = losses_of(trainer_of(tmp_path / "a", tiny_model("deepseek_v4")))
    trainer = trainer_of(tmp_path / "b", tiny_model("deepseek_v4"))
    with caplog.at_level(logging.WARNING):
        losses = losses_of(hasten.speed_up(trainer, plan))
    assert "joined" in caplog.text
    assert "taken out" not in caplog.text
    assert losses == pytest.approx(plain, rel=1e-4)


def test_v4s_rows_that_the_trainer_packs_are_said_to_be_mixed_by_transformers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_of(tmp_path, tiny_model("deepseek_v4"))
    trainer.data_collator = DataCollatorWithFlattening()
    with caplog.at_level(logging.WARNING):
        hasten.speed_up(trainer)
    (line,) = said(caplog)
    assert "document_attention" not in line.partition("\n")[0]
    assert "left out: document_attention: this trainer packs rows, and" in line


def test_what_one_trainer_can_not_carry_is_left_out_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_of(tmp_path)
    trainer.optimizer = torch.optim.SGD([torch.zeros(1)])
    hasten.speed_up(trainer)
    assert "fused_adamw: this trainer was given its optimizer" in caplog.text


def test_a_plan_of_ones_own_is_taken_as_it_is(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    hasten.speed_up(trainer, plan=["packed", {"labelled_token_loss": {"chunk": 128}}])
    (joined,) = [c for c in trainer.callback_handler.callbacks if isinstance(c, TrainerTechniques)]
    assert [t.name() for t in joined.setup.plan] == ["packed", "labelled_token_loss"]
    with pytest.raises(InputError, match="pakked"):
        hasten.speed_up(trainer_of(tmp_path), plan=["pakked"])
    with pytest.raises(InputError, match="prefetched: the Trainer doesn't let others decide"):
        hasten.speed_up(trainer_of(tmp_path), plan=["prefetched"])


def kept_race(trainer: Trainer, folder: Path, **changes: Any) -> None:
    """A choice of ``plan: auto`` for the trainer's model and data, as a race leaves it."""
    model: Any = trainer.model
    lengths = SizedRows(trainer.train_dataset).lengths
    examples = ExampleStats(len(lengths), sum(lengths), max(lengths), 0.5)
    context = replace(context_of(model, "cpu"), examples=examples)
    usual = ["packed", "document_attention", "bf16_master_weights", "prefetched"]
    entries: list[Any] = changes.pop("entries", usual)
    entries = [*entries, {"checkpoints": {"interval": 4}}]
    choice = Choice(entries, "measured", "the fastest", [], gain=span(6.0))
    context = replace(context, **changes.pop("known", {}))
    path = folder / f"{len(list(folder.glob('*')))}.json"
    store_choice(path, choice, context, AutoPlan(**changes))


def span(median: float) -> dict[str, float | None]:
    return {"median": median, "low": 0.9 * median, "high": 1.1 * median}


PROVEN = (
    r"speed_up: first step: loss and gradients equal to \d\.\de-\d\d of those without hasten; "
    r"\d techniques joined"
)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What speed_up prints, except its notice on releases that weren't tested yet."""
    messages = [example.message for example in caplog.records if "speed_up" in example.message]
    return [message for message in messages if "hasten wasn't tested with" not in message]


def test_a_race_of_this_model_and_data_decides_and_its_gain_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, choices: Path
) -> None:
    trainer = trainer_of(tmp_path)
    kept_race(trainer, choices)
    hasten.speed_up(trainer)
    (line,) = said(caplog)
    day = time.strftime("%Y-%m-%d")
    assert line.startswith(
        "speed_up: packed, document_attention joined, as plan: auto chose for this model and data "
        f"on {day}\n  left out: "  # the gain is of the whole plan
    )
    assert "prefetched: the Trainer" in line
    assert "checkpoints" not in line  # what the other run asked for beside its plan
    caplog.clear()
    (choices / "0.json").unlink()
    kept_race(trainer, choices, entries=["packed"])
    hasten.speed_up(trainer)
    assert said(caplog)[0].endswith(f"on {day}: about 6.00 times its speed")


class Drawing(torch.utils.data.Dataset[Any]):
    """A user's data set that draws, and counts how often it is read."""

    def __init__(self, rows: Any) -> None:
        self.rows, self.reads, self.draw = rows, 0, torch.Generator().manual_seed(1)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        torch.rand(()), torch.rand((), generator=self.draw)
        return self.rows[index]


def test_rows_that_are_read_for_their_lengths_leave_no_trace() -> None:
    rows = Drawing([{"input_ids": [3, 4, 5]}, {"input_ids": [3, 4]}])
    before = torch.get_rng_state(), rows.draw.get_state()
    sized = SizedRows(rows)
    assert (sized.lengths, sized.trained) == ([3, 2], [2, 1])
    assert rows.reads == 0
    assert all(map(torch.equal, before, (torch.get_rng_state(), rows.draw.get_state())))


@pytest.mark.parametrize(
    "changes",
    [
        {"known": {"device": "cuda:0"}},
        {"known": {"versions": {"torch": "1.0"}}},
        {"known": {"examples": ExampleStats(1000, 40_000, 60, 0.5)}},
        {"known": {"model": ModelFacts("llama", 10**9)}},
        {"known": {"world": World(size=2)}},
        {"fidelity": "lossy"},
    ],
    ids=["device", "versions", "data", "model", "ranks", "fidelity"],
)
def test_a_race_of_something_else_decides_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, choices: Path, changes: dict[str, Any]
) -> None:
    trainer = trainer_of(tmp_path)
    kept_race(trainer, choices, **changes)
    hasten.speed_up(trainer)
    (line,) = said(caplog)
    assert "labelled_token_loss" in line
    assert "as plan: auto chose" not in line


def test_a_damaged_choice_is_told_of_and_left_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, choices: Path
) -> None:
    for text in ("{", "[]", '{"about": {}, "fidelity": "exact"}'):
        (choices / "damaged.json").write_text(text)
        caplog.clear()
        trainer = trainer_of(tmp_path)
        if text.startswith('{"about"'):
            kept_race(trainer, choices)
            whole = json.loads((choices / "1.json").read_text())
            (choices / "damaged.json").write_text(json.dumps({**whole, "choice": {}}))
            (choices / "1.json").unlink()
        hasten.speed_up(trainer)
        (warned,) = [r.message for r in caplog.records if "can't be read" in r.message]
        assert "damaged.json" in warned
        assert (choices / "damaged.json").exists()
        assert "labelled_token_loss" in said(caplog)[0]


def test_without_a_race_the_figures_of_the_machine_decide_and_the_speed_is_compared_with_nothing(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    choices: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slower = Gain(0.8, 0.7, 0.9, 6)
    monkeypatch.setattr(kernel_variants, "layers_gain", lambda device: slower)
    trainer = trainer_of(tmp_path)
    hasten.speed_up(hasten.speed_up(trainer))  # the second call replaces all of the first
    joined, _, left = said(caplog)[0].partition("\n  left out: ")
    assert "fused_layers" not in joined
    assert "fused_layers: measured on this machine: 0.80× [0.70, 0.90] the speed" in left
    caplog.clear()
    trainer.args.max_steps, trainer.data_collator = WATCHED_STEPS, left_padded
    trainer.train()
    *proven, line = said(caplog)
    assert any(re.fullmatch(PROVEN, text) for text in proven)
    second = r"step 2, without hasten, at [\d,]+ tokens/s"
    assert re.fullmatch(rf"speed_up: steps 11 to 20 ran at [\d,]+ tokens/s; {second}", line)


def test_a_trainer_of_another_kind_is_refused() -> None:
    with pytest.raises(InputError, match="speed_up: SimpleNamespace is no trainer of"):
        hasten.speed_up(SimpleNamespace())


class Module(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model


class SingleDeviceStrategy:
    root_device = torch.device("cpu")


class LightningSettings:
    """What is read of a Lightning trainer."""

    strategy = SingleDeviceStrategy()
    world_size, accumulate_grad_batches, max_steps, max_epochs = 1, 1, STEPS, None
    default_root_dir, scaler = "out", None
    _accelerator_connector = SimpleNamespace(use_distributed_sampler=True)


def test_in_lightning_they_join_when_fit_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for its Trainer, which is known by the name of its package."""
    fitted: list[Any] = []

    class Trainer(LightningSettings):
        callbacks: ClassVar[list[Any]] = []

        def fit(self, model: Any, train_dataloaders: Any = None) -> str:
            fitted.append((model, train_dataloaders))
            return "fitted"

    Trainer.__module__ = "lightning.pytorch.trainer.trainer"
    monkeypatch.setattr(lightning_host, "step_evidence", lambda note: note)
    module, loader, other = Module(tiny_model()), DataLoader([1]), DataLoader([2])  # type: ignore[arg-type, var-annotated]
    seen: list[Any] = []

    def with_techniques(trainer: Any, given: Any, batches: Any, plan: Any) -> Any:
        seen.append((given, batches, [t.name() for t in plan]))
        return module, other

    monkeypatch.setattr(lightning_host, "with_techniques", with_techniques)
    trainer = hasten.speed_up(hasten.speed_up(Trainer(), ["fused_layers"]), [Packed()])
    assert not seen
    assert trainer.fit(module, loader) == "fitted"
    assert seen == [(module, loader, ["packed"])]
    assert fitted == [(module, other)]
    with pytest.raises(InputError, match="give fit the module and a torch DataLoader"):
        hasten.speed_up(Trainer(), plan=[Packed()]).fit(module)


def test_in_lightning_what_is_not_recognised_is_left_alone_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fitted: list[Any] = []

    class Trainer:
        strategy = SimpleNamespace(root_device=torch.device("cpu"))

        def fit(self, model: Any, train_dataloaders: Any = None, **more: Any) -> str:
            fitted.append((model, train_dataloaders, more))
            return "fitted"

    Trainer.__module__ = "lightning.pytorch.trainer.trainer"
    module, loader = torch.nn.Linear(1, 1), DataLoader([1])  # type: ignore[arg-type, var-annotated]
    trainer = hasten.speed_up(Trainer())
    with caplog.at_level(logging.INFO, "hasten"):
        assert trainer.fit(module, datamodule="theirs") == "fitted"
        assert hasten.speed_up(Trainer()).fit(module, loader) == "fitted"
    assert fitted == [(module, None, {"datamodule": "theirs"}), (module, loader, {})]
    assert "speed_up: nothing joined: give fit the module and a torch DataLoader" in caplog.text
    assert "Linear has no Hugging Face causal language model" in caplog.text
    assert "fit" not in vars(trainer) or trainer.fit.__self__ is trainer


def test_idle_threads_wait_as_before_once_the_training_is_over() -> None:
    note: Any = SpeedNote(context_of(tiny_model(), "cpu"))
    note._machine = SimpleNamespace(idle_threads=SimpleNamespace(sleep_sooner=True))
    note.close()
    assert not note._machine.idle_threads.sleep_sooner
