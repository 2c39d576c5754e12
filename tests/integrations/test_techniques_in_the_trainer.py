"""Techniques in the Hugging Face Trainer: the same losses as in hasten's own, or a refusal."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.integrations.transformers import with_techniques
from hasten.parts.checkpoint import SmartCheckpointer
from hasten.parts.kernels import rowwise
from hasten.techniques import CATALOGUE
from hasten.techniques.activation_checkpointing import ActivationCheckpointing
from hasten.techniques.allocator import Allocator
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.checkpoint import Checkpoints
from hasten.techniques.collate import Packed
from hasten.techniques.communication.compress import TopK
from hasten.techniques.experts import ExpertsImplementation
from hasten.techniques.feed import Prefetched
from hasten.techniques.layers import FusedLayers
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.optimizer import CompactAdamW, FusedAdamW, Muon
from hasten.techniques.precision import Autocast
from hasten.techniques.sampler import LengthGrouped, PackedEpoch
from tiny import SILENT, examples, language_job, run, session_of, tiny_model

STEPS, BATCH, RATE, SEED = 4, 8, 1e-2, 3  # three steps are an epoch
DATA = examples(24)
GROUPED = LengthGrouped(window=64)
compiles = pytest.mark.skipif(rowwise.library().library is None, reason="needs a compiler")
EVERYTHING: tuple[Technique, ...] = (
    *(
        GROUPED,
        Packed(),
        DocumentAttention(),
        LabelledTokenLoss(chunk=128),
        ActivationCheckpointing(),
    ),
)
PLANS: dict[str, tuple[Technique, ...]] = {
    "grouped": (GROUPED,),
    "packed": (GROUPED, Packed()),
    "packed epoch": (PackedEpoch(row_tokens=90), Packed()),
    "documents": (GROUPED, Packed(), DocumentAttention()),
    "loss": (GROUPED, LabelledTokenLoss(chunk=128)),
    "activation_checkpointing": (GROUPED, ActivationCheckpointing()),
    "compact": (GROUPED, CompactAdamW("bf16")),
    "muon": (GROUPED, Muon()),
    "everything": EVERYTHING,
}


def as_others_have_them(data: Any = DATA) -> list[dict[str, Any]]:
    """Rows as a tokeniser's owner writes them: labels not shifted, -100 for no loss."""
    return [
        {
            "input_ids": r.input_ids.tolist(),
            "labels": [int(i) if t else -100 for i, t in zip(r.input_ids, r.trained, strict=True)],
        }
        for r in data
    ]


def collate(rows_: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """What a user's own collator does: pad, and mark the filler."""
    longest = max(len(r["input_ids"]) for r in rows_)

    def filled(key: str, filler: int) -> torch.Tensor:
        return torch.tensor([r[key] + [filler] * (longest - len(r[key])) for r in rows_])

    return {"input_ids": filled("input_ids", 0), "labels": filled("labels", -100)}


def trainer_of(folder: Path, model: Any = None, **changes: Any) -> Trainer:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "seed": SEED,
        **SILENT,
    }
    given: Any = model or tiny_model()
    data: Any = as_others_have_them()
    return Trainer(
        given,
        TrainingArguments(**{**settings, **changes}),
        data_collator=collate,
        train_dataset=data,
    )


def losses_of(trainer: Trainer) -> list[float]:
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def own_losses(*plan: Technique, architecture: str = "llama", steps: int = STEPS) -> list[float]:
    job = language_job(
        lambda: tiny_model(architecture), data=DATA, steps=steps, batch=BATCH, lr=RATE
    )
    return [m.loss for m in run(session_of(job, *plan, architecture=architecture))]


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_the_trainer_has_the_losses_of_hastens_own(
    plan: tuple[Technique, ...], tmp_path: Path
) -> None:
    found = losses_of(with_techniques(trainer_of(tmp_path), plan))
    assert found == pytest.approx(own_losses(*plan), rel=1e-4)
    assert found[-1] < found[0]


@compiles
def test_fused_layers_and_optimizer_have_the_losses_of_hastens_own(tmp_path: Path) -> None:
    plan = (*EVERYTHING, FusedLayers(), FusedAdamW())
    found = losses_of(with_techniques(trainer_of(tmp_path), plan))
    assert found == pytest.approx(own_losses(*plan), rel=1e-4)


def test_experts_go_the_way_that_was_asked_for(tmp_path: Path) -> None:
    plan = (*EVERYTHING, ExpertsImplementation("eager"))
    model = tiny_model("deepseek_v3")
    found = losses_of(with_techniques(trainer_of(tmp_path, model), plan))
    assert found == pytest.approx(own_losses(*plan, architecture="deepseek_v3"), rel=1e-4)


