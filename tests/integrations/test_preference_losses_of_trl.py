"""Losses and gradients of preference pairs are those of TRL's trainers, on the same batches.

In float64, with TRL's chunked head (float32 inside) replaced by log-softmax.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForSequenceClassification
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hasten.parts.data.collate import TokenizedExample
from hasten.parts.data.pairs import (
    EMPTY,
    PreferencePair,
    packed_pairs,
    padded_pairs,
    with_other_answer,
)
from hasten.parts.nn.attention import use_document_attention
from hasten.parts.nn.preference import OnePassPreferenceLoss, PreferenceLoss, RewardLoss
from hasten.parts.nn.preference_objectives import Objective
from pairs import example, pairs
from tiny import SILENT, tiny_config, tiny_model
from words import tokenizer

NEEDED = ("trl.trainer.utils", "datasets", "tokenizers")
HAS_TRL = all(importlib.util.find_spec(name.partition(".")[0]) for name in NEEDED)
pytestmark = pytest.mark.skipif(
    not HAS_TRL or not hasattr(importlib.import_module(NEEDED[0]), "_ChunkedLogProbFunction"),
    reason="needs a TRL with the chunked head, after 1.0",
)
PAIRS = pairs(5, seed=8)
BOUND = 1e-12
LAYOUTS = ("padded", "packed", "shared")


class Exact:
    """Log-softmax in the model's own format, called as TRL's chunked head is."""

    @staticmethod
    def apply(hidden: Tensor, weight: Tensor, bias: Any, targets: Tensor, *settings: Any) -> Any:
        scores = (hidden @ weight.t()).log_softmax(-1)
        log_probs = scores.gather(1, targets.unsqueeze(1)).squeeze(1)
        zero = log_probs.detach().float() * 0
        return log_probs, zero, None, zero, zero > 1


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything of a float64 model computes in float64."""
    utils: Any = importlib.import_module("trl.trainer.utils")
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", Exact)
    usual = Tensor.float
    monkeypatch.setattr(Tensor, "float", lambda t: t if t.dtype == torch.float64 else usual(t))

    def forward(norm: Any, x: Tensor) -> Tensor:
        scaled: Tensor = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
        return norm.weight * scaled

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)


def trainer_of(kind: str, module: str, folder: Path, model: Any, **more: Any) -> Any:
    """A trainer of TRL with one pair of words as data, which no test reads."""
    trl: Any = importlib.import_module(module)
    data: Any = importlib.import_module("datasets").Dataset
    row: dict[str, Any] = {"prompt": "the cat", "chosen": " sat", "rejected": " ran"}
    if kind == "KTO":
        row = {"prompt": "the cat", "completion": " sat", "label": True}
    settings = {
        "output_dir": str(folder),
        "bf16": False,
        "gradient_checkpointing": False,
        **SILENT,
    }
    config = getattr(trl, f"{kind}Config")(**settings)
    return getattr(trl, f"{kind}Trainer")(
        model=model,
        args=config,
        train_dataset=data.from_list([row] * 8),
        processing_class=tokenizer(),
        **more,
    )


def filled(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows])


def of_rows(rows: Sequence[TokenizedExample]) -> dict[str, Tensor]:
    return {
        "input_ids": filled([row.input_ids.tolist() for row in rows], 0),
        "attention_mask": filled([[1] * row.length for row in rows], 0),
        "completion_mask": filled([[int(t) for t in row.trained] for row in rows], 0),
    }


def rows_of(given: Sequence[PreferencePair]) -> list[TokenizedExample]:
    return [pair.chosen for pair in given] + [pair.rejected for pair in given]


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected.values()))
    return max(float((found[n] - expected[n]).norm()) for n in found) / norm


def laid_out(layout: str, given: Sequence[PreferencePair], objective: Objective) -> dict[str, Any]:
    if layout == "padded":
        return padded_pairs(given, 0, **objective.layout)
    return packed_pairs(given, layout == "shared", **objective.layout)


