"""Conversations: the shapes of examples, and a user's own columns."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hasten.data.turns import (
    CALLS,
    EMPTY_VALUES,
    ROLE_KEYS,
    Message,
    NoConversationError,
    check_turns,
    kind_of,
    message,
    present_key,
    read_json,
    read_list,
    rows_of,
    sound,
    tools_turn,
    unread_keys,
)
from hasten.errors import InputError

# The known shapes of a training example, with required columns [and optional ones].
#
# Other columns are ignored; a missing or null optional column is empty.
#
#     alpaca      instruction, output or response [input]
#     sharegpt    conversations: from (human, gpt, system, function_call, observation), value
#     messages    messages: role (user, assistant, system, tool), content, tool_calls
#     prompt      prompt, completion: texts, or lists of turns (the prompt's aren't trained)
#     question    question, answer
#     query       query, response
#     text        text: no dialogue, every token is trained
#
# Each dialogue may have a system text, tools and a history (pairs of question and answer). Turns
# may have the keys of sharegpt or of messages in every shape.


@dataclass(frozen=True, slots=True)
class Conversation:
    """One example before tokenising: a dialogue that ends with an answer, or plain text.

    Exactly one of `messages` and `text` is set. `messages` may begin with the available
    tools and a system turn. User and assistant turns follow, with the tools' turns after
    the calls.
    """

    messages: tuple[Message, ...]
    text: str | None
    location: str  # "file:line"


def shape_of(example: Mapping[str, Any], possible: Sequence[str] | None = None) -> str | None:
    """Returns the first of all, or of the possible shapes with columns that the example has."""
    names = SHAPES if possible is None else possible
    return next((name for name in names if example.keys() >= {*SHAPES[name].needs}), None)


def conversation(example: Any, shape: str, location: str) -> Conversation:
    """Returns the conversation in an example; raises NoConversationError if there is none."""
    if not isinstance(example, dict):
        raise NoConversationError(f"{kind_of(example)}, not an object")
    if shape not in SHAPES:
        raise NoConversationError("the file's shape is unknown: its first examples are all damaged")
    needs, read = SHAPES[shape].needs, SHAPES[shape].read
    if missing := [key for key in needs if key not in example]:
        raise NoConversationError(
            f"lacks {' and '.join(map(repr, missing))} (the file's shape is {shape})"
        )
    if read is None:
        if not (text := _text(example, "text")).strip():
            raise NoConversationError("lacks a text: it is empty")
        return Conversation((), text, location)
    messages = tuple(read(example))
    check_turns(messages)
    return Conversation(messages, None, location)


_Reader = Callable[[Mapping[str, Any]], Iterator[Message]]


def _framed(read: _Reader) -> _Reader:
    """Returns a reader that adds the example's tools and system text before the turns."""

    def framed(example: Mapping[str, Any]) -> Iterator[Message]:
        turns = list(read(example))
        yield from tools_turn(example.get("tools") or example.get("functions"))
        if not (turns and turns[0].role == "system"):
            yield from _system(example)
        yield from turns

    return framed


def _alpaca(answer: str) -> _Reader:
    def read(example: Mapping[str, Any]) -> Iterator[Message]:
        yield from _history(example)
        first, second = _text(example, "instruction"), _text(example, "input", optional=True)
        question = "\n".join(part for part in (first, second) if part)
        yield Message("user", question, instruction=first if second else "", input=second)
        yield Message("assistant", _text(example, answer))

    return _framed(read)


def _pair(question: str, answer: str) -> _Reader:
    def read(example: Mapping[str, Any]) -> Iterator[Message]:
        yield from _history(example)
        question_turns, answer_turns = (_as_turns(example.get(key)) for key in (question, answer))
        if question_turns is None:
            prompt = [Message("user", _text(example, question))]
        else:
            turns = _turns(question_turns, question)
            prompt = [turn._replace(trained=turn.role != "assistant") for turn in turns]
        if answer_turns is None:
            yield from (*prompt, Message("assistant", _text(example, answer)))
        else:
            yield from _joined(prompt, _turns(answer_turns, answer), answer)

    return _framed(read)


def _joined(prompt: list[Message], reply: list[Message], key: str) -> list[Message]:
    """Joins the turns of a question and an answer; a repeated question is used once.

    Preference pairs often repeat the complete dialogue in each answer.
    """
    systems = [[t for t in turns[:1] if t.role == "system"] for turns in (prompt, reply)]
    questions, dialogue = prompt[len(systems[0]) :], reply[len(systems[1]) :]
    if not (dialogue and dialogue[0].role == "user" and any(t.role == "user" for t in questions)):
        return [*prompt, *reply]
    repeated = dialogue[: len(questions)]
    pairs = [*zip(*systems, strict=False), *zip(questions, repeated, strict=False)]
    differ = any(a.role != b.role or a.content.strip() != b.content.strip() for a, b in pairs)
    if differ or len(repeated) < len(questions):
        raise NoConversationError(f"{key!r} begins with another question than its prompt")
    return [*(systems[0] or systems[1]), *questions, *dialogue[len(questions) :]]


