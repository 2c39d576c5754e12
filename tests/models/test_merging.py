"""Quantised bases and merging: frozen layers make no gradient, a merge has the bits of PEFT's."""

from __future__ import annotations

import copy
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hasten.errors import InputError
from hasten.models.adapters import (
    add_lora,
    merge,
    merged_values,
    quantised_layers,
    round_base,
    with_adapter,
)
from hasten.models.load import load_model
from hasten.models.save import save_adapter
from hasten.parts.nn.late_weights import late_weight
from hasten.parts.nn.quantised import KINDS, Kind, QuantisedLinear

NAMES = ("deepseek-llm-tiny", "r1-distill-qwen-tiny", "v2-lite-tiny", "v3-tiny")
TOKENS = torch.arange(24).reshape(2, 12)


def build(name: str) -> Any:
    return load_model(name, vocab_size=64)


def taught(model: Any, **changes: Any) -> Any:
    """An adapted model whose adapter does something."""
    model = add_lora(model, **({"rank": 4, "alpha": 8} | changes))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "magnitude" in name:
            parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def state(model: Any) -> dict[str, torch.Tensor]:
    return dict(model.state_dict())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (NAMES[0], {}),
        *((name, {"targets": "all-linear"}) for name in NAMES),
        *((name, {"rslora": True, "dora": True}) for name in NAMES[::3]),
    ],
    ids=str,
)
def test_a_saved_adapter_merges_to_the_bits_of_pefts_own_merge(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = taught(build(name), **changes)
    save_adapter(model, None, tmp_path / "adapter")
    expected = state(copy.deepcopy(model).merge_and_unload())
    found = merge(with_adapter(build(name), tmp_path / "adapter"))
    assert state(found).keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in state(found).items())
    before = state(build(name))
    assert not any(torch.equal(before[key], expected[key]) for key in before if "o_proj" in key)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"targets": "all-linear"}),
        ("llama", {"rslora": True, "dora": True}),
        ("v3", {"targets": ["experts", "o_proj", "gate_proj"]}),
    ],
    ids=str,
)
def test_weights_merged_one_by_one_have_the_bits_of_the_merged_model(
    name: str,
    changes: dict[str, Any],
    dtype: torch.dtype,
    saved_llama: Path,
    saved_v3: Path,
    tmp_path: Path,
) -> None:
    source = str(saved_v3 if name == "v3" else saved_llama)
    save_adapter(taught(load_model(source, dtype=dtype), **changes), None, tmp_path / "adapter")
    expected = state(merge(with_adapter(load_model(source, dtype=dtype), tmp_path / "adapter")))
    base, other = (load_model(source, dtype=dtype, late=True) for _ in range(2))
    adapted = with_adapter(other, tmp_path / "adapter")
    values = merged_values(base, adapted)
    found = {n: values(weight) for n, weight in base.state_dict(keep_vars=True).items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[n], expected[n]) for n in found)
    assert all(late_weight(p) is not None for p in base.parameters())
    assert {late_weight(p) is None for n, p in adapted.named_parameters() if "lora" in n} == {True}


@pytest.mark.parametrize(
    ("name", "base"), [*((name, "nf4") for name in NAMES), ("v3-tiny", "int8")]
)
def test_the_rounded_base_with_the_adapter_is_the_model_that_was_trained(
    name: str, base: Kind, tmp_path: Path
) -> None:
    model = taught(build(name), base=base)
    trained = model(input_ids=TOKENS).logits
    save_adapter(model, None, tmp_path / "adapter")
    rounded = build(name)
    round_base(rounded, base)
    found = with_adapter(rounded, tmp_path / "adapter")(input_ids=TOKENS).logits
    torch.testing.assert_close(found, trained, rtol=1e-4, atol=1e-5)
    other = with_adapter(build(name), tmp_path / "adapter")(input_ids=TOKENS).logits
    assert (other - trained).abs().max() > 10 * (found - trained).abs().max()


@pytest.mark.parametrize("name", NAMES)
def test_all_frozen_linears_but_head_and_router_rest_in_few_bits(name: str) -> None:
    model = add_lora(build(name), rank=4, alpha=8, base="nf4")
    wide = [
        key
        for key, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and "lora_" not in key
    ]
    assert wide == ["base_model.model.lm_head"]
    assert quantised_layers(model) > 4 * 4
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    assert {key for key, p in model.named_parameters() if p.grad is not None} == {
        key for key, _ in model.named_parameters() if "lora_" in key
    }


