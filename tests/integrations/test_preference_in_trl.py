"""TRL's preference trainers with techniques in the calls of policy and reference."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hasten
from hasten.errors import InputError
from hasten.integrations import scored_labels
from hasten.integrations.adapt import HostedTechniques
from hasten.integrations.scored_labels import ScoredCalls, fused_head, without_fused_head
from hasten.integrations.transformers import with_techniques
from hasten.parts.kernels import rowwise
from hasten.parts.nn.attention import use_document_attention
from hasten.parts.nn.losses import LabelOnlyLoss
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.collate import Packed
from hasten.techniques.layers import FusedLayers
from hasten.techniques.loss import LabelledTokenLoss
from tiny import SILENT, tiny_model
from words import WORDS, tokenizer

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("trl", "datasets", "tokenizers"))
    or not hasattr(importlib.import_module("trl.trainer.utils"), "add_fused_lm_head"),
    reason="needs trl with a fused head",
)
STEPS = 5
PLAN = [Packed(), DocumentAttention(), LabelledTokenLoss()]
if rowwise.library().library is not None:  # there is a compiler
    PLAN.insert(2, FusedLayers())


def rows(kind: str, count: int = STEPS * 3, seed: int = 0) -> list[dict[str, Any]]:
    draw = random.Random(seed)

    def text(least: int, most: int) -> str:
        return "".join(f" {word}" for word in draw.choices(WORDS, k=draw.randint(least, most)))

    prompts = [text(2, 9).strip() for _ in range(count)]
    if kind == "GRPO":
        return [{"prompt": prompt} for prompt in prompts]
    if kind == "KTO":
        return [
            {"prompt": prompt, "completion": text(1, 12), "label": bool(number % 2)}
            for number, prompt in enumerate(prompts)
        ]
    return [{"prompt": p, "chosen": text(1, 12), "rejected": text(1, 12)} for p in prompts]


def trainer_of(
    folder: Path, kind: str = "DPO", model: str = "llama", dtype: Any = torch.float32, **more: Any
) -> Any:
    trl: Any = importlib.import_module("trl")
    dataset: Any = importlib.import_module("datasets").Dataset
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 3 if kind != "GRPO" else 4,
        "learning_rate": 1e-3,
        **SILENT,
        "logging_steps": 1,
        "bf16": False,
        "seed": 3,
        "gradient_checkpointing": False,
    }
    given = {name: more.pop(name) for name in ("peft_config", "data") if name in more}
    if kind == "GRPO":
        settings |= {"num_generations": 4, "max_completion_length": 6, "beta": 0.1}
        given["reward_funcs"] = lambda completions, **_: [float(len(set(c))) for c in completions]
    start: Any = tiny_model(model, dtype=dtype)
    start.save_pretrained(folder / "start")  # the reference is read from there
    return getattr(trl, f"{kind}Trainer")(
        model=type(start).from_pretrained(folder / "start", dtype=dtype),
        args=getattr(trl, f"{kind}Config")(**{**settings, **more}),
        train_dataset=dataset.from_list(given.pop("data", rows(kind))),
        processing_class=tokenizer(),
        **given,
    )


def trained(trainer: Any) -> list[dict[str, float]]:
    torch.manual_seed(0)
    trainer.train()
    times = ("epoch", "step", "runtime", "per_second", "step_time", "flos")
    logs = [line for line in trainer.state.log_history if "loss" in line]
    return [{k: v for k, v in line.items() if not any(t in k for t in times)} for line in logs]


def joined(trainer: Any) -> set[str]:
    return {technique.name() for technique in trainer._hasten_techniques.training.techniques}


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        *({"loss_type": kind} for kind in ("sigmoid", "ipo", "hinge")),
        {"loss_type": "robust", "label_smoothing": 0.1},
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], "ld_alpha": 0.5},
        {"loss_type": "aot", "gradient_accumulation_steps": 2},
        {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.5},
        {"sync_ref_model": True, "ref_model_sync_steps": 2, "gradient_checkpointing": True},
        {"precompute_ref_log_probs": True},
    ],
    ids=str,
)
def test_losses_and_logs_are_those_of_trl(settings: dict[str, Any], tmp_path: Path) -> None:
    alone = trained(trainer_of(tmp_path / "alone", **settings))
    trainer = hasten.speed_up(trainer_of(tmp_path / "fast", **settings))
    fast = trained(trainer)
    assert joined(trainer) >= {"packed", "document_attention", "labelled_token_loss"}
    assert len(fast) == STEPS
    for one, other in zip(alone, fast, strict=True):
        assert one.keys() == other.keys()
        assert other == pytest.approx(one, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("kind", ["KTO", "GRPO"])
def test_other_trainers_have_their_losses_too(kind: str, tmp_path: Path) -> None:
    alone = trained(trainer_of(tmp_path / "alone", kind))
    trainer = hasten.speed_up(trainer_of(tmp_path / "fast", kind))
    fast = trained(trainer)
    assert joined(trainer) >= {"packed", "document_attention", "labelled_token_loss"}
    for one, other in zip(alone, fast, strict=True):
        assert other == pytest.approx(one, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("model", ["llama", "deepseek_v3"])
@pytest.mark.parametrize("kind", ["DPO", "KTO"])
def test_policy_and_reference_are_equal_at_the_start(
    kind: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HASTEN_PROOF", "off")  # or the first step would be TRL's own
    trainer = with_techniques(trainer_of(tmp_path, kind, model), PLAN)
    first = trained(trainer)[0]
    assert first.get("kl", 0.0) == 0.0
    assert [first[f"rewards/{side}"] for side in ("chosen", "rejected")] == [0.0, 0.0]
    assert first["loss"] == pytest.approx(math.log(2) if kind == "DPO" else 0.5, abs=1e-7)


@pytest.mark.parametrize("is_given", [False, True])
def test_an_adapter_and_its_reference_run_the_same_code(is_given: bool, tmp_path: Path) -> None:
    peft: Any = importlib.import_module("peft")

    def lora(name: str) -> Any:
        config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        if not is_given:
            return trainer_of(tmp_path / name, peft_config=config)
        trl: Any = importlib.import_module("trl")
        torch.manual_seed(1)
        model = peft.get_peft_model(tiny_model(), config)
        for number, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
            torch.nn.init.normal_(parameter, std=0.02 + 0.001 * number)
        plain = trainer_of(tmp_path / name)
        return trl.DPOTrainer(
            model=model,
            args=plain.args,
            train_dataset=plain.train_dataset.select_columns(["prompt", "chosen", "rejected"]),
            processing_class=tokenizer(),
        )

    alone = trained(lora("alone"))
    trainer = hasten.speed_up(lora("fast"))
    fast = trained(trainer)
    assert joined(trainer) >= {"packed", "labelled_token_loss"}
    for one, other in zip(alone, fast, strict=True):
        assert other == pytest.approx(one, rel=1e-4, abs=1e-4)


def test_what_the_part_has_no_numbers_for_is_left_to_trl(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, use_weighting=True)
    with pytest.raises(InputError, match="the trainer also reads log_sum_sq_probs"):
        with_techniques(trainer, [LabelledTokenLoss()])
    alone = trained(trainer_of(tmp_path / "alone", use_weighting=True))
    trainer = with_techniques(trainer, PLAN[:2])
    fast = trained(trainer)
    assert joined(trainer) == {"packed", "document_attention"}
    for one, other in zip(alone, fast, strict=True):
        assert other == pytest.approx(one, rel=1e-4, abs=1e-4)


def test_a_reference_of_other_kernels_is_left_alone_in_half_precision(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, dtype=torch.bfloat16, precompute_ref_log_probs=True)
    for technique in PLAN:
        with pytest.raises(InputError, match="other kernels computed the reference's"):
            with_techniques(trainer, [technique])


def test_a_call_with_other_inputs_stays_padded_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_of(tmp_path)
    collate = trainer.data_collator
    trainer.data_collator = lambda examples: {
        **(batch := collate(examples)),
        "position_ids": torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"]),
    }
    trainer.args.remove_unused_columns = False
    with caplog.at_level(logging.WARNING, "hasten"):
        trained(with_techniques(trainer, PLAN))
    assert "packed: left out for some batches: the model is called with position_ids" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_twenty_batches_without_a_fault_remove_nothing(dtype: Any, tmp_path: Path) -> None:
    for seed in range(20):
        folder = tmp_path / str(seed)
        data = rows("DPO", 4, seed)
        trainer = trainer_of(folder, data=data, max_steps=1, seed=seed, dtype=dtype)
        trainer = hasten.speed_up(trainer)
        trained(trainer)
        assert joined(trainer) >= {"packed", "document_attention", "labelled_token_loss"}, seed


def faulty_scores(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of a model return other numbers, or get other inputs."""
    usual = ScoredCalls.scored

    def scored(self: ScoredCalls, model: Any, named: dict[str, Any]) -> Any:
        labels = named["labels"]
        if fault == "padding counted":
            filler = named["attention_mask"] == 0
            named = {**named, "attention_mask": torch.ones_like(filler, dtype=torch.long)}
            named["labels"] = torch.where(filler, named["input_ids"], labels)
        if fault == "NLL over the wrong span":
            named["labels"] = labels.roll(-1, 1)
        is_narrow = fault == "reference in another dtype" and not torch.is_grad_enabled()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_narrow):
            output = usual(self, model, named)
        if fault == "sum for mean":
            output.log_probs = output.log_probs / (labels[:, 1:] != -100).sum(1, keepdim=True)
        if fault == "a pair less":
            half = len(labels) // 2
            gone = torch.arange(len(labels)) % half == half - 1
            output.log_probs = output.log_probs.masked_fill(gone.unsqueeze(1), 0.0)
        return output

    monkeypatch.setattr(ScoredCalls, "scored", scored)