def _dialogue(key: str) -> _Reader:
    return _framed(lambda example: iter(_turns(example.get(key), key)))


def _as_turns(content: Any) -> Any:
    """Returns a list of turns if the content is one, a turn, or JSON of these; else None."""
    if isinstance(content, str):
        if not content.lstrip().startswith("[{"):
            return None
        try:
            content = read_list(content, "")
        except NoConversationError:
            return None
    rows = rows_of(content)
    listed = [rows] if isinstance(rows, dict) else rows
    if not isinstance(listed, list) or not listed:
        return None
    are_turns = all(isinstance(one, dict) and present_key(one, ROLE_KEYS) for one in listed)
    return listed if are_turns else None


def _turns(content: Any, key: str) -> list[Message]:
    made: list[Message] = []
    for one in read_list(content, key):
        entry = (
            read_json(one, key) if isinstance(one, str) and one.lstrip().startswith("{") else one
        )
        if not isinstance(entry, dict):
            raise NoConversationError(f"a turn in {key!r} is {kind_of(entry)}, not an object")
        for turn in _exchange(entry):
            parsed = message(turn)
            calls = turn.get(present_key(turn, ROLE_KEYS)) in CALLS
            if calls and made and made[-1].role == "assistant":
                # Calls in separate turns belong to the answer before them.
                if made[-1].trained != parsed.trained:
                    raise NoConversationError("an answer and its calls differ in their flags")
                parsed = made[-1]._replace(calls=(*made[-1].calls, *parsed.calls))
                made.pop()
            made.append(parsed)
    return made


def _exchange(turn: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the turns of an object with question and answer under their roles (ms-swift)."""
    if "role" in turn or "from" in turn:
        return [turn]
    question_key = next((key for key in ("human", "user") if key in turn), None)
    answer_key = next((key for key in ("assistant", "gpt", "bot") if key in turn), None)
    if not (question_key and answer_key):
        return [turn]
    more = {key: content for key, content in turn.items() if key not in (question_key, answer_key)}
    return [
        {"role": "user", "content": turn[question_key]},
        {"role": "assistant", "content": turn[answer_key], **more},
    ]


def _history(example: Mapping[str, Any]) -> Iterator[Message]:
    if example.get("history") in (None, "", []):
        return
    for pair in read_list(example["history"], "history"):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise NoConversationError("'history' must hold pairs of question and answer")
        yield Message("user", sound(pair[0], "history"))
        yield Message("assistant", sound(pair[1], "history"))


def _system(example: Mapping[str, Any]) -> Iterator[Message]:
    key = "system" if example.get("system") else "system_prompt"
    if text := _text(example, key, optional=True):
        yield Message("system", text)


def _text(example: Mapping[str, Any], key: str, optional: bool = False) -> str:
    if key not in example and not optional:
        raise NoConversationError(f"lacks {key!r}")
    text = example.get(key)
    return "" if text is None and optional else sound(text, key)


_TAKES = ("system", "system_prompt", "tools", "functions", "history")


class _Shape(NamedTuple):
    needs: tuple[str, ...]
    read: _Reader | None  # None: plain text
    takes: tuple[str, ...] = _TAKES  # columns that may be missing
    turns: bool = False  # True: the first column is a list of turns


SHAPES: dict[str, _Shape] = {  # the first match is used: alpaca files often also have a "text"
    "alpaca": _Shape(("instruction", "output"), _alpaca("output"), ("input", *_TAKES)),
    "sharegpt": _Shape(("conversations",), _dialogue("conversations"), turns=True),
    "messages": _Shape(("messages",), _dialogue("messages"), turns=True),
    "conversation": _Shape(("conversation",), _dialogue("conversation"), turns=True),
    "prompt": _Shape(("prompt", "completion"), _pair("prompt", "completion")),
    "question": _Shape(("question", "answer"), _pair("question", "answer")),
    "instruction": _Shape(("instruction", "response"), _alpaca("response"), ("input", *_TAKES)),
    "query": _Shape(("query", "response"), _pair("query", "response")),
    "prompt, response": _Shape(("prompt", "response"), _pair("prompt", "response")),
    "question, response": _Shape(("question", "response"), _pair("question", "response")),
    "text": _Shape(("text",), None, ()),
}


def unread(example: Mapping[str, Any], shape: str, read_columns: Collection[str]) -> set[str]:
    """Returns unread columns and keys of turns that aren't empty."""
    others = example.keys() - read_columns
    columns = {key for key in others if example[key] not in EMPTY_VALUES}
    for name in SHAPES[shape].needs:
        column = example.get(name)
        if isinstance(column, str):  # a cell of JSON
            column = _as_turns(column)
        rows = rows_of(column) if isinstance(column, dict) else column
        for turn in rows if isinstance(rows, list) else ():
            if (
                isinstance(turn, dict)
                and (keys := unread_keys(turn))
                and present_key(turn, ROLE_KEYS)
            ):
                columns |= {f"{name}[].{key}" for key in keys}
    return columns


# Columns: a user's names for the columns of a known shape, and for keys and roles of turns.
#
# `question: prompt_text` reads the column `question` of a shape from the user's `prompt_text`.
# Eight tags, named as in LLaMA-Factory's dataset_info.json, rename parts of turns. `role_tag`,
# `content_tag` and `train_tag` (axolotl's `message_field_training`) are keys of a turn. `user_tag`,
# `assistant_tag`, `system_tag`, `function_tag` (content is JSON of calls) and `observation_tag`
# (results of calls) are roles.

_ROLE_TAGS = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "system_tag": "system",
    "function_tag": CALLS[0],
    "observation_tag": "observation",
}
_KEY_TAGS = {"role_tag": "role", "content_tag": "content", "train_tag": "train"}
TAGS = (*_KEY_TAGS, *_ROLE_TAGS)
_NAMES = list(dict.fromkeys(n for shape in SHAPES.values() for n in (*shape.needs, *shape.takes)))


