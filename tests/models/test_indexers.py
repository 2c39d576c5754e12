"""A DeepSeek-V3 model becomes a DeepSeek-V3.2 model that computes the same while all keys fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV32ForCausalLM

from hasten.errors import InputError
from hasten.models.indexers import add_indexers
from hasten.models.load import load_model
from hasten.models.save import save_model
from tiny import tiny_config, tiny_model

SIZES = {"heads": 16, "width": 8, "topk": 6}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 32,
}


def dense(folder: Path, **fields: Any) -> Path:
    config = tiny_config("deepseek_v3")
    for name, value in fields.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def outputs(folder: Path) -> Tensor:
    """Logits in float64 of a row twice as long as the keys that are chosen."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=torch.arange(12)[None]).logits[0]
    return found


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rope_parameters": YARN, "max_position_embeddings": 128},
        {"tie_word_embeddings": True},
        {"routed_scaling_factor": 1.5, "norm_topk_prob": False, "rms_norm_eps": 1e-3},
    ],
    ids=["plain", "yarn", "tied", "routing"],
)
def test_outputs_are_equal_to_the_bit_while_every_key_is_chosen(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    source, to = dense(tmp_path / "dense", **fields), tmp_path / "sparse"
    assert add_indexers(str(source), to, **SIZES) == 2 * 5
    before, after = outputs(source), outputs(to)
    assert torch.equal(before[:6], after[:6])
    assert not torch.allclose(before[6:], after[6:], atol=1e-3), "an indexer chose"
    assert (to / "tokenizer_config.json").is_file()


def test_transformers_finds_all_weights_and_no_others(tmp_path: Path) -> None:
    source, to = dense(tmp_path / "dense"), tmp_path / "sparse"
    add_indexers(str(source), to, **SIZES)
    model, report = DeepseekV32ForCausalLM.from_pretrained(to, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    config = model.config
    assert (config.index_n_heads, config.index_head_dim, config.index_topk) == (16, 8, 6)
    scores = model.model.layers[1].self_attn.indexer.weights_proj.weight
    other = model.model.layers[0].self_attn.indexer.weights_proj.weight
    assert scores.std() > 0
    assert not torch.equal(scores, other)
    # A trained folder keeps them.
    save_model(load_model(str(to)), None, tmp_path / "again")
    again = DeepseekV32ForCausalLM.from_pretrained(tmp_path / "again").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())


def test_weights_in_several_files_and_in_float8_stay_as_they_are(tmp_path: Path) -> None:
    source, to = dense(tmp_path / "dense"), tmp_path / "sparse"
    weights = load_file(source / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    rounded = (weights[name] * 8).to(torch.float8_e4m3fn)
    weights |= {name: rounded, f"{name}_scale_inv": torch.full((1, 1), 0.125)}
    names = sorted(weights)
    index = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({n: weights[n].contiguous() for n in part}, source / file, {"format": "pt"})
        index |= dict.fromkeys(part, file)
    (source / "model.safetensors").unlink()
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (source / "config.json").write_text(json.dumps(config))
    add_indexers(str(source), to, **SIZES)
    made = {n: t for file in to.glob("*.safetensors") for n, t in load_file(file).items()}
    assert all(
        torch.equal(made[n].view(torch.uint8), t.view(torch.uint8)) for n, t in weights.items()
    )
    written = json.loads((to / "config.json").read_text())["quantization_config"]
    assert written["weight_block_size"] == [128, 128]
    assert "indexer.wq_b" in written["modules_to_not_convert"]
    state = load_model(str(to)).state_dict()
    assert torch.equal(state[name], rounded.float() / 8)


@pytest.mark.parametrize(
    ("change", "sizes", "reason"),
    [
        ({"q_lora_rank": None}, {}, "q_lora_rank is null, and an indexer reads"),
        (
            {"rope_interleave": False},
            {},
            "rope_interleave is False, and that class computes as with True",
        ),
        ({}, {"width": 2}, "holds the 8 rotary columns .* width is 2; give 8 or more"),
        ({}, {"topk": 0}, "an indexer with topk 0 makes no sense"),
    ],
)
def test_what_can_not_be_converted_is_refused(
    change: dict[str, Any], sizes: dict[str, int], reason: str, tmp_path: Path
) -> None:
    source = dense(tmp_path / "dense", **change)
    with pytest.raises(InputError, match=reason):
        add_indexers(str(source), tmp_path / "sparse", **{**SIZES, **sizes})
    assert not (tmp_path / "sparse").exists()


def test_a_model_of_another_class_is_refused(tmp_path: Path) -> None:
    tiny_model("deepseek_v2").save_pretrained(tmp_path / "v2")  # type: ignore[operator]
    with pytest.raises(InputError, match="is a deepseek_v2 model, and only DeepSeek-V3's class"):
        add_indexers(str(tmp_path / "v2"), tmp_path / "new")
