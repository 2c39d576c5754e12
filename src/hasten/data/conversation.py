"""Conversations: turns and tool calls, the shapes of a record that hold them, a user's own columns.

Calls are read as OpenAI's chat format has them (`tool_calls`, a tool's turn that may name its
call) and as ShareGPT files do (`function_call`: JSON of one call or a list, `observation`). What
may be called comes first, as a turn of its own whose role is `tools` and whose content is JSON.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hasten.errors import InputError

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
}
CALLS = "function_call"  # the role whose content is JSON of calls
FLAGS = ("weight", "loss_weight", "train")  # of a turn: whether it is trained
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
MEDIA_PARTS = ("image", "audio", "video", "file")


class ToolCall(NamedTuple):
    """One call of a tool."""

    name: str
    arguments: str  # JSON of an object
    id: str = ""


class Message(NamedTuple):
    """One turn."""

    role: str  # system, user, assistant or tool; tools: not a turn, but what may be called
    content: str
    calls: tuple[ToolCall, ...] = ()  # the assistant's
    id: str = ""  # a tool's turn: the call that it answers
    name: str = ""  # a tool's turn: the tool, where the record says it
    trained: bool = True  # the assistant's: whether it carries loss
    instruction: str = ""  # a question of two parts: the first, and
    input: str = ""  # the second, which some formats write apart


class NoConversationError(ValueError):
    """Why a record has no conversation in it."""


def message(turn: Mapping[str, Any], role: str, content: str) -> Message:
    """The message of a turn whose keys are `role` and `content`.

    Raises:
        NoConversationError: it is none.
        InputError: a key of it means what hasten doesn't do, so that no such record is usable.
    """
    for key in (role, content):
        if key not in turn and not (key == content and turn.get("tool_calls")):
            raise NoConversationError(f"lacks {key!r}")
    name = sound(turn[role], role)
    if name not in ROLES:
        raise NoConversationError(f"the role {name[:40]!r} is not one of {', '.join(ROLES)}")
    trained = _is_trained(turn, ROLES[name])
    if name == CALLS:
        called = _calls(_parsed(sound(turn.get(content), content), CALLS))
        return Message("assistant", "", called, trained=trained)
    calls = _calls(turn["tool_calls"]) if turn.get("tool_calls") else ()
    if turn.get("function_call"):  # OpenAI's older form of a single call
        calls = (*calls, *_calls([turn["function_call"]]))
    if calls and ROLES[name] != "assistant":
        raise NoConversationError(f"a turn of {name} holds tool calls, which are the assistant's")
    given = _joined(turn.get(content), content)
    text = "" if calls and given is None else sound(given, content)
    if ROLES[name] != "tool":
        return Message(ROLES[name], text, calls, trained=trained)
    return Message("tool", text, (), _name(turn, "tool_call_id"), _name(turn, "name"))


def _is_trained(turn: Mapping[str, Any], role: str) -> bool:
    """What the flags of other trainers say of a turn's loss: OpenAI's, LLaMA-Factory's, axolotl's.

    Raises:
        InputError: they say what can't be followed.
    """
    for key in THOUGHTS:
        if turn.get(key):
            raise InputError(
                f"a turn has {key!r}, which hasten doesn't train: write the thoughts into its "
                "content as <think>...</think>, or leave the key out"
            )
    if turn.get("train_detail"):
        raise InputError("a turn has 'train_detail', and hasten trains whole turns: leave it out")
    found = True
    for key in FLAGS:
        value = turn.get(key)
        if value is None:
            continue
        if value not in (0, 1):
            raise InputError(f"a turn's {key!r} is {value!r}: hasten takes 0 and 1 alone")
        if role != "assistant" and value and key == "train":
            raise InputError(f"a turn of {role} has 'train', and hasten trains answers alone")
        found = found and bool(value)
    return found or role != "assistant"


def _joined(content: Any, key: str) -> Any:
    """The text of content in parts; other content as it is."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            if isinstance(kind, str) and any(word in kind for word in MEDIA_PARTS):
                raise InputError(
                    f"{key!r} has a part of type {kind!r}; hasten trains text alone, so take "
                    "records without images, audio and video"
                )
            raise NoConversationError(f"{key!r} has a part that is no text")
        texts.append(sound(part.get("text", part.get("value")), "text"))
    return "".join(texts)


def tools_turn(given: Any) -> tuple[Message, ...]:
    """What may be called as a turn, from a list or its JSON; none where there is none."""
    listed = _parsed(given, "tools") if isinstance(given, str) and given.strip() else given
    if not listed or isinstance(listed, str):
        return ()
    tools = []
    for tool in listed if isinstance(listed, list) else [listed]:
        wrapped = tool if isinstance(tool, dict) and "function" in tool else {"function": tool}
        function = wrapped["function"]
        if not isinstance(function, dict) or not _name(function, "name"):
            raise NoConversationError("'tools' must be a list of functions, each with a name")
        tools.append({"type": "function", **wrapped})
    return (Message("tools", sound(json.dumps(tools, ensure_ascii=False), "tools")),)


