"""The same techniques in Lightning and in a plain loop: the losses of hasten's own trainer."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from torch.utils.data import DataLoader

from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.integrations import lightning as lightning_host
from hasten.integrations.batches import padded_rows
from hasten.integrations.lightning import with_techniques
from hasten.integrations.loop import in_loop
from hasten.techniques.checkpoint import Checkpoints
from hasten.techniques.collate import Packed
from hasten.techniques.experts import ExpertsImplementation
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.optimizer import Muon
from hasten.techniques.precision import Autocast
from hasten.techniques.sampler import PackedEpoch
from integrations.test_techniques_in_the_trainer import (
    BATCH,
    DATA,
    EVERYTHING,
    GROUPED,
    RATE,
    SEED,
)
from tiny import COMMON, language_job, run, session_of, tiny_model

STEPS = 6
PLANS: dict[str, tuple[Technique, ...]] = {
    "grouped": (GROUPED,),
    "packed epoch": (PackedEpoch(row_tokens=90), Packed()),
    "muon": (GROUPED, Packed(), Muon()),
    "everything": EVERYTHING,
}
plans = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
has_lightning = importlib.util.find_spec("lightning") is not None
lightning_only = pytest.mark.skipif(not has_lightning, reason="needs lightning")


def own_losses(plan: tuple[Technique, ...]) -> list[float]:
    """hasten's trainer without clipping, as a loop without it."""
    job = language_job(data=DATA, steps=STEPS, batch=BATCH, lr=RATE, max_grad_norm=None)
    return [m.loss for m in run(session_of(job, *plan))]


def adamw(model: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)


@pytest.mark.parametrize(
    ("name", "passes"), [*((name, 1) for name in PLANS), ("everything", 2), ("everything", 4)]
)
def test_a_plain_loop_has_the_losses_of_hastens_own_in_any_number_of_passes(
    name: str, passes: int
) -> None:
    plan = PLANS[name]
    model: Any = tiny_model()
    loop = in_loop(model, plan, examples=DATA, batch=BATCH, steps=STEPS, seed=SEED)
    optimizer = loop.optimizer(adamw(model))
    losses: list[float] = []
    for epoch in range(STEPS):
        for number, batch in enumerate(loop.loader(epoch, passes)):
            loss = model(**batch).loss / passes
            loss.backward()
            losses.append(loss.item())
            if number % passes == passes - 1:
                loop.step(optimizer)
    found = [sum(losses[i : i + passes]) for i in range(0, passes * STEPS, passes)]
    assert found == pytest.approx(own_losses(plan), rel=1e-4)


def module_of(model: Any) -> Any:
    lightning: Any = importlib.import_module("lightning.pytorch")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = model, []

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self.model)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch).loss
            self.losses.append(loss.item())
            return loss

    return Module()


def trainer_of(folder: Path, **changes: Any) -> Any:
    lightning: Any = importlib.import_module("lightning.pytorch")
    settings: dict[str, Any] = {
        "max_steps": STEPS,
        "default_root_dir": folder,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return lightning.Trainer(**{**settings, **changes})


def loader(size: int = BATCH, workers: int = 0) -> Any:
    return DataLoader(DATA, batch_size=size, num_workers=workers, collate_fn=padded_rows)  # type: ignore[arg-type]


@lightning_only
@plans
def test_lightning_has_the_losses_of_hastens_own(
    plan: tuple[Technique, ...], tmp_path: Path
) -> None:
    trainer, module = trainer_of(tmp_path), module_of(tiny_model())
    trainer.fit(*with_techniques(trainer, module, loader(), plan, seed=SEED))
    assert module.losses == pytest.approx(own_losses(plan), rel=1e-4)


@lightning_only
@pytest.mark.parametrize("passes", [2, 4])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_token_weighs_the_same_in_whatever_pass(
    passes: int, workers: int, tmp_path: Path
) -> None:
    plan = (GROUPED, Packed(), LabelledTokenLoss(chunk=128))
    trainer = trainer_of(tmp_path, accumulate_grad_batches=passes)
    module, given = module_of(tiny_model()), loader(BATCH // passes, workers)
    trainer.fit(*with_techniques(trainer, module, given, plan, seed=SEED))
    found = [sum(module.losses[i : i + passes]) / passes for i in range(0, passes * STEPS, passes)]
    assert found == pytest.approx(own_losses(plan), rel=1e-4)


@lightning_only
def test_lightning_saves_where_steps_end(tmp_path: Path) -> None:
    trainer, module = trainer_of(tmp_path), module_of(tiny_model())
    plan = [Packed(), Checkpoints(interval=2)]
    trainer.fit(*with_techniques(trainer, module, loader(), plan))
    assert sorted(p.name[-1] for p in (tmp_path / "hasten").glob("step-*")) == ["2", "4", "6"]


def test_a_loop_has_no_place_for_a_number_format() -> None:
    with pytest.raises(InputError, match="autocast"):
        in_loop(tiny_model(), [Autocast()], examples=DATA, batch=8)
    with pytest.raises(InputError, match="there are none"):
        in_loop(tiny_model(), [GROUPED], examples=[], batch=8)


def test_techniques_are_told_the_device_that_lightning_will_train_on(tmp_path: Path) -> None:
    trainer = SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device("cuda", 1)),
        accumulate_grad_batches=2,
        max_steps=-1,
        max_epochs=3,
        default_root_dir=tmp_path,
    )
    module = torch.nn.Module()
    module.model = tiny_model()
    run_ = lightning_host.HostModule(trainer, module, loader(), SEED).run()
    assert (run_.device, run_.steps, run_.epochs, run_.batch) == ("cuda:1", None, 3, 2 * BATCH)


def test_a_mask_by_its_place_is_not_dropped() -> None:
    model: Any = tiny_model()
    in_loop(model, [LabelledTokenLoss(chunk=128)], examples=DATA, batch=BATCH, steps=STEPS)
    ids = torch.arange(3, 11).view(1, 8)
    mask = torch.ones_like(ids)
    mask[:, 5:] = 0
    own = model(ids, mask, labels=ids)  # the model's own forward, with logits
    assert own.loss.item() == tiny_model()(ids, mask, labels=ids).loss.item()
    fused = model(ids, labels=ids)
    assert fused.logits is None
    fused.loss.backward()


def test_experts_of_qwen3_are_seen_too() -> None:
    torch.manual_seed(0)
    size = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    config = hf.Qwen3MoeConfig(**COMMON, **size, num_key_value_heads=2, head_dim=8)
    model: Any = hf.AutoModelForCausalLM.from_config(config)
    in_loop(model, [ExpertsImplementation("eager")], examples=DATA, batch=BATCH, steps=STEPS)
    assert model.config._experts_implementation == "eager"
