"""Tool calls: read from both formats, rendered as Transformers renders them, the loss on calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.data.chat_template import CALLS_IN_PYTHON, encode
from hasten.data.conversation import ColumnNames, Conversation, columns_of
from hasten.data.prompt_formats import PROMPT_FORMATS
from hasten.data.readers import read_examples, read_sources
from hasten.data.sources import Source, source_of
from hasten.data.tokenize import BOS, EOS, train_bpe
from hasten.data.turns import Message, ToolCall
from hasten.errors import InputError

# The way Qwen writes tools: declared in the system turn, results grouped in a user's turn.
HERMES = """\
{%- if tools %}<im>system
{{ messages[0].content + '\\n' if messages[0].role == 'system' else '' -}}
# Tools{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}{{ eos_token + '\\n' }}
{%- elif messages[0].role == 'system' %}<im>system
{{ messages[0].content + eos_token + '\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{{- '<im>' + m.role + '\\n' + m.content + eos_token + '\\n' }}
{%- elif m.role == 'assistant' %}{{ '<im>assistant' + ('\\n' + m.content if m.content else '') }}
{%- for call in m.tool_calls %}{% set f = call.function %}
{{- '\\n<tool_call>\\n{"name": "' + f.name + '", "arguments": ' }}{{ f.arguments | tojson }}
{{- '}\\n</tool_call>' }}{% endfor %}{{ eos_token + '\\n' }}
{%- elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<im>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ eos_token + '\\n' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<im>assistant\\n' }}{% endif %}"""
# Adds arguments to a text, as DeepSeek's published templates do: an object fails there.
AS_TEXT = HERMES.replace("{{ f.arguments | tojson }}", "{{ '' + f.arguments }}")
PASTES = HERMES.replace("{{ f.arguments | tojson }}", "{{ f.arguments }}")
NO_TOOLS = HERMES.replace("if tools", "if false")
NO_CALLS = HERMES.replace("for call in m.tool_calls", "for call in []")
NO_RESULTS = HERMES.replace("m.content + '\\n</tool_response>'", "'</tool_response>'")
NO_SECOND = HERMES.replace("for call in m.tool_calls", "for call in m.tool_calls[:1]")

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a town",
            "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
        },
    }
]


def call(town: str, number: int) -> dict[str, Any]:
    function = {"name": "weather", "arguments": {"town": town, "days": [1, 2]}}
    return {"id": f"c{number}", "type": "function", "function": function}


TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Köln and Bonn?"},
    {"role": "assistant", "content": None, "tool_calls": [call("Köln", 1), call("Bonn", 2)]},
    {"role": "tool", "content": '{"sun": true}', "tool_call_id": "c1"},
    {"role": "tool", "content": "rain", "tool_call_id": "c2"},
    {"role": "assistant", "content": "", "tool_calls": [call("Ulm", 3)]},
    {"role": "tool", "content": "fog", "tool_call_id": "c3"},
    {"role": "assistant", "content": "Sun, rain and fog."},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "Welcome."},
]
RECORD = {"messages": TURNS, "tools": TOOLS}


def conversation(folder: Path, example: Any) -> Conversation:
    (folder / "data.jsonl").write_text(json.dumps(example) + "\n")
    (found,) = read_examples([folder / "data.jsonl"]).conversations
    return found


def runs(tokenizer: Any, found: Conversation) -> tuple[str, list[str]]:
    """The text of an example, and the text of each run of trained tokens."""
    encoded = encode(tokenizer, found, 10_000)
    assert encoded.reason is None, encoded.reason
    (example,) = encoded.examples
    parts: list[list[int]] = []
    for at in range(example.length):
        if example.trained[at]:
            if not example.trained[at - 1]:
                parts.append([])
            parts[-1].append(int(example.input_ids[at]))
    return tokenizer.decode(example.input_ids), [tokenizer.decode(part) for part in parts]


def test_the_text_is_the_one_transformers_renders_and_loss_is_on_calls_and_answers(
    tokenizer: Any, tmp_path: Path
) -> None:
    tokenizer.chat_template = HERMES
    text, trained = runs(tokenizer, conversation(tmp_path, RECORD))
    assert text == tokenizer.apply_chat_template(TURNS, tools=TOOLS, tokenize=False)

    def written(*towns: str) -> str:
        return "\n".join(
            f'<tool_call>\n{{"name": "weather", "arguments": {{"town": "{town}", "days": [1, 2]}}'
            "}\n</tool_call>"
            for town in towns
        )

    assert trained == [
        f"{written('Köln', 'Bonn')}{EOS}",
        f"{written('Ulm')}{EOS}",
        f"Sun, rain and fog.{EOS}",
        f"Welcome.{EOS}",
    ]


