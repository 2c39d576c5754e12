"""``hasten.speed_up``: what a trainer can carry joins by itself, with the same losses."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import hasten
from hasten.errors import InputError
from hasten.integrations import lightning as lightning_host
from hasten.techniques.collate import Packed
from hosts.test_techniques_in_the_trainer import as_others_have_them, collate, compiles
from tiny import tiny_model

STEPS = 4


def trainer_of(folder: Path, **changes: Any) -> Trainer:
    torch.manual_seed(0)
    arguments = TrainingArguments(
        str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=8,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        learning_rate=1e-2,
    )
    rows = as_others_have_them()
    return Trainer(
        tiny_model(),
        arguments,
        train_dataset=rows,
        data_collator=collate,
        **changes,  # type: ignore[arg-type]
    )


def losses(trainer: Trainer) -> list[float]:
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@compiles
def test_the_same_trainer_has_the_techniques_it_can_carry_and_the_same_losses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = losses(trainer_of(tmp_path / "a"))
    trainer = trainer_of(tmp_path / "b")
    with caplog.at_level(logging.WARNING):
        assert hasten.speed_up(trainer) is trainer
    (said,) = [record.message for record in caplog.records if "speed_up" in record.message]
    joined, _, left = said.partition("; not here: ")
    for name in ("packed", "document_attention", "fused_layers", "labelled_token_loss"):
        assert name in joined
    assert "bf16_master_weights: the Trainer doesn't let others decide" in left
    assert losses(trainer) == pytest.approx(plain, rel=2e-3)


def test_what_one_trainer_can_not_carry_is_left_out_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_of(tmp_path, optimizers=(torch.optim.SGD([torch.zeros(1)]), None))
    hasten.speed_up(trainer)
    assert "fused_adamw: this trainer was given its optimizer" in caplog.text


def test_a_plan_of_ones_own_is_taken_as_it_is(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    before = trainer.data_collator
    hasten.speed_up(trainer, plan=["packed", {"labelled_token_loss": {"chunk": 128}}])
    assert trainer.data_collator is not before
    with pytest.raises(InputError, match="pakked"):
        hasten.speed_up(trainer_of(tmp_path), plan=["pakked"])
    with pytest.raises(InputError, match="prefetched: the Trainer doesn't let others decide"):
        hasten.speed_up(trainer_of(tmp_path), plan=["prefetched"])


def test_a_trainer_of_another_kind_is_refused() -> None:
    with pytest.raises(InputError, match="speed_up: SimpleNamespace is no trainer of"):
        hasten.speed_up(SimpleNamespace())


def test_in_lightning_they_join_when_fit_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for its Trainer, which is known by the name of its package."""
    fitted: list[Any] = []

    class Trainer:
        def fit(self, model: Any, train_dataloaders: Any = None) -> str:
            fitted.append((model, train_dataloaders))
            return "fitted"

    Trainer.__module__ = "lightning.pytorch.trainer.trainer"
    module, loader, other = torch.nn.Linear(1, 1), DataLoader([1]), DataLoader([2])  # type: ignore[arg-type, var-annotated]
    seen: list[Any] = []

    def with_techniques(trainer: Any, given: Any, batches: Any, plan: Any) -> Any:
        seen.append((given, batches, [t.name() for t in plan]))
        return module, other

    monkeypatch.setattr(lightning_host, "with_techniques", with_techniques)
    trainer = hasten.speed_up(Trainer(), plan=[Packed()])
    assert not seen
    assert trainer.fit(module, loader) == "fitted"
    assert seen == [(module, loader, ["packed"])]
    assert fitted == [(module, other)]
    with pytest.raises(InputError, match="give fit the module and a torch DataLoader"):
        hasten.speed_up(Trainer(), plan=[Packed()]).fit(module)


@pytest.mark.skipif(not importlib.util.find_spec("lightning"), reason="needs lightning")
def test_lightnings_own_trainer_is_known() -> None:
    import lightning

    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    usual = trainer.fit
    assert hasten.speed_up(trainer).fit is not usual
