"""``hasten chat`` and ``eval``: what they print and what they refuse."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
from pathlib import Path

import pytest
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from hasten.release.evaluation import eval_examples
from hasten.release.trained_model import load_run
from told import Hasten


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
    for errors in ("strict", "surrogateescape"):  # of a UTF-8 locale, and of the C locale
        broken = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8", errors=errors)
        monkeypatch.setattr("sys.stdin", broken)
        code, _, err = hasten("chat", full_run)
        assert (code, err.count("\n")) == (2, 1)
        assert "is not UTF-8 text: it has the byte 0xe9" in err
    longest = json.loads((full_run / "model/config.json").read_text())["max_position_embeddings"]
    assert f"takes {longest}" in refused(full_run, "--system", "apples " * longest)


class Typed(io.TextIOWrapper):
    """What is typed at a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_line_at_the_terminal_that_is_not_utf_8_is_named_and_the_next_one_answered(
    full_run: Path, hasten: Hasten, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = Typed(io.BytesIO(b"caf\xe9\nhow many apples\n/quit\n"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", typed)
    code, out, err = hasten("chat", full_run, "--max-new-tokens", "4")
    assert code == 0
    assert "a question is not UTF-8 text: it has the byte 0xe9" in err
    assert reference(full_run / "model", full_run / "model", "how many apples", 4) in out


def test_a_run_is_compared_with_its_base(full_run: Path, hasten: Hasten, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    rows = [{"question": f"{n} apples", "answer": "more apples"} for n in range(3)]
    pairs.write_text("\n".join(map(json.dumps, rows)))
    result = tmp_path / "result.json"
    code, out, err = hasten("eval", full_run, "--tasks", pairs, "--limit", 2, "-o", result)
    assert code == 0, err
    assert out.splitlines()[0].split()[:5] == ["task", "metric", "examples", "before", "after"]
    metrics = json.loads(result.read_text())["metrics"]
    assert [m["metric"] for m in metrics] == ["eval loss", "exact match"]
    assert all(m["examples"] == 2 and m["before"] is not None for m in metrics)


def test_an_answer_that_the_recipe_cut_is_no_exact_match_to_judge(
    full_run: Path, hasten: Hasten
) -> None:
    """A model that gives the whole answer would be wrong by an answer that lacks its end."""
    examples = eval_examples(full_run, lambda text: None)
    end = load_run(full_run).tokenizer.eos_token_id
    complete = [e for e in examples if e.input_ids[-1] == end]
    assert 0 < len(complete) < len(examples)
    code, out, err = hasten("eval", full_run, "--compare", "none", "--json")
    assert code == 0, err
    loss, exact = json.loads(out)["metrics"]
    assert (loss["examples"], exact["examples"]) == (len(examples), len(complete))


def test_a_result_that_finds_no_room_is_printed_all_the_same(
    full_run: Path, hasten: Hasten, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("hasten.machine.files.write_atomic", full)
    result = tmp_path / "result.json"
    code, out, err = hasten("eval", full_run, "--limit", 2, "--compare", "none", "-o", result)
    assert (code, err.count("\n")) == (2, 1)
    assert "eval loss" in out
    assert "result.json can't be written: No space left on device; make room" in err


def test_bad_input_of_eval_is_one_sentence(full_run: Path, hasten: Hasten, tmp_path: Path) -> None:
    def refused(*words: object) -> str:
        code, out, err = hasten("eval", *words)
        assert (code, out, err.count("\n")) == (2, "", 1), (code, out, err)
        return err

    assert "there is no such folder" in refused(tmp_path / "missing")
    assert "missing.jsonl" in refused(full_run, "--tasks", tmp_path / "missing.jsonl")
    assert "missing.yaml" in refused(full_run, "--tasks", tmp_path / "missing.yaml")
    assert "can't be written" in refused(full_run, "-o", tmp_path / "no" / "result.json")
    assert "is no preset" in refused(full_run, "--compare", "nothing")