# Walks over the arguments, as Qwen3-Coder's template does: other values than objects as Jinja
# writes them.
WALKS = HERMES.replace(
    "{{ f.arguments | tojson }}",
    "{%- for k, v in f.arguments | items %}{{- ' ' + k + '=' }}"
    "{{- v | tojson if v is mapping else v | string }}{% endfor %}",
)


@pytest.mark.parametrize(
    ("template", "value", "is_noted"),
    [
        (WALKS, None, True),
        (WALKS, True, True),
        (WALKS, False, True),
        (WALKS, ["a", None], True),
        (WALKS, {"a": [1, None, True]}, False),
        (WALKS, "None, True and False", False),
        (WALKS, [1, 2.5], False),
        (HERMES, {"a": None, "b": True}, False),
        (PASTES, {"a": None, "b": True}, False),  # gets the text that the example has
    ],
)
def test_values_of_calls_that_a_template_writes_in_python_are_trained_and_noted(
    tokenizer: Any, tmp_path: Path, template: str, value: Any, is_noted: bool
) -> None:
    tokenizer.chat_template = template
    function = {"name": "f", "arguments": {"none": value, "town": "Ulm"}}
    turns = [
        TURNS[1],
        {"role": "assistant", "content": None, "tool_calls": [{"function": function}]},
    ]
    found = conversation(tmp_path, {"messages": turns})
    text, (trained,) = runs(tokenizer, found)
    if template == PASTES:
        function["arguments"] = json.dumps(function["arguments"])
    expected = tokenizer.apply_chat_template(turns, tokenize=False)
    assert text == expected
    assert trained in expected[expected.index("<im>assistant") :]
    assert "Ulm" in trained
    assert encode(tokenizer, found, 10_000).notes[CALLS_IN_PYTHON] == is_noted


@pytest.mark.parametrize("value", [None, "Ulm"])
def test_a_missing_text_that_a_template_writes_as_none_is_not_trained(
    tokenizer: Any, tmp_path: Path, value: Any
) -> None:
    tokenizer.chat_template = WALKS.replace(
        "'\\n' + m.content if m.content else ''", "'\\n' ~ (m.content or none)"
    )
    turns = [TURNS[1], {"role": "assistant", "content": None, "tool_calls": [
        {"function": {"name": "f", "arguments": {"a": value}}}]}]  # fmt: skip
    encoded = encode(tokenizer, conversation(tmp_path, {"messages": turns}), 10_000)
    assert "writes None for the text of an answer that has only calls" in (encoded.reason or "")