@dataclass(frozen=True)
class ColumnNames:
    """The user's names for a shape's columns and tags; without `shape` it is detected."""

    names: Mapping[str, str] = field(default_factory=dict)  # a shape's column -> the user's
    tags: Mapping[str, str] = field(default_factory=dict)
    shape: str | None = None  # if set, only the columns in `names` are read

    def shapes(self) -> tuple[str, ...]:
        """Returns the shapes that have these names, in the order of the table."""
        if self.shape:
            return (self.shape,)
        fit = (n for n, s in SHAPES.items() if {*s.needs, *s.takes} >= self.names.keys())
        return tuple(name for name in fit if SHAPES[name].turns or not self.tags)

    def renamed(self, example: Any, shape: str | None = None) -> Any:
        """Returns the example with the shape's names instead of the user's."""
        if not isinstance(example, dict):
            return example
        taken = {*self.names.values()} - self.names.keys()
        left_out = {*example} if self.shape else {*self.names, *taken}
        fields = {k: v for k, v in example.items() if k not in left_out}
        fields |= {k: example[user] for k, user in self.names.items() if user in example}
        known_shape = SHAPES.get(shape or "")
        if self.tags and known_shape and (key := known_shape.needs[0]) in fields:
            fields[key] = [self._turn(turn) for turn in read_list(fields.get(key), key)]
        return fields

    def _turn(self, turn: Any) -> Any:
        if not isinstance(turn, dict):
            return turn
        keys = {user_key: _KEY_TAGS[tag] for tag, user_key in self.tags.items() if tag in _KEY_TAGS}
        taken = {*keys, *keys.values()}
        fields = {key: content for key, content in turn.items() if key not in taken}
        fields |= {key: turn[user] for user, key in keys.items() if user in turn}
        roles = {user: _ROLE_TAGS[tag] for tag, user in self.tags.items() if tag in _ROLE_TAGS}
        if isinstance(name := fields.get(who := present_key(fields, ROLE_KEYS)), str):
            fields[who] = roles.get(name, name)
        return fields


def columns_of(mapping: Mapping[str, str]) -> ColumnNames:
    """Reads a recipe's columns; raises InputError for a name that no shape has."""
    for key, user_name in mapping.items():
        if key not in (*_NAMES, *TAGS):
            close = difflib.get_close_matches(key, (*_NAMES, *TAGS), n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(_NAMES)}"
            raise InputError(f"columns: no shape has a column {key!r}: {hint}")
        if not user_name:
            raise InputError(f"columns: {key} has no name: write {key}: and your column's name")
    names = {key: user_name for key, user_name in mapping.items() if key not in TAGS}
    columns = ColumnNames(
        names, {key: user_name for key, user_name in mapping.items() if key in TAGS}
    )
    if not columns.shapes():
        raise InputError(
            f"columns: {', '.join(mapping)} don't belong to one shape; see the shapes in the "
            "quick start"
        )
    return columns
