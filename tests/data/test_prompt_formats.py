"""Published prompt formats: the text that their sources write, and the loss on the answers in it.

The texts of `foreign/prompt_formats.json` are what other tools, or a model card's template, make of
the dialogues there. Masks are compared with two references: `{% generation %}` marks, which
Transformers evaluates, and a search for the answers in Transformers' own rendering.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import ByteLevel

from hasten.data import prompt_formats
from hasten.data.chat_template import THOUGHTS_LEFT_OUT, LossOn, answer_end, encode
from hasten.data.conversation import Conversation, conversation
from hasten.data.prompt_formats import PROMPT_FORMATS, choose_chat_template, missing_tokens
from hasten.data.template_sandbox import render
from hasten.data.tokenize import train_bpe
from hasten.data.turns import Message, NoConversationError
from hasten.errors import InputError

FILE = json.loads((Path(__file__).parent / "foreign/prompt_formats.json").read_text("utf-8"))
TEXTS = FILE["texts"]
IDS = [f"{row['format']}-{row['dialogue']}-{row['source'].split()[0]}" for row in TEXTS]
END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|end|>")


@functools.cache
def tokenizer_for(name: str, template: str = "") -> Any:
    """A small tokenizer with <s>, </s> and the special tokens that a format needs."""
    tokenizer = train_bpe(["a question and the answer to it, ab ba"] * 3, 300)
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    tokenizer.add_bos_token = True
    needed = missing_tokens(tokenizer, name) if name else END_TOKENS
    tokenizer.add_tokens(list(needed), special_tokens=True)
    tokenizer.chat_template = template or PROMPT_FORMATS[name]
    return tokenizer


def read(dialogue: Any, tools: Any = None) -> Conversation:
    """A conversation as the reader of examples makes it."""
    if isinstance(dialogue, dict):
        return conversation(dialogue, "alpaca", "a:1")
    return conversation({"messages": dialogue, "tools": tools}, "messages", "a:1")


def runs(tokenizer: Any, found: Conversation, loss_on: LossOn = "answers") -> tuple[str, list[str]]:
    """The text of an example, and the text of each run of trained tokens."""
    encoded = encode(tokenizer, found, 10_000, "truncate", loss_on)
    assert encoded.reason is None, encoded.reason
    (example,) = encoded.examples
    trained = "".join("X" if mark else "." for mark in example.trained)
    spans = [match.span() for match in re.finditer("X+", trained)]
    return tokenizer.decode(example.input_ids), [
        tokenizer.decode(example.input_ids[first:last]) for first, last in spans
    ]


@pytest.mark.parametrize("row", TEXTS, ids=IDS)
def test_a_format_is_written_as_its_source_writes_it(row: dict[str, Any]) -> None:
    tools = FILE["tools"] if row["dialogue"] == "tools" else None
    text, trained = runs(
        tokenizer_for(row["format"]), read(FILE["dialogues"][row["dialogue"]], tools)
    )
    assert text == row["text"]
    if "answers" in row:
        ours = [run.rstrip("\n") for run in trained]
        # A line break after the end token stays untrained.
        assert ours == [answer.rstrip("\n") for answer in row["answers"]]


@pytest.mark.parametrize("name", ["qwen3", "qwen3-thoughts"])
def test_a_thought_in_a_key_of_its_own_is_written_as_one_in_the_content(name: str) -> None:
    inside = FILE["dialogues"]["thoughts"]
    apart = []
    for turn in inside:
        before, end, content = turn["content"].rpartition("\n</think>\n\n")
        thought = {"reasoning_content": before.removeprefix("<think>\n")} if end else {}
        apart.append({"role": turn["role"], "content": content, **thought})
    texts = [render(PROMPT_FORMATS[name], "a:1", {"messages": turns}) for turns in (inside, apart)]
    assert texts[0] == texts[1]
    assert "Add those." in texts[0]


def test_a_format_without_thoughts_counts_those_that_it_leaves_out() -> None:
    turns = read(FILE["dialogues"]["thoughts"])
    counts = {
        name: encode(tokenizer_for(name), turns, 999).notes[THOUGHTS_LEFT_OUT]
        for name in ("qwen3-empty-thoughts", "qwen3", "deepseek-r1", "qwen3-thoughts", "chatml")
    }
    assert [*counts.values()] == [2, 1, 1, 0, 0]


def test_null_is_not_written_as_a_word() -> None:
    template = CHATML.replace("m.content +", "m.content ~ (m.tool_calls or '') ~")
    turns = read(FILE["dialogues"]["tools"][1:])
    text, _ = runs(tokenizer_for("", template), turns)
    assert "None" not in text


def test_every_format_has_a_text_of_its_source() -> None:
    assert {row["format"] for row in TEXTS} == {*PROMPT_FORMATS}


# Templates that differ in what they do with earlier answers. The marks say what a trainer that
# follows them trains; the sandbox reads through them.

CHATML = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# An empty thought in the last answer, none in those before.
EMPTY_THOUGHT = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}{% set said = m.content.split('</think>')[-1].lstrip('\n') %}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n')
   if '</think>' in m.content else '' %}
{%- generation %}{{ '<think>\n' + thought + '\n</think>\n\n' if loop.last else '' }}
{{- said + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# One more token after the last answer.
TWO_ENDS = """\
{{- bos_token }}{% for m in messages %}
{%- if m.role == 'assistant' %}{{ 'A:' }}{% generation %}{{ ' ' + m.content + '<|end|>' }}
{{- eos_token if loop.last else '' }}{% endgeneration %}
{%- else %}{{ 'Q: ' + m.content + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ 'A:' }}{% endif %}"""
NO_END = """\
{%- for m in messages %}{{ m.role + ': ' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}
{%- else %}{{ m.content }}{% endif %}{{ '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""
SYSTEM_FIRST = """\
{%- set about = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}
{{- bos_token }}{% for m in messages %}
{%- if m.role == 'user' %}{{ '[INST] ' + (about if loop.index0 < 2 else '') + m.content }}
{{- '[/INST]' }}
{%- elif m.role == 'assistant' %}{% generation %}{{ ' ' + m.content + eos_token }}
{%- endgeneration %}{% endif %}{% endfor %}"""
CALLS = """\
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}
{{- '<call>' + call.function.name + ' ' + (call.function.arguments | tojson) }}{% endfor %}
{{- '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
CALLS_AND_THOUGHTS = CALLS.replace(
    "{% generation %}",
    "{% generation %}{{ '<think>\\n\\n</think>\\n\\n' if loop.last else '' }}",
)
MARKED = {
    "chatml": CHATML,
    "empty thought": EMPTY_THOUGHT,
    "system first": SYSTEM_FIRST,
    "two ends": TWO_ENDS,
    "no end": NO_END,
    "calls": CALLS,
    "calls, an empty thought": CALLS_AND_THOUGHTS,
}

words = st.text("ab \n<é四", max_size=8)


def called(number: int, words: str) -> list[dict[str, Any]]:
    """A call of a tool, and its result."""
    function = {"name": "weather", "arguments": {"place": f"P{number}:{words}."}}
    return [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        },
        {"role": "tool", "content": f"R{number}:{words}."},
    ]


@st.composite
def dialogues(draw: Any, thoughts: bool, calls: bool = False) -> list[dict[str, Any]]:
    """Turns whose texts occur once each and have no white space at their borders."""
    turns = [{"role": "system", "content": f"S:{draw(words)}."}] if draw(st.booleans()) else []
    for number in range(draw(st.integers(1, 4))):
        thought = f"<think>\nT{number}:{draw(words)}.\n</think>\n\n" if thoughts else ""
        thought = thought if draw(st.booleans()) else ""
        turns.append({"role": "user", "content": f"Q{number}:{draw(words)}."})
        if calls and draw(st.booleans()):
            turns += called(number, draw(words))
        turns.append({"role": "assistant", "content": f"{thought}A{number}:{draw(words)}."})
    return turns


@pytest.mark.parametrize("name", MARKED)
@settings(max_examples=8)
@given(data=st.data())
def test_the_mask_is_that_of_the_marks_in_the_template(name: str, data: st.DataObject) -> None:
    turns = data.draw(dialogues(thoughts=name == "empty thought", calls="calls" in name))
    tools = FILE["tools"] if any("tool_calls" in turn for turn in turns) else None
    tokenizer = tokenizer_for("", MARKED[name])
    (example,) = encode(tokenizer, read(turns, tools), 10_000).examples
    reference = tokenizer.apply_chat_template(
        turns, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert example.input_ids.tolist() == reference["input_ids"]
    ours, marks = example.trained.tolist(), reference["assistant_masks"]
    if name == "no end":  # what follows an answer belongs to it where no token ends it
        ours = [ours[at] and (marks[at] or marks[at - 1]) for at in range(len(ours))]
        wrong = [at for at, mark in enumerate(marks) if mark and not ours[at]]
        assert wrong == []
    else:
        assert ours == [bool(mark) for mark in marks]


def searched(text: str, turns: list[dict[str, str]], ends: tuple[str, ...]) -> list[str]:
    """The reference on strings: each answer as the text shows it, with the end token after it."""
    found = []
    for turn in turns:
        if turn["role"] == "assistant":
            shown = turn["content"]
            if shown not in text:
                shown = shown.rpartition("</think>")[2].strip()
            assert text.count(shown) == 1
            after = text.partition(shown)[2]
            gap = re.match(r"\s*", after)
            assert gap is not None
            end = next((end for end in ends if after[gap.end() :].startswith(end)), "")
            found.append(shown + (gap[0] + end if end else ""))
    return found


@pytest.mark.parametrize("name", PROMPT_FORMATS)
@settings(max_examples=4)
@given(data=st.data())
def test_every_format_trains_each_answer_and_nothing_else(name: str, data: st.DataObject) -> None:
    turns = data.draw(dialogues(thoughts=True))
    tokenizer = tokenizer_for(name)
    text, trained = runs(tokenizer, read(turns))
    assert text == tokenizer.apply_chat_template(turns, tokenize=False)
    last_end = text.rpartition(turns[-1]["content"].rpartition("</think>")[2].strip())[2].strip()
    bare = [re.sub(r"^\s*<think>\s*</think>", "", run).strip() for run in trained]
    # A question's marker is where a GLM model stops.
    expected = searched(text, turns, (last_end, "<|user|>") if name == "glm4" else (last_end,))
    opened = "<think>\n" if name == "deepseek-r1" else ""  # by the prompt, so not trained
    assert bare == [answer.removeprefix(opened) for answer in expected]


# Templates that write an answer in another way where it is the last.

MOVES_SYSTEM = """\
{%- set led = messages[0].role == 'system' %}{{ bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}
{{- '[INST] ' + (messages[0].content + '\n\n' if led and loop.last else '') + m.content }}
{{- '[/INST]' }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"""
TURNS = [
    Message("system", "Be kind."),
    Message("user", "one?"),
    Message("assistant", "1"),
    Message("user", "two?"),
    Message("assistant", "2"),
]


def test_a_system_text_in_the_last_question_is_where_the_model_would_see_it() -> None:
    tokenizer = tokenizer_for("", MOVES_SYSTEM)
    text, trained = runs(tokenizer, Conversation(tuple(TURNS), None, "a:1"))
    assert text == "<s>[INST] one?[/INST] 1</s>[INST] Be kind.\n\ntwo?[/INST] 2</s>"
    assert [run.strip() for run in trained] == ["1</s>", "2</s>"]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("messages[0].content + '\n\n' if led", "'' if led", "a turn of system"),
        (") + m.content }}", ") + 'q' }}", "drops or rewrites a turn of"),
        ("' ' + m.content", "' ' + (m.content if loop.last else '-')", "the answer of turn 3"),
        ("' ' + m.content", "' ' + (m.content if loop.last else '')", "the answer of turn 3"),
    ],
)
def test_a_template_that_drops_words_rejects_the_record(old: str, new: str, reason: str) -> None:
    assert old in MOVES_SYSTEM
    tokenizer = tokenizer_for("", MOVES_SYSTEM.replace(old, new))
    found = encode(tokenizer, Conversation(tuple(TURNS), None, "a:1"), 10_000)
    assert found.examples == ()
    assert reason in str(found.reason)


def test_the_last_answer_or_everything_is_trained_where_that_is_asked_for() -> None:
    tokenizer = tokenizer_for("chatml")
    turns = Conversation(tuple(TURNS), None, "a:1")
    assert runs(tokenizer, turns, "last_answer")[1] == ["2<|im_end|>"]
    text, trained = runs(tokenizer, turns, "everything")
    assert trained == [text]
    flagged = [turn._replace(trained=turn.content != "1") for turn in TURNS]
    text, trained = runs(tokenizer, Conversation(tuple(flagged), None, "a:1"), "everything")
    assert "1<|im_end|>".join(trained) == text
    flagged = [turn._replace(trained=turn.content != "2") for turn in TURNS]
    found = encode(
        tokenizer, Conversation(tuple(flagged), None, "a:1"), 99, "truncate", "last_answer"
    )
    assert found.reason == "its flags leave no answer to train"


# Tokens that a text has already.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a tale", "<s>a tale</s>"),
        ("<s>a tale", "<s>a tale</s>"),
        ("a tale</s>", "<s>a tale</s>"),
        ("<s>a tale</s>\n", "<s>a tale</s>\n"),
        (" <s>a tale</s>", " <s>a tale</s>"),
        ("a <s> tale </s> more", "<s>a <s> tale </s> more</s>"),
    ],
)
def test_a_text_gets_the_tokens_that_it_lacks(text: str, expected: str) -> None:
    tokenizer = tokenizer_for("chatml")
    (example,) = encode(tokenizer, Conversation((), text, "a:1"), 99).examples
    assert tokenizer.decode(example.input_ids) == expected
    assert example.trained.all()


@pytest.mark.parametrize("name", ["llama2", "llama3", "chatml", "alpaca", "gemma"])
def test_an_answer_that_ends_with_the_end_token_has_it_once(name: str) -> None:
    tokenizer = tokenizer_for(name)
    end = answer_end(tokenizer)
    assert end is not None
    asked, begun = (Message("user", begin + "one?") for begin in ("", end.bos))
    plain = runs(tokenizer, Conversation((asked, Message("assistant", "1")), None, "a:1"))
    for answer in (f"1{end.token}", f"1{end.token}\n"):
        turns = (begun, Message("assistant", answer))
        assert runs(tokenizer, Conversation(turns, None, "a:1")) == plain


@pytest.mark.parametrize("name", ["alpaca", "vicuna"])
@pytest.mark.parametrize("begins", [True, False])
def test_a_format_without_bos_begins_as_the_tokenizer_begins_a_text(
    name: str, begins: bool
) -> None:
    tokenizer = train_bpe(["a question and the answer to it, ab ba"] * 3, 300)
    if not begins:  # as Pythia's, whose bos token is for other uses
        tokenizer.backend_tokenizer.post_processor = ByteLevel(trim_offsets=False)
    choose_chat_template(tokenizer, name)
    turns = (Message("user", "one?"), Message("assistant", "1"))
    (example,) = encode(tokenizer, Conversation(turns, None, "a:1"), 999).examples
    text = tokenizer.decode(example.input_ids)
    assert text.count(tokenizer.bos_token) == int(begins)
    plain = text.removeprefix(tokenizer.bos_token)
    assert example.input_ids.tolist() == tokenizer(plain)["input_ids"]


def test_an_answer_that_is_its_end_token_alone_is_none() -> None:
    for answers in (("</s>", "2"), ("1", " </s>\n")):
        turns = [Message(r, c) for c in answers for r, c in (("user", "q"), ("assistant", c))]
        found = encode(tokenizer_for("llama2"), Conversation(tuple(turns), None, "a:1"), 99)
        assert found.reason == "an answer is only its end token"


def test_a_template_without_bos_and_end_keeps_those_of_the_record() -> None:
    tokenizer = tokenizer_for("", NO_END)
    turns = (Message("user", "<s>one?"), Message("assistant", "1</s>"))
    text, trained = runs(tokenizer, Conversation(turns, None, "a:1"))
    assert text == "user: <s>one?\nassistant: 1</s>\n"
    assert trained == ["1</s>"]


@pytest.mark.parametrize("content", ["", " ", "\n"])
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_an_empty_turn_is_no_conversation(role: str, content: str) -> None:
    turns = [{"role": r, "content": content if r == role else "x"} for r in ("user", "assistant")]
    with pytest.raises(NoConversationError, match="it is empty"):
        read(turns)


# The end of an answer, and the tokens that a format needs.


@pytest.mark.parametrize(
    ("template", "text", "token"),
    [
        (PROMPT_FORMATS["chatml"], "<|im_end|>\n", "<|im_end|>"),
        (PROMPT_FORMATS["llama2"], " </s>", "</s>"),
        (PROMPT_FORMATS["gemma"], "<end_of_turn>\n", ""),  # the tokenizer has no such token
        (NO_END, "\n", ""),
    ],
    ids=["chatml", "llama2", "gemma", "no end"],
)
def test_the_end_of_an_answer_is_found(template: str, text: str, token: str) -> None:
    end = answer_end(tokenizer_for("", template))
    assert end is not None
    assert (end.text, end.token) == (text, token)


def test_no_end_is_found_where_a_template_takes_no_plain_dialogue() -> None:
    assert answer_end(tokenizer_for("", "{{ raise_exception('tools alone') }}")) is None


def test_missing_special_tokens_are_named() -> None:
    plain = train_bpe(["ab"], 300)
    assert missing_tokens(plain, "chatml") == ["<|im_start|>", "<|im_end|>"]
    assert missing_tokens(plain, "alpaca") == missing_tokens(plain, "auto") == []
    assert missing_tokens(tokenizer_for("chatml"), "chatml") == []


def test_a_name_that_is_none_gets_the_nearest() -> None:
    with pytest.raises(InputError, match=r"no 'lama3': use llama3"):
        choose_chat_template(train_bpe(["ab"], 300), "lama3")


def test_the_docs_name_every_format() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/recipe.md").read_text("utf-8")
    missing = [n for n in PROMPT_FORMATS if not re.search(rf"[\s`]{re.escape(n)}[\s`]", page)]
    assert missing == []


def test_every_row_of_the_library_names_its_source() -> None:
    rows = json.loads(
        (Path(prompt_formats.__file__).parent / "chat_templates/formats.json").read_text("utf-8")
    )
    assert all(row.get("source") for row in rows.values())
    keys = {"source", "body", "begins", "tokens", "settings"}
    assert all(row.keys() <= keys for row in rows.values())
