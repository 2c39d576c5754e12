"""``hasten chat`` in a pipe: the run's template and adapter, and one sentence for bad input."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

Hasten = Callable[..., tuple[int, str, str]]


def ask(monkeypatch: pytest.MonkeyPatch, *questions: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{q}\n" for q in questions)))


def reference(base: Path, adapter: Path, question: str, tokens: int) -> str:
    """The answer by transformers and PEFT alone."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(adapter)
    model = AutoModelForCausalLM.from_pretrained(base)
    if (adapter / "adapter_config.json").is_file():
        model = PeftModel.from_pretrained(model, str(adapter))
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    written = model.eval().generate(
        **{k: inputs[k] for k in ("input_ids", "attention_mask")},
        max_new_tokens=tokens,
        do_sample=False,
    )
    text = tokenizer.decode(written[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return str(text).strip()


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_answers_are_those_of_transformers_alone(
    kind: str, full_run: Path, lora_run: Path, hasten: Hasten, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = full_run if kind == "full" else lora_run
    questions = ["how many apples does she have", "she gives two to her friend"]
    ask(monkeypatch, questions[0], "", questions[1])
    code, out, err = hasten("chat", run, "--json", "--max-new-tokens", 8)
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0, err
    assert [row["question"] for row in rows] == questions  # and each line is a new conversation
    saved = run / ("model" if kind == "full" else "adapter")
    expected = [reference(full_run / "model", saved, q, 8) for q in questions]
    assert [row["answers"]["run"] for row in rows] == expected


def test_the_base_answers_next_to_the_run(
    full_run: Path, lora_run: Path, hasten: Hasten, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(monkeypatch, "how many apples")
    code, out, _ = hasten("chat", lora_run, "--compare", "base", "--max-new-tokens", 4)
    assert code == 0
    assert out.startswith("[run]\n")
    expected = reference(full_run / "model", full_run / "model", "how many apples", 4)
    assert out.partition("[base]\n")[2].strip() == expected


def test_bad_input_is_one_sentence(
    lora_run: Path,
    full_run: Path,
    hasten: Hasten,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(run: Path, *words: str) -> str:
        ask(monkeypatch, "how many apples")
        code, out, err = hasten("chat", run, *words)
        assert (code, out, err.count("\n")) == (2, "", 1), (code, out, err)
        return err

    assert "there is no such folder" in refused(tmp_path / "missing")
    assert "has no saved weights in model or adapter" in refused(tmp_path)
    assert "has no saved weights in best" in refused(full_run, "--weights", "best")
    assert "is no preset" in refused(full_run, "--compare", "nothing")
    run = tmp_path / "run"
    shutil.copytree(lora_run, run)
    values = yaml.safe_load((run / "recipe.yaml").read_text())
    shutil.copytree(full_run / "model", tmp_path / "other")
    (run / "recipe.yaml").write_text(yaml.safe_dump(values | {"model": str(tmp_path / "other")}))
    assert "is an adapter of" in refused(run)
    (run / "recipe.yaml").write_text(yaml.safe_dump(values))
    (run / "adapter" / "chat_template.jinja").unlink()
    settings = run / "adapter" / "tokenizer_config.json"  # has it too, for older readers
    kept = {k: v for k, v in json.loads(settings.read_text()).items() if k != "chat_template"}
    settings.write_text(json.dumps(kept))
    assert "has no chat template" in refused(run)
    longest = json.loads((full_run / "model/config.json").read_text())["max_position_embeddings"]
    assert f"takes {longest}" in refused(full_run, "--system", "apples " * longest)
