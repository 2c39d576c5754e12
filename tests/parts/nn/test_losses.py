"""Label-only loss: the value and gradients of the usual way, with one chunk of logits at a time.

The reference is the same model with its loss over all logits, in float64.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from covering import covering
from hasten.parts.data.collate import IGNORED, TokenizedExample, padded
from hasten.parts.nn.losses import (
    LabelOnlyHead,
    LabelOnlyLoss,
    LossTerms,
    ObjectiveLoss,
    TokenAccuracy,
    WholeLogitsLoss,
    label_only_cross_entropy,
)
from tiny import ARCHITECTURES, NEWER, VOCABULARY, examples, tiny_config, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # between peft and transformers
BATCH = padded(examples(6, seed=4))
TOKENS = BATCH["input_ids"][:, :12]
TERMS = (
    LossTerms(),
    LossTerms(label_smoothing=0.1),
    LossTerms(z_loss=1e-2),
    LossTerms(label_smoothing=0.3, z_loss=0.2),
)


def gradients(loss: nn.Module, **batch: Tensor) -> tuple[float, int, dict[str, Tensor]]:
    loss.zero_grad()
    total, count = loss(**batch)
    total.backward()
    found = {n: p.grad.clone() for n, p in loss.named_parameters() if p.grad is not None}
    return total.item(), int(count), found


def biased_model() -> Any:
    model: Any = tiny_model(dtype=torch.float64)
    head = nn.Linear(32, VOCABULARY, dtype=torch.float64)
    head.weight = model.lm_head.weight
    model.lm_head = head
    return model


MODELS: dict[str, Any] = {
    "tied": partial(tiny_model, tied=True, dtype=torch.float64),
    "biased": biased_model,
}


@pytest.mark.parametrize(
    ("architecture", "terms"), covering([*ARCHITECTURES, *NEWER, *MODELS], TERMS), ids=str
)
def test_a_model_learns_the_same_from_labelled_positions_alone(
    architecture: str, terms: LossTerms
) -> None:
    """Tied: the gradients of head and embedding add up in one weight."""
    build = MODELS.get(architecture) or partial(tiny_model, architecture, dtype=torch.float64)
    expected = gradients(WholeLogitsLoss(build(), terms), **BATCH)
    found = gradients(LabelOnlyLoss(build(), 5, terms), **BATCH)
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    assert found[1] == expected[1] == int((BATCH["labels"] != IGNORED).sum())
    assert found[2].keys() == expected[2].keys()
    for name, gradient in found[2].items():
        reference = expected[2][name]
        assert (gradient - reference).norm() <= 1e-9 * reference.norm(), name


class Made(TorchDispatchMode):
    """Notes the shape of every tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[torch.Size] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        found = out if isinstance(out, tuple | list) else (out,)
        self.shapes |= {t.shape for t in found if isinstance(t, Tensor)}
        return out

    def rows_of_logits(self) -> int:
        """The most rows of a vocabulary's width, leaving out the head's weight and its gradient."""
        width = tiny_config("llama").hidden_size
        wide = (s for s in self.shapes if VOCABULARY in s and width not in s)
        return max((s.numel() // VOCABULARY for s in wide), default=0)


@pytest.mark.parametrize("chunk", [1, 10, 1000])
def test_no_more_than_a_chunk_of_logits_ever_exists(chunk: int) -> None:
    model: Any = tiny_model()
    labelled = int((BATCH["labels"] != IGNORED).sum())
    assert labelled > 10
    loss = LabelOnlyLoss(model, chunk)
    with Made() as made:
        gradients(loss, **BATCH)
    assert made.rows_of_logits() == min(chunk, labelled) == loss.largest_logits


@pytest.mark.parametrize("kind", [WholeLogitsLoss, LabelOnlyLoss])
def test_a_eval_loss_is_plain_whatever_was_trained_on(kind: Any) -> None:
    plain, regular = kind(tiny_model()), kind(tiny_model(), terms=LossTerms(0.2, 0.1))
    with torch.no_grad():
        assert plain(**BATCH)[0] != regular(**BATCH)[0]
        assert plain.eval()(**BATCH)[0] == regular.eval()(**BATCH)[0]


def test_the_common_way_makes_logits_for_every_slot() -> None:
    with Made() as made:
        gradients(WholeLogitsLoss(tiny_model()), **BATCH)
    assert made.rows_of_logits() == BATCH["labels"].numel()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_frozen_head_costs_no_gradient_of_its_size(frozen: bool) -> None:
    generator = torch.Generator().manual_seed(9)
    hidden = torch.randn(9, 8, generator=generator, requires_grad=True)
    weight, labels = torch.randn(29, 8, generator=generator), torch.arange(9)
    with Made() as made:
        label_only_cross_entropy(hidden, weight.requires_grad_(not frozen), labels, 4).backward()
    assert (weight.shape in made.shapes) is not frozen


def test_a_micro_batch_without_labels_costs_nothing_and_teaches_nothing() -> None:
    loss = LabelOnlyLoss(tiny_model(), chunk=4)
    nothing = torch.full_like(BATCH["labels"], IGNORED)
    total, count, found = gradients(loss, input_ids=BATCH["input_ids"], labels=nothing)
    assert (total, count) == (0.0, 0)
    assert not any(g.any() for g in found.values())


@pytest.mark.parametrize("tied", [False, True])
def test_names_weights_files_and_generation_stay_as_they_were(tied: bool, tmp_path: Path) -> None:
    model: Any = tiny_model(tied=tied, dtype=torch.float64)
    before = {n: t.data_ptr() for n, t in model.state_dict().items()}
    logits = model(input_ids=TOKENS).logits
    text = model.generate(TOKENS[:1], max_new_tokens=5, do_sample=False)
    LabelOnlyLoss(model, chunk=3)
    assert isinstance(model.lm_head, LabelOnlyHead)
    assert {n: t.data_ptr() for n, t in model.state_dict().items()} == before
    assert torch.equal(model(input_ids=TOKENS).logits, logits)
    assert torch.equal(model.generate(TOKENS[:1], max_new_tokens=5, do_sample=False), text)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert again.state_dict().keys() == before.keys()
    assert torch.equal(again(input_ids=TOKENS).logits, logits)


def test_a_head_is_replaced_once() -> None:
    model: Any = tiny_model()
    LabelOnlyLoss(model, chunk=3)
    head = model.lm_head
    LabelOnlyLoss(model, chunk=3)
    assert model.lm_head is head


@pytest.mark.parametrize("targets", [["lm_head", "q_proj"], ["q_proj", "o_proj"]], ids=str)
@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_an_adapter_on_the_head_or_below_learns_the_same(
    terms: LossTerms, targets: list[str]
) -> None:
    found = []
    for wrap in (WholeLogitsLoss, partial(LabelOnlyLoss, chunk=5)):
        torch.manual_seed(1)
        config = LoraConfig(target_modules=targets, init_lora_weights=False)
        model = get_peft_model(tiny_model(dtype=torch.float64), config).double()
        found.append(gradients(wrap(model, terms=terms), **BATCH))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-12)
    assert any(f"{targets[0]}.lora_A" in name for name in found[0][2])
    assert found[0][2].keys() == found[1][2].keys()
    for name, gradient in found[0][2].items():
        torch.testing.assert_close(found[1][2][name], gradient, rtol=1e-8, atol=1e-10)


def test_an_adapted_head_makes_one_chunk_of_logits_at_a_time() -> None:
    config = LoraConfig(target_modules=["lm_head"], init_lora_weights=False)
    loss = LabelOnlyLoss(get_peft_model(tiny_model(), config), chunk=10)
    with Made() as made:
        gradients(loss, **BATCH)
    assert made.rows_of_logits() == 10
    nothing = torch.full_like(BATCH["labels"], IGNORED)
    total, count, found = gradients(loss, input_ids=BATCH["input_ids"], labels=nothing)
    assert (total, count) == (0.0, 0)
    assert found, "replicas wait for a gradient of every weight"
    assert not any(g.any() for g in found.values())


def test_an_objectives_mean_is_weighted_and_its_pair_is_taken_as_it_is() -> None:
    layer = nn.Linear(3, 1)
    x, y = torch.randn(5, 3), torch.randn(5, 1)
    mean, weight = ObjectiveLoss(layer, F.mse_loss)((x,), {}, y, 5)
    assert mean.item() == pytest.approx(5 * F.mse_loss(layer(x), y).item())
    pair = ObjectiveLoss(layer, lambda out, target: (out.sum(), 2))((), {"input": x}, y, 5)
    assert (pair[0].item(), int(pair[1])) == (layer(x).sum().item(), 2)
    assert int(weight) == 5


def by_hand(model: torch.nn.Module, found: list[TokenizedExample]) -> float:
    right = seen = 0
    for example in found:
        logits = model(input_ids=torch.tensor(example.input_ids[None].astype("int64"))).logits[0]
        for place in range(1, example.length):
            if example.trained[place]:
                seen += 1
                right += int(logits[place - 1].argmax()) == int(example.input_ids[place])
    return right / seen


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_predicted_tokens_are_those_that_a_loop_over_positions_finds_first(
    architecture: str,
) -> None:
    model, found = tiny_model(architecture, dtype=torch.float64).eval(), list(examples(20))
    batch = padded(found)
    for kind in (WholeLogitsLoss, LabelOnlyLoss):  # the second replaces the model's head
        with torch.no_grad():
            predicted, labels = kind(model)(predict=True, **batch)
            right = float(TokenAccuracy().score(predicted, labels))
            assert right / len(labels) == pytest.approx(by_hand(model, found), abs=1e-12)
    silent = batch | {"labels": torch.full_like(batch["labels"], IGNORED)}
    assert [len(found) for found in WholeLogitsLoss(model)(predict=True, **silent)] == [0, 0]