def test_v3_writes_calls_and_results_as_published(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = PROMPT_FORMATS["deepseek-v3"]
    example = {"messages": TURNS}
    text, trained = runs(tokenizer, conversation(tmp_path, example))

    def written(*towns: str) -> str:
        calls = "\n".join(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
            f'{{"town": "{town}", "days": [1, 2]}}\n```<｜tool▁call▁end｜>'
            for town in towns
        )
        return f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>{EOS}"

    def results(*texts: str) -> str:
        inner = "\n".join(f"<｜tool▁output▁begin｜>{t}<｜tool▁output▁end｜>" for t in texts)
        return f"<｜tool▁outputs▁begin｜>{inner}<｜tool▁outputs▁end｜>"

    answers = [written("Köln", "Bonn"), written("Ulm"), f"Sun, rain and fog.{EOS}"]
    assert text == (
        f"{BOS}Be kind.<｜User｜>Köln and Bonn?<｜Assistant｜>{answers[0]}"
        f"{results(TURNS[3]['content'], 'rain')}{answers[1]}{results('fog')}{answers[2]}"
        f"<｜User｜>Thanks<｜Assistant｜>Welcome.{EOS}"
    )
    assert trained == [*answers, f"Welcome.{EOS}"]
    assert text == tokenizer.apply_chat_template(TURNS, tokenize=False)


def test_a_dialogue_may_end_with_a_call_and_say_something_with_it(
    tokenizer: Any, tmp_path: Path
) -> None:
    turns = [*TURNS[:2], {**TURNS[2], "content": "Let me look."}]
    for template in (HERMES, PROMPT_FORMATS["deepseek-v3"]):
        tokenizer.chat_template = template
        text, trained = runs(tokenizer, conversation(tmp_path, {"messages": turns}))
        assert text == tokenizer.apply_chat_template(turns, tokenize=False)
        assert len(trained) == 1
        assert trained[0].startswith("Let me look.")
        assert trained[0].endswith(f">{EOS}")


def test_arguments_are_given_as_the_template_takes_them(tokenizer: Any, tmp_path: Path) -> None:
    found = conversation(tmp_path, RECORD)
    tokenizer.chat_template = HERMES
    expected = runs(tokenizer, found)
    for template in (AS_TEXT, PASTES):
        tokenizer.chat_template = template
        assert runs(tokenizer, found) == expected


def test_arguments_in_any_spelling_of_json_are_trained_as_servers_write_them(
    tokenizer: Any, tmp_path: Path
) -> None:
    given = '{"town":"K\\u00f6ln",\n  "days":[1,2]}'
    turns = [*TURNS[:2], calls([{"function": {"name": "weather", "arguments": given}}]), *TURNS[6:]]
    found = conversation(tmp_path, {"messages": turns, "tools": TOOLS})
    # Servers read the text of a request, and give the object to the template.
    read = [{"function": {"name": "weather", "arguments": json.loads(given)}}]
    tokenizer.chat_template = HERMES
    expected = tokenizer.apply_chat_template(
        [*TURNS[:2], calls(read), *TURNS[6:]], tools=TOOLS, tokenize=False
    )
    assert '{"town": "Köln", "days": [1, 2]}' in expected
    for template in (HERMES, AS_TEXT, PASTES):
        tokenizer.chat_template = template
        assert runs(tokenizer, found)[0] == expected


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (NO_TOOLS, "ignores the example's tools"),
        (NO_CALLS, "ignores the example's tool calls"),
        (NO_SECOND, "ignores the example's tool calls"),
        (NO_RESULTS, "drops the result of a tool"),
        (PROMPT_FORMATS["deepseek-v3"], "ignores the example's tools"),
        (PROMPT_FORMATS["deepseek-r1"], "ignores the example's tools"),
        (PROMPT_FORMATS["deepseek-llm"], "ignores the example's tools"),
        ("{{ raise_exception('only users') }}", "doesn't support turns of tools: choose another"),
    ],
)
def test_a_template_that_ignores_tools_rejects_the_record_with_the_reason(
    tokenizer: Any, tmp_path: Path, template: str, reason: str
) -> None:
    tokenizer.chat_template = template
    encoded = encode(tokenizer, conversation(tmp_path, RECORD), 10_000)
    assert encoded.examples == ()
    with pytest.raises(ValueError, match=reason):
        raise ValueError(encoded.reason)


def test_a_template_that_shows_one_tool_of_two_rejects_the_record(
    tokenizer: Any, tmp_path: Path
) -> None:
    other = {"type": "function", "function": {**TOOLS[0]["function"], "name": "tides"}}
    tokenizer.chat_template = HERMES.replace("for tool in tools", "for tool in tools[:1]")
    found = conversation(tmp_path, {**RECORD, "tools": [*TOOLS, other]})
    assert "ignores the example's tools" in (encode(tokenizer, found, 10_000).reason or "")


def test_sharegpt_turns_of_tools_are_the_same_dialogue(tmp_path: Path) -> None:
    calls = [one["function"] for one in TURNS[2]["tool_calls"]]
    turns = [
        {"from": "human", "value": "Köln and Bonn?"},
        {"from": "function_call", "value": json.dumps(calls)},
        {"from": "observation", "value": "rain"},
        {"from": "gpt", "value": "Rain."},
    ]
    flat = [tool["function"] for tool in TOOLS]
    example = {"conversations": turns, "tools": json.dumps(flat), "system": "Be kind."}
    found = conversation(tmp_path, example).messages
    wanted = tuple(
        ToolCall(c["name"], json.dumps(c["arguments"], ensure_ascii=False)) for c in calls
    )
    assert json.loads(found[0].content) == TOOLS
    assert found[1:] == (
        Message("system", "Be kind."),
        Message("user", "Köln and Bonn?"),
        Message("assistant", "", wanted),
        Message("tool", "rain"),
        Message("assistant", "Rain."),
    )


def test_tags_and_entries_name_the_turns_of_tools(tmp_path: Path) -> None:
    turns = [
        {"who": "Q", "says": "x"},
        {"who": "F", "says": '{"name": "f", "arguments": "{\\"a\\": 1}"}'},
        {"who": "O", "says": ""},
        {"who": "A", "says": "y"},
    ]
    tags = {"role_tag": "who", "content_tag": "says", "user_tag": "Q", "assistant_tag": "A"}
    tags |= {"function_tag": "F", "observation_tag": "O"}
    (tmp_path / "a.json").write_text(json.dumps([{"dialog": turns, "can": [{"name": "f"}]}]))
    given = {"messages": "dialog", "tools": "can"}
    entry = {"file_name": "a.json", "formatting": "sharegpt", "columns": given, "tags": tags}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"mine": entry}))
    own: list[ColumnNames] = [columns_of({**given, **tags})]
    for source in (Source(tmp_path / "a.json", own[0]), source_of(f"{tmp_path}:mine")):
        (reading,) = read_sources([source])
        (found,) = reading.conversations
        assert [m.role for m in found.messages] == [
            "tools",
            "user",
            "assistant",
            "tool",
            "assistant",
        ]
        assert found.messages[2].calls == (ToolCall("f", '{"a": 1}'),)


