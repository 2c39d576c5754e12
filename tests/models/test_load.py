"""Loading: the same seed gives the same model, and nothing wrong in a folder passes unseen."""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hasten.errors import InputError
from hasten.models.load import load_model, load_tokenizer, quiet, read_config
from hasten.models.save import save_model

WEIGHTS = "model.safetensors"


@pytest.fixture
def damaged(saved_llama: Path, tmp_path: Path) -> Path:
    """A copy of a saved model, for the test to damage."""
    return Path(shutil.copytree(saved_llama, tmp_path / "model"))


def edit_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def refusal(source: Any, **arguments: Any) -> str:
    with pytest.raises(InputError) as caught:
        load_model(str(source), **arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def same(one: Any, other: Any) -> bool:
    theirs = dict(other.named_parameters())
    return all(torch.equal(p, theirs[name]) for name, p in one.named_parameters())


# Random weights


def test_a_seed_decides_the_weights_and_leaves_other_random_numbers_alone() -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    first = load_model("v3-tiny", vocab_size=64, seed=5)
    assert torch.equal(torch.rand(3), expected)
    assert same(first, load_model("v3-tiny", vocab_size=64, seed=5))
    assert not same(first, load_model("v3-tiny", vocab_size=64, seed=6))


def test_half_precision_is_the_float32_model_rounded_with_buffers_kept() -> None:
    exact = load_model("v3-tiny", vocab_size=64)
    half = load_model("v3-tiny", vocab_size=64, dtype=torch.bfloat16)
    rounded = dict(half.named_parameters())
    for name, parameter in exact.named_parameters():
        assert torch.equal(parameter.to(torch.bfloat16), rounded[name])
    assert {buffer.dtype for buffer in half.buffers()} == {torch.float32}
    assert half.config.dtype == torch.bfloat16


def test_a_padding_token_that_also_ends_texts_still_learns() -> None:
    model = load_model("deepseek-llm-tiny", vocab_size=64, eos_token_id=2, pad_token_id=2)
    tokens = torch.tensor([[2, 5, 2, 6]])
    model(input_ids=tokens, labels=tokens).loss.backward()
    embedding = model.get_input_embeddings().weight
    assert embedding[2].abs().sum() > 0
    assert embedding.grad[2].abs().sum() > 0
    assert model.config.pad_token_id == model.generation_config.pad_token_id == 2


def test_from_scratch_takes_the_config_alone(damaged: Path) -> None:
    (damaged / WEIGHTS).unlink()
    edit_config(damaged, lambda c: c.update(quantization_config={"quant_method": "fp8"}))
    model = load_model(str(damaged), from_scratch=True, vocab_size=64, seed=3)
    assert same(model, load_model("deepseek-llm-tiny", vocab_size=64, seed=3))
    assert "quantization_config" not in model.config.to_dict()


# Trained weights


def test_half_precision_weights_load_with_their_buffers_in_float32(saved_v3: Path) -> None:
    model = load_model(str(saved_v3), dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
    assert model.training


def test_a_published_v3_config_loads_natively_despite_its_custom_code(
    saved_v3: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(saved_v3, tmp_path / "v3"))

    def publish(config: dict[str, Any]) -> None:
        del config["rope_parameters"]
        config["rope_theta"] = 10000
        config["rope_scaling"] = {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
        }
        config["auto_map"] = {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}

    edit_config(folder, publish)
    (folder / "modeling_deepseek.py").write_text("raise SystemExit('executed')")
    model = load_model(str(folder))
    assert type(model).__module__.startswith("transformers.models.deepseek_v3")
    assert model.config.rope_parameters["rope_type"] == "yarn"


def test_token_ids_reach_the_configs_of_loaded_weights(saved_llama: Path) -> None:
    model = load_model(str(saved_llama), bos_token_id=0, eos_token_id=1, pad_token_id=1)
    for config in (model.config, model.generation_config):
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (0, 1, 1)
    assert "301 rows" in refusal(saved_llama, vocab_size=301)


@pytest.mark.parametrize(
    ("generation", "config", "stops"),
    [
        ([5, 6], 5, [5, 6, 1, 7]),
        ([7, 1], None, [7, 1]),
        (None, [5, 6], [5, 6, 1, 7]),  # of releases that had no generation config
        (9, 5, [9, 1, 7]),
    ],
)
def test_the_base_s_stop_tokens_stay_and_the_trained_one_joins_them(
    damaged: Path, tmp_path: Path, generation: Any, config: Any, stops: list[int]
) -> None:
    edit_config(damaged, lambda found: found.update(eos_token_id=config))
    file = damaged / "generation_config.json"
    if generation is None:
        file.unlink(missing_ok=True)
    else:
        file.write_text(json.dumps({"eos_token_id": generation}))
    model = load_model(str(damaged), eos_token_id=1, stop_token_id=7)
    save_model(model, None, tmp_path / "again")
    saved = json.loads((tmp_path / "again/generation_config.json").read_text())
    assert saved["eos_token_id"] == stops


@pytest.mark.parametrize("stops", ["x", [1, "x"], [[1]], 1.5, True, {"a": 1}])
def test_stop_tokens_that_are_no_numbers_are_refused(damaged: Path, stops: Any) -> None:
    (damaged / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    assert "has eos_token_id" in refusal(damaged)


def test_a_model_from_nothing_has_the_stop_tokens_of_its_tokenizer_alone() -> None:
    model = load_model("deepseek-llm-tiny", vocab_size=64, eos_token_id=2, stop_token_id=5)
    assert model.generation_config.eos_token_id == [2, 5]
    model = load_model("deepseek-llm-tiny", vocab_size=64, eos_token_id=2, stop_token_id=2)
    assert model.generation_config.eos_token_id == 2


# Refusals


def test_a_folder_without_its_parts_is_refused_by_the_name_of_the_part(damaged: Path) -> None:
    (damaged / WEIGHTS).rename(damaged / "pytorch_model.bin")
    assert "convert it once" in refusal(damaged)
    (damaged / "pytorch_model.bin").unlink()
    assert f"{damaged} has no model.safetensors" in refusal(damaged)
    (damaged / "config.json").unlink()
    assert f"{damaged} has no config.json" in refusal(damaged)
    (damaged / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    assert "an adapter, not a model" in refusal(damaged)
    assert "some/base" in refusal(damaged)


def test_a_missing_shard_is_named(damaged: Path) -> None:
    (damaged / WEIGHTS).rename(damaged / "one.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (damaged / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lacks 1 of 2 weight files" in refusal(damaged)
    assert "two.safetensors" in refusal(damaged)


def test_two_sets_of_weights_are_refused(damaged: Path) -> None:
    index = damaged / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": WEIGHTS}}))
    load_model(str(damaged))  # the index names a file that is gone
    shutil.copy(damaged / WEIGHTS, damaged / "one.safetensors")
    assert "two sets of weights" in refusal(damaged)
    assert "one.safetensors" in refusal(damaged)


def test_a_truncated_file_is_refused_by_name(damaged: Path) -> None:
    whole = (damaged / WEIGHTS).read_bytes()
    (damaged / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    assert f"{damaged / WEIGHTS} is damaged or cut off" in refusal(damaged)


def test_a_pointer_of_git_lfs_is_named(damaged: Path) -> None:
    (damaged / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert f"{damaged / WEIGHTS} is a pointer of Git LFS" in refusal(damaged)


def test_tensors_that_do_not_fit_the_config_are_refused_with_the_first_three(
    damaged: Path,
) -> None:
    def spoil(weights: dict[str, torch.Tensor]) -> None:
        for layer in range(4):
            del weights[f"model.layers.{layer}.mlp.up_proj.weight"]
        weights["model.norm.weight"] = torch.ones(3)
        weights["model.extra"] = torch.ones(3)

    edit_weights(damaged, spoil)
    said = refusal(damaged)
    assert "4 missing" in said
    assert "layers.2.mlp.up_proj" in said
    assert "layers.3.mlp.up_proj" not in said
    assert "1 unknown (model.extra)" in said
    assert "model.norm.weight [3] instead of [64]" in said


def test_one_expert_too_few_is_refused(saved_v3: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved_v3, tmp_path / "v3"))
    edit_weights(folder, lambda w: w.pop("model.layers.1.mlp.experts.3.up_proj.weight"))
    assert "some experts' weights are missing" in refusal(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "novel"}, "unknown to transformers"),
        ({"model_type": "novel", "auto_map": {"AutoConfig": "c.C"}}, "never executed"),
        ({"model_type": "vit"}, "predicts no next token"),
        ({"model_type": "gemma3"}, "reads more than text.* of the type gemma3_text"),
        ({"model_type": None}, "no model_type"),
        ({"hidden_size": "wide"}, "expected int, got str"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised .fp8."),
    ],
)
def test_a_config_that_cannot_be_trained_is_refused(
    damaged: Path, change: dict[str, Any], said: str
) -> None:
    edit_config(damaged, lambda config: config.update(change))
    with pytest.raises(InputError, match=said):
        load_model(str(damaged))


@pytest.mark.parametrize(
    "change",
    [
        {"_attn_implementation": "somebody/kernel"},
        {"attn_implementation": "somebody/kernel@v1:attend"},
        {"_attn_implementation_internal": "paged|somebody/kernel"},
        {"attn_implementation": {"": "sdpa", "text_config": "somebody/kernel"}},
        {"text_config": {"attn_implementation": "somebody/kernel"}},
        {"parts": [{"attn_implementation": ["sdpa"]}]},
        {"attn_implementation": "flash_attention_2"},  # not installed: transformers would fetch it
        {"_experts_implementation": "sonicmoe"},
        {"experts_implementation": "deepgemm"},
    ],
)
def test_a_kernel_that_a_config_names_is_refused_before_anything_is_fetched(
    damaged: Path, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.utils.is_flash_attn_2_available", lambda: False)
    edit_config(damaged, lambda config: config.update(change))
    for read in (load_model, read_config):
        with pytest.raises(InputError, match=r"implementation.* never fetched or run"):
            read(str(damaged))


@pytest.mark.parametrize("name", ["eager", "sdpa", None])
def test_a_config_may_choose_among_attentions_of_transformers_itself(
    damaged: Path, name: str | None
) -> None:
    edit_config(damaged, lambda config: config.update(attn_implementation=name))
    assert read_config(str(damaged))._attn_implementation == name


def test_a_config_that_is_not_json_is_refused(damaged: Path) -> None:
    (damaged / "config.json").write_text('{"model_type": ')
    assert f"{damaged / 'config.json'}:1 is not JSON" in refusal(damaged)


def test_a_number_of_a_config_that_is_not_finite_is_refused(damaged: Path) -> None:
    edit_config(damaged, lambda config: config.update(rope_scaling={"factors": [1.0, math.inf]}))
    assert "sets factors to a number that isn't finite" in refusal(damaged)


def test_a_name_that_is_nothing_is_answered_with_the_nearest_preset(tmp_path: Path) -> None:
    assert "did you mean v3-tiny" in refusal("v3-tinny")
    assert "check the path" in refusal(tmp_path / "nowhere")
    assert "check the path" in refusal("./nowhere")
    (tmp_path / "file").touch()
    assert "is a file: give the folder" in refusal(tmp_path / "file")


# Tokenizers and quiet


def test_a_tokenizer_is_what_its_file_says_whatever_the_model_beside_it(
    saved_llama: Path, tokenizer: Any, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(saved_llama, tmp_path / "qwen"))
    edit_config(folder, lambda config: config.update(model_type="qwen2"))
    loaded = load_tokenizer(str(folder))
    text = "def f(x):\n    return  x + 2001 and héllo"
    assert loaded(text).input_ids == tokenizer.backend_tokenizer.encode(text).ids
    assert loaded.decode(loaded(text).input_ids) == text
    assert loaded.chat_template == tokenizer.chat_template
    assert loaded.pad_token_id == tokenizer.eos_token_id


@pytest.mark.parametrize("adds", [True, False])
def test_add_bos_token_of_a_config_is_followed(
    saved_llama: Path, tokenizer: Any, tmp_path: Path, adds: bool
) -> None:
    """DeepSeek's tokenizer.json leaves the bos token to the class of transformers 4."""
    folder = Path(shutil.copytree(saved_llama, tmp_path / "source"))
    fields = json.loads((folder / "tokenizer_config.json").read_text()) | {"add_bos_token": adds}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    plain = tokenizer.backend_tokenizer.encode("two words", add_special_tokens=False)
    loaded = load_tokenizer(str(folder))
    expected = [loaded.bos_token_id, *plain.ids] if adds else plain.ids
    assert loaded("two words").input_ids == expected
    bare = loaded("two words", add_special_tokens=False, return_offsets_mapping=True)
    assert (bare.input_ids, bare.offset_mapping) == (plain.ids, plain.offsets)


@pytest.mark.parametrize(
    "part",
    [
        {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [
                    {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 60}
                ]
                * 5,
            }
        },
        {"normalizer": {"type": "Prepend", "prepend": "x" * (2 << 20)}},
        {"padding": {"strategy": {"Fixed": 10**9}}},
    ],
    ids=["replace", "prepend", "padding"],
)
def test_a_tokenizer_that_makes_long_texts_of_short_ones_is_refused(
    saved_llama: Path, tmp_path: Path, part: dict[str, Any]
) -> None:
    folder = Path(shutil.copytree(saved_llama, tmp_path / "model"))
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | part))
    with pytest.raises(InputError, match="which no tokenizer needs: correct its normalizer"):
        load_tokenizer(str(folder))


def test_a_source_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the preset v3-tiny has no tokenizer"):
        load_tokenizer("v3-tiny")
    with pytest.raises(InputError, match=r"has no tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(InputError, match=r"tokenizer\.model but no tokenizer\.json: write it once"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match=r"tokenizer\.json:1 is not JSON"):
        load_tokenizer(str(tmp_path))


def test_loading_is_silent(damaged: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load_model(str(damaged))
    edit_weights(damaged, lambda weights: weights.pop("model.norm.weight"))
    refusal(damaged)
    assert capfd.readouterr() == ("", "")


def test_quiet_gives_back_the_log_level_and_the_progress_bars_it_found() -> None:
    from transformers.utils import logging as hf_logging

    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.INFO)
    hf_logging.enable_progress_bar()
    with quiet():
        assert (logger.level, hf_logging.is_progress_bar_enabled()) == (logging.ERROR, False)
    assert (logger.level, hf_logging.is_progress_bar_enabled()) == (logging.INFO, True)
    hf_logging.disable_progress_bar()
    with quiet():
        pass
    assert not hf_logging.is_progress_bar_enabled()
    hf_logging.enable_progress_bar()
    logger.setLevel(before)


# Hostile folders


@pytest.mark.parametrize(
    "weight_map",
    [["a"], {}, None, {"a": 3}, {"a": ["x"]}, {"a": {"b": "c"}}, "model.safetensors"],
    ids=str,
)
def test_a_weight_map_of_another_kind_is_a_sentence(damaged: Path, weight_map: Any) -> None:
    (damaged / WEIGHTS).rename(damaged / "one.safetensors")
    index = damaged / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert re.search("weight_map is not an object|is no file name", refusal(damaged))
    index.write_text("[" * 100_000)
    assert "nested too deeply" in refusal(damaged)


@pytest.mark.parametrize("absolute", [False, True])
def test_a_weight_map_that_leads_out_of_the_folder_is_refused(
    damaged: Path, absolute: bool
) -> None:
    elsewhere = damaged.parent / "elsewhere.safetensors"
    (damaged / WEIGHTS).rename(elsewhere)
    name = str(elsewhere) if absolute else "../elsewhere.safetensors"
    (damaged / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    assert "leads out of" in refusal(damaged)


def test_a_weight_file_may_be_a_link_as_in_the_cache_of_the_hub(damaged: Path) -> None:
    (damaged / WEIGHTS).rename(damaged.parent / "blob")
    (damaged / "one.safetensors").symlink_to("../blob")
    index = {"weight_map": {"a": "one.safetensors"}}
    (damaged / "model.safetensors.index.json").write_text(json.dumps(index))
    load_model(str(damaged))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", -1),
        ("num_hidden_layers", 10**9),
        ("num_attention_heads", -4),
        ("hidden_size", -1),
        ("vocab_size", -5),
        ("intermediate_size", 1 << 40),
    ],
)
def test_a_size_that_no_model_has_is_refused_by_key(damaged: Path, key: str, value: int) -> None:
    edit_config(damaged, lambda config: config.update({key: value}))
    assert f"sets {key} to {value}; write a number from 0 to" in refusal(damaged)
    assert f"sets {key}" in refusal(damaged, from_scratch=True)


@pytest.mark.parametrize(
    ("kind", "key", "other", "computed"),
    [
        ("deepseek_v2", "norm_topk_prob", True, "False"),
        ("deepseek_v2", "scoring_func", "sigmoid", "'softmax'"),
        ("deepseek_v2", "topk_method", "noaux_tc", "'greedy' or 'group_limited_greedy'"),
        ("deepseek_v2", "moe_layer_freq", 2, "1"),
        ("deepseek_v3", "scoring_func", "softmax", "'sigmoid'"),
        ("deepseek_v3", "topk_method", "greedy", "'noaux_tc'"),
        ("deepseek_v32", "moe_layer_freq", 2, "1"),
    ],
)
def test_a_routing_that_the_class_does_not_compute_is_refused(
    damaged: Path, kind: str, key: str, other: object, computed: str
) -> None:
    edit_config(damaged, lambda config: config.update({"model_type": kind, key: other}))
    said = refusal(damaged, from_scratch=True)
    assert f"sets {key} to {other!r}, but transformers' {kind} computes {computed}:" in said


def test_a_size_in_a_part_of_a_config_is_checked_too(damaged: Path) -> None:
    edit_config(damaged, lambda config: config.update(text_config={"num_hidden_layers": -1}))
    assert "sets num_hidden_layers to -1" in refusal(damaged)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_key_twice_in_a_config_is_refused(damaged: Path, name: str) -> None:
    path = damaged / name
    text = path.read_text() if path.exists() else "{}"
    content = {"use_cache": True, **json.loads(text)}
    path.write_text('{"use_cache": false, ' + json.dumps(content)[1:])
    assert "the key 'use_cache' occurs twice" in refusal(damaged)