class WeightProducts(TorchDispatchMode):
    """The matrix products of a backward pass, by the shape of their result."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.mm:
            self.shapes.append(tuple(found.shape))
        return found


@pytest.mark.parametrize("base", [None, *KINDS])
def test_a_frozen_layer_costs_no_product_for_its_weights_gradient(base: Kind | None) -> None:
    model = add_lora(build("deepseek-llm-tiny"), rank=4, alpha=8, targets="all-linear", base=base)
    loss = model(input_ids=TOKENS, labels=TOKENS).loss
    shapes = {
        (m.out_features, m.in_features)
        for name, m in model.named_modules()
        if isinstance(m, torch.nn.Linear | QuantisedLinear) and "lora_" not in name
    }
    with WeightProducts() as seen:
        loss.backward()
    assert seen.shapes
    assert not shapes & set(seen.shapes)


def test_a_quantised_base_is_not_merged_into() -> None:
    with pytest.raises(InputError, match="can't be merged into a quantised base"):
        merge(taught(build("v3-tiny"), base="nf4"))


def test_what_does_not_go_with_a_quantised_base_is_refused() -> None:
    with pytest.raises(InputError, match="DoRA measures the base weight"):
        add_lora(build("v3-tiny"), rank=2, alpha=2, dora=True, base="int8")
    with pytest.raises(InputError, match=r"which int8 can.t keep in few bits"):
        add_lora(build("v3-tiny"), rank=2, alpha=2, targets="all-linear", base="int8")


@pytest.mark.usefixtures("published_presets")
def test_another_models_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no adapter"):
        with_adapter(build("v3-tiny"), tmp_path)
    save_adapter(taught(build("v3-tiny")), None, tmp_path / "adapter")
    with pytest.raises(InputError, match="no adapter of this model, which has no place for"):
        with_adapter(build("deepseek-llm-tiny"), tmp_path / "adapter")
    save_adapter(taught(build("deepseek-llm-tiny")), None, tmp_path / "other")
    with pytest.raises(InputError, match="no adapter of this model") as caught:
        with_adapter(build("r1-distill-qwen-tiny"), tmp_path / "other")
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def llama_and_adapter(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model without its adapter, and that in a folder."""
    folder = tmp_path_factory.mktemp("adapter")
    save_adapter(taught(build("deepseek-llm-tiny")), None, folder)
    return build("deepseek-llm-tiny"), folder


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"r": 10**12}, "has r '1000000000000'; it must be a whole number from 1 to 65,536"),
        ({"r": True}, "has r 'True'"),
        ({"r": None}, "has no rank r"),
        ({"rank_pattern": {"q_proj": "x"}}, "has rank_pattern"),
        ({"rank_pattern": {"(a+)+b": 4}}, "has rank_pattern"),
        ({"alpha_pattern": {"(a|a)*b": 4}}, "has alpha_pattern"),
        ({"peft_type": "BONE"}, "has peft_type 'BONE'; supported: LORA"),
        ({"task_type": "SEQ_CLS"}, "has task_type 'SEQ_CLS'; it must be CAUSAL_LM"),
        ({"target_modules": "(a+)+b"}, "has target_modules '(a+)+b'; it must be a list of names"),
        ({"exclude_modules": "(a+)+b"}, "has exclude_modules '(a+)+b'"),
        ({"layers_pattern": "(a+)+b"}, "has layers_pattern '(a+)+b'"),
        ({"lora_alpha": "x"}, "has lora_alpha 'x'; it must be a number above 0"),
        ({"lora_alpha": math.nan}, "has lora_alpha 'nan'"),
        ({"lora_dropout": math.inf}, "has lora_dropout 'inf'"),
        ({"init_lora_weights": "pissa"}, "has init_lora_weights 'pissa'"),
        ({"megatron_config": {"a": 1}, "megatron_core": "antigravity"}, "has megatron_config"),
        ({"trainable_token_indices": [0]}, "it must be left out: hasten doesn't read it"),
    ],
)
def test_a_config_of_an_adapter_that_is_no_such_thing_is_a_sentence(
    llama_and_adapter: tuple[Any, Path], tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    model, adapter = llama_and_adapter
    shutil.copytree(adapter, tmp_path, dirs_exist_ok=True)
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(InputError) as caught:
        with_adapter(model, tmp_path)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_pickle_in_the_place_of_an_adapter_s_weights_is_never_read(tmp_path: Path) -> None:
    save_adapter(taught(build("deepseek-llm-tiny")), None, tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(InputError, match="read from safetensors alone"):
        with_adapter(build("deepseek-llm-tiny"), tmp_path)