def asked(*turns: dict[str, Any], tools: Any = None) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "q"}, *turns], "tools": tools}


def calls(given: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": given}


ANSWER = {"role": "assistant", "content": "a"}
RESULT = {"role": "tool", "content": "r"}
FINE = calls([call("Ulm", 1)])


@pytest.mark.parametrize(
    ("example", "reason"),
    [
        (asked(RESULT, ANSWER), "turn 2 is tool's, expected user's or assistant's"),
        (asked(FINE, ANSWER), "turn 3 is assistant's, expected tool's"),
        (asked(FINE, {"role": "user", "content": "q"}, ANSWER), "turn 3 is user's"),
        (asked(FINE, RESULT), "its last turn is the tool's"),
        (asked(calls([{"function": {"arguments": {}}}])), "lacks the name of its function"),
        (asked(calls([3])), "lacks the name of its function"),
        (asked(calls([{"function": {"name": 3}}])), "'name' is a number"),
        (asked(calls([{"function": {"name": "f", "arguments": [1]}}])), "are an array"),
        (asked(calls([{"function": {"name": "f", "arguments": "{"}}])), "'arguments' is no JSON"),
        (asked(calls([{"function": {"name": "f", "arguments": '{"a": NaN}'}}])), "NaN"),
        (asked(calls([{"function": {"name": "f", "arguments": {"a": "\ud83d"}}}])), "surrogate"),
        (asked(calls([{"function": {"name": "f", "arguments": '["\\ud83d"]'}}])), "an array"),
        (asked(calls([{"function": {"name": "f", "arguments": '{"a":"\\ud83d"}'}}])), "surrogate"),
        (asked({**RESULT, "tool_calls": [call("Ulm", 1)]}), "which are the assistant's"),
        (asked(calls([])), "null, not a text"),
        (asked(ANSWER, tools="{"), "'tools' is no JSON"),
        (asked(ANSWER, tools=[{"type": "function"}]), "each with a name"),
        (asked(ANSWER, tools=[3]), "each with a name"),
    ],
)
def test_turns_of_tools_that_make_no_sense_are_rejected(
    tmp_path: Path, example: Any, reason: str
) -> None:
    with pytest.raises(InputError, match=reason):
        conversation(tmp_path, example)


SMALL = train_bpe(["a question ab ba <tool_call>"] * 3, 300)
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=9)
WORDS = st.text("abcxyz_", min_size=1, max_size=8)
VALUES = st.recursive(TEXTS | st.integers(-9, 9) | st.none(), lambda v: st.lists(v, max_size=2))


@given(
    name=WORDS,
    arguments=st.dictionaries(WORDS, VALUES, max_size=3),
    result=TEXTS,
    quoted=st.booleans(),
)
@pytest.mark.parametrize("template", [HERMES, PROMPT_FORMATS["deepseek-v3"]])
def test_whatever_is_called_is_trained_to_the_letter_and_no_result_is(
    tmp_path: Path, template: str, name: str, arguments: dict[str, Any], result: str, quoted: bool
) -> None:
    SMALL.chat_template = template
    given = json.dumps(arguments, ensure_ascii=False) if quoted else arguments
    function = {"name": name, "arguments": given}
    turns = [{"role": "user", "content": "q"}, calls([{"function": function}])]
    turns += [{"role": "tool", "content": result}, {"role": "assistant", "content": "so"}]
    (encoded,) = encode(SMALL, conversation(tmp_path, {"messages": turns}), 10_000).examples
    plain = [turns[0], calls([{"function": {"name": name, "arguments": arguments}}]), *turns[2:]]
    text = SMALL.apply_chat_template(plain, tokenize=False)
    assert encoded.input_ids.tolist() == SMALL.encode(text, add_special_tokens=False)
    begins = SMALL.apply_chat_template(plain[:1], tokenize=False, add_generation_prompt=True)
    middle = SMALL.apply_chat_template(plain[:3], tokenize=False, add_generation_prompt=True)
    for start, end in ((begins, plain[:2]), (middle, plain)):
        said = SMALL.apply_chat_template(end, tokenize=False)[len(start) :].rstrip()
        assert said in SMALL.decode(encoded.input_ids[encoded.trained])
    trained = SMALL.decode(encoded.input_ids[encoded.trained])
    assert trained.count(EOS) == 2
    assert "tool_response" not in trained
    assert "tool▁output" not in trained
