"""Parts in other people's loops: the Hugging Face Trainer, Lightning, plain torch."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from hasten import SmartCheckpointer
from hasten.machine.environment import World
from hasten.parts.comm.gradient_compressor import GradientCompressor
from hasten.parts.data.collate import TokenizedExample, packed, padded
from hasten.parts.data.dynamic_batch import DynamicBatchSampler
from hasten.parts.nn.attention import use_document_attention
from hasten.parts.nn.losses import WholeLogitsLoss
from ranks import on_ranks
from tiny import examples, tiny_model

ROWS = [{"x": torch.randn(4, generator=torch.Generator().manual_seed(i))} for i in range(24)]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.linear(x).square().mean()}


def settings(folder: Path, **changes: Any) -> TrainingArguments:
    """Of a Trainer that leaves nothing behind and is quiet."""
    usual = {"report_to": [], "save_strategy": "no", "logging_strategy": "no"}
    usual |= {"disable_tqdm": True, "use_cpu": True}
    return TrainingArguments(output_dir=str(folder), **{**usual, **changes})


def collate(given: Any) -> dict[str, Any]:
    """Labels under the name that tells Transformers not to shift them once more."""
    batch = padded(given)
    return {**batch, "shift_labels": batch["labels"]}


class Saving(TrainerCallback):
    """What the card tells a reader to write."""

    def __init__(self, checkpointer: SmartCheckpointer) -> None:
        self.checkpointer = checkpointer

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.checkpointer.protect(
            model=given["model"], optimizer=given["optimizer"], schedule=given["lr_scheduler"]
        )
        self.checkpointer.restore()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.checkpointer.after_step(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.checkpointer.close()


def test_the_trainer_saves_and_a_fresh_one_has_weights_moments_and_schedule(
    tmp_path: Path,
) -> None:
    def trainer(steps: int) -> tuple[Trainer, SmartCheckpointer]:
        keeper = SmartCheckpointer(interval=2, folder=tmp_path / "saved")
        arguments = settings(tmp_path, max_steps=steps, per_device_train_batch_size=4)
        found = Trainer(Model(), arguments, train_dataset=ROWS, callbacks=[Saving(keeper)])
        return found, keeper

    first, keeper = trainer(6)
    first.train()
    assert [p.name[-1] for p in keeper.list()] == ["2", "4", "6"]
    trained: Any = first.model
    second, again = trainer(6)
    begun: dict[str, Any] = {}

    class Look(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            begun.setdefault("weight", given["model"].linear.weight.detach().clone())
            moments = given["optimizer"].state_dict()["state"]
            begun.setdefault("steps", float(moments[0]["step"]))
            begun.setdefault("rate", given["lr_scheduler"].last_epoch)

    second.add_callback(Look())
    second.train()
    assert again.interval.failures == 1
    assert torch.equal(begun["weight"], trained.linear.weight)
    assert begun["steps"] == 6
    assert begun["rate"] == 6


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs lightning")
def test_lightning_saves_where_a_batch_ends(tmp_path: Path) -> None:
    lightning: Any = importlib.import_module("lightning.pytorch")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()
            self.keeper = SmartCheckpointer(interval=2, folder=tmp_path)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.model.parameters())

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.model(batch[0])["loss"]

        def on_train_start(self) -> None:
            self.keeper.protect(model=self.model, optimizer=self.trainer.optimizers[0]).restore()

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            self.keeper.after_step(self.trainer.global_step)

        def on_train_end(self) -> None:
            self.keeper.close()

    module = Module()
    data = DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=4)
    trainer = lightning.Trainer(
        max_steps=6, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(module, data)
    assert [p.name[-1] for p in module.keeper.list()] == ["2", "4", "6"]


def hugging_face(world: World) -> dict[str, Any]:
    # Accelerate asks for a place to meet even where the ranks have met already.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    model = tiny_model()
    compressor = GradientCompressor(sparsity_method="int4", communication_backend="gloo")

    class Compress(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, **named: Any) -> None:
            compressor.attach(trainer.model_wrapped)

    optimizer = AdamW(model.parameters(), lr=3e-3)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=settings(
                Path(folder),
                max_steps=8,
                per_device_train_batch_size=4,
                ddp_backend="gloo",
                logging_strategy="steps",
                logging_steps=1,
            ),
            data_collator=collate,
            train_dataset=examples(8, seed=1),
            optimizers=(optimizer, LambdaLR(optimizer, lambda step: 1.0)),
            callbacks=[Compress()],
        )
        trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    flat = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    numbers = sum(p.numel() for p in model.parameters())
    return {
        "losses": losses,
        "weights": [float(flat.sum()), float(flat.abs().sum())],
        "steps": compressor.steps,
        "sent": compressor.sent_bytes,
        "predicted": compressor.predicted(model),
        "dense": 4 * numbers,
    }


def test_the_trainer_s_replicas_learn_alike_with_few_bytes(tmp_path: Path) -> None:
    one, two = on_ranks(hugging_face, tmp_path)
    assert one["weights"] == two["weights"]
    assert one["losses"][-1] < one["losses"][0]
    assert one["steps"] == 8
    assert one["sent"] > 0
    assert one["predicted"] < 0.14 * one["dense"]


DATA = examples(30, seed=1)
BUDGET = 120


class TokenBudgetTrainer(Trainer):
    """The Trainer takes a batch sampler through its own loader."""

    def get_train_dataloader(self) -> Any:
        sampler = DynamicBatchSampler(self.train_dataset, BUDGET, seed=4)
        loader = DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=collate)
        return self.accelerator.prepare(loader)


def test_the_trainer_sees_the_batches_of_each_epoch(tmp_path: Path) -> None:
    model = tiny_model()
    seen: list[list[int]] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        seen.append(sorted(kwargs["input_ids"].flatten().tolist()))

    model.register_forward_pre_hook(note, with_kwargs=True)
    arguments = settings(tmp_path, num_train_epochs=2)
    TokenBudgetTrainer(model=model, args=arguments, train_dataset=DATA).train()
    sampler = DynamicBatchSampler(DATA, BUDGET, seed=4)
    expected = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        expected += [padded([DATA[i] for i in batch])["input_ids"] for batch in sampler]
    assert seen == [sorted(ids.flatten().tolist()) for ids in expected]


def test_lightning_trains_from_it(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.examples = tiny_model(), 0

        def training_step(self, batch: Any) -> Any:
            self.examples += len(batch["input_ids"])
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    sampler = DynamicBatchSampler(DATA, BUDGET)
    loader = DataLoader(DATA, batch_sampler=sampler, collate_fn=collate)  # type: ignore[arg-type, var-annotated]
    module = Module()
    lightning.Trainer(max_epochs=1, default_root_dir=tmp_path, accelerator="cpu", logger=False).fit(
        module, loader
    )
    assert module.examples == len(DATA)


PACKED_DATA = examples(8, seed=1)
STEPS, RATE = 3, 0.5


def collate_packed(given: Sequence[TokenizedExample]) -> dict[str, Any]:
    """Labels under the name that tells Transformers not to shift them once more."""
    batch = packed(given)
    return {**batch, "shift_labels": batch["labels"]}


def by_hand() -> dict[str, torch.Tensor]:
    """The same three steps over all examples, padded, in a plain loop."""
    model = tiny_model()
    loss, optimizer = WholeLogitsLoss(model), SGD(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        total, count = loss(**padded(PACKED_DATA))
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("documents", [False, True])
def test_the_trainer_learns_from_packed_rows_what_a_loop_learns_from_padded_ones(
    documents: bool, accumulate: int, tmp_path: Path
) -> None:
    model = tiny_model()
    if documents:
        use_document_attention(model)
    optimizer = SGD(model.parameters(), lr=RATE)
    trainer = Trainer(
        model=model,
        args=settings(
            tmp_path,
            max_steps=STEPS,
            per_device_train_batch_size=len(PACKED_DATA) // accumulate,
            gradient_accumulation_steps=accumulate,
            max_grad_norm=0.0,
        ),
        data_collator=collate_packed,
        train_dataset=PACKED_DATA,
        optimizers=(optimizer, LambdaLR(optimizer, lambda step: 1.0)),
    )
    trainer.train()
    expected = by_hand()
    start = dict(tiny_model().named_parameters())
    for name, weight in model.named_parameters():
        moved = (expected[name] - start[name]).norm()
        assert (weight - expected[name]).norm() < 1e-4 * moved, name
