"""The rule by which transformers' parser separates a thought from an answer, at any cut."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_parsing import ResponseParser

from hasten.data.chat_template import answer_end
from hasten.data.prompt_formats import PROMPT_FORMATS
from hasten.data.response_template import response_template
from hasten.data.tokenize import EOS, train_bpe

TOKENIZER = train_bpe(["a question ab ba"] * 3, 300)
TEXTS = st.text("a <\n", max_size=6)


def rule(template: str, opens_thoughts: bool = True, model_type: str = "llama") -> Any:
    TOKENIZER.chat_template = PROMPT_FORMATS[template]
    return response_template(TOKENIZER, answer_end(TOKENIZER), model_type, opens_thoughts)


THINKING, ANSWERING = rule("deepseek-r1"), rule("deepseek-r1", opens_thoughts=False)


def parsed(rule: Any, prompt: str, pieces: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """The texts of the parts that are streamed, and those of the whole message."""
    parser = ResponseParser(rule, prefix=prompt)
    events = list(parser.initial_events)
    for piece in pieces:
        events += parser.feed(piece)
    message, last = parser.finalize()
    streamed = {"thinking": "", "content": ""}
    for event in (*events, *last):
        if event["type"] == "region_chunk":
            streamed[event["field"]] += event["text"]
    return streamed, {name: message.get(name, "") for name in streamed}


@pytest.mark.parametrize("prompt", ["<U>q<A>", "<U>q<A><think>\n", "<U><think>q</think>\n\n"])
@given(thought=TEXTS, answer=TEXTS, cuts=st.sets(st.integers(0, 40)), ends=st.booleans())
def test_thought_and_answer_are_apart_however_the_text_is_cut(
    prompt: str, thought: str, answer: str, cuts: set[int], ends: bool
) -> None:
    opened = "" if prompt.endswith("<think>\n") else "<think>"
    text = f"{opened}{thought}</think>{answer}" + EOS * ends
    borders = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(borders)]
    streamed, whole = parsed(THINKING, prompt, pieces)
    assert streamed == whole == {"thinking": thought.strip(), "content": answer.lstrip()}


@given(text=st.text("a <>/think\n", max_size=12))
def test_a_text_without_a_thought_is_the_answer_character_for_character(text: str) -> None:
    expected = {"thinking": "", "content": text}
    for rule, prompt in ((THINKING, "<A>"), (ANSWERING, "<A><think>\n")):
        if "<think>" not in text:
            assert parsed(rule, prompt, [*text, EOS]) == (expected, expected)


def test_the_parsers_of_the_server_stay_where_they_fit() -> None:
    TOKENIZER.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    TOKENIZER.eos_token = "<|im_end|>"
    assert rule("qwen3", model_type="qwen3") is None
    assert rule("qwen3", model_type="llama") is not None  # the server has none for it
    assert rule("qwen3", opens_thoughts=False, model_type="qwen3") == rule("qwen3", False)
    assert rule("deepseek-v3", model_type="qwen3") is not None
    TOKENIZER.eos_token = EOS
    assert rule("qwen3", model_type="qwen3") is not None  # the server's doesn't know this end
