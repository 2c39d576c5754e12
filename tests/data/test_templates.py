"""Chat templates: the ids of the whole text, loss on the answers and on nothing else."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import ByteLevel, TemplateProcessing

from hasten.data.chat_template import THOUGHTS_LEFT_OUT, _dialogue_example, encode, encode_all
from hasten.data.conversation import Conversation
from hasten.data.prompt_formats import PROMPT_FORMATS, ensure_chat_template
from hasten.data.tokenize import EOS, train_bpe
from hasten.data.turns import Message
from hasten.errors import InputError
from hasten.parts.data.collate import TokenizedExample

# The way R1 writes: thoughts are cut off every answer, also the last one.
DROPS_THOUGHTS = """\
{{- bos_token }}{% for m in messages %}{% if m.role == 'user' %}<U>{{ m.content }}
{%- else %}<A>{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<A>{% endif %}"""
OPENS_THOUGHTS = DROPS_THOUGHTS.replace("%}<A>{% endif", "%}<A>{{ '<think>\\n' }}{% endif")
CLOSES_THOUGHTS = DROPS_THOUGHTS.replace("<A>", "<A></think>")
# The way Qwen writes: a line break after the end-of-turn token.
CHATML = """\
{%- for m in messages %}{{ '<im>' + m.role + '\n' + m.content + eos_token + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<im>assistant\n' }}{% endif %}"""


# Qwen's fails on a dialogue without turns.
NEEDS_A_QUESTION = "{%- set first = messages[0].role ~ '' %}" + CHATML
SMALL = train_bpe(["a question ab ba"] * 3, 300)


def chat(*contents: str, system: str | None = None) -> Conversation:
    roles = ("user", "assistant") * len(contents)
    turns = [Message(role, content) for role, content in zip(roles, contents, strict=False)]
    first = [Message("system", system)] if system else []
    return Conversation((*first, *turns), None, "chat.jsonl:7")


def parts(tokenizer: Any, example: TokenizedExample) -> tuple[str, list[str]]:
    """The text of an example, and the text of each run of trained tokens."""
    runs: list[list[int]] = []
    for at, token in enumerate(example.input_ids.tolist()):
        if example.trained[at]:
            if not example.trained[at - 1]:
                runs.append([])
            runs[-1].append(token)
    return tokenizer.decode(example.input_ids), [tokenizer.decode(run) for run in runs]


def rendered(tokenizer: Any, *contents: str, system: str | None = None) -> tuple[str, list[str]]:
    (example,) = encode(tokenizer, chat(*contents, system=system), 10_000).examples
    return parts(tokenizer, example)


def test_a_line_break_after_the_end_of_turn_is_not_trained(tokenizer: Any) -> None:
    tokenizer.chat_template = CHATML
    text, trained = rendered(tokenizer, "Hi", "Hello\n", "more", "yes")
    assert text.endswith(f"yes{EOS}\n")
    assert trained == [f"Hello\n{EOS}", f"yes{EOS}"]


@pytest.mark.parametrize("template", [DROPS_THOUGHTS, CLOSES_THOUGHTS])
def test_the_last_thought_stays_and_an_earlier_answer_is_trained_without_its_own(
    tokenizer: Any, template: str
) -> None:
    tokenizer.chat_template = template
    turns = ("q", "<think>early</think>one", "r", "<think>late</think>two")
    text, trained = rendered(tokenizer, *turns)
    assert "early" not in text
    assert text.endswith(f"<A><think>late</think>two{EOS}")
    assert trained == [f"one{EOS}", f"<think>late</think>two{EOS}"]
    assert encode(tokenizer, chat(*turns), 100).notes[THOUGHTS_LEFT_OUT] == 1


def test_a_thought_that_the_prompt_opens_is_learned_from_where_the_model_begins(
    tokenizer: Any,
) -> None:
    tokenizer.chat_template = OPENS_THOUGHTS
    text, trained = rendered(tokenizer, "q", "<think>\nlate</think>two")
    assert text.endswith(f"<A><think>\nlate</think>two{EOS}")
    assert trained == [f"late</think>two{EOS}"]
    assert rendered(tokenizer, "q", "plain")[1] == [f"plain{EOS}"]


def test_a_template_that_keeps_only_the_last_thought_is_taken_as_it_is(tokenizer: Any) -> None:
    tokenizer.chat_template = DROPS_THOUGHTS.replace(
        "m.content.split('</think>')[-1]",
        "m.content if loop.last else m.content.split('</think>')[-1]",
    )
    text, trained = rendered(tokenizer, "q", "<think>a</think>1", "r", "<think>b</think>2")
    assert text.endswith(f"<A>1{EOS}<U>r<A><think>b</think>2{EOS}")
    assert trained == [f"1{EOS}", f"<think>b</think>2{EOS}"]


@pytest.mark.parametrize(
    ("turns", "trained"),
    [
        (["user one", "user two", "assistant yes"], ["yes"]),
        (["assistant hi", "user two", "assistant yes"], ["hi", "yes"]),
        (["system s", "assistant hi", "user two", "assistant yes"], ["hi", "yes"]),
        (["user one", "assistant a", "assistant b"], ["a", "b"]),
        (["user one", "assistant a", "system s", "user two", "assistant b"], ["a", "b"]),
        (["system s", "system t", "user two", "assistant b"], ["b"]),
    ],
)
def test_turns_stand_in_any_order_that_the_template_writes(
    tokenizer: Any, turns: list[str], trained: list[str]
) -> None:
    messages = tuple(Message(*turn.split()) for turn in turns)
    written = "".join(f"<im>{m.role}\n{m.content}{EOS}\n" for m in messages)
    for template in (CHATML, NEEDS_A_QUESTION):
        tokenizer.chat_template = template
        (example,) = encode(tokenizer, Conversation(messages, None, "a:1"), 10_000).examples
        assert parts(tokenizer, example) == (written, [answer + EOS for answer in trained])


def test_a_greeting_is_trained_from_where_a_prompt_ends(tokenizer: Any) -> None:
    greeted = (Message("assistant", "Hi"), Message("user", "one"), Message("assistant", "yes"))
    (example,) = encode(tokenizer, Conversation(greeted, None, "a:1"), 10_000).examples
    assert parts(tokenizer, example)[1] == [f" Hi{EOS}", f" yes{EOS}"]  # as deepseek-llm writes it


@pytest.mark.parametrize("name", ["llama2", "mistral-v3"])
@pytest.mark.parametrize("order", ["uua", "aua", "uaa"])
def test_formats_whose_answers_have_no_beginning_of_their_own_need_turns_in_turn(
    tokenizer: Any, name: str, order: str
) -> None:
    tokenizer.chat_template = PROMPT_FORMATS[name]
    roles = {"u": "user", "a": "assistant"}
    messages = tuple(Message(roles[role], "text") for role in order)
    reason = encode(tokenizer, Conversation(messages, None, "a:1"), 10_000).reason
    assert reason is not None
    assert "has no turns of" in reason


def test_a_template_without_answers_gives_a_reason(tokenizer: Any) -> None:
    for template in ("{{ messages[0].content }}", DROPS_THOUGHTS.replace("<A>{{", "<A>{{ 1 or")):
        tokenizer.chat_template = template
        encoded = encode(tokenizer, chat("q", "an answer"), 100)
        assert encoded.examples == ()
        assert "drops or rewrites" in str(encoded.reason)


@pytest.mark.parametrize(
    "template",
    [
        "{% if %}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    ],
)
def test_a_failing_template_is_named_with_the_record(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(InputError, match=r"chat template fails on chat\.jsonl:7"):
        encode(tokenizer, chat("q", "a"), 100)


def test_a_missing_template_is_an_error_until_a_fallback_is_set(tokenizer: Any) -> None:
    assert not ensure_chat_template(tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="no chat template"):
        encode(tokenizer, chat("q", "a"), 100)
    with pytest.raises(InputError, match=r"use deepseek-v3"):
        ensure_chat_template(tokenizer, "deepseek-v33")
    assert ensure_chat_template(tokenizer)
    assert tokenizer.chat_template == PROMPT_FORMATS["deepseek-llm"]


def test_a_long_dialogue_is_cut_and_one_without_answer_is_rejected(tokenizer: Any) -> None:
    whole = encode(tokenizer, chat("q", "a b c d e"), 1000).examples[0]
    first = int(np.flatnonzero(whole.trained)[0])
    (cut,) = encode(tokenizer, chat("q", "a b c d e"), first + 1).examples
    assert np.array_equal(cut.input_ids, whole.input_ids[: first + 1])
    assert cut.trained_tokens == 1
    encoded = encode(tokenizer, chat("q", "a b c d e"), first)
    assert encoded[:3] == ((), f"no answer left within cutoff_len={first}", True)
    with pytest.raises(InputError, match="cutoff_len=1"):
        encode(tokenizer, chat("q", "a"), 1)


@pytest.mark.parametrize("begins", [True, False])
def test_a_text_begins_as_the_tokenizer_begins_it(tokenizer: Any, begins: bool) -> None:
    ordinary = copy.deepcopy(tokenizer)
    if not begins:  # as GPT-2's, whose bos token is for other uses
        ordinary.backend_tokenizer.post_processor = ByteLevel(trim_offsets=False)
    (example,) = encode(ordinary, Conversation((), "a b c", "t:1"), 100).examples
    assert example.input_ids.tolist() == [*ordinary("a b c").input_ids, ordinary.eos_token_id]
    assert (ordinary.bos_token_id in example.input_ids) == begins


def test_a_text_begins_with_all_tokens_that_the_tokenizer_writes_before_it(tokenizer: Any) -> None:
    glm = copy.deepcopy(tokenizer)  # writes [gMASK]<sop>, and neither is its bos token
    pad, bos = glm.pad_token, glm.bos_token
    special = [(pad, glm.pad_token_id), (bos, glm.bos_token_id)]
    glm.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{pad} {bos} $A", special_tokens=special
    )
    whole = [*glm("a b c").input_ids, glm.eos_token_id]
    assert whole[:2] == [glm.pad_token_id, glm.bos_token_id]
    for text in ("a b c", f"{pad}{bos}a b c"):  # once, also if the text has them
        (example,) = encode(glm, Conversation((), text, "t:1"), 100).examples
        assert example.input_ids.tolist() == whole


@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1), cutoff=st.integers(2, 9))
def test_plain_text_loses_nothing_and_predicts_every_token_once(text: str, cutoff: int) -> None:
    tokenizer = _plain()
    pieces = encode(tokenizer, Conversation((), text, "t:1"), cutoff).examples
    whole = [*tokenizer.encode(text), tokenizer.eos_token_id]
    predicted = np.concatenate([piece.input_ids[1:] for piece in pieces])
    assert [pieces[0].input_ids[0], *predicted] == whole
    assert all(2 <= piece.length <= cutoff and piece.trained.all() for piece in pieces)


WORDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(str.strip)


@given(contents=st.lists(WORDS, min_size=2, max_size=6).filter(lambda words: len(words) % 2 == 0))
def test_ids_are_those_of_the_whole_text_and_trained_are_exactly_the_answers(
    contents: list[str],
) -> None:
    tokenizer = _plain()
    (example,) = encode(tokenizer, chat(*contents), 10_000).examples
    whole, expected = [tokenizer.bos_token_id], [False]
    for question, answer in zip(contents[::2], contents[1::2], strict=True):
        # The reference: pieces by themselves. The format keeps merges from crossing "Assistant:".
        prompt = tokenizer.encode(f"User: {question}\n\nAssistant:", add_special_tokens=False)
        reply = tokenizer.encode(f" {answer}", add_special_tokens=False)
        reply.append(tokenizer.eos_token_id)
        whole += prompt + reply
        expected += [False] * len(prompt) + [True] * len(reply)
    assert example.input_ids.tolist() == whole
    assert example.trained.tolist() == expected


def test_many_are_encoded_in_order_whatever_their_kind(tokenizer: Any) -> None:
    mixed = [chat("q", "a" * n) if n % 3 else Conversation((), "t" * n, "t:1") for n in range(600)]
    single = [encode(tokenizer, conversation, 64) for conversation in mixed[250:260]]
    for one, many in zip(single, list(encode_all(tokenizer, mixed, 64))[250:260], strict=True):
        for left, right in zip(one.examples, many.examples, strict=True):
            assert np.array_equal(left.input_ids, right.input_ids)
            assert np.array_equal(left.trained, right.trained)


_TOKENIZERS: list[Any] = []


def _plain() -> Any:
    """One tokenizer for property tests, which can't take fixtures of a function's scope."""
    if not _TOKENIZERS:
        _TOKENIZERS.append(train_bpe(["User: a b c Assistant: the answer is yes"] * 9, 300))
    return _TOKENIZERS[0]


@given(
    answers=st.lists(st.text("ab \n", min_size=1, max_size=40).filter(str.strip), min_size=1),
    cutoff=st.integers(2, 30),
)
def test_splitting_predicts_every_trained_token_once(answers: list[str], cutoff: int) -> None:
    turns = [text for answer in answers for text in ("a question", answer)]
    whole = encode(SMALL, chat(*turns), 10**6)
    found = encode(SMALL, chat(*turns), cutoff, "split")
    (example,) = whole.examples
    trained = [piece.input_ids[1:][piece.trained[1:]] for piece in found.examples]
    assert np.array_equal(np.concatenate(trained), example.input_ids[1:][example.trained[1:]])
    assert all(2 <= piece.length <= cutoff and piece.trained_tokens for piece in found.examples)
    assert found.long == (example.length > cutoff)
    assert not whole.long


def test_dropping_leaves_out_what_is_too_long_and_nothing_else(tokenizer: Any) -> None:
    text = Conversation((), "a tale of some length", "t:1")
    for example in (chat("q", "an answer"), text):
        (whole,) = encode(tokenizer, example, 1000, "drop").examples
        assert encode(tokenizer, example, whole.length, "drop").examples
        dropped = encode(tokenizer, example, whole.length - 1, "drop")
        reason = f"too long for cutoff_len={whole.length - 1}: {whole.length} tokens"
        assert dropped[:3] == ((), reason, True)


# Tokens in the order of their text: each begins where the last did (a character of several tokens)
# or at or after its end; some have no width.
WIDTHS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(1, 3)), min_size=1, max_size=20
)


@given(widths=WIDTHS, spans=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=3))
def test_a_token_is_trained_where_it_has_a_part_of_an_answer(
    widths: list[tuple[int, int, int]], spans: list[tuple[int, int]]
) -> None:
    offsets: list[tuple[int, int]] = []
    for gap, width, times in widths:
        begin = (offsets[-1][1] if offsets else 0) + gap
        # Only a character of one width is shared by several tokens.
        offsets += [(begin, begin + width)] * (times if width == 1 else 1)
    answers = [(first, first + size) for first, size in spans]
    example = _dialogue_example(list(range(len(offsets))), offsets, answers)
    assert example.trained.tolist() == [
        any(begin < last and max(end, begin + 1) > first for first, last in answers)
        for begin, end in offsets
    ]
