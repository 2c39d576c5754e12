"""Saving: what comes back has the same bits, and a name never stands for half a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from hasten.errors import InputError
from hasten.models.adapters import adapted_table, add_lora, merge
from hasten.models.load import load_model, load_tokenizer
from hasten.models.presets import PRESETS, build_config
from hasten.models.save import save_adapter, save_model

TINY = [name for name in PRESETS if name.endswith("-tiny")]
TOKENS = torch.arange(24).reshape(2, 12)


def logits(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def with_random_b(model: Any) -> Any:
    """Fresh LoRA adds nothing (B is zero); give every B a value, as training would."""
    generator = torch.Generator().manual_seed(9)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.1, generator=generator)
    return model


@pytest.mark.parametrize("name", TINY)
def test_a_saved_model_comes_back_with_the_same_bits(
    name: str, tokenizer: Any, tmp_path: Path
) -> None:
    model = load_model(name, vocab_size=300, eos_token_id=1, pad_token_id=1)
    for buffer in (b for key, b in model.named_buffers() if "correction_bias" in key):
        buffer.uniform_()  # training moves it; it must survive though it is no parameter
    save_model(model, tokenizer, tmp_path / "model")
    again = load_model(str(tmp_path / "model"))
    assert torch.equal(logits(model), logits(again))
    assert (again.config.pad_token_id, again.generation_config.eos_token_id) == (1, 1)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(logits(model), logits(plain))


def test_bfloat16_weights_come_back_with_the_same_bits(tmp_path: Path) -> None:
    model = load_model("v3-tiny", vocab_size=64, dtype=torch.bfloat16)
    save_model(model, None, tmp_path / "model")
    again = load_model(str(tmp_path / "model"), dtype=torch.bfloat16)
    assert torch.equal(logits(model), logits(again))


@pytest.mark.parametrize("name", TINY)
def test_tied_embeddings_are_written_once_and_come_back_tied(name: str, tmp_path: Path) -> None:
    config = build_config(PRESETS[name], vocab_size=64)
    config.tie_word_embeddings = True
    model = AutoModelForCausalLM.from_config(config)
    save_model(model, None, tmp_path / "model")
    again = load_model(str(tmp_path / "model"))
    assert torch.equal(logits(model), logits(again))
    assert again.get_input_embeddings().weight is again.get_output_embeddings().weight


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("targets", ["auto", "all-linear"])
def test_a_saved_adapter_comes_back_with_the_same_bits(
    name: str, targets: str, tokenizer: Any, tmp_path: Path
) -> None:
    def base() -> Any:
        return load_model(name, vocab_size=300, seed=4)

    model = with_random_b(add_lora(base(), rank=4, alpha=8, targets=targets))
    save_adapter(model, tokenizer, tmp_path / "adapter")
    again = PeftModel.from_pretrained(base(), tmp_path / "adapter")
    assert adapted_table(again) == adapted_table(model)
    assert torch.equal(logits(model), logits(again))
    assert not torch.equal(logits(model), logits(base()))
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_an_adapter_on_routed_experts_comes_back_and_merges(tmp_path: Path) -> None:
    model = load_model("v3-tiny", vocab_size=64)
    model = with_random_b(add_lora(model, rank=2, alpha=4, targets=["experts", "o_proj"]))
    save_adapter(model, None, tmp_path / "adapter")
    base = load_model("v3-tiny", vocab_size=64)
    again = PeftModel.from_pretrained(base, tmp_path / "adapter")
    adapted = logits(model)
    assert torch.equal(adapted, logits(again))
    torch.testing.assert_close(logits(merge(model)), adapted, rtol=1e-4, atol=1e-5)


def test_a_merged_adapter_on_tied_embeddings_saves_as_a_full_model(tmp_path: Path) -> None:
    config = build_config(PRESETS["r1-distill-qwen-tiny"], vocab_size=64)
    config.tie_word_embeddings = True
    tied = AutoModelForCausalLM.from_config(config)
    merged = merge(with_random_b(add_lora(tied, rank=4, alpha=8, targets="all-linear")))
    save_model(merged, None, tmp_path / "model")
    assert torch.equal(logits(merged), logits(load_model(str(tmp_path / "model"))))


def test_the_folder_has_the_files_that_other_tools_expect(
    saved_llama: Path, tokenizer: Any
) -> None:
    assert sorted(path.name for path in saved_llama.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    messages = [{"role": "user", "content": "words"}]
    template = load_tokenizer(str(saved_llama)).apply_chat_template(messages, tokenize=False)
    assert template == "words"


# The name and the folder


@pytest.fixture
def model() -> Any:
    return load_model("deepseek-llm-tiny", vocab_size=32)


def test_a_failed_save_leaves_the_old_model_and_nothing_else(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(model, None, tmp_path / "model")
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    other = load_model("deepseek-llm-tiny", vocab_size=32, seed=1)

    class Broken:
        def save_pretrained(self, folder: Path) -> None:
            raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        save_model(other, Broken(), tmp_path / "model")  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert {p.name: p.read_bytes() for p in (tmp_path / "model").iterdir()} == before


def test_if_the_last_rename_fails_the_old_model_gets_its_name_back(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(model, None, tmp_path / "model")
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise OSError("disk gone")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="disk gone"):
        save_model(model, None, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "config.json").is_file()


def test_a_new_model_replaces_the_old_one_whole(model: Any, tmp_path: Path) -> None:
    save_model(model, None, tmp_path / "model")
    (tmp_path / "model" / "model-00002-of-00002.safetensors").touch()
    save_model(model, None, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert not (tmp_path / "model" / "model-00002-of-00002.safetensors").exists()


def test_a_link_keeps_pointing_at_the_folder_that_is_replaced(model: Any, tmp_path: Path) -> None:
    save_model(model, None, tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    save_model(model, None, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "config.json").is_file()


def test_a_folder_that_is_not_a_model_is_never_deleted(model: Any, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match=r"holds thesis\.tex, which saving here would delete"):
        save_model(model, None, tmp_path)
    save_model(model, None, tmp_path / "model")
    (tmp_path / "model" / "checkpoints").mkdir()
    with pytest.raises(InputError, match="holds checkpoints"):
        save_model(model, None, tmp_path / "model")
    with pytest.raises(InputError, match="is a file"):
        save_model(model, None, tmp_path / "thesis.tex")
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_the_saved_folder_is_as_readable_as_any_new_one(model: Any, tmp_path: Path) -> None:
    save_model(model, None, tmp_path / "model")
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "model").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_the_two_kinds_of_saving_are_not_mistaken_for_each_other(
    model: Any, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="carries no adapter"):
        save_adapter(model, None, tmp_path / "a")
    with pytest.raises(InputError, match="carries an adapter"):
        save_model(add_lora(model, rank=2, alpha=2), None, tmp_path / "a")  # type: ignore[arg-type]
    assert not (tmp_path / "a").exists()
