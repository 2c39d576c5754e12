"""What is said of a chat template before a model is trained with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hasten.cli import data as data_command
from hasten.cli.check import check
from hasten.data.tokenize import train_bpe
from hasten.models.load import load_model
from hasten.models.save import save_model
from hasten.recipe.prepared_data import prepare_data, template_advice
from hasten.recipe.schema import Recipe

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_END = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
THOUGHTFUL = [
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\n1"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "2"},
]


def recipe(folder: Path, template: str, tokens: tuple[str, ...] = (), **changes: Any) -> Recipe:
    """Dialogues and a tokenizer of two files; the model is a preset unless it is given."""
    tokenizer = train_bpe(["one two"], 300)
    tokenizer.add_tokens(list(tokens), special_tokens=True)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder / "tokenizer")
    rows = [{"messages": THOUGHTFUL}] * 4
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Recipe(
        **{
            "model": "deepseek-llm-tiny",
            "tokenizer": str(folder / "tokenizer"),
            "dataset": str(folder / "data.jsonl"),
            "eval_data": 0,
            "max_steps": 1,
            "output": str(folder / "run"),
            "data_workers": 1,
            **changes,
        }
    )


def advice(found: Recipe) -> list[str]:
    return template_advice(found, prepare_data(found, Path(found.output) / "data"))


def test_a_template_without_an_end_token_is_told(tmp_path: Path) -> None:
    (said,) = advice(recipe(tmp_path, NO_END))
    assert said.startswith("the chat template writes nothing after an answer and no end token")


def test_an_end_that_the_tokenizer_splits_is_no_end_token(tmp_path: Path) -> None:
    (said,) = advice(recipe(tmp_path, CHATML))
    assert "writes '<|im_end|>' after an answer and no end token" in said
    missing, _ = advice(recipe(tmp_path, NO_END, chat_template="chatml"))
    assert "chatml needs the special tokens <|im_start|>, <|im_end|>" in missing


def test_nothing_is_said_where_answers_end_with_a_token(tmp_path: Path) -> None:
    found = recipe(tmp_path, CHATML, ("<|im_start|>", "<|im_end|>"))
    assert advice(found) == []
    data = prepare_data(found, Path(found.output) / "data")
    assert data.note.stop_token == data.tokenizer.convert_tokens_to_ids("<|im_end|>")


@pytest.mark.parametrize(("answer", "is_told"), [("2", True), ("hm\n</think>\n\n2", False)])
def test_answers_without_the_thought_that_a_prompt_opens_are_counted(
    tmp_path: Path, answer: str, is_told: bool
) -> None:
    opening = CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
    found = recipe(tmp_path, opening, ("<|im_start|>", "<|im_end|>"))
    thought = f"<think>\n{answer}" if "</think>" in answer else answer
    turns = [{"role": "user", "content": "two?"}, {"role": "assistant", "content": thought}]
    (tmp_path / "data.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 3)
    expected = "a prompt ends with <think> under this chat template, and 3 answers have no thought"
    assert [expected in sentence for sentence in advice(found)] == [True] * is_told


def test_texts_of_a_tokenizer_without_an_end_token_are_told(tmp_path: Path) -> None:
    found = recipe(tmp_path, CHATML, ("<|im_start|>", "<|im_end|>"))
    (tmp_path / "data.jsonl").write_text('{"text": "one two"}\n' * 3)
    settings = tmp_path / "tokenizer" / "tokenizer_config.json"
    fields = json.loads(settings.read_text())
    del fields["eos_token"]
    settings.write_text(json.dumps(fields))
    (said,) = advice(found)
    assert said.startswith("the tokenizer has no end token")


def test_an_adapter_s_base_that_stops_elsewhere_is_told(tmp_path: Path) -> None:
    base = tmp_path / "base"
    save_model(load_model("deepseek-llm-tiny", vocab_size=400), None, base)
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [2]}))
    tokens = ("<|im_start|>", "<|im_end|>")
    lora = {"finetuning_type": "lora", "model": str(base)}
    (said,) = advice(recipe(tmp_path, CHATML, tokens, **lora))
    assert "answers end with <|im_end|>, an end token at which the base model doesn't stop" in said
    full = recipe(tmp_path, CHATML, tokens, model=str(base), output=str(tmp_path / "full"))
    assert advice(full) == []


def test_thoughts_that_are_left_out_are_counted_also_by_a_later_start(tmp_path: Path) -> None:
    found = recipe(tmp_path, NO_END, chat_template="deepseek-r1")
    for _ in range(2):
        *_, said, _ = advice(found)
        assert said.startswith("4 answers are trained without their thoughts")


def test_values_of_calls_in_pythons_notation_are_told_also_by_a_later_start(tmp_path: Path) -> None:
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% for k, v in "
    calls += "c.function.arguments | items %} {{ k }}={{ v }}{% endfor %}{% endfor %}"
    template = CHATML.replace("+ m.content +", "+ (m.content or '') }}" + calls + "{{", 1)
    found = recipe(tmp_path, template, ("<|im_start|>", "<|im_end|>"))
    function = {"name": "f", "arguments": {"a": None, "b": True}}
    answer = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
    turns = [{"role": "user", "content": "two?"}, answer]
    (tmp_path / "data.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 3)
    for _ in range(2):
        (said,) = advice(found)
        assert "tool calls of 3 examples are trained with values in Python's notation" in said


def test_plain_text_needs_no_template(tmp_path: Path) -> None:
    found = recipe(tmp_path, NO_END)
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": "a tale"}) + "\n")
    assert advice(found) == []


def test_the_commands_say_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = recipe(tmp_path, NO_END)
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(found.model_dump(mode="json", exclude_defaults=True)))
    data_command.inspect(path, [], 1)
    assert "warning: the chat template writes nothing" in capsys.readouterr().err
    check(path, [])
    assert "warn template" in capsys.readouterr().out
