"""Multi-token prediction against a plain loop over examples and positions, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from covering import covering
from hasten.parts.data.collate import packed, padded, tokenized_example
from hasten.parts.nn.attention import use_document_attention
from hasten.parts.nn.causal_lm import trunk
from hasten.parts.nn.losses import LabelOnlyLoss, ObjectiveLoss, WholeLogitsLoss
from hasten.parts.nn.multi_token import MultiToken, add_to_loss, same_document
from tiny import ARCHITECTURES, NEWER, examples, tiny_config, tiny_model
from tokens_ahead import plain

DATA = [*examples(4, seed=3, longest=12), tokenized_example([5]), tokenized_example([7, 8])]
DATA += [tokenized_example([9, 10, 11], [True, False, True])]
LAYOUTS: dict[str, Any] = {"padded": padded, "packed": packed}
LOSSES: dict[str, Any] = {"whole": WholeLogitsLoss, "labelled": lambda m: LabelOnlyLoss(m, 5)}
architectures = pytest.mark.parametrize("architecture", [*ARCHITECTURES, *NEWER])


def built(
    architecture: str = "llama", depth: int = 2, weight: float = 0.3, loss: str = "whole"
) -> tuple[nn.Module, Any, MultiToken]:
    """A model in float64, its loss, and the modules that belong to the loss."""
    model = tiny_model(architecture, dtype=torch.float64)
    if architecture == "deepseek_v4":  # nothing else keeps its documents apart
        use_document_attention(model)
    loss_of = LOSSES[loss](model)
    ahead = MultiToken(model, depth, weight)
    add_to_loss(loss_of, ahead)
    return model, loss_of.train(), ahead


def loss_and_gradients(loss_of: Any, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    loss_of.zero_grad()
    loss, _ = loss_of(**inputs)
    loss.backward()
    found = {n: p.grad.clone() for n, p in loss_of.named_parameters() if p.grad is not None}
    return loss.detach(), found


@pytest.mark.parametrize(
    ("architecture", "layout", "loss"),
    covering([*ARCHITECTURES, *NEWER], LAYOUTS, LOSSES, rounds=2),
)
def test_loss_and_gradients_are_those_of_the_plain_loop(
    architecture: str, layout: str, loss: str
) -> None:
    model, loss_of, ahead = built(architecture, loss=loss)
    found, gradients = loss_and_gradients(loss_of, LAYOUTS[layout](DATA))
    loss_of.zero_grad()
    expected = plain(model, ahead, DATA)
    expected.backward()
    assert float(found) == pytest.approx(float(expected.detach()), rel=1e-6)  # norms are float32
    wanted = {n: p.grad for n, p in loss_of.named_parameters() if p.grad is not None}
    assert set(gradients) == set(wanted)
    assert any(name.startswith("ahead.") for name in wanted)
    for name, gradient in wanted.items():
        error = float((gradients[name] - gradient).norm())
        assert error <= 1e-5 * float(gradient.norm()) + 1e-7, name


def test_documents_of_a_packed_row_are_apart_under_document_attention_too() -> None:
    model, _, _ = built()
    use_document_attention(model)
    loss_of = WholeLogitsLoss(model).train()
    ahead = MultiToken(model, 2, 0.3)
    add_to_loss(loss_of, ahead)
    found, _ = loss_and_gradients(loss_of, packed(DATA))
    model.set_attn_implementation("sdpa")  # type: ignore[operator]
    for module in ahead.modules_ahead.values():
        module.block.set_attn_implementation("sdpa")
    assert float(found) == pytest.approx(float(plain(model, ahead, DATA).detach()), rel=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_another_record_says_changes_nothing(layout: str) -> None:
    _, loss_of, ahead = built(depth=3)
    one = tokenized_example([5, 6, 7, 8, 9, 10])
    silent = np.zeros(5, bool)
    found = []
    for others in ([20, 21, 22, 23, 24], [30, 40, 50, 60, 70]):
        inputs = LAYOUTS[layout]([one, tokenized_example(others, silent)])
        loss, gradients = loss_and_gradients(loss_of, inputs)
        found.append((loss, [g for n, g in gradients.items() if n.startswith("ahead.")]))
    assert found[0][0] == found[1][0]
    for a, b in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    assert [int(count) for _, count in ahead.last] == [4, 3, 2]


def test_the_weight_scales_what_is_added_and_evaluation_has_none_of_it() -> None:
    inputs = padded(DATA)
    totals = []
    for weight in (0.1, 0.3):
        _, loss_of, _ = built(weight=weight)
        total, _ = loss_of(**inputs)
        loss_of.eval()
        eval_data, _ = loss_of(**inputs)
        totals.append(float(total.detach() - eval_data.detach()))
    assert totals[1] == pytest.approx(3 * totals[0], rel=1e-9)
    assert totals[0] > 0


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(1, 4), st.integers(0, 3))
def test_a_token_ahead_is_in_the_same_document_where_a_plain_loop_says_so(
    lengths: list[int], distance: int, filler: int
) -> None:
    owner = [d for d, n in enumerate(lengths) for _ in range(n)]
    places = [i for n in lengths for i in range(n)] + list(range(filler))
    owner += [len(lengths)] * filler
    expected = [
        i + distance < len(owner) and owner[i] == owner[i + distance] for i in range(len(owner))
    ]
    ids = torch.zeros(1, len(owner), dtype=torch.long)
    assert same_document(ids, torch.tensor([places]), distance)[0].tolist() == expected
    rows = same_document(torch.zeros(2, 5), None, distance)
    assert rows.tolist() == [[i + distance < 5 for i in range(5)]] * 2


def test_a_module_computes_what_transformers_does_with_the_released_weights() -> None:
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpLayer"):
        pytest.skip("this Transformers runs no such modules")
    model, _, ahead = built("deepseek_v3", depth=1)
    ours: Any = ahead.modules_ahead["0"]
    config = tiny_config("deepseek_v3")
    config.first_k_dense_replace = 0
    config._attn_implementation = "sdpa"
    config._experts_implementation = "eager"
    last: Any = trunk(model).layers[-1]  # type: ignore[index, union-attr]
    theirs = layers.MtpLayer(config, type(last), type(trunk(model).norm), 0).double()
    theirs.mtp_block.load_state_dict(ours.block.layers[0].state_dict())
    theirs.enorm.load_state_dict(ours.embedding_norm.state_dict())
    theirs.hnorm.load_state_dict(ours.state_norm.state_dict())
    theirs.eh_proj.load_state_dict(ours.project.state_dict())
    theirs.post_norm.load_state_dict(ours.block.norm.state_dict())
    embedded, hidden = torch.randn(2, 1, 9, 32, dtype=torch.float64)
    places = torch.arange(9)[None]
    angles = trunk(model).rotary_emb(hidden, position_ids=places)  # type: ignore[operator]
    mask = torch.full((9, 9), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    expected = theirs(embedded, hidden, angles, mask, places, None)
    torch.testing.assert_close(ours(embedded, hidden), expected, rtol=1e-5, atol=1e-6)


@architectures
def test_a_module_s_layer_is_of_the_kind_of_the_models_last(architecture: str) -> None:
    model, _, ahead = built(architecture, depth=1)
    last: Any = trunk(model).layers[-1]  # type: ignore[index, union-attr]
    ours: Any = ahead.modules_ahead["0"]
    [layer] = ours.block.layers
    shapes = {name: p.shape for name, p in last.named_parameters()}
    assert {name: p.shape for name, p in layer.named_parameters()} == shapes
    assert {p.dtype for p in ahead.parameters()} == {torch.float64}
    owned = {id(p) for p in ahead.parameters()}
    assert not owned & {id(p) for p in model.parameters()}
    assert set(tiny_model(architecture).state_dict()) == set(model.state_dict())


def test_what_makes_no_sense_is_refused() -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match="depth is 0"):
        MultiToken(model, 0)
    with pytest.raises(ValueError, match="ObjectiveLoss"):
        add_to_loss(ObjectiveLoss(model, None), MultiToken(model))
    model.config.model_type = "strange"  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="layers of strange"):
        MultiToken(model)