def check_turns(messages: Sequence[Message]) -> None:
    """Raise unless it is [tools] [system], then users and assistants in turn, an answer at last.

    A call is an answer, and its results and the next answer follow it.
    """
    turns = [turn for at, turn in enumerate(messages) if not _leads(messages, at)]
    expected: tuple[str, ...] = ("user",)
    for number, turn in enumerate(turns, start=1):
        if turn.role not in expected:
            wanted = " or ".join(f"{role}'s" for role in expected)
            raise NoConversationError(f"turn {number} is {turn.role}'s, expected {wanted}")
        if not turn.content.strip() and not turn.calls and turn.role != "tool":
            kind = "a question" if turn.role == "user" else "an answer"
            raise NoConversationError(f"lacks {kind}: it is empty")
        expected = _after(turn)
    if turns and not any(turn.trained for turn in turns if turn.role == "assistant"):
        raise NoConversationError("its flags leave no answer to train")
    if not turns or turns[-1].role != "assistant":
        last = f"its last turn is the {turns[-1].role}'s" if turns else ""
        raise NoConversationError(f"lacks an answer: {last}" if turns else "is empty")


def _after(turn: Message) -> tuple[str, ...]:
    if turn.role == "tool":
        return ("tool", "assistant")
    if turn.calls:
        return ("tool",)
    return ("assistant",) if turn.role == "user" else ("user",)


def _leads(messages: Sequence[Message], at: int) -> bool:
    role, before = messages[at].role, [turn.role for turn in messages[:at]]
    return (role == "tools" and not before) or (role == "system" and before in ([], ["tools"]))


def _calls(given: Any) -> tuple[ToolCall, ...]:
    calls = []
    for one in given if isinstance(given, list) else [given]:
        function = one.get("function", one) if isinstance(one, dict) else None
        if not isinstance(function, dict) or not _name(function, "name"):
            raise NoConversationError("a tool call lacks the name of its function")
        arguments = function.get("arguments")
        if arguments is None or arguments == "":
            arguments = {}
        parsed = _parsed(arguments, "arguments") if isinstance(arguments, str) else arguments
        if not isinstance(parsed, dict):
            raise NoConversationError(
                f"the arguments of a tool call are {kind_of(parsed)}, not an object"
            )
        plain = sound(json.dumps(parsed, ensure_ascii=False), "arguments")  # without its escapes
        text = arguments if isinstance(arguments, str) else plain
        calls.append(ToolCall(_name(function, "name"), text, _name(one, "id")))
    if not calls:
        raise NoConversationError(f"a turn of {CALLS} holds no call")
    return tuple(calls)


