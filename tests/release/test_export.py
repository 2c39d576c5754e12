"""``hasten export``: what is written gives the logits of the model that was trained."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

from hasten.cli.main import app
from hasten.core.setup import Session
from hasten.errors import FAILED, InputError
from hasten.models.adapters import add_lora, merge, with_adapter
from hasten.models.load import load_model, load_tokenizer
from hasten.models.save import save_model
from hasten.models.weights import NumberFormats
from hasten.parts.checkpoint import checkpoints
from hasten.parts.checkpoint.saver import Saver
from hasten.parts.checkpoint.state import FrozenWeights
from hasten.parts.nn.late_weights import read_now
from hasten.recipe.build import lora_of, requested_plan
from hasten.recipe.schema import Recipe
from hasten.release import export as exporting
from hasten.release.trained_model import recipe_of
from hasten.training.run import train
from sample_data import small
from tiny import logits


def call(*words: object) -> Result:
    return CliRunner().invoke(app, ["export", *map(str, words)])


def refusal(*words: object) -> str:
    error = call(*words).exception
    assert isinstance(error, InputError), error
    assert "\n" not in str(error)
    return str(error)


def trained(folder: Path, **changes: Any) -> Path:
    train(Recipe(**small(folder, **changes)), tell=lambda text: None)
    return folder / "run"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published model in bfloat16, as it were, with a contradictory generation config."""
    folder = tmp_path_factory.mktemp("base")
    run = trained(folder, max_steps=1, model="r1-distill-qwen-tiny")
    model, tokenizer = load_model(str(run / "model")), load_tokenizer(str(run / "model"))
    model.generation_config.temperature = 0.6
    save_model(model, tokenizer, folder / "base", NumberFormats(torch.bfloat16))
    return folder / "base"


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA run on a quantised base with random weights."""
    return trained(
        tmp_path_factory.mktemp("lora"),
        model="v2-lite-tiny",
        finetuning_type="lora",
        lora_base="nf4",
        checkpoint_every=1,
    )


@pytest.fixture(scope="module")
def exported(lora_run: Path) -> tuple[Path, str]:
    """The LoRA run exported, and what was printed."""
    result = call(lora_run, "-o", lora_run.parent / "out")
    assert result.exit_code == 0, result.output
    return lora_run.parent / "out", result.stdout


@pytest.fixture(scope="module")
def full_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"plan": ["packed", "weight_average"], "checkpoint_every": 3, "eval_every": 1}
    return trained(tmp_path_factory.mktemp("full"), **changes)


@pytest.fixture(scope="module")
def run_on_base(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    return trained(folder, model=str(base), finetuning_type="lora", lora_rank=4, lora_rslora=True)


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[Path], Path]:
    """A copy of a run that a test may damage."""

    def copied(run: Path) -> Path:
        return Path(shutil.copytree(run, tmp_path / "copy"))

    return copied


def test_plain_transformers_load_the_trained_model_from_an_export(
    lora_run: Path, exported: tuple[Path, str]
) -> None:
    folder, printed = exported
    assert "on the original base, compared with the base in nf4" in printed
    assert "8 eval examples and 12 training examples" in printed
    assert f"to serve it: transformers serve {folder}\n" in printed
    assert f"to serve it: vllm serve {folder} --host 127.0.0.1\n" in printed
    tokenizer = load_tokenizer(str(lora_run / "adapter"))
    expected = logits(with_adapter(_base_of(lora_run), lora_run / "adapter"))
    found = logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    plain = AutoTokenizer.from_pretrained(folder)
    assert plain.chat_template == tokenizer.chat_template
    stored = json.loads((folder / "export.json").read_text())
    quantised, last = stored["comparisons"]
    assert stored["equal"]
    assert last["examples"] == 20
    assert last["largest"] <= last["tolerance"] == 1e-5
    assert quantised["tolerance"] is None
    assert quantised["largest"] > 1e-3
    card = (folder / "README.md").read_text()
    assert "compared with the trained model" in card
    assert f"{last['mean']:.2g}" in card


def test_generation_stops_where_training_taught_it(exported: tuple[Path, str]) -> None:
    folder, _ = exported
    config = json.loads((folder / "generation_config.json").read_text())
    tokenizer = load_tokenizer(str(folder))
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    ids = tokenizer.apply_chat_template(turns, return_dict=False)
    ends = config["eos_token_id"]
    assert ids[-1] in (ends if isinstance(ends, list) else [ends])
    assert ids.count(tokenizer.bos_token_id) <= 1


@pytest.mark.parametrize(
    "weights", ["average", pytest.param("best", marks=pytest.mark.long), "checkpoint"]
)
def test_other_weights_of_a_run_are_exported(full_run: Path, weights: str, tmp_path: Path) -> None:
    result = call(full_run, "-o", tmp_path / "out", "--weights", weights, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["comparisons"][0]["largest"] == 0
    folder = {"average": "model_average", "best": "best", "checkpoint": "model"}[weights]
    expected = load_file(full_run / folder / "model.safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_an_unfinished_lora_run_exports_its_newest_checkpoint(
    lora_run: Path, copy: Callable[[Path], Path], tmp_path: Path
) -> None:
    run = copy(lora_run)
    expected = logits(with_adapter(_base_of(run), run / "adapter"))
    shutil.rmtree(run / "adapter")
    (run / "summary.json").unlink()
    assert "choose other weights of the run" in refusal(run, "-o", tmp_path / "out")
    result = call(run, "-o", tmp_path / "out", "--weights", "checkpoint")
    assert result.exit_code == 0, result.output
    assert "no model card is written" in result.stdout
    found = logits(load_model(str(tmp_path / "out")))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_checkpoint_on_another_base_is_refused(lora_run: Path) -> None:
    recipe = recipe_of(lora_run)
    lora = lora_of(recipe, requested_plan(recipe))
    assert lora is not None
    rows = len(load_tokenizer(str(lora_run / "adapter")))
    newest = checkpoints(lora_run / "checkpoints")[-1]

    def load(model: Any) -> None:
        exporting._load_checkpoint(model, newest, lambda: FrozenWeights(model).hash)

    for seed in (recipe.seed, recipe.seed + 1):
        model = lora.adapt(load_model(recipe.model, seed=seed, vocab_size=rows))
        with contextlib.ExitStack() as stack:
            if seed != recipe.seed:
                pattern = r"trained on another base: its \d+ frozen weights differ .* set model to"
                stack.enter_context(pytest.raises(InputError, match=pattern))
            load(model)


def test_the_command_that_a_failed_save_prints_writes_the_trained_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sessions: list[Session] = []
    recipe = Recipe(**small(tmp_path, max_steps=4, checkpoint_every=2))
    with monkeypatch.context() as patch:
        patch.setattr("hasten.training.folder.save_model", fails)
        summary = train(recipe, tell=lambda text: None, on_start=sessions.append)
    [command] = re.findall("`hasten (.*?)`", " ".join(summary["unsaved"]))
    words = [str(tmp_path / "out") if word == "FOLDER" else word for word in command.split()]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    found = load_model(str(tmp_path / "out"), dtype=torch.float32).state_dict()
    for name, weight in sessions[0].model.state_dict().items():
        assert torch.equal(found[name], weight), name


def _base_of(run: Path) -> Any:
    return load_model("v2-lite-tiny", vocab_size=len(load_tokenizer(str(run / "adapter"))))


@pytest.mark.slow
def test_an_export_has_the_format_of_its_base_and_a_valid_generation_config(
    base: Path, run_on_base: Path, tmp_path: Path
) -> None:
    result = call(run_on_base, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "do_sample is written as true" in result.stdout
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {weight.dtype for weight in stored.values()} == {torch.bfloat16}
    merged = merge(with_adapter(load_model(str(base)), run_on_base / "adapter")).state_dict()
    assert all(torch.equal(stored[n], merged[n].to(torch.bfloat16)) for n in stored)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    model.generation_config.validate(strict=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")  # a qwen2 model, no ChatML
    parsed = tokenizer.parse_response(f"Two.{tokenizer.eos_token}", prefix="User: ?\n\nAssistant:")
    assert parsed == {"role": "assistant", "content": "Two."}
    comparison = json.loads((tmp_path / "out" / "export.json").read_text())["comparisons"][0]
    assert comparison["format"] == "bfloat16"
    assert 0 < comparison["mean"] <= 5e-2


@pytest.mark.slow
def test_an_adapter_alone_is_exported_without_paths_of_the_machine(
    base: Path, run_on_base: Path, tmp_path: Path
) -> None:
    result = call(run_on_base, "-o", tmp_path / "out", "--adapter")
    assert result.exit_code == 0
    served = f"--max-lora-rank 8 --lora-modules adapter={tmp_path / 'out'}"
    assert f"vllm serve {base} --host 127.0.0.1 --enable-lora {served}\n" in result.stdout
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "README.md"} <= names
    assert "model.safetensors" not in names
    for file in (tmp_path / "out").glob("*.*"):
        for folder in (tmp_path, run_on_base.parent):
            assert str(folder).encode() not in file.read_bytes(), file
        assert str(base.parent).encode() not in file.read_bytes(), file
    before = load_file(run_on_base / "adapter" / "adapter_model.safetensors")
    after = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert all(torch.equal(after[name], before[name]) for name in before)
    # llama.cpp's converter reads lora_alpha alone, and its programs divide it by the rank.
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    layers = with_adapter(load_model(str(base)), tmp_path / "out").modules()
    scaling = next(layer.scaling["default"] for layer in layers if isinstance(layer, LoraLayer))
    assert f"{scaling * config['r'] / config['lora_alpha']:.3g} times too weak" in result.stdout


@pytest.mark.parametrize("kind", [pytest.param("f16", marks=pytest.mark.long), "q8_0"])
def test_a_gguf_file_has_the_logits_of_the_trained_model(
    kind: str, lora_run: Path, tmp_path: Path
) -> None:
    pytest.importorskip("gguf", reason="needs the package gguf, of the extra gguf")
    words = ("-o", tmp_path / "out", "--to", "gguf", "--gguf-type", kind)
    result = call(lora_run, *words)
    assert result.exit_code == 0, result.output
    file = tmp_path / "out" / f"out-{kind.upper()}.gguf"
    assert file.is_file()
    assert f"to serve it: llama-server -m {file}\n" in result.stdout
    comparison = json.loads((tmp_path / "out" / "export.json").read_text())["comparisons"][-1]
    assert 0 < comparison["mean"] <= comparison["tolerance"]
    assert "library_name: gguf" in (tmp_path / "out" / "README.md").read_text()


def test_a_mismatch_is_exit_code_4_and_nothing_is_uploaded(
    full_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(model: Any, *rest: Any) -> Any:
        read_now(model)
        model.lm_head.weight.data[5] += 0.1
        return save_model(model, *rest)

    def fail(*words: object) -> None:
        pytest.fail("uploaded")

    monkeypatch.setattr(exporting, "save_model", changed)
    monkeypatch.setattr(exporting, "check_upload", lambda *words: None)
    monkeypatch.setattr(exporting, "upload", fail)
    result = call(full_run, "-o", tmp_path / "out", "--push", "me/model")
    assert result.exit_code == FAILED
    assert "DIFFERENT" in result.stdout
    assert "nothing was uploaded" in result.stderr
    assert not json.loads((tmp_path / "out" / "export.json").read_text())["equal"]


def test_a_model_that_amplifies_rounding_is_measured_by_its_own(
    lora_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(exporting.TOLERANCES, "float32", 1e-9)
    assert call(lora_run, "-o", tmp_path / "out").exit_code == 0
    last = json.loads((tmp_path / "out" / "export.json").read_text())["comparisons"][-1]
    assert 1e-9 < last["largest"] <= last["tolerance"] < 1e-4


def test_weights_that_are_no_numbers_are_never_equal() -> None:
    found = exporting.compare("a", "float32", [torch.tensor([[torch.nan]])], [torch.ones(1, 1)], 1)
    assert not found.is_equal


def test_the_findings_of_an_experiment_join_the_card(full_run: Path, tmp_path: Path) -> None:
    report = Path(__file__).parents[1] / "report/data/report_full.json"
    assert call(full_run, "-o", tmp_path / "out", "--report", report).exit_code == 0
    assert "| only fused_layers" in (tmp_path / "out" / "README.md").read_text()
    (tmp_path / "list.json").write_text("[]")
    words = (full_run, "-o", tmp_path / "new", "--report", tmp_path / "list.json")
    assert "is not a report.json of an experiment" in refusal(*words)


def test_bad_input_is_one_sentence_and_nothing_is_written(
    full_run: Path, lora_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, busy = tmp_path / "out", tmp_path / "busy"
    busy.mkdir()
    (busy / "mine").write_text("mine")
    for words, sentence in (
        ((tmp_path, "-o", out), "has no recipe.yaml: give the folder of a finished run"),
        ((full_run, "-o", busy), "is not an empty folder"),
        ((full_run, "-o", busy / "mine"), "is not an empty folder"),
        ((full_run, "-o", out, "--adapter"), "trained all weights, so it has no adapter"),
        ((full_run, "-o", out, "--weights", "last"), "choose from final, average, best"),
        ((lora_run, "-o", out, "--weights", "average"), "holds no adapter"),
        ((lora_run, "-o", out, "--gguf-type", "q4"), "--gguf-type q4 is unknown"),
        ((lora_run, "-o", out, "--adapter", "--to", "gguf"), "exclude each other"),
        ((lora_run, "-o", out, "--gguf-type", "f16"), "f16 is for a GGUF file: add --to gguf"),
        ((lora_run, "-o", "model.gguf"), "-o model.gguf is for a GGUF file: add --to gguf"),
        ((lora_run, "-o", out, "--push", "a name"), "is no name of a repository"),
        ((lora_run, "-o", out, "--push", "name"), "names no owner"),
    ):
        assert sentence in refusal(*words)
    usage = shutil.disk_usage(tmp_path)._replace(free=2**20)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        assert "GB are free there: make room" in refusal(full_run, "-o", out)

    def full(*rest: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "save_model", full)
    assert "No space left on device): make room" in refusal(full_run, "-o", out)
    assert [path.name for path in tmp_path.iterdir()] == ["busy"]


def test_an_adapter_of_another_base_and_a_missing_template_are_refused(
    lora_run: Path, base: Path, copy: Callable[[Path], Path], tmp_path: Path
) -> None:
    run, out = copy(lora_run), tmp_path / "out"
    recipe = (run / "recipe.yaml").read_text()
    other = recipe.replace("model: v2-lite-tiny", f"model: {base}", 1)
    (run / "recipe.yaml").write_text(other)
    assert "adapter of this model" in refusal(run, "-o", out)
    config = json.loads((run / "adapter" / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "some/other"
    (run / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    assert "is an adapter of some/other" in refusal(run, "-o", out)
    (run / "recipe.yaml").write_text(recipe)
    file = run / "adapter" / "tokenizer_config.json"
    fields = json.loads(file.read_text())
    fields.pop("chat_template", None)
    file.write_text(json.dumps(fields))
    (run / "adapter" / "chat_template.jinja").unlink(missing_ok=True)
    assert "has no chat template" in refusal(run, "-o", out)


def test_a_template_that_begins_twice_is_refused(
    full_run: Path, copy: Callable[[Path], Path], tmp_path: Path
) -> None:
    run = copy(full_run)
    tokenizer = load_tokenizer(str(run / "model"))
    tokenizer.chat_template = "{{ bos_token }}" + str(tokenizer.chat_template)
    tokenizer.save_pretrained(run / "model")
    file = run / "model" / "tokenizer_config.json"
    fields = json.loads(file.read_text())
    fields.pop("chat_template", None)
    file.write_text(json.dumps(fields))
    assert "twice" in refusal(run, "-o", tmp_path / "out")


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    saver = Saver(tmp_path, 1)
    saver.save(1, {"model/w": torch.ones(3)}, {})
    saver.close()
    model = add_lora(load_model("deepseek-llm-tiny", vocab_size=64), rank=2, alpha=2)
    with pytest.raises(InputError, match="of another model than the recipe's"):
        exporting._load_checkpoint(model, checkpoints(tmp_path)[-1])
