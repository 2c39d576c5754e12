"""Weights as other tools leave them: read under the model's own names, or refused in a sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from covering import covering
from hasten.errors import InputError
from hasten.models.adapters import add_lora
from hasten.models.load import (
    check_rows,
    check_weights,
    load_model,
    local_folder,
    read_config,
    stored_formats,
)
from hasten.models.save import save_adapter, save_model
from hasten.recipe.prepare import weight_notes
from hasten.recipe.schema import Recipe
from tiny import logits

WEIGHTS = "model.safetensors"
Weights = dict[str, torch.Tensor]


@pytest.fixture
def llama(saved_llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved_llama, tmp_path / "llama"))


@pytest.fixture
def v3(saved_v3: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved_v3, tmp_path / "v3"))


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def edit_weights(folder: Path, change: Callable[[Weights], Weights]) -> None:
    weights = change(load_file(folder / WEIGHTS))
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def notes(folder: Path) -> list[str]:
    return check_weights(str(folder), folder, read_config(str(folder), needs_weights=True))


def refusal(folder: Path) -> str:
    """What both the check of the headers and the loading say."""
    with pytest.raises(InputError) as caught:
        notes(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Names


WRAPPED: dict[str, Callable[[str], str]] = {
    "compiled": lambda name: f"_orig_mod.{name}",
    "parallel": lambda name: f"module.{name}",
    "both": lambda name: f"module._orig_mod.{name}",
    "peft": lambda name: f"base_model.model.{name}",
    "doubled": lambda name: f"model.{name}",
    "missing": lambda name: name.removeprefix("model."),
    "checkpointed": lambda name: name.replace(
        ".self_attn.", "._checkpoint_wrapped_module.self_attn."
    ),
    "regional": lambda name: name.replace(".self_attn.", "._orig_mod.self_attn."),
}


@pytest.mark.parametrize(("preset", "wrapped"), covering(["llama", "v3"], WRAPPED))
def test_what_wrappers_put_into_names_is_left_off(
    preset: str, wrapped: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(preset)
    expected = logits(load_model(str(folder)))
    edit_weights(folder, lambda weights: {WRAPPED[wrapped](n): w for n, w in weights.items()})
    assert notes(folder) == []
    assert torch.equal(logits(load_model(str(folder))), expected)


def test_a_wrapped_model_is_saved_under_its_own_names(llama: Path, tmp_path: Path) -> None:
    names = set(load_file(llama / WEIGHTS))
    edit_weights(llama, lambda weights: {f"_orig_mod.{n}": w for n, w in weights.items()})
    save_model(load_model(str(llama)), None, tmp_path / "again")
    assert set(load_file(tmp_path / "again" / WEIGHTS)) == names


def test_two_tensors_of_one_name_are_refused(llama: Path) -> None:
    norm = "model.norm.weight"
    edit_weights(llama, lambda weights: weights | {f"module.{norm}": weights[norm].clone()})
    assert f"hold {norm} twice" in refusal(llama)


def test_missing_and_unknown_tensors_are_found_before_weights_are_read(llama: Path) -> None:
    def spoil(weights: Weights) -> Weights:
        del weights["model.layers.1.mlp.up_proj.weight"]
        return weights | {"model.extra": torch.ones(3), "model.norm.weight": torch.ones(3)}

    edit_weights(llama, spoil)
    said = refusal(llama)
    assert "1 missing (model.layers.1.mlp.up_proj.weight)" in said
    assert "1 unknown (model.extra)" in said
    assert "model.norm.weight [3] instead of [64]" in said


def test_a_missing_head_is_no_lack_where_it_is_tied(llama: Path) -> None:
    edit_weights(llama, lambda weights: {n: w for n, w in weights.items() if "lm_head" not in n})
    assert "1 missing (lm_head.weight)" in refusal(llama)
    edit_config(llama, tie_word_embeddings=True)
    assert notes(llama) == []


def test_an_embedding_and_a_head_that_differ_are_not_tied_in_silence(llama: Path) -> None:
    edit_config(llama, tie_word_embeddings=True)
    assert "an embedding and a head that differ" in refusal(llama)
    embedding = load_file(llama / WEIGHTS)["model.embed_tokens.weight"]
    edit_weights(llama, lambda weights: weights | {"lm_head.weight": embedding.clone()})
    assert notes(llama) == []


# Adapters


def test_an_adapter_beside_the_weights_is_refused_with_its_base(llama: Path) -> None:
    (llama / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    with pytest.raises(
        InputError, match=r"an adapter .*some/base\) together with a model's weights"
    ):
        read_config(str(llama), needs_weights=True)
    (llama / WEIGHTS).unlink()
    with pytest.raises(InputError, match=r"an adapter, not a model: .*\(some/base\)"):
        read_config(str(llama), needs_weights=True)
    assert load_model(str(llama), from_scratch=True) is not None


@pytest.mark.parametrize("part", ["lora_A.default.weight", "base_layer.weight"])
def test_an_adapter_among_the_weights_is_refused(llama: Path, part: str) -> None:
    name = f"base_model.model.model.layers.0.self_attn.q_proj.{part}"
    edit_weights(llama, lambda weights: weights | {name: torch.ones(2, 2)})
    assert "hold tensors of an adapter" in refusal(llama)


def test_a_saved_adapter_names_the_folder_of_its_base(llama: Path, tmp_path: Path) -> None:
    model = add_lora(load_model(str(llama)), rank=2, alpha=4)
    save_adapter(model, None, tmp_path / "adapter")
    saved = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == str(llama)


# Multi-token prediction


def with_layer_ahead(weights: Weights, layer: int, last: int) -> Weights:
    """With a layer behind the last, as DeepSeek-V3 is published."""
    behind = f"model.layers.{layer}."
    copied = {
        name.replace(f"model.layers.{last}.", behind): weight.clone()
        for name, weight in weights.items()
        if name.startswith(f"model.layers.{last}.")
    }
    hidden = weights["model.norm.weight"].shape[0]
    return (
        weights
        | copied
        | {
            f"{behind}eh_proj.weight": torch.ones(hidden, 2 * hidden),
            f"{behind}enorm.weight": torch.ones(hidden),
            f"{behind}hnorm.weight": torch.ones(hidden),
            f"{behind}shared_head.head.weight": weights["lm_head.weight"].clone(),
            f"{behind}embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
        }
    )


@pytest.mark.parametrize(("stored", "counted"), covering([0, 1, 2], [0, 1, None], rounds=2))
def test_layers_ahead_are_left_out_whatever_the_config_counts(
    v3: Path, stored: int, counted: int | None, tmp_path: Path
) -> None:
    expected = logits(load_model(str(v3)))
    count = read_config(str(v3)).num_hidden_layers
    for layer in range(count, count + stored):
        edit_weights(v3, lambda weights, layer=layer: with_layer_ahead(weights, layer, count - 1))  # type: ignore[misc]
    edit_config(v3, num_nextn_predict_layers=counted or 0)
    if counted is None:
        config = json.loads((v3 / "config.json").read_text())
        del config["num_nextn_predict_layers"]
        (v3 / "config.json").write_text(json.dumps(config))
    assert [note.partition(" (")[0].split(" ", 1)[1] for note in notes(v3)] == [
        "tensors of multi-token prediction"
    ] * bool(stored)
    model = load_model(str(v3))
    assert torch.equal(logits(model), expected)
    save_model(model, None, tmp_path / "saved")
    assert (
        json.loads((tmp_path / "saved" / "config.json").read_text())["num_nextn_predict_layers"]
        == 0
    )


def test_a_layer_that_the_config_doesnt_count_is_refused(v3: Path) -> None:
    count = read_config(str(v3)).num_hidden_layers
    edit_config(v3, num_hidden_layers=count - 1)
    assert f"hold layer {count - 1}" in refusal(v3)
    assert f"num_hidden_layers {count - 1}" in refusal(v3)


# Rotary frequencies


def test_stored_frequencies_are_left_out_if_they_are_those_of_the_config(llama: Path) -> None:
    expected = logits(load_model(str(llama)))
    config = read_config(str(llama))
    base, width = config.rope_parameters["rope_theta"], config.head_dim
    frequencies = base ** -(torch.arange(0, width, 2).float() / width)
    for kind in (torch.float32, torch.bfloat16, torch.float16):
        stored = {
            f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": frequencies.to(kind, copy=True)
            for layer in range(config.num_hidden_layers)
        }
        edit_weights(llama, lambda weights, stored=stored: weights | stored)  # type: ignore[misc]
        assert notes(llama) == []
        assert torch.equal(logits(load_model(str(llama))), expected)
    edit_config(llama, rope_parameters={"rope_type": "default", "rope_theta": 5e5}, rope_theta=5e5)
    assert "(rope_theta 500000): correct rope_theta" in refusal(llama)


# Number formats


def in_float8(weight: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounded to float8, each block by its own scale; by a plain loop over blocks."""
    rows, columns = (-(-n // block) for n in weight.shape)
    scales = torch.zeros(rows, columns)
    rounded = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(rows):
        for j in range(columns):
            part = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
            scales[i, j] = weight[part].abs().max().clamp(min=1e-12) / 448
            rounded[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
    return rounded, scales


QUANTISED = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [48, 48]}


def test_block_scaled_float8_is_read_as_numbers_times_scales(v3: Path) -> None:
    exact = load_file(v3 / WEIGHTS)
    found: Weights = {}
    for name, weight in exact.items():
        if name.endswith("_proj.weight") and weight.dim() == 2:
            rounded, scales = in_float8(weight, 48)
            found |= {name: rounded, f"{name}_scale_inv": scales}
        else:
            found[name] = weight
    edit_weights(v3, lambda weights: found)
    assert "have block scales" in refusal(v3)
    edit_config(v3, quantization_config=QUANTISED)
    (note,) = notes(v3)
    assert "block-scaled float8 are read as numbers times their scales" in note
    assert str(stored_formats(str(v3), read_config(str(v3)))) in (
        "bfloat16, some in float32",
        "float32, some in bfloat16",
    )
    model = load_model(str(v3))
    assert "quantization_config" not in model.config.to_dict()
    read = dict(model.named_parameters())["model.layers.0.mlp.up_proj.weight"]
    expected = exact["model.layers.0.mlp.up_proj.weight"]
    assert (read - expected).abs().max() < expected.abs().max() / 16
    i, j = 100, 50  # one of another block than the first
    rounded, scales = in_float8(expected, 48)
    assert read[i, j] == rounded[i, j].float() * scales[i // 48, j // 48]


def test_float8_without_its_scales_and_scales_without_their_weight_are_refused(v3: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    rounded, scales = in_float8(load_file(v3 / WEIGHTS)[name], 48)
    whole = load_file(v3 / WEIGHTS)
    edit_config(v3, quantization_config=QUANTISED)
    edit_weights(v3, lambda weights: whole | {name: rounded})
    assert "are quantised" in refusal(v3)
    edit_weights(v3, lambda weights: whole | {name: rounded, f"{name}_scale_inv": scales[:1]})
    assert "which blocks of [48, 48] don't fit" in refusal(v3)
    edit_weights(v3, lambda weights: whole | {"model.other.weight_scale_inv": scales})
    assert "scales without a weight (model.other.weight)" in refusal(v3)


@pytest.mark.parametrize(
    ("quantised", "said"),
    [
        ({"quant_method": "fp8"}, r"quantised \(fp8\)"),
        ({"quant_method": "gptq", "bits": 4}, r"quantised \(gptq\)"),
        ({"quant_method": "compressed-tensors"}, r"quantised \(compressed-tensors\)"),
    ],
)
def test_other_quantised_weights_are_refused(
    llama: Path, quantised: dict[str, Any], said: str
) -> None:
    edit_config(llama, quantization_config=quantised)
    with pytest.raises(InputError, match=said):
        read_config(str(llama), needs_weights=True)


def test_whole_numbers_are_no_weights(llama: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    edit_weights(llama, lambda weights: weights | {name: weights[name].to(torch.int8)})
    assert f"are quantised ({name} is I8)" in refusal(llama)


# Token ids


def test_a_generation_config_that_transformers_cannot_read_is_refused(llama: Path) -> None:
    (llama / "generation_config.json").write_text('{"num_return_sequences": 5}')
    assert "generation_config.json" in refusal(llama)
    (llama / "generation_config.json").write_text('{"temperature": 0.6}')
    assert [note.rpartition("(")[2] for note in notes(llama)] == [
        "temperature); it is saved as it is"
    ]


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "pad_token_id"])
def test_an_id_of_the_config_beyond_the_embedding_is_refused(llama: Path, key: str) -> None:
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), None)
    edit_config(llama, **(ids | {key: 300}))
    with pytest.raises(InputError, match=f"{key} 300 is outside the vocabulary of 300"):
        load_model(str(llama))
    assert load_model(str(llama), **{key: 7}) is not None  # type: ignore[arg-type]


def test_no_padding_token_may_be_written_as_minus_one(llama: Path) -> None:
    edit_config(llama, pad_token_id=-1)
    assert load_model(str(llama)).config.pad_token_id is None


def with_token(tokenizer: Any, token_id: int) -> Any:
    """The tokenizer with a further token of that id, which leaves a gap before it."""
    from transformers import PreTrainedTokenizerFast

    raw = json.loads(tokenizer.backend_tokenizer.to_str())
    raw["model"]["vocab"]["<extra>"] = token_id
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    raw["added_tokens"].append({"id": token_id, "content": "<extra>", "special": True, **flags})
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(json.dumps(raw))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def test_an_id_beyond_the_embedding_is_refused_however_few_tokens_there_are(
    llama: Path, tokenizer: Any
) -> None:
    config = read_config(str(llama))
    check_rows(str(llama), config, tokenizer, from_scratch=False)
    high = with_token(tokenizer, config.vocab_size + 5)
    with pytest.raises(InputError, match=r"306 rows \(the last is '<extra>'\) .* only 300"):
        check_rows(str(llama), config, high, from_scratch=False)
    for source, from_scratch in (("v3-tiny", False), (str(llama), True)):
        with pytest.raises(InputError, match="294 tokens and ids up to 305"):
            check_rows(source, config, high, from_scratch=from_scratch)
    config.vocab_size = 400
    check_rows(str(llama), config, high, from_scratch=False)


def test_what_is_fetched_from_a_hub_is_checked_as_a_folder_is(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def fetch(source: str, allow_patterns: list[str], local_files_only: bool) -> str:
        asked.extend([source, *allow_patterns])
        return str(llama)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert local_folder("some-owner/some-model") == llama
    assert asked[0] == "some-owner/some-model"
    assert {"adapter_config.json", "model*.safetensors"} <= set(asked)
    (llama / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="together with a model's weights"):
        local_folder("some-owner/some-model")


def test_weights_of_a_hub_name_are_checked_before_data_is_prepared(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the hub's cache as its client lays it out."""
    edit_config(llama, tie_word_embeddings=True)
    model = tmp_path / "hub" / "models--some-owner--some-model"
    snapshot = model / "snapshots" / ("a" * 40)
    shutil.copytree(llama, snapshot)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(snapshot.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    recipe = Recipe(model="some-owner/some-model", dataset="examples.jsonl", max_steps=1)
    for fetch in (False, True):
        with pytest.raises(InputError, match="an embedding and a head that differ"):
            weight_notes(recipe, fetch=fetch)
    (snapshot / WEIGHTS).unlink()
    assert weight_notes(recipe, fetch=False) == []
    with pytest.raises(InputError, match=f"has no {WEIGHTS}"):
        weight_notes(recipe, fetch=True)