def _parsed(text: str, key: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise NoConversationError(f"{key!r} is no JSON: {str(error)[:100]}") from None


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


def _name(holder: Mapping[str, Any], key: str) -> str:
    value = holder.get(key)
    return "" if value is None else sound(value, key)


def sound(value: Any, key: str) -> str:
    """`value` if it is a text that survives UTF-8; escapes can hide what raw bytes can't."""
    if not isinstance(value, str):
        raise NoConversationError(f"{key!r} is {kind_of(value)}, not a text")
    if "\x00" in value or "\ufeff" in value:
        raise NoConversationError(f"{key!r} holds a NUL character or a byte order mark")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise NoConversationError(f"{key!r} holds a lone surrogate: half of a character") from None
    return value


def kind_of(value: Any) -> str:
    """What a JSON value is, for people."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


# The usual shapes of a training record, each with the columns it needs and its reader.
#
# More columns than a shape needs are fine, whatever they hold; a missing or null optional column is
# empty.
#
#     alpaca      instruction, output [input, system, history: pairs of question and answer]
#     sharegpt    conversations: from (human, gpt, system, function_call, observation), value
#                 [system, tools]
#     messages    messages: role (user, assistant, system, tool), content, tool_calls [tools]
#     prompt      prompt, completion
#     question    question, answer
#     text        text: no dialogue, every token is trained


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
    """The conversation in a record of a shape; raises NoConversationError where there is none."""
    if not isinstance(record, dict):
        raise NoConversationError(f"{kind_of(record)}, not an object")
    if shape not in SHAPES:
        raise NoConversationError("the file's shape is unknown: its first records are all damaged")
    needs, read = SHAPES[shape].needs, SHAPES[shape].read
    if missing := [key for key in needs if key not in record]:
        raise NoConversationError(
            f"lacks {' and '.join(map(repr, missing))} (the file's shape is {shape})"
        )
    if read is None:
        return Conversation((), _filled(_text(record, "text"), "text"), place)
    messages = tuple(read(record))
    check_turns(messages)
    return Conversation(messages, None, place)


def _alpaca(record: Mapping[str, Any]) -> Iterator[Message]:
    yield from _system(record)
    for pair in _list(record, "history") if record.get("history") not in (None, "") else ():
        if not isinstance(pair, list) or len(pair) != 2:
            raise NoConversationError("'history' must hold pairs of question and answer")
        question, answer = pair
        yield Message("user", sound(question, "history"))
        yield Message("assistant", sound(answer, "history"))
    first, second = _text(record, "instruction"), _text(record, "input", optional=True)
    question = "\n".join(part for part in (first, second) if part)
    yield Message("user", question, instruction=first if second else "", input=second)
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
            raise NoConversationError(f"a turn in {key!r} is {kind_of(turn)}, not an object")
        yield message(turn, role, content)


def _system(record: Mapping[str, Any]) -> Iterator[Message]:
    if text := _text(record, "system", optional=True):
        yield Message("system", text)


def _list(record: Mapping[str, Any], key: str) -> list[Any]:
    value = record.get(key)
    if not isinstance(value, list):
        raise NoConversationError(f"{key!r} is {kind_of(value)}, not a list")
    return value


def _text(record: Mapping[str, Any], key: str, optional: bool = False) -> str:
    if key not in record and not optional:
        raise NoConversationError(f"lacks {key!r}")
    value = record.get(key)
    return "" if value is None and optional else sound(value, key)


def _filled(text: str, what: str) -> str:
    if not text.strip():
        raise NoConversationError(f"lacks {'an' if what == 'answer' else 'a'} {what}: it is empty")
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


# Columns: a user's names for the columns of a known shape, and for what is inside its turns.
#
# `question: prompt_text` reads the column `question` of a shape from the user's `prompt_text`.
# Seven tags, named as in LLaMA-Factory's dataset_info.json, say the same of turns: `role_tag` and
# `content_tag` are the keys of a turn, `user_tag`, `assistant_tag`, `system_tag`, `function_tag` (a
# turn whose content is JSON of calls) and `observation_tag` (their results) its roles.

_ROLE_TAGS = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "system_tag": "system",
    "function_tag": CALLS,
    "observation_tag": "observation",
}
TAGS = ("role_tag", "content_tag", *_ROLE_TAGS)
# Stay in a turn as they are.
_KEPT = ("tool_calls", "function_call", "tool_call_id", "name", *FLAGS, *THOUGHTS, "train_detail")
_NAMES = list(dict.fromkeys(n for shape in SHAPES.values() for n in (*shape.needs, *shape.takes)))


@dataclass(frozen=True)
class ColumnNames:
    """What the user calls a shape's columns and tags; without `shape` it is found out."""

    names: Mapping[str, str] = field(default_factory=dict)  # a shape's column <- the user's
    tags: Mapping[str, str] = field(default_factory=dict)
    shape: str | None = None  # known beforehand: columns that `names` lacks are then not read

    def shapes(self) -> tuple[str, ...]:
        """The shapes that these names can belong to, in the order of the table."""
        if self.shape:
            return (self.shape,)
        fit = (n for n, s in SHAPES.items() if {*s.needs, *s.takes} >= self.names.keys())
        return tuple(name for name in fit if SHAPES[name].turn or not self.tags)

    def renamed(self, record: Any, shape: str | None = None) -> Any:
        """The record with the shape's names in place of the user's; anything else as it is."""
        if not isinstance(record, dict):
            return record
        taken = {*self.names.values()} - self.names.keys()
        kept = {} if self.shape else {k: v for k, v in record.items() if k not in self.names}
        named = {known: record[own] for known, own in self.names.items() if own in record}
        found = {k: v for k, v in kept.items() if k not in taken} | named
        known_shape = SHAPES.get(shape or "")
        if self.tags and known_shape and (keys := known_shape.turn):
            turns = found.get(known_shape.needs[0])
            if isinstance(turns, list):
                found[known_shape.needs[0]] = [self._turn(turn, *keys) for turn in turns]
        return found

    def _turn(self, turn: Any, who: str, what: str) -> Any:
        if not isinstance(turn, dict):
            return turn
        role, content = self.tags.get("role_tag", who), self.tags.get("content_tag", what)
        found = {known: turn[own] for known, own in ((who, role), (what, content)) if own in turn}
        found |= {key: turn[key] for key in _KEPT if key in turn}
        roles = {own: _ROLE_TAGS[tag] for tag, own in self.tags.items() if tag in _ROLE_TAGS}
        if isinstance(name := found.get(who), str):
            found[who] = roles.get(name, name)
        return found


def columns_of(given: Mapping[str, str]) -> ColumnNames:
    """Columns as a recipe writes them; raises InputError for a name that no shape has."""
    for key, own in given.items():
        if key not in (*_NAMES, *TAGS):
            close = difflib.get_close_matches(key, (*_NAMES, *TAGS), n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(_NAMES)}"
            raise InputError(f"columns: no shape has a column {key!r}: {hint}")
        if not own:
            raise InputError(f"columns: {key} has no name: write {key}: and your column's name")
    names = {key: own for key, own in given.items() if key not in TAGS}
    found = ColumnNames(names, {key: own for key, own in given.items() if key in TAGS})
    if not found.shapes():
        raise InputError(
            f"columns: {', '.join(given)} don't belong to one shape; see the shapes in the "
            "quick start"
        )
    return found
