"""Saved folders open with equal logits in transformers 5 and, where it is installed, in 4.57.

``python scripts/test_versions.py`` makes the environment of 4.57.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hasten.models.adapters import add_lora, merge, with_adapter
from hasten.models.load import load_model
from hasten.models.presets import PRESETS, build_config
from hasten.models.save import save_adapter, save_model
from hasten.models.weights import NumberFormats
from models.reader_job import TEXT, TOKENS, read
from narrow_presets import as_published

JOB = Path(__file__).with_name("reader_job.py")
READERS = Path.home() / ".cache" / "hasten" / "test-environments" / "readers" / "bin" / "python"
BASES = ("deepseek-llm-tiny", "r1-distill-qwen-tiny", "v2-lite-tiny", "v3-tiny")
# Positions stretched as published models have them: Llama 3, DeepSeek-V2 and V3.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
    "beta_fast": 32,
    "beta_slow": 1,
}
# Without mscale_all_dim, which 4.57's DeepSeek-V2 (not V3) leaves out of the scale of attention.
PLAIN_YARN = {key: value for key, value in YARN.items() if "scale" not in key}
ROPES: dict[str, Any] = dict(zip(BASES, (LLAMA3, PLAIN_YARN, PLAIN_YARN, YARN), strict=True))
CASES = [(name, kind) for name in BASES for kind in ("merged", "stretched")]
CASES.append(("v3-tiny", "bfloat16"))


@as_published()  # a narrower model is less exact in bf16
def base(name: str, kind: str, folder: Path) -> Any:
    """A model with weights that aren't all alike, its rope stretched where the case says so."""
    source = name
    if kind == "stretched":
        config = build_config(PRESETS[name], vocab_size=300)
        config.rope_parameters = ROPES[name]
        config.save_pretrained(folder / "config")
        source = str(folder / "config")
    model = load_model(
        source, from_scratch=source != name, vocab_size=300, eos_token_id=1, pad_token_id=1
    )
    generator = torch.Generator().manual_seed(3)
    for weight in model.parameters():
        weight.data += torch.randn(weight.shape, generator=generator) * 0.02
    for key, buffer in model.named_buffers():
        if "correction_bias" in key:
            buffer.uniform_(generator=generator)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> dict[tuple[str, str], Path]:
    """Every case's folder, with the logits that the model had in ``expected.safetensors``."""
    found = {}
    for name, kind in CASES:
        place = tmp_path_factory.mktemp("readers") / f"{name}-{kind}"
        place.parent.mkdir(exist_ok=True)
        model = base(name, kind, place.parent)
        formats = NumberFormats(torch.bfloat16) if kind == "bfloat16" else NumberFormats()
        if kind == "merged":
            adapted = add_lora(model, rank=4, alpha=8, targets="all-linear", seed=1)
            for key, weight in adapted.named_parameters():
                if "lora_B" in key:
                    weight.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(5))
            adapter = place.parent / f"{name}-adapter"
            save_adapter(adapted, tokenizer, adapter)
            model = merge(with_adapter(base(name, kind, place.parent), adapter))
        assert save_model(model, tokenizer, place, formats) == []
        for weight in model.parameters():
            weight.data = weight.data.to(formats.of("", weight))
        with torch.no_grad():
            logits = model.eval()(input_ids=TOKENS).logits.float().contiguous()
        save_file({"logits": logits}, place / "expected.safetensors")
        found[name, kind] = place
    return found


