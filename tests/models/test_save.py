"""Saving: what comes back has the same bits, and a name never stands for half a model."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import Chunk, WeightConverter

from covering import covering
from hasten.errors import InputError
from hasten.models import weight_files
from hasten.models.adapters import adapted_table, add_lora, merge
from hasten.models.load import load_model, load_tokenizer, stored_formats
from hasten.models.presets import PRESETS, build_config
from hasten.models.save import save_adapter, save_model
from hasten.models.weight_files import UNSPLIT, WeightFiles, WeightPlan
from hasten.models.weights import NumberFormats
from tiny import logits

TINY = [name for name in PRESETS if name.endswith("-tiny")]


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


@pytest.mark.parametrize(("name", "targets"), covering(TINY, ["auto", "all-linear"]))
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

    def full(*given: Any, **named: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(WeightFiles, "write", full)
    with pytest.raises(OSError, match="no space left"):
        save_model(other, None, tmp_path / "model")
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


# What costs no weights


def saved_formats_of(folder: Path) -> dict[str, torch.dtype]:
    from safetensors.torch import load_file

    return {name: weight.dtype for name, weight in load_file(folder / "model.safetensors").items()}


@pytest.mark.parametrize(
    "contradiction",
    [
        {"temperature": 0.6},
        {"top_p": 0.9, "do_sample": False},
        {"top_k": 20},
        {"length_penalty": 2.0},
        {"output_scores": True},
        {"pad_token_id": -1},
        {"early_stopping": True},
    ],
    ids=lambda found: next(iter(found)),
)
def test_a_generation_config_that_transformers_calls_invalid_is_saved_as_it_is(
    model: Any, contradiction: dict[str, Any], tmp_path: Path
) -> None:
    for key, value in contradiction.items():
        setattr(model.generation_config, key, value)
    with pytest.raises(ValueError, match="invalid"):
        model.generation_config.save_pretrained(tmp_path)
    assert save_model(model, None, tmp_path / "model") == []
    written = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert {key: written.get(key, False) for key in contradiction} == contradiction
    assert torch.equal(logits(load_model(str(tmp_path / "model"))), logits(model))


def test_what_cannot_be_written_is_named_and_the_weights_are_there(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        chat_template = None

        def save_pretrained(self, folder: Path) -> None:
            raise RuntimeError("two\n  lines")

    def fails(*given: Any, **named: Any) -> None:
        raise ValueError("invalid config")

    monkeypatch.setattr(type(model.config), "to_json_string", fails)
    model.generation_config.to_diff_dict = fails
    before = model.state_dict()
    assert save_model(model, Broken(), tmp_path / "model") == [  # type: ignore[arg-type]
        "config.json couldn't be written: invalid config",
        "generation_config.json couldn't be written: invalid config",
        "the tokenizer couldn't be written: two lines",
    ]
    from safetensors.torch import load_file

    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(before[name], weight) for name, weight in stored.items())


def test_weights_are_saved_in_the_formats_that_are_asked_for(tmp_path: Path) -> None:
    model = load_model("v3-tiny", vocab_size=64)
    norm = "model.norm.weight"
    formats = NumberFormats(torch.bfloat16, {norm: torch.float32})
    assert save_model(model, None, tmp_path / "model", formats) == []
    found = saved_formats_of(tmp_path / "model")
    kept = {name for name, kind in found.items() if kind == torch.float32}
    assert {name for name in kept if not name.endswith("e_score_correction_bias")} == {norm}
    assert len(kept) > 1  # the routers' biases are no parameters
    assert set(found.values()) == {torch.float32, torch.bfloat16}
    assert next(model.parameters()).dtype == torch.float32
    again = load_model(str(tmp_path / "model"))
    theirs = dict(again.named_parameters())
    for name, weight in model.named_parameters():
        expected = weight if name == norm else weight.to(torch.bfloat16).float()
        assert torch.equal(theirs[name], expected)
    assert stored_formats(str(tmp_path / "model"), again.config).most == torch.bfloat16


def test_what_float16_cannot_hold_is_saved_as_it_is(model: Any, tmp_path: Path) -> None:
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data[0, 0] = 7e4
    (problem,) = save_model(model, None, tmp_path / "model", NumberFormats(torch.float16))
    assert problem.startswith("model.layers.0.mlp.up_proj.weight has values that float16 can't")
    assert set(saved_formats_of(tmp_path / "model").values()) == {torch.float32}
    weight.data[0, 0] = float("inf")
    assert save_model(model, None, tmp_path / "model", NumberFormats(torch.float16)) == []


def test_tied_weights_that_are_rounded_are_written_once(tmp_path: Path) -> None:
    config = build_config(PRESETS["deepseek-llm-tiny"], vocab_size=64)
    config.tie_word_embeddings = True
    model = AutoModelForCausalLM.from_config(config)
    save_model(model, None, tmp_path / "model", NumberFormats(torch.bfloat16))
    assert "lm_head.weight" not in saved_formats_of(tmp_path / "model")


def test_a_tokenizer_is_written_in_words_of_transformers_4(
    model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    """4.57 fails on a list under extra_special_tokens and on the class TokenizersBackend."""
    tokenizer.save_pretrained(tmp_path / "before")
    marked = load_tokenizer(str(tmp_path / "before"))
    marked.add_special_tokens({"extra_special_tokens": ["<mark>"]})
    marked.chat_template = {"default": "plain", "tool_use": "tools"}
    assert save_model(model, marked, tmp_path / "model") == []
    fields = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    assert fields["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert fields["additional_special_tokens"] == ["<mark>"]
    assert "extra_special_tokens" not in fields
    assert "token_type_ids" not in fields["model_input_names"]
    assert fields["add_bos_token"] == (marked("a").input_ids[0] == marked.bos_token_id)
    assert fields["chat_template"] == [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
    ]
    again = load_tokenizer(str(tmp_path / "model"))
    assert again.extra_special_tokens == ["<mark>"]
    assert again.chat_template == marked.chat_template
    save_model(model, marked, tmp_path / "model")  # its folder of templates is its own


def test_a_sentencepiece_vocabulary_stays_beside_its_tokenizer(
    model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    tokenizer.save_pretrained(tmp_path / "before")
    (tmp_path / "before" / "tokenizer.model").write_bytes(b"pieces")
    assert save_model(model, load_tokenizer(str(tmp_path / "before")), tmp_path / "after") == []
    assert (tmp_path / "after" / "tokenizer.model").read_bytes() == b"pieces"


# The weights, one group at a time


def test_a_merged_adapter_is_saved_as_transformers_saves_it(tmp_path: Path) -> None:
    adapted = add_lora(load_model("v3-tiny", vocab_size=64), rank=2, alpha=4, targets="all-linear")
    merged: Any = merge(with_random_b(adapted))
    save_model(merged, None, tmp_path / "model")
    merged.save_pretrained(tmp_path / "plain")
    files = [tmp_path / name / "model.safetensors" for name in ("model", "plain")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_several_files_have_the_index_and_bytes_of_transformers(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "SHARD_BYTES", 60_000)
    save_model(model, None, tmp_path / "model")
    model.save_pretrained(tmp_path / "plain", max_shard_size=60_000)
    names = sorted(path.name for path in (tmp_path / "plain").glob("model*"))
    assert len(names) > 2
    assert names == sorted(path.name for path in (tmp_path / "model").glob("model*"))
    for name in names:
        assert (tmp_path / "model" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


def test_weights_that_are_stored_as_one_are_gathered_together(model: Any, tmp_path: Path) -> None:
    """A file of q, k and v in one matrix needs all three; every other weight comes alone."""
    names = [f"self_attn.{n}_proj.weight" for n in "qkv"]
    model._weight_conversions = [WeightConverter(["self_attn.qkv.weight"], names, [Chunk(dim=0)])]
    plan = WeightPlan(model, NumberFormats(), UNSPLIT)
    sizes = [len(group) for group in plan.gathered()]
    layers = model.config.num_hidden_layers
    assert sizes.count(9) == layers  # with its layer
    assert sizes.count(1) == len(sizes) - layers
    save_model(model, None, tmp_path / "model")
    model.save_pretrained(tmp_path / "plain")
    files = [tmp_path / name / "model.safetensors" for name in ("model", "plain")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_process_that_is_killed_while_it_saves_leaves_no_folder_of_that_name(
    model: Any, tmp_path: Path
) -> None:
    child = os.fork()
    if not child:
        written: list[int] = []
        write = WeightFiles.write

        def dying(files: WeightFiles, tensors: Any) -> None:
            write(files, tensors)
            written.append(1)
            if len(written) == 3:
                os.kill(os.getpid(), signal.SIGKILL)

        WeightFiles.write = dying  # type: ignore[method-assign]  # in this process alone
        save_model(model, None, tmp_path / "model")
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert not (tmp_path / "model").exists()
    assert [path.name.startswith(".model.partial-") for path in tmp_path.iterdir()] == [True]