def split_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second half of the first document is a document of its own."""
    lay_out = scored_labels.end_to_end

    def cut(documents: Any) -> Any:
        first, *others = documents
        middle = len(first) // 2
        return [first[:middle], first[middle:], *others]

    def cut_out(ids: Any, labels: Any) -> Any:
        return lay_out(cut(ids), cut(labels))

    monkeypatch.setattr(scored_labels, "end_to_end", cut_out)


def longer_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    common = scored_labels._common
    monkeypatch.setattr(
        scored_labels,
        "_common",
        lambda one, other: min(common(one, other) + 1, len(one), len(other)),
    )


def other_smoothing(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    active = HostedTechniques.active

    @contextlib.contextmanager
    def smoothed_otherwise(self: HostedTechniques, techniques: Any) -> Iterator[None]:
        before = trainer.label_smoothing
        trainer.label_smoothing = 0.0 if techniques else before
        with active(self, techniques):
            yield
        trainer.label_smoothing = before

    monkeypatch.setattr(HostedTechniques, "active", smoothed_otherwise)


FAULTS_OF_PACKING = ("a pair split", "prefix longer than the prompt")
FAULTS = (
    *("padding counted", "reference in another dtype", "a pair less", "sum for mean"),
    *("label smoothing mixed up", "NLL over the wrong span"),
)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*FAULTS_OF_PACKING, *FAULTS])
def test_a_planted_fault_is_removed(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"loss_type": ["robust", "sft"], "label_smoothing": 0.2, "max_steps": 2}
    alone = trained(trainer_of(tmp_path / "alone", **settings))
    trainer = trainer_of(tmp_path / "fast", **settings)
    if fault == "a pair split":
        split_pairs(monkeypatch)
    elif fault == "prefix longer than the prompt":
        longer_prefixes(monkeypatch)
    elif fault == "label smoothing mixed up":
        other_smoothing(trainer, monkeypatch)
    else:
        faulty_scores(fault, monkeypatch)
    trainer = with_techniques(trainer, PLAN)
    fast = trained(trainer)
    # Without document_attention, packed rows don't share a prompt.
    assert not joined(trainer) >= {"packed", "document_attention"}
    assert fault in FAULTS_OF_PACKING or "labelled_token_loss" not in joined(trainer)
    assert [line["loss"] for line in fast] == pytest.approx([line["loss"] for line in alone])


def test_a_head_of_another_version_is_not_recognised(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    head = fused_head(trainer.model)
    assert head is not None
    assert head.outputs == ("log_probs", "entropy", "mean_logits", "is_top1")
    forward = trainer.model.forward

    def other(*args: Any, **named: Any) -> Any:
        return forward(*args, **named)

    trainer.model.forward = other
    assert fused_head(trainer.model) is None
    with pytest.raises(InputError, match="has a compute_loss of its own"):
        with_techniques(trainer, [Packed()])


def padded(lengths: list[int], width: int, left: bool, common: int) -> tuple[Tensor, Tensor]:
    """Rows of random tokens; each two whose numbers differ by two begin alike."""
    draw = torch.Generator().manual_seed(5)
    rows = [torch.randint(3, 40, (length,), generator=draw) for length in lengths]
    for one, other in zip(rows[:2], rows[2:], strict=True):
        other[:common] = one[:common]
    ids, mask = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(2))
    for number, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(len(row))
        ids[number, place], mask[number, place] = row, 1
    return ids, mask


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize(("own_head", "common"), [(False, 0), (True, 0), (True, 3), (True, 5)])
def test_packed_rows_have_the_scores_of_padded_ones(
    left: bool, own_head: bool, common: int
) -> None:
    utils: Any = importlib.import_module("trl.trainer.utils")
    model: Any = tiny_model()
    fields = ("log_probs", "entropy", "mean_logits", "is_top1")
    utils.add_fused_lm_head(model, outputs=fields)
    ids, mask = padded([7, 6, 9, 5], 10, left, common)
    labels = ids.masked_fill(mask == 0, -100)
    first = mask.argmax(1, keepdim=True)
    for column in (first, first + 1):
        labels.scatter_(1, column, -100)
    named = {"input_ids": ids, "attention_mask": mask, "labels": labels, "fused_lm_head": True}
    wanted = model(**named)
    head = fused_head(model)
    assert head is not None
    with without_fused_head(model):
        loss = LabelOnlyLoss(model) if own_head else None
        use_document_attention(model)
    calls: list[dict[str, Any]] = []
    hook = model.model.register_forward_pre_hook(
        lambda module, arguments, inputs: calls.append(inputs), with_kwargs=True
    )
    found = ScoredCalls(head, True, 0.0, loss, contextlib.nullcontext).scored(model, named)
    hook.remove()
    assert calls[0]["input_ids"].numel() == 27 - 2 * common
    for name in fields[:3]:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-5)
    assert torch.equal(found.is_top1, wanted.is_top1)
    assert torch.equal(found.label_mask, wanted.label_mask)
    torch.testing.assert_close(found.loss, wanted.loss)
    gradients = [torch.autograd.grad(one.loss, [*model.parameters()]) for one in (found, wanted)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