def check(
    model: Any,
    other: Any,
    objective: Objective,
    theirs: Tensor,
    layouts: Sequence[str] = LAYOUTS,
    given: Sequence[PreferencePair] = PAIRS,
) -> None:
    """Compares with TRL's loss of ``model``; ``other`` is the reference."""
    expected = gradients(model, theirs)
    for layout in layouts:
        mine, reference = tiny_model(dtype=torch.float64, seed=1), None
        for each in (mine, other):
            if layout != "padded":
                use_document_attention(each)
        batch = laid_out(layout, given, objective)
        if objective.needs_reference:
            reference, _ = PreferenceLoss(other, objective)(**batch, log_probs=True)
        module = OnePassPreferenceLoss(mine, objective)
        loss, count = module(**batch, reference=reference)
        assert (loss / count).item() == pytest.approx(theirs.item(), rel=BOUND, abs=BOUND), layout
        assert apart(gradients(module.model, loss / count), expected) < BOUND, layout
        other.set_attn_implementation("sdpa")


DPO: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sigmoid": ({}, {}),
    "robust": ({"label_smoothing": 0.2}, {"label_smoothing": 0.2}),
    "hinge": ({}, {}),
    "ipo": ({}, {}),
    "sigmoid_norm": ({}, {}),
    "apo_zero": ({}, {}),
    "apo_down": ({}, {}),
    "nca": ({}, {"loss_types": ["nca_pair"]}),
    "bco_pair": ({}, {}),
    "sppo": ({}, {"loss_types": ["sppo_hard"]}),
    "sigmoid and sft": (
        {"loss": "sigmoid", "sft_weight": 0.7},
        {"loss_types": ["sigmoid", "sft"], "loss_weights": [1.0, 0.7]},
    ),
    "sigmoid with ld_alpha": ({"loss": "sigmoid", "ld_alpha": 0.3}, {
        "loss_types": ["sigmoid"],
        "ld_alpha": 0.3,
    }),
}  # fmt: skip


def test_dpo_with_each_loss(exact: None, tmp_path: Path) -> None:
    model: Any = tiny_model(dtype=torch.float64, seed=1)
    other: Any = tiny_model(dtype=torch.float64, seed=2)
    trainer = trainer_of("DPO", "trl", tmp_path, model, ref_model=other)
    for index, (name, (ours, theirs)) in enumerate(DPO.items()):
        usual = {"loss_types": [name], "loss_weights": [1.0], "label_smoothing": 0.0}
        vars(trainer).update({**usual, "ld_alpha": None, "beta": 0.2, **theirs})
        loss = trainer._compute_loss(trainer.model, of_rows(rows_of(PAIRS)), False)
        objective = Objective(**{"loss": name, "beta": 0.2, **ours})
        check(trainer.model, other, objective, loss, (LAYOUTS[index % 3], LAYOUTS[1 - index % 2]))


def of_answers(given: Sequence[PreferencePair]) -> dict[str, Any]:
    """A batch as the experimental trainers read it."""
    batch = {}
    for side in ("chosen", "rejected"):
        rows = of_rows([getattr(pair, side) for pair in given])
        labels = rows["input_ids"].masked_fill(rows["completion_mask"] == 0, -100)
        batch |= {
            f"{side}_input_ids": rows["input_ids"],
            f"{side}_attention_mask": rows["attention_mask"],
            f"{side}_labels": labels,
        }
    return batch


def test_orpo(exact: None, tmp_path: Path) -> None:
    model: Any = tiny_model(dtype=torch.float64, seed=1)
    trainer = trainer_of("ORPO", "trl.experimental.orpo", tmp_path, model)
    trainer.beta = 0.3
    loss, _ = trainer.get_batch_loss_metrics(trainer.model, of_answers(PAIRS))
    check(trainer.model, tiny_model(), Objective("orpo", beta=0.3), loss)


CPO: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "cpo": ({"sft_weight": 0.5}, {"loss_type": "sigmoid", "cpo_alpha": 0.5}),
    "simpo": ({"gamma": 0.4}, {"loss_type": "simpo", "simpo_gamma": 0.4, "cpo_alpha": 0.0}),
    "simpo with smoothing": (
        {"loss": "simpo", "gamma": 0.4, "label_smoothing": 0.1, "sft_weight": 1.0},
        {"loss_type": "simpo", "simpo_gamma": 0.4, "label_smoothing": 0.1, "cpo_alpha": 1.0},
    ),
}


