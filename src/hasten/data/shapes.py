"""The usual shapes of a training record, each with the columns it needs and its reader.

More columns than a shape needs are fine, whatever they hold; a missing or null optional column is
empty.

    alpaca      instruction, output [input, system, history: pairs of question and answer]
    sharegpt    conversations: from (human, gpt, system, function_call, observation), value
                [system, tools]
    messages    messages: role (user, assistant, system, tool), content, tool_calls [tools]
    prompt      prompt, completion
    question    question, answer
    text        text: no dialogue, every token is trained
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hasten.data.messages import (
    Message,
    UnfitError,
    check_turns,
    kind_of,
    message,
    sound,
    tools_turn,
)

__all__ = ["SHAPES", "Conversation", "Message", "UnfitError", "conversation", "shape_of"]


@dataclass(frozen=True, slots=True)
class Conversation:
    """One example before tokenising: a dialogue that ends with an answer, or plain text.

    Exactly one of `messages` and `text` is set. `messages` may begin with what tools there are and
    a system turn; user and assistant turns then take turns, with tools' after the calls.
    """

    messages: tuple[Message, ...]
    text: str | None
    place: str  # "file:line"


def shape_of(record: Mapping[str, Any], possible: Sequence[str] | None = None) -> str | None:
    """The name of the first shape, of all or of the possible, whose columns the record has."""
    names = SHAPES if possible is None else possible
    return next((name for name in names if record.keys() >= {*SHAPES[name].needs}), None)


def conversation(record: Any, shape: str, place: str) -> Conversation:
    """The conversation in a record of a shape; raises UnfitError where there is none."""
    if not isinstance(record, dict):
        raise UnfitError(f"{kind_of(record)}, not an object")
    if shape not in SHAPES:
        raise UnfitError("the file's shape is unknown: its first records are all damaged")
    needs, read = SHAPES[shape].needs, SHAPES[shape].read
    if missing := [key for key in needs if key not in record]:
        raise UnfitError(f"lacks {' and '.join(map(repr, missing))} (the file's shape is {shape})")
    if read is None:
        return Conversation((), _filled(_text(record, "text"), "text"), place)
    messages = tuple(read(record))
    check_turns(messages)
    return Conversation(messages, None, place)


def _alpaca(record: Mapping[str, Any]) -> Iterator[Message]:
    yield from _system(record)
    for pair in _list(record, "history") if record.get("history") not in (None, "") else ():
        if not isinstance(pair, list) or len(pair) != 2:
            raise UnfitError("'history' must hold pairs of question and answer")
        question, answer = pair
        yield Message("user", sound(question, "history"))
        yield Message("assistant", sound(answer, "history"))
    parts = (_text(record, "instruction"), _text(record, "input", optional=True))
    yield Message("user", "\n".join(part for part in parts if part))
    yield Message("assistant", _text(record, "output"))


def _sharegpt(record: Mapping[str, Any]) -> Iterator[Message]:
    turns = list(_turns(record, "conversations", "from", "value"))
    yield from tools_turn(record.get("tools"))
    if not (turns and turns[0].role == "system"):
        yield from _system(record)
    yield from turns


def _messages(record: Mapping[str, Any]) -> Iterator[Message]:
    yield from tools_turn(record.get("tools"))
    yield from _turns(record, "messages", "role", "content")


def _pair(question: str, answer: str) -> Callable[[Mapping[str, Any]], Iterator[Message]]:
    def read(record: Mapping[str, Any]) -> Iterator[Message]:
        yield Message("user", _text(record, question))
        yield Message("assistant", _text(record, answer))

    return read


def _turns(record: Mapping[str, Any], key: str, role: str, content: str) -> Iterator[Message]:
    for turn in _list(record, key):
        if not isinstance(turn, dict):
            raise UnfitError(f"a turn in {key!r} is {kind_of(turn)}, not an object")
        yield message(turn, role, content)


def _system(record: Mapping[str, Any]) -> Iterator[Message]:
    if text := _text(record, "system", optional=True):
        yield Message("system", text)


def _list(record: Mapping[str, Any], key: str) -> list[Any]:
    value = record.get(key)
    if not isinstance(value, list):
        raise UnfitError(f"{key!r} is {kind_of(value)}, not a list")
    return value


def _text(record: Mapping[str, Any], key: str, optional: bool = False) -> str:
    if key not in record and not optional:
        raise UnfitError(f"lacks {key!r}")
    value = record.get(key)
    return "" if value is None and optional else sound(value, key)


def _filled(text: str, what: str) -> str:
    if not text.strip():
        raise UnfitError(f"lacks {'an' if what == 'answer' else 'a'} {what}: it is empty")
    return text


class _Shape(NamedTuple):
    needs: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], Iterator[Message]] | None  # None: plain text
    takes: tuple[str, ...] = ()  # columns that may be missing
    turn: tuple[str, str] | None = None  # keys of a turn: who, what


SHAPES: dict[str, _Shape] = {  # the first that fits wins: alpaca files often have a "text" too
    "alpaca": _Shape(("instruction", "output"), _alpaca, ("input", "system", "history")),
    "sharegpt": _Shape(("conversations",), _sharegpt, ("system", "tools"), ("from", "value")),
    "messages": _Shape(("messages",), _messages, ("tools",), ("role", "content")),
    "prompt": _Shape(("prompt", "completion"), _pair("prompt", "completion")),
    "question": _Shape(("question", "answer"), _pair("question", "answer")),
    "text": _Shape(("text",), None),
}
