"""A conversation as tokens, rendered by the tokenizer's chat template, loss on the answers alone.

  (1) the template renders the whole conversation to one text; it brings its own bos token
  (2) rendered prefixes tell where each answer begins and ends in that text; what a template drops
      or rewrites there (the thoughts of earlier turns) is not trained
  (3) the text is tokenised once, as a model would see it; the offsets of the tokens say which of
      them belong to an answer, its end-of-turn token included
  (4) what is longer than `cutoff_len` meets `too_long`:

      truncate    a dialogue is cut at the end; a plain text goes on in the next piece
      split       a dialogue goes on too; pieces without any part of an answer are left out
      drop        dialogue or text, it is left out whole

Pieces overlap by one token, so every trained token of the whole is predicted exactly once.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from hasten.data import renderer
from hasten.data.chatformats import (
    DEEPSEEK_LLM,
    DEEPSEEK_R1,
    DEEPSEEK_V3,
    FALLBACKS,
    ensure_chat_template,
)
from hasten.data.chattemplate import (
    TURNS,
    ChatTemplate,
    chat_template_of,
    render_turns,
    seconds_explained,
)
from hasten.data.shapes import Conversation, Message
from hasten.data.toolturns import FORMS, UnseenError, check_seen
from hasten.errors import InputError
from hasten.parts.data.records import TokenRecord, token_record

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "DEEPSEEK_LLM",
    "DEEPSEEK_R1",
    "DEEPSEEK_V3",
    "FALLBACKS",
    "NOT_THE_RECORDS_FAULT",
    "Encoded",
    "TooLong",
    "encode",
    "encode_all",
    "ensure_chat_template",
]

TooLong = Literal["truncate", "split", "drop"]
_NONE_LEFT, _DROPPED = "no answer left", "too long"
NOT_THE_RECORDS_FAULT = (_NONE_LEFT, _DROPPED)  # how reasons begin where cutoff_len is at fault
_BATCH = 256  # texts that the tokenizer sees at once: it spreads them over the cores
_STAND_IN = "\ue000answer\ue000"  # private use characters: no template changes them
_PLAIN = ("system", "user", "assistant")
_THOUGHT = re.compile(r"(?:<think>\s*)?</think>\s*\Z|<think>\s*\Z")  # opened or left empty


class Encoded(NamedTuple):
    """The records of one conversation, or why there are none."""

    records: tuple[TokenRecord, ...]  # one for a dialogue, one per piece where it goes on
    reason: str | None
    long: bool = False  # the whole is longer than cutoff_len


class _Drawn(NamedTuple):
    text: str
    answers: list[tuple[int, int]] | None  # character spans, end exclusive; None: plain text
    reason: str = "the chat template drops or rewrites the last answer"  # where there are no spans


def encode(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    cutoff_len: int,
    too_long: TooLong = "truncate",
) -> Encoded:
    """One conversation as token records of at most `cutoff_len` tokens, or a reason.

    Raises InputError for a tokenizer without offsets or template, or a template that fails.
    """
    return next(encode_all(tokenizer, (conversation,), cutoff_len, too_long))


def encode_all(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
    cutoff_len: int,
    too_long: TooLong = "truncate",
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
    backend, template = _plain_backend(tokenizer), chat_template_of(tokenizer)
    while batch := list(islice(left, _BATCH)):
        drawn = _draw_all(template, batch, ends)
        # The template has put the special tokens into the text.
        tokens = backend.encode_batch([item.text for item in drawn], add_special_tokens=False)
        for item, source, found in zip(drawn, batch, tokens, strict=True):
            ids = found.ids
            if item.answers is None:
                whole = _text_record(tokenizer, ids)
            else:
                _check_bos(tokenizer, ids, source.place)
                whole = _dialogue_record(ids, found.offsets, item.answers)
            yield _fitted(whole, item, cutoff_len, too_long)


def _fitted(whole: TokenRecord, drawn: _Drawn, cutoff_len: int, too_long: TooLong) -> Encoded:
    """The record in pieces of at most `cutoff_len` tokens, each with something to predict."""
    long, answers = whole.length > cutoff_len, drawn.answers
    if answers == []:
        return Encoded((), drawn.reason)
    if answers is None and whole.length < 2:
        return Encoded((), "a text of one token has nothing to predict")
    if long and too_long == "drop":
        reason = f"{_DROPPED} for cutoff_len={cutoff_len}: {whole.length} tokens"
        return Encoded((), reason, long)
    pieces = _pieces(whole, cutoff_len)
    if answers is not None:
        pieces = pieces if too_long == "split" else pieces[:1]
        pieces = [piece for piece in pieces if piece.trained_tokens]
        if not pieces:
            return Encoded((), f"{_NONE_LEFT} within cutoff_len={cutoff_len}", long)
    return Encoded(tuple(pieces), None, long)


def _pieces(whole: TokenRecord, cutoff_len: int) -> list[TokenRecord]:
    """The record in pieces, each beginning with the last token of the piece before it.

    So every token but the first of all is predicted exactly once, and no piece has fewer than two.
    """
    starts = range(0, max(whole.length - 1, 1), cutoff_len - 1)
    return [
        token_record(whole.input_ids[at : at + cutoff_len], whole.trained[at : at + cutoff_len])
        for at in starts
    ]


def _plain_backend(tokenizer: PreTrainedTokenizerBase) -> Any:
    """What tokenises for the tokenizer, neither cutting nor padding.

    A call of the tokenizer sets that up; the backend's own answers come without the dictionaries of
    lists that Transformers makes of them, which cost a third of the tokenising.
    """
    tokenizer(["a"], add_special_tokens=False, truncation=False, padding=False)
    return tokenizer.backend_tokenizer


def _dialogue_record(
    ids: list[int], offsets: list[tuple[int, int]], answers: list[tuple[int, int]]
) -> TokenRecord:
    trained = np.zeros(len(ids), np.bool_)
    for first, last in answers:
        # A token across the border is trained: it has a part of the answer in it. One of no
        # width (some tokenizers report them for spaces) counts as one character. Tokens lie in the
        # order of their text, so two searches find all of an answer's.
        begin = bisect_right(offsets, first, key=lambda token: max(token[1], token[0] + 1))
        trained[begin : bisect_left(offsets, last, key=lambda token: token[0])] = True
    return token_record(ids, trained)


def _text_record(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> TokenRecord:
    """bos, text, eos: every token of it is trained."""
    bordered = (tokenizer.bos_token_id, *ids, tokenizer.eos_token_id)
    return token_record([token for token in bordered if token is not None])


def _check_bos(tokenizer: PreTrainedTokenizerBase, ids: list[int], place: str) -> None:
    bos = tokenizer.bos_token_id
    if bos is not None and ids[:2] == [bos, bos] and tokenizer.bos_token != tokenizer.eos_token:
        raise InputError(
            f"{place} begins with {tokenizer.bos_token} twice: take it out of the chat template, "
            "or out of the record's first text"
        )


def _draw_all(
    template: ChatTemplate, conversations: Sequence[Conversation], ends: tuple[str, ...]
) -> list[_Drawn]:
    """The whole text of each and where the answers are in it; templates run in another process."""
    dialogues = [each for each in conversations if each.text is None]
    drawn: Iterator[_Drawn] = iter(())
    if dialogues:
        place = f"{dialogues[0].place} to {dialogues[-1].place}"
        explained = sum(map(seconds_explained, dialogues))
        drawn = iter(renderer.ask(place, explained, _draw_dialogues, template, dialogues, ends))
    return [next(drawn) if c.text is None else _Drawn(c.text, None) for c in conversations]


def _draw_dialogues(
    template: ChatTemplate, dialogues: Sequence[Conversation], ends: tuple[str, ...]
) -> list[_Drawn]:
    return [_draw(template, dialogue, ends) for dialogue in dialogues]


def _draw(template: ChatTemplate, conversation: Conversation, ends: tuple[str, ...]) -> _Drawn:
    if len(conversation.messages) > TURNS:
        number = len(conversation.messages)
        return _Drawn("", [], f"a dialogue of {number:,} turns: split those of over {TURNS:,}")
    if all(message.role in _PLAIN and not message.calls for message in conversation.messages):
        return _draw_turns(template, conversation, ends, "object")
    unseen, failed = "", ""
    for form in FORMS:  # templates differ in how they take the arguments of a call
        try:
            return _draw_turns(template, conversation, ends, form)
        except UnseenError as error:
            unseen = unseen or str(error)
        except InputError as error:
            failed = failed or f"the chat template takes no turns of tools: {error}"
    return _Drawn("", [], unseen or failed)


def _draw_turns(
    template: ChatTemplate, conversation: Conversation, ends: tuple[str, ...], form: str
) -> _Drawn:
    def render(messages: Sequence[Message], prompt: bool = False) -> str:
        return render_turns(template, messages, prompt, conversation.place, form)

    *before, last = messages = conversation.messages
    text, prompt = render(messages), render(before, prompt=True)
    check_seen(messages, text, render)
    begin = _begin(text, prompt, last.content)
    if begin is None and not last.calls:
        text, begin = _force(render([*before, Message("assistant", _STAND_IN)]), prompt, last)
    if begin is None:
        return _Drawn("", [])
    answers = []
    for turn, message in enumerate(before):
        if message.role == "assistant" and message.trained:
            upto = render(messages[: turn + 1])
            start = _begin(upto, render(messages[:turn], prompt=True), message.content)
            if start is not None and text.startswith(upto):
                answers.append((start, _close(upto, ends)))
    if last.trained:
        answers.append((begin, _close(text, ends)))
    return _Drawn(text, answers)


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