def read_elsewhere(python: Path, folders: list[Path]) -> list[dict[str, Any]]:
    """The folders as another interpreter's transformers reads them."""
    command = [str(python), str(JOB), *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def check(
    folders: dict[tuple[str, str], Path], rows: list[dict[str, Any]], tokenizer: Any
) -> set[str]:
    """The releases that opened all folders with equal logits, ids and chat template."""
    ids = tokenizer.backend_tokenizer.encode(TEXT).ids
    for ((name, kind), folder), row in zip(folders.items(), rows, strict=True):
        found = load_file(folder / "read.safetensors")["logits"]
        expected = load_file(folder / "expected.safetensors")["logits"]
        # Releases add up in another order; bfloat16 keeps 8 bits of each product.
        tolerance = 0.05 if kind == "bfloat16" else 2e-5
        case = f"{name} {kind} in {row['release']}"
        torch.testing.assert_close(
            found, expected, rtol=tolerance, atol=tolerance, msg=lambda text, case=case: case + text
        )
        assert row["problems"] == [], case
        assert row["format"] == f"torch.{'bfloat16' if kind == 'bfloat16' else 'float32'}", case
        assert row["eos"] == 1, case
        assert row["text"] == "wordsnumbers", case
        assert row["ids_of_file"] == ids, case
        # transformers 5 splits by rules of its own for qwen2, whatever tokenizer.json says.
        assert row["ids"] == ids or ("qwen" in name and row["release"].startswith("5.")), case
        if row["gguf"] is not None:
            assert row["gguf"]["unknown"] == [], case
            assert row["gguf"]["eos"] == 1, case
            assert row["gguf"]["template"] == tokenizer.chat_template, case
    return {row["release"] for row in rows}


@pytest.mark.slow
def test_folders_open_with_equal_logits_in_this_transformers(
    saved: dict[tuple[str, str], Path], tokenizer: Any
) -> None:
    rows = [json.loads(json.dumps(read(folder))) for folder in saved.values()]
    assert check(saved, rows, tokenizer) == {transformers.__version__}


@pytest.mark.long  # what older readers need is looked at in the files below, and in test_save.py
@pytest.mark.slow
@pytest.mark.skipif(
    not READERS.exists(), reason="no environment of transformers 4.57: scripts/test_versions.py"
)
def test_folders_open_with_equal_logits_in_transformers_4(
    saved: dict[tuple[str, str], Path], tokenizer: Any
) -> None:
    rows = read_elsewhere(READERS, list(saved.values()))
    (release,) = check(saved, rows, tokenizer)
    assert release.startswith("4.57.")


def test_the_rope_of_two_kinds_of_layers_is_written_for_older_readers(tmp_path: Path) -> None:
    older = {
        "rope_theta": 5e5,
        "rope_local_base_freq": 2e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "head_dim": 8}
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    config = transformers.Gemma3TextConfig(
        vocab_size=64, num_key_value_heads=1, **sizes, **layers, **older
    )
    save_model(transformers.AutoModelForCausalLM.from_config(config), None, tmp_path / "model")
    saved = json.loads((tmp_path / "model" / "config.json").read_text())
    scaling = older["rope_scaling"] | {"type": "linear"}
    assert {key: saved[key] for key in older} == older | {"rope_scaling": scaling}
    again = load_model(str(tmp_path / "model")).config.rope_parameters
    assert again["full_attention"] == {**scaling, "rope_theta": 5e5}
    assert again["sliding_attention"] == {"rope_type": "default", "rope_theta": 2e4}


def test_a_folder_is_written_for_older_readers_too(tmp_path: Path, tokenizer: Any) -> None:
    model = base("v3-tiny", "stretched", tmp_path)
    model.config.auto_map = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    model.config.num_nextn_predict_layers = 1
    save_model(model, tokenizer, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["rope_theta"] == YARN["rope_theta"]
    scaling = {key: value for key, value in YARN.items() if key != "rope_theta"}
    assert config["rope_scaling"] == {**scaling, "type": "yarn"}
    assert config["rope_parameters"] == YARN
    assert config["dtype"] == config["torch_dtype"] == "float32"
    assert config["num_nextn_predict_layers"] == 0
    assert "auto_map" not in config
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    told = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    assert told["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert told["chat_template"] == (tmp_path / "model" / "chat_template.jinja").read_text()
    shutil.rmtree(tmp_path / "config")
    again = load_model(str(tmp_path / "model"))
    assert again.config.rope_parameters | {"type": "yarn"} == {**YARN, "type": "yarn"}
