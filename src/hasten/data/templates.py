"""A conversation as tokens, rendered by the tokenizer's chat template, loss on the answers alone.

  (1) the template renders the whole conversation to one text; it brings its own bos token
  (2) rendered prefixes tell where each answer begins and ends in that text; what a template drops
      or rewrites there (the thoughts of earlier turns) is not trained
  (3) the text is tokenised once, as a model would see it; the offsets of the tokens say which of
      them belong to an answer, its end-of-turn token included
  (4) the record is cut at `cutoff_len`; plain text is cut into pieces instead

Templates come from model folders, so transformers renders them in Jinja's sandbox.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hasten.data.shapes import Conversation, Message
from hasten.errors import InputError
from hasten.parts.records import TokenRecord, token_record

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The chat format of DeepSeek LLM (DeepSeek-AI 2024, the model card of deepseek-llm-7b-chat).
DEEPSEEK_LLM = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- 'User: ' + message.content + '\n\n' }}
    {%- elif message.role == 'assistant' %}
        {{- 'Assistant: ' + message.content + eos_token }}
    {%- else %}
        {{- message.content + '\n\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'Assistant:' }}
{%- endif %}"""

# The chat format of DeepSeek V3 (DeepSeek-AI 2024, the model card of DeepSeek-V3), no tools.
DEEPSEEK_V3 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<｜User｜>' + message.content }}
    {%- elif message.role == 'assistant' %}
        {{- '<｜Assistant｜>' + message.content + eos_token }}
    {%- else %}
        {{- message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<｜Assistant｜>' }}
{%- endif %}"""

FALLBACKS = {"deepseek-llm": DEEPSEEK_LLM, "deepseek-v3": DEEPSEEK_V3}

TOO_LONG = "no answer left"  # how the reason begins when cutting, not the record, is at fault
_BATCH = 256  # texts that the tokenizer sees at once: it spreads them over the cores
_STAND_IN = "\ue000answer\ue000"  # private use characters: no template changes them
_THOUGHT = re.compile(r"(?:<think>\s*)?</think>\s*\Z|<think>\s*\Z")  # opened or left empty


class Encoded(NamedTuple):
    """The records of one conversation, or why there are none."""

    records: tuple[TokenRecord, ...]  # one for a dialogue, one per piece for plain text
    reason: str | None


class _Drawn(NamedTuple):
    text: str
    answers: list[tuple[int, int]] | None  # character spans, end exclusive; None: plain text


def ensure_chat_template(
    tokenizer: PreTrainedTokenizerBase, fallback: str = "deepseek-llm"
) -> bool:
    """Give a tokenizer without a chat template one of FALLBACKS; True if it had none."""
    if fallback not in FALLBACKS:
        close = difflib.get_close_matches(fallback, FALLBACKS, n=1) or list(FALLBACKS)
        raise InputError(f"there is no chat template {fallback!r}: use {' or '.join(close)}")
    if tokenizer.chat_template:
        return False
    tokenizer.chat_template = FALLBACKS[fallback]
    return True


def encode(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, cutoff_len: int
) -> Encoded:
    """One conversation as token records of at most `cutoff_len` tokens, or a reason.

    Raises InputError for a tokenizer without offsets or template, or a template that fails.
    """
    return next(encode_all(tokenizer, (conversation,), cutoff_len))


def encode_all(
    tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Conversation], cutoff_len: int
) -> Iterator[Encoded]:
    """`encode` for many, in order; a batch at a time goes through the tokenizer."""
    if cutoff_len < 2:
        raise InputError(f"cutoff_len={cutoff_len} leaves nothing to predict: 2 is the least")
    if not tokenizer.is_fast:
        raise InputError(
            f"{type(tokenizer).__name__} reports no offsets, which tell answers from questions: "
            "use the model's fast tokenizer (tokenizer.json)"
        )
    ends = tuple(token for token in tokenizer.get_added_vocab() if token.strip())
    left = iter(conversations)
    while batch := list(islice(left, _BATCH)):
        drawn = [_draw(tokenizer, conversation, ends) for conversation in batch]
        tokens = tokenizer(
            [item.text for item in drawn],
            add_special_tokens=False,  # the template has put them into the text
            return_attention_mask=False,
            return_offsets_mapping=True,
            truncation=False,
            verbose=False,  # longer than the model: cut below
            padding=False,
        )
        for item, ids, offsets in zip(
            drawn, tokens["input_ids"], tokens["offset_mapping"], strict=True
        ):
            if item.answers is None:
                yield _pieces(tokenizer, ids, cutoff_len)
            else:
                yield _dialogue(item, ids, offsets, cutoff_len)


def _dialogue(
    drawn: _Drawn, ids: list[int], offsets: list[tuple[int, int]], cutoff_len: int
) -> Encoded:
    if not drawn.answers:
        return Encoded((), "the chat template drops or rewrites the last answer")
    begin, end = np.asarray(offsets[:cutoff_len], np.int64).reshape(-1, 2).T
    trained = np.zeros(len(begin), np.bool_)
    for first, last in drawn.answers:
        # A token across the border is trained: it has a part of the answer in it. One of no
        # width (some tokenizers report them for spaces) counts as one character.
        trained |= (begin < last) & (np.maximum(end, begin + 1) > first)
    record = token_record(ids[:cutoff_len], trained)
    if not record.trained_tokens:
        return Encoded((), f"{TOO_LONG} within cutoff_len={cutoff_len}")
    return Encoded((record,), None)


def _pieces(tokenizer: PreTrainedTokenizerBase, ids: list[int], cutoff_len: int) -> Encoded:
    """bos, text, eos in pieces, each beginning with the last token of the piece before it.

    So every token but the first of all is predicted exactly once, and no piece has fewer than two.
    """
    bordered = (tokenizer.bos_token_id, *ids, tokenizer.eos_token_id)
    whole = np.asarray([token for token in bordered if token is not None], np.int32)
    if len(whole) < 2:
        return Encoded((), "a text of one token has nothing to predict")
    starts = range(0, len(whole) - 1, cutoff_len - 1)
    return Encoded(tuple(token_record(whole[at : at + cutoff_len]) for at in starts), None)


def _draw(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, ends: tuple[str, ...]
) -> _Drawn:
    """The whole text of a conversation and where the answers are in it."""
    if conversation.text is not None:
        return _Drawn(conversation.text, None)

    def render(messages: Sequence[Message], prompt: bool = False) -> str:
        return _render(tokenizer, messages, prompt, conversation.place)

    *before, last = messages = conversation.messages
    text, prompt = render(messages), render(before, prompt=True)
    begin = _begin(text, prompt, last.content)
    if begin is None:
        text, begin = _force(render([*before, Message("assistant", _STAND_IN)]), prompt, last)
    if begin is None:
        return _Drawn("", [])
    answers = []
    for turn, message in enumerate(before):
        if message.role == "assistant":
            upto = render(messages[: turn + 1])
            start = _begin(upto, render(messages[:turn], prompt=True), message.content)
            if start is not None and text.startswith(upto):
                answers.append((start, _close(upto, ends)))
    return _Drawn(text, [*answers, (begin, _close(text, ends))])


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], prompt: bool, place: str
) -> str:
    if not tokenizer.chat_template:
        names = " or ".join(FALLBACKS)
        raise InputError(f"the tokenizer has no chat template, which {place} needs: use {names}")
    turns = [message._asdict() for message in messages]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt)
    except Exception as error:  # a foreign program: it may raise anything
        kind = type(error).__name__
        raise InputError(
            f"the tokenizer's chat template fails on {place} ({kind}: {error}): "
            "correct the template or the record"
        ) from error
    return str(text)


def _begin(text: str, prompt: str, answer: str) -> int | None:
    """Where a model would begin to write `answer`, which ends `text`; None if it isn't in it.

    A prompt may open the thought itself; then the text goes on with the thought, or without any.
    """
    head = prompt if text.startswith(prompt) else _THOUGHT.sub("", prompt)
    shared = len(_THOUGHT.sub("", prompt))
    if not text.startswith(head) or _squash(answer) not in _squash(text[shared:]):
        return None
    return len(head)


def _force(frame: str, prompt: str, answer: Message) -> tuple[str, int | None]:
    """Put an answer that the template would rewrite (R1 drops thoughts) where its stand-in is."""
    if frame.count(_STAND_IN) != 1:
        return frame, None
    before, after = frame.split(_STAND_IN)
    if "<think>" in answer.content:
        before = _THOUGHT.sub("", before)
    text = before + answer.content + after
    return text, len(prompt) if text.startswith(prompt) else len(before)


def _close(text: str, ends: tuple[str, ...]) -> int:
    """Where the trained part ends: at the end-of-turn token, without the line break after it."""
    bare = text.rstrip()
    return len(bare) if bare.endswith(ends) else len(text)


def _squash(text: str) -> str:
    """The text without white space, which templates trim and add around thoughts."""
    return "".join(text.split())
