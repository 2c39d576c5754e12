"""Tokenises preference pairs: a prompt, and each answer in a row after it.

  (1) a chat template renders the prompt as a model would be asked, and the prompt with each
      answer. A pair of texts has no template: the answer follows the prompt, then eos.
  (2) each text is tokenised as one. The prompt is the longest common beginning of its tokens
      and those of both complete texts, because tokens may merge where an answer begins. So
      both rows have the same prompt. All tokens after it are the answer, as in TRL.
  (3) both rows are cut at ``cutoff_len``. If the prompt fills it, the pair is left out.

A row is a token example; its trained tokens are the answer. A pair is two consecutive rows. If an
answer is missing, its row is empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hasten.data import renderer
from hasten.data.chat_template import (
    BATCH,
    DROPPED,
    EMPTY,
    EQUAL,
    MERGED,
    NONE_LEFT,
    SHARED,
    Encoded,
    PlainTokenizer,
    Rendered,
    TooLong,
    added_tokens,
    chat_template_of,
    draw_pairs,
    seconds_explained,
    with_answers,
)
from hasten.data.conversation import Conversation
from hasten.parts.data.collate import TokenizedExample, tokenized_example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NOTHING = tokenized_example(())


class _Pair(NamedTuple):
    """A prompt's text, and the text of it with each answer."""

    prompt: str
    texts: list[Rendered | None]


def encode_pairs(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
    cutoff_len: int,
    too_long: TooLong = "truncate",
    separate: bool = False,
) -> Iterator[Encoded]:
    """Yields the rows of each conversation with answers, or the reason why it has none.

    With ``separate``, two answers become two pairs, each with one answer (KTO).

    Raises InputError for a tokenizer without offsets or template, or if the template fails.
    """
    plain = PlainTokenizer(tokenizer, cutoff_len)
    template, ends = chat_template_of(tokenizer), added_tokens(tokenizer)
    remaining = iter(conversations)
    while batch := list(islice(remaining, BATCH)):
        dialogues = [each for each in batch if each.text is None]
        drawn: Iterator[tuple[str, list[Rendered | None]]] = iter(())
        if dialogues:
            location = f"{dialogues[0].location} to {dialogues[-1].location}"
            complete = (each for dialogue in dialogues for each in with_answers(dialogue))
            explained = sum(map(seconds_explained, filter(None, complete)))
            work = (template, dialogues, ends)
            drawn = iter(renderer.ask(location, explained, draw_pairs, *work))
        eos = str(tokenizer.eos_token or "")
        pairs = [_Pair(*next(drawn)) if c.text is None else _texts(c, eos) for c in batch]
        texts = [
            text for p in pairs for text in (p.prompt, *(t.text if t else "" for t in p.texts))
        ]
        tokens = iter(plain.encode(texts))
        for source, pair in zip(batch, pairs, strict=True):
            prompt, *rows = (next(tokens).ids for _ in range(3))
            if source.text is None:
                plain.check_begin(prompt, source.location)
            else:
                begin = plain.prefix_of(pair.prompt or next(t.text for t in pair.texts if t))
                prompt, *rows = ([*begin, *ids] for ids in (prompt, *rows))
            answers = [row if t else None for row, t in zip(rows, pair.texts, strict=True)]
            yield _encoded(pair, prompt, answers, cutoff_len, too_long, separate)


def _texts(source: Conversation, eos: str) -> _Pair:
    """Returns the texts of a pair without a template; an eos in a text isn't repeated."""
    texts: list[Rendered | None] = []
    for answer in source.answers or ():
        ended = str(answer) if str(answer).endswith(eos) else f"{answer}{eos}"
        texts.append(None if answer is None else Rendered(f"{source.text}{ended}", None))
    return _Pair(str(source.text), texts)


def _encoded(
    pair: _Pair,
    prompt: list[int],
    answers: list[list[int] | None],
    cutoff_len: int,
    too_long: TooLong,
    separate: bool,
) -> Encoded:
    """Returns the rows of at most ``cutoff_len`` tokens of one conversation."""
    if refused := next((t for t in pair.texts if t is not None and t.trained == []), None):
        return Encoded((), refused.reason)
    present = [ids for ids in answers if ids is not None]
    long = max(map(len, present)) > cutoff_len
    if long and too_long == "drop":
        tokens = max(map(len, present))
        return Encoded((), f"{DROPPED} for cutoff_len={cutoff_len}: {tokens} tokens", long)
    starts = [shared_tokens(prompt, ids) for ids in present]
    if not separate:  # both rows have the same prompt
        starts = [min(starts)] * len(starts)
    if max(starts) >= cutoff_len:
        return Encoded((), f"{NONE_LEFT} within cutoff_len={cutoff_len}", long)
    begins = iter(starts)
    rows = [_NOTHING if i is None else _row(i[:cutoff_len], next(begins)) for i in answers]
    notes = {
        MERGED: int(min(starts) < len(prompt)),
        EMPTY: int(any(row.length and not row.trained.any() for row in rows)),
    }
    for rendered in filter(None, pair.texts):
        for name, count in rendered.notes.items():
            notes[name] = max(notes.get(name, 0), count)
    if len(present) == 2:
        if separate:
            rows = [rows[0], _NOTHING, _NOTHING, rows[1]]
        else:
            notes[SHARED] = shared_tokens(rows[0].input_ids, rows[1].input_ids)
            notes[EQUAL] = int(np.array_equal(rows[0].input_ids, rows[1].input_ids))
    counts = {name: count for name, count in notes.items() if count}
    return Encoded(tuple(rows), None, long, counts)


def shared_tokens(one: Any, other: Any) -> int:
    """Returns the length of the longest common beginning."""
    size = min(len(one), len(other))
    differ = np.flatnonzero(np.asarray(one[:size]) != np.asarray(other[:size]))
    return int(differ[0]) if len(differ) else size


def _row(ids: Sequence[int], start: int) -> TokenizedExample:
    return tokenized_example(ids, np.arange(len(ids)) >= start)
