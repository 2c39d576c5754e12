"""Callbacks in other trainers' loops: their lines against what was fed, read by hasten's report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hasten.errors import InputError
from hasten.integrations import lightning
from hasten.integrations.checkpoints import MetricsFile, TokenCount
from hasten.report.runs import compare_runs, read_runs, render
from tiny import SILENT, tiny_model


def batches(count: int = 12) -> list[dict[str, Any]]:
    """Examples of 3, 5, 7, ... tokens, padded to 30 by the loader's own examples."""
    found = []
    for i in range(count):
        own = 3 + 2 * i
        ids = [5 + (i + k) % 90 for k in range(own)] + [0] * (30 - own)
        mask = [1] * own + [0] * (30 - own)
        labels = [v if m else -100 for v, m in zip(ids, mask, strict=True)]
        found.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return found


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def hugging_face(folder: Path, callback: Any, **changes: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    settings = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        **SILENT,
        **changes,
    }
    arguments = TrainingArguments(output_dir=str(folder / "theirs"), **settings)
    data: Any = batches()
    trainer = Trainer(
        tiny_model(), arguments, train_dataset=data, eval_dataset=data, callbacks=[callback]
    )
    trainer.train()
    return trainer


def test_the_trainer_s_tokens_are_counted_without_padding(tmp_path: Path) -> None:
    from hasten.integrations.transformers import StepEvidence

    trainer = hugging_face(tmp_path, StepEvidence(tmp_path / "run"))
    found = lines(tmp_path / "run")
    assert [line["step"] for line in found] == [1, 2, 3]
    own = sum(sum(example["attention_mask"]) for example in batches())
    assert sum(line["tokens"] for line in found) == own  # 3 steps of 4 examples: each example once
    assert [line["positions"] for line in found] == [120, 120, 120]
    for line, logged in zip(found, trainer.state.log_history, strict=False):
        assert line["loss"] == pytest.approx(logged["loss"])
        assert line["padding_share"] == pytest.approx(1 - line["tokens"] / 120)
        assert line["tokens_per_second"] == pytest.approx(line["tokens"] / line["step_seconds"])
        assert line["peak_memory_bytes"] > 1e6
    (run,) = read_runs(tmp_path / "run")
    assert run.tokens == own
    assert "tokens/s" in render(compare_runs([run, run]))


def test_evaluation_is_neither_counted_nor_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hasten.integrations import checkpoints
    from hasten.integrations.transformers import StepEvidence

    class Slow(StepEvidence):  # the clock jumps an hour in every evaluation
        def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
            shift[0] += 3600
            super().on_evaluate(*args, **kwargs)

    shift, usual = [0.0], checkpoints.time.perf_counter
    monkeypatch.setattr(checkpoints.time, "perf_counter", lambda: usual() + shift[0])
    hugging_face(tmp_path, Slow(tmp_path / "run"), eval_strategy="steps", eval_steps=1)
    found = lines(tmp_path / "run")
    assert shift[0] == 3 * 3600
    assert all(line["step_seconds"] < 60 for line in found)
    assert [line["positions"] for line in found] == [120, 120, 120]


def test_a_batch_without_mask_or_boundaries_has_unknown_tokens() -> None:
    ids = torch.ones(2, 5, dtype=torch.long)
    count = TokenCount()
    count.add({"input_ids": ids})
    assert count.take() == (None, 10)
    count.add({"input_ids": ids, "position_ids": ids})
    assert count.take() == (10, 10)
    count.add({"input_ids": ids, "attention_mask": torch.ones(2, 1, 5, 5)})
    assert count.take() == (None, 10)  # a mask of another shape keeps pairs, not positions
    count.add([ids])
    count.add({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    assert count.take()[0] is None
    assert count.take() == (None, 0)


def test_an_earlier_run_is_not_overwritten(tmp_path: Path) -> None:
    MetricsFile(tmp_path).close()
    with pytest.raises(InputError, match="a folder of its own"):
        MetricsFile(tmp_path)
    with pytest.raises(InputError, match="can't be written"):
        MetricsFile(tmp_path / "metrics.jsonl" / "x")


def test_a_line_is_in_the_file_before_the_step_after_the_next(tmp_path: Path) -> None:
    file, count = MetricsFile(tmp_path), TokenCount()
    file.begin()
    for step in (1, 2, 3):
        file.step(step, count, float("nan"))
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
    file.loss(1.5)
    file.close()
    file.close()
    assert [line["loss"] for line in lines(tmp_path)] == [None, None, 1.5]


def test_without_lightning_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(lightning.importlib, "import_module", absent)
    with pytest.raises(InputError, match="pip install lightning"):
        lightning.step_evidence("x")


def test_lightning_s_steps_are_counted(tmp_path: Path) -> None:
    found = pytest.importorskip("lightning", reason="Lightning is not installed")
    evidence = lightning.step_evidence(tmp_path / "run")
    model = tiny_model()
    losses: list[float] = []

    class Module(found.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def collate(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        return {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}

    loader = torch.utils.data.DataLoader(batches(), batch_size=2, collate_fn=collate)  # type: ignore[arg-type]
    trainer = found.Trainer(
        max_epochs=1,
        accelerator="cpu",
        accumulate_grad_batches=2,
        callbacks=[evidence],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(Module(), loader)
    written = lines(tmp_path / "run")
    assert [line["step"] for line in written] == [1, 2, 3]
    own = sum(sum(example["attention_mask"]) for example in batches())
    assert sum(line["tokens"] for line in written) == own
    means = [(losses[i] + losses[i + 1]) / 2 for i in (0, 2, 4)]
    assert [line["loss"] for line in written] == pytest.approx(means)