def test_cpo_and_simpo(exact: None, tmp_path: Path) -> None:
    model: Any = tiny_model(dtype=torch.float64, seed=1)
    trainer = trainer_of("CPO", "trl.experimental.cpo", tmp_path, model)
    for name, (ours, theirs) in CPO.items():
        vars(trainer).update({"label_smoothing": 0.0, "beta": 0.2, **theirs})
        loss, _ = trainer.get_batch_loss_metrics(trainer.model, of_answers(PAIRS))
        objective = Objective(**{"loss": name, "beta": 0.2, **ours})
        check(trainer.model, tiny_model(), objective, loss)


@pytest.mark.parametrize("name", ["kto", "apo_zero_unpaired"])
def test_answers_judged_alone(exact: None, name: str, tmp_path: Path) -> None:
    """In TRL the other answer of a row is that of the row before, in its batch."""
    model: Any = tiny_model(dtype=torch.float64, seed=1)
    other: Any = tiny_model(dtype=torch.float64, seed=2)
    trainer = trainer_of("KTO", "trl", tmp_path, model, ref_model=other)
    trainer.loss_type, trainer.beta, trainer.undesirable_weight = name, 0.2, 1.5
    trainer.calculate_KL = name == "kto"
    is_good = [True, False, True, True, False]
    rows = [
        PreferencePair(pair.chosen, EMPTY) if good else PreferencePair(EMPTY, pair.rejected)
        for pair, good in zip(pairs(5, seed=14), is_good, strict=True)  # they diverge
    ]
    given = [with_other_answer(row, rows[index - 1]) for index, row in enumerate(rows)]
    others = of_rows([row.other for row in given if row.other])
    batch = of_rows([row.chosen if row.chosen.length else row.rejected for row in rows])
    batch |= {f"KL_{key}": value for key, value in others.items()}
    batch["label"] = torch.tensor(is_good)
    loss = trainer._compute_loss(trainer.model, batch, False)
    assert (trainer._metrics["train"]["kl"][0] > 0.01) == (name == "kto")
    objective = Objective(name, beta=0.2, undesirable_weight=1.5)
    check(trainer.model, other, objective, loss, given=given)


def reward_model(seed: int) -> Any:
    torch.manual_seed(seed)
    config = tiny_config("llama")
    config.num_labels = 1
    return LlamaForSequenceClassification(config).to(torch.float64)


def test_a_reward_model(exact: None, tmp_path: Path) -> None:
    trainer = trainer_of("Reward", "trl", tmp_path, reward_model(1))
    trainer.args.center_rewards_coefficient = 0.01
    batch = of_rows(rows_of(PAIRS))
    del batch["completion_mask"]
    theirs = trainer.compute_loss(trainer.model, batch)
    expected = gradients(trainer.model, theirs)
    objective = Objective("bradley_terry", centre=0.01)
    for layout in LAYOUTS:
        model = reward_model(1)
        if layout != "padded":
            use_document_attention(model)
        module = RewardLoss(model, objective)
        loss, count = module(**laid_out(layout, PAIRS, objective))
        assert (loss / count).item() == pytest.approx(theirs.item(), rel=BOUND)
        assert apart(gradients(module.model, loss / count), expected) < BOUND


def test_in_float32_ours_is_as_near_to_float64_as_theirs(tmp_path: Path) -> None:
    """Of log-ratios over long answers, whose sums take the digits of float32."""
    rows = [[*range(5, 60), index] for index in range(60, 68)]
    given = [PreferencePair(example([3], a), example([3], b)) for a, b in pairwise(rows)]
    batch = of_rows(rows_of(given))
    truth, _ = PreferenceLoss(tiny_model(dtype=torch.float64), Objective())(
        **padded_pairs(given), log_probs=True
    )
    module = OnePassPreferenceLoss(tiny_model(), Objective())
    ours, _ = module(**packed_pairs(given), log_probs=True)
    trainer = trainer_of("DPO", "trl", tmp_path, tiny_model(), ref_model=tiny_model())
    theirs = torch.stack(trainer.compute_ref_log_probs(trainer.ref_model, batch), 1)
    error, of_theirs = ((t.double() - truth).abs().mean() for t in (ours, theirs))
    assert error <= of_theirs
