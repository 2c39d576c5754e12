"""Gradients, leaks and updates against references of their own."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from hasten.core.loop import Evaluation
from hasten.core.plan import Plan
from hasten.measure.quality.checks import (
    REFERENCE,
    _at,
    errors,
    gradient,
    leak,
    losses,
    others,
    reference,
    train,
    update,
)
from hasten.measure.worker import QualityJob
from hasten.techniques.adapter import LoRA
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.collate import Packed
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.optimizer import Muon
from hasten.techniques.precision import Autocast
from measure.quality.verify_plants import bench
from tiny import examples, tiny_model


def test_the_reference_is_the_plain_float64_loop(tmp_path: Path) -> None:
    proof = bench(tmp_path)
    answer = reference(proof, Plan())
    job = proof.small(Plan())
    torch.manual_seed(job.seed)
    model = tiny_model().double()
    total, count = 0.0, 0
    for index in range(len(job.examples)):
        example = job.examples[index]
        ids = torch.tensor(example.input_ids[None].astype("int64"))
        logs = model(ids).logits[0, :-1].log_softmax(-1)
        marks = torch.tensor(example.trained[1:])
        loss = -logs.gather(1, ids[0, 1:, None])[:, 0][marks].sum()
        loss.backward()
        total, count = total + float(loss.detach()), count + int(marks.sum())
    found = torch.load(tmp_path / REFERENCE)["gradients"]
    assert answer["loss"] == pytest.approx(total / count, rel=1e-9)
    for name, parameter in model.named_parameters():
        key = next(k for k in found if k.endswith(name))
        assert parameter.grad is not None
        torch.testing.assert_close(found[key], parameter.grad / count, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("cut", ["planned", "whole", "single"])
def test_a_cut_leaves_loss_and_gradient(tmp_path: Path, cut: str) -> None:
    proof, plan = bench(tmp_path), Plan([Packed(), GradientAccumulation(micro_batch_size=3)])
    reference(proof, Plan())
    found = gradient(proof, plan, cut, padded=False)
    passes = {"planned": 3, "whole": 1, "single": 8}
    assert found["micro_batches"] == passes[cut]
    assert found["error"] < 1e-6
    assert found["loss_error"] < 1e-6


def test_fp16_finds_its_scale_before_it_is_judged(tmp_path: Path) -> None:
    proof = bench(tmp_path)
    reference(proof, Plan())
    scale = Autocast(dtype="fp16", initial_scale=2.0**40)
    assert gradient(proof, Plan([scale]), "whole", padded=False)["error"] < 5e-2


def test_an_adapter_of_the_plan_is_in_the_reference_too(tmp_path: Path) -> None:
    proof, lora = bench(tmp_path), LoRA(dropout=0.2)
    reference(proof, Plan([lora]))
    found = gradient(proof, Plan([lora, LabelledTokenLoss()]), "whole", padded=False)
    assert found["error"] < 1e-5


def test_a_tensor_without_a_gradient_to_speak_of_has_no_relative_error() -> None:
    right = {"a": torch.ones(100).double(), "b": torch.full((100,), 1e-12).double()}
    found = errors({"a": torch.ones(100), "b": torch.full((100,), 2e-12)}, right)
    assert found["error"] < 1e-9
    assert found["worst"] < 1e-6


def test_a_gradient_that_is_not_a_number_is_the_worst() -> None:
    right = {"a": torch.ones(3).double(), "b": torch.ones(3).double()}
    found = errors({"a": torch.full((3,), math.nan), "b": torch.zeros(3)}, right)
    assert math.isnan(found["error"])


def test_other_parameters_than_the_references_are_refused() -> None:
    with pytest.raises(RuntimeError, match="other parameters"):
        errors({"a": torch.ones(3)}, {"b": torch.ones(3)})


def test_changed_neighbours_keep_their_lengths_and_lose_every_token() -> None:
    given = examples(5)
    for before, after in zip(given, others(given), strict=True):
        assert before.length == after.length
        assert (before.input_ids != after.input_ids).all()


def test_documents_of_a_packed_row_do_not_hear_of_each_other(tmp_path: Path) -> None:
    for architecture in ("llama", "deepseek_v3"):
        found = leak(bench(tmp_path, architecture), Plan([Packed()]))
        assert found["change"] < 1e-6, architecture


def test_another_update_rule_moves_the_weights_elsewhere(tmp_path: Path) -> None:
    assert update(bench(tmp_path), Plan(), [])["error"] == 0.0
    assert update(bench(tmp_path), Plan([Muon()]), [])["error"] > 0.1


def test_losses_repeat_and_weights_are_part_of_the_answer(tmp_path: Path) -> None:
    one, two = (losses(bench(tmp_path), Plan(), 2) for _ in range(2))
    assert one["losses"] == two["losses"]
    assert one["weights"] == two["weights"]
    assert one["weights"] != losses(bench(tmp_path, lr=2e-2), Plan(), 2)["weights"]


def test_a_training_ends_at_its_tokens_and_a_seed_is_its_own(tmp_path: Path) -> None:
    one, two = (train(bench(tmp_path), Plan(), seed, 600) for seed in (1, 2))
    assert one["tokens"] == two["tokens"] == 600
    assert one["eval_loss"] != two["eval_loss"]


def test_the_loss_is_that_of_the_tokens_asked_for_and_not_of_a_whole_step() -> None:
    before, last = Evaluation(1, 400, 3.0, {"a": 0.2}), Evaluation(2, 800, 2.0, {"a": 0.6})
    assert _at(600, before, last) == (pytest.approx(2.5), {"a": pytest.approx(0.4)})
    assert _at(800, before, last) == (2.0, {"a": 0.6})
    assert _at(900, before, last) == (2.0, {"a": 0.6})  # the data ended before
    assert _at(600, None, last) == (2.0, {"a": 0.6})
    assert _at(600, before, Evaluation(2, 800, None)) == (None, {})


def test_an_order_that_fails_is_answered_with_its_reason(tmp_path: Path) -> None:
    job = QualityJob(bench(tmp_path))
    assert "FileNotFoundError" in job.handle("gradient", {})["refused"]
    assert "unknown request" in job.handle("dance", {})["refused"]
    assert "no technique is called" in job.handle("leak", {"plan": ["x"]})["refused"]
