"""Shapes of data of other tools: each is read as its documentation says, or refused by its name.

`foreign/shapes.yaml` has the cases and an independent reading of each. What is read is compared
with it turn by turn, and its tokens and loss with those of Transformers' own rendering.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from hasten.data.chat_template import THOUGHTS_LEFT_OUT, encode
from hasten.data.conversation import Conversation, columns_of
from hasten.data.prompt_formats import template_file
from hasten.data.readers import ReadExamples, read_examples, read_sources
from hasten.data.sources import Source, source_of
from hasten.data.tokenize import train_bpe
from hasten.errors import InputError
from hasten.foreign_files import is_too_deep, open_regular
from hasten.formatting import shown

CASES = {
    case["name"]: case
    for case in yaml.load(
        (Path(__file__).parent / "foreign" / "shapes.yaml").read_text(), yaml.CSafeLoader
    )
}
TYPES = {
    "maps": pa.list_(pa.map_(pa.string(), pa.string())),
    "large": pa.large_string(),
    "dictionary": pa.dictionary(pa.int32(), pa.string()),
    "bytes": pa.binary(),
}
CHATML = """\
{%- if tools %}<im>tools{% for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}<end>
{% endif %}
{%- for m in messages %}{{ '<im>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}{% generation %}
{%- if m.reasoning_content or m.thinking %}<think>
{{ (m.reasoning_content or m.thinking) + '\\n</think>\\n\\n' }}{% endif %}
{{- m.content or '' }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<call>' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
{{- '</call>' }}{% endfor %}<end>{% endgeneration %}
{{- '\\n' }}{% else %}{{ m.content + '<end>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<im>assistant\\n' }}{% endif %}"""


@pytest.fixture(scope="module")
def chatml() -> Any:
    tokenizer = train_bpe(["assistant user system tool <think> Hello"] * 3, 300)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<im>", "<end>"]})
    tokenizer.chat_template = CHATML
    return tokenizer


def maps(value: Any, kind: str | None) -> Any:
    """Lists of pairs as Arrow takes them for maps."""
    if kind != "maps":
        return value.encode() if kind == "bytes" else value
    return [[tuple(pair) for pair in one] for one in value]


def write(path: Path, case: dict[str, Any]) -> None:
    examples = case.get("examples", [])
    if "text" in case:
        path.write_bytes(case["text"].encode())
    elif path.suffix == ".json":
        path.write_text(json.dumps(examples))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(example) + "\n" for example in examples))
    else:
        kinds = case.get("types", {})
        columns = {
            name: pa.array(
                [maps(example.get(name), kinds.get(name)) for example in examples],
                TYPES.get(kinds.get(name)),
            )
            for name in dict.fromkeys(key for example in examples for key in example)
        }
        table = pa.table(columns)
        if path.suffix == ".parquet":
            pq.write_table(table, path)
        else:
            with pa.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table)


def read(folder: Path, case: dict[str, Any]) -> ReadExamples:
    path = folder / case.get("file", "data.jsonl")
    write(path, case)
    if "entry" in case:
        listing = {"mine": {"file_name": path.name, **case["entry"]}}
        (folder / "dataset_info.json").write_text(json.dumps(listing))
        source = source_of(f"{folder}:mine")
    else:
        source = Source(path, columns_of(case.get("columns", {})))
    return read_sources([source])[0]


def turns(found: Conversation) -> list[list[Any]]:
    """A dialogue in the notation of the catalogue."""
    if found.text is not None:
        return [["text", found.text]]
    rows: list[list[Any]] = []
    for turn in found.messages:
        calls = [[call.name, json.loads(call.arguments)] for call in turn.calls]
        if turn.role == "tools":
            names = [tool["function"]["name"] for tool in json.loads(turn.content)]
            rows.append(["tools", *names])
        elif turn.role == "assistant":
            kind = ("answer" if turn.trained else "shown") if not calls else "call"
            kind = "shown_call" if calls and not turn.trained else kind
            rows.append([kind, turn.content, *calls, *([turn.thoughts] if turn.thoughts else [])])
        else:
            rows.append(["result" if turn.role == "tool" else turn.role, turn.content])
    return rows


def expected_tokens(
    tokenizer: Any, rows: list[list[Any]], tools: Any
) -> tuple[list[int], list[bool]]:
    """Tokens and loss by Transformers; an answer without loss has its span's marks taken out."""
    if rows[0][0] == "text":
        ids = tokenizer.encode(rows[0][1], add_special_tokens=False)
        ids = [tokenizer.bos_token_id, *ids, tokenizer.eos_token_id]
        return ids, [True] * len(ids)
    messages: list[dict[str, Any]] = []
    learnt: list[bool] = []
    for kind, text, *more in (row for row in rows if row[0] != "tools"):
        role = {"user": "user", "system": "system", "result": "tool"}.get(kind, "assistant")
        turn: dict[str, Any] = {"role": role, "content": text}
        if kind in ("call", "shown_call"):
            turn["tool_calls"] = [
                {"type": "function", "function": {"name": name, "arguments": arguments}}
                for name, arguments in more
            ]
        elif more:
            turn["reasoning_content"] = more[0]
        messages.append(turn)
        if role == "assistant":
            learnt.append(kind in ("answer", "call"))
    found = tokenizer.apply_chat_template(
        messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
    )
    marks = [bool(mark) for mark in found["assistant_masks"]]
    number = -1
    for at, mark in enumerate(marks):
        number += mark and not (at and found["assistant_masks"][at - 1])
        marks[at] = mark and learnt[number]
    return found["input_ids"], marks


def test_the_catalogue_names_a_source_and_one_outcome_of_each_case() -> None:
    assert len(CASES) >= 120
    for case in CASES.values():
        assert case["source"]
        assert ("read" in case) != ("refused" in case)


@pytest.mark.parametrize("name", CASES)
def test_a_shape_is_read_as_documented_or_refused_with_its_cause(
    tmp_path: Path, chatml: Any, name: str
) -> None:
    case = CASES[name]
    if "refused" in case:
        with pytest.raises(InputError, match=f"(?s){case['refused']}") as refused:
            read(tmp_path, case)
        assert "Error" not in str(refused.value)
        return
    reading = read(tmp_path, case)
    assert reading.rejected == []
    assert [turns(found) for found in reading.conversations] == case["read"]
    (unread,) = reading.unread.values()
    assert sorted(unread) == case.get("unread", [])
    for found, rows in zip(reading.conversations, case["read"], strict=True):
        tools = rows[0][0] == "tools" and json.loads(found.messages[0].content)
        (example,) = encode(chatml, found, 10_000).examples
        ids, marks = expected_tokens(chatml, rows, tools or None)
        assert example.input_ids.tolist() == ids
        assert example.trained.tolist() == marks


# As Qwen3's: thoughts are written after the last question alone.
LAST_THOUGHTS = """\
{%- set ns = namespace(last=0) %}{% for m in messages %}
{%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{{ '<im>' + m.role + '\\n' }}{% if m.role == 'assistant' %}{% generation %}
{%- if loop.index0 > ns.last and m.reasoning_content %}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- m.content }}<end>{% endgeneration %}{{ '\\n' }}{% else %}{{ m.content + '<end>\\n' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<im>assistant\\n' }}{% endif %}"""


def test_answers_keep_their_loss_where_thoughts_of_earlier_ones_are_dropped(
    tmp_path: Path, chatml: Any
) -> None:
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yo", "reasoning_content": "One."},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "Night", "reasoning_content": "Two."},
    ]
    (found,) = read(tmp_path, {"examples": [{"messages": turns}]}).conversations
    chatml.chat_template = LAST_THOUGHTS
    try:
        encoded = encode(chatml, found, 10_000)
        expected = chatml.apply_chat_template(
            turns, return_dict=True, return_assistant_tokens_mask=True
        )
    finally:
        chatml.chat_template = CHATML
    (example,) = encoded.examples
    assert example.input_ids.tolist() == expected["input_ids"]
    assert example.trained.tolist() == [bool(mark) for mark in expected["assistant_masks"]]
    assert encoded.notes[THOUGHTS_LEFT_OUT] == 1  # the first answer's


def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.json.gz", "a.parquet", "a.jinja"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(OSError, match="not a regular file"):
            open_regular(tmp_path / name)
        read = template_file if name.endswith("jinja") else lambda path: read_examples([path])
        with pytest.raises(InputError, match="not a regular file"):
            read(tmp_path / name)


def test_control_characters_are_shown_and_text_stays() -> None:
    assert shown("a\x1b]0;b\x07\x7f\r\tc\n你") == "a\\x1b]0;b\\x07\\x7f\\x0d\tc\n你"
    assert shown("a\x9b\u202eb\u2028c") == "a\\u009b\\u202eb\\u2028c"


@pytest.mark.parametrize(("opens", "closes", "levels"), [("[", "]", 1), ('{"[": ["]", ', "]}", 2)])
def test_the_same_depth_is_refused_by_every_python(opens: str, closes: str, levels: int) -> None:
    for depth in (500, 502):
        count = depth // levels
        assert is_too_deep(opens * count + "1" + closes * count) == (depth > 500)