@pytest.mark.parametrize("passes", [2, 4])
def test_accumulated_passes_change_no_loss(passes: int, tmp_path: Path) -> None:
    trainer = trainer_of(
        tmp_path,
        per_device_train_batch_size=BATCH // passes,
        gradient_accumulation_steps=passes,
    )
    assert losses_of(with_techniques(trainer, EVERYTHING)) == pytest.approx(
        own_losses(*EVERYTHING), rel=1e-4
    )


def test_checkpoints_hold_weights_moments_and_schedule(tmp_path: Path) -> None:
    trainer = with_techniques(trainer_of(tmp_path), [Checkpoints(interval=2)])
    trainer.train()
    trained: Any = trainer.model
    fresh = tiny_model(seed=1)
    other = trainer_of(tmp_path, fresh)
    other.create_optimizer_and_scheduler(STEPS)
    optimizer, schedule = other.optimizer, other.lr_scheduler
    with SmartCheckpointer(interval=2, folder=tmp_path / "hasten") as keeper:
        keeper.protect(model=fresh, optimizer=optimizer, schedule=schedule).restore()
        assert keeper.step == STEPS
    assert optimizer is not None
    assert len(optimizer.state) == len(list(fresh.parameters()))
    expected = dict(trained.named_parameters())
    assert all(torch.equal(p, expected[n]) for n, p in fresh.named_parameters())
    with pytest.raises(InputError, match="earlier run"):
        with_techniques(trainer_of(tmp_path), [Checkpoints(interval=2)])


def test_evidence_is_written_beside(tmp_path: Path) -> None:
    trainer = with_techniques(trainer_of(tmp_path), [Packed()], evidence=tmp_path / "evidence")
    trainer.train()
    lines = (tmp_path / "evidence" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == STEPS
    assert '"padding_share": 0.0' not in lines[0]  # the first step is the trainer's own
    assert all('"padding_share": 0.0' in line for line in lines[1:])


@pytest.mark.parametrize(
    ("technique", "advice"),
    [
        (Prefetched(), "dataloader_num_workers"),
        (GradientAccumulation(), "gradient_accumulation_steps"),
        (Autocast(), "bf16=True"),
        (DDP(), "torchrun"),
        (Allocator(), "hasten check"),
    ],
    ids=str,
)
def test_a_slot_that_the_trainer_keeps_is_refused_with_advice(
    technique: Technique, advice: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=advice) as refused:
        with_techniques(trainer_of(tmp_path), [technique])
    assert str(refused.value).startswith(technique.name())


def test_a_refusal_leaves_the_trainer_as_it_was(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    with pytest.raises(InputError):
        with_techniques(trainer, [Packed(), LabelledTokenLoss(), Prefetched()])
    assert trainer.data_collator is collate
    assert losses_of(trainer) == losses_of(trainer_of(tmp_path))


def test_columns_that_the_model_does_not_know_are_left_out(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    named: Any = [{**row, "name": "of a row"} for row in as_others_have_them()]
    trainer.train_dataset = named
    trainer.data_collator = lambda rows_: {"seen": [sorted(r) for r in rows_]}
    batch = next(iter(with_techniques(trainer, [GROUPED]).get_train_dataloader()))
    assert batch["seen"] == [["input_ids", "labels"]] * BATCH


@pytest.mark.parametrize("kind", CATALOGUE, ids=lambda kind: kind.name())
def test_every_technique_of_the_catalogue_is_taken_or_refused_in_one_sentence(
    kind: type[Technique], tmp_path: Path
) -> None:
    said = ""
    try:
        with_techniques(trainer_of(tmp_path), [kind()])
    except InputError as refused:
        said = str(refused)
    assert "\n" not in said
    assert not said or kind.name() in said


def test_what_can_not_work_here_is_said(tmp_path: Path) -> None:
    given = trainer_of(tmp_path)
    given.optimizer = torch.optim.SGD(tiny_model().parameters())
    with pytest.raises(InputError, match="its optimizer"):
        with_techniques(given, [Muon()])
    with pytest.raises(InputError, match="both decide"):
        with_techniques(trainer_of(tmp_path), [GROUPED, PackedEpoch()])
    unread = trainer_of(tmp_path)
    texts: Any = [{"text": "hello"}]
    unread.train_dataset = texts
    with pytest.raises(InputError, match="input_ids"):
        with_techniques(unread, [GROUPED])
    newer = "activation_checkpointing" in TrainingArguments.__dataclass_fields__
    name = "activation_checkpointing" if newer else "gradient_checkpointing"
    with pytest.raises(InputError, match="activation_checkpointing"):
        with_techniques(trainer_of(tmp_path, **{name: True}), [ActivationCheckpointing()])


def test_with_one_process_no_gradient_travels_and_nothing_changes(tmp_path: Path) -> None:
    found = losses_of(with_techniques(trainer_of(tmp_path), [GROUPED, TopK(0.05)]))
    assert found == pytest.approx(own_losses(GROUPED), rel=1e-4)
    assert all(math.isfinite(loss) for loss in found)
