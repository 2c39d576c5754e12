"""Reads turns of a dialogue and tool calls from the values in files.

Calls are read in two forms. OpenAI's chat format has `tool_calls`, and a tool's turn may name
its call. ShareGPT files have `function_call` (JSON of one call or a list) and `observation`. The
available tools are the first turn, with the role `tools` and JSON as content.

A list may also be JSON text (a cell of a CSV file) or an object of lists (a table's nested column).
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hasten.data.stages import MEDIA, is_label, is_preference
from hasten.errors import InputError
from hasten.foreign_files import unique_keys

# OpenAI's names, ShareGPT's, Gemma's and Llama 3's, and those of ms-swift's documentation
# (Custom-dataset.md).
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "ipython": "tool",
    "tool_response": "tool",
}
CALLS = ("function_call", "tool_call")  # roles whose content is JSON of calls
FLAGS = ("weight", "loss_weight", "loss_scale", "train", "loss")  # keys: is a turn trained?
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
MEDIA_PARTS = ("image", "audio", "video", "file")
ROLE_KEYS, CONTENT_KEYS = ("role", "from"), ("content", "value")  # a turn's keys
_PLAIN = frozenset((*ROLE_KEYS, *CONTENT_KEYS))
_READ = frozenset((*ROLE_KEYS, *CONTENT_KEYS, *FLAGS, *THOUGHTS, "tool_calls", "function_call"))
_OF_RESULTS = ("tool_call_id", "name")
EMPTY_VALUES: tuple[Any, ...] = (None, "", [], {})
_ON_LOSS = re.compile("loss|train|mask|weight")  # unread keys with these words are refused
_TAG_ADVICE = "user_tag, assistant_tag, system_tag, function_tag or observation_tag"


class ToolCall(NamedTuple):
    """One call of a tool."""

    name: str
    arguments: str  # JSON of an object, as json.dumps writes it
    id: str = ""


class Message(NamedTuple):
    """One turn."""

    role: str  # system, user, assistant or tool; tools: the list of available tools
    content: str
    calls: tuple[ToolCall, ...] = ()  # the assistant's
    id: str = ""  # a tool's turn: the id of its call
    name: str = ""  # a tool's turn: the tool, if the example has its name
    trained: bool = True  # False: an answer that isn't trained
    thoughts: str = ""  # the assistant's, separate from its content
    instruction: str = ""  # first part of a question with two parts
    input: str = ""  # second part, which some formats write separately


class NoConversationError(ValueError):
    """The reason why an example has no conversation."""


def message(turn: Mapping[str, Any]) -> Message:
    """Returns the message of a turn with the keys `role` and `content`, or `from` and `value`.

    Raises:
        NoConversationError: the turn is invalid.
        InputError: a key requests something unsupported, so that no such example is usable.
    """
    who, what = present_key(turn, ROLE_KEYS), present_key(turn, CONTENT_KEYS)
    if who not in turn:
        raise NoConversationError("a turn lacks 'role' (or 'from')")
    if what not in turn and not any(turn.get(key) for key in ("tool_calls", "function_call")):
        raise NoConversationError("a turn lacks 'content' (or 'value')")
    name = sound(turn[who], who)
    if name not in ROLES:
        raise NoConversationError(
            f"the role {name[:40]!r} is not one of {', '.join(ROLES)}: write one of these, or name "
            f"it in columns with {_TAG_ADVICE}"
        )
    role = ROLES[name]
    if turn.keys() <= _PLAIN and isinstance(turn[what], str) and name not in CALLS:
        return Message(role, sound(turn[what], what))  # most turns
    if more := unread_keys(turn):
        _check_keys(turn, more)
    trained = _is_trained(turn, role)
    if name in CALLS:
        content = turn.get(what)
        call_list = read_json(sound(content, what), name) if isinstance(content, str) else content
        return Message("assistant", "", _calls(call_list), trained=trained)
    content = _joined(turn.get(what), what, role)
    thoughts = content.thoughts or _thoughts(turn, role)
    calls = (*content.calls, *(_calls(turn["tool_calls"]) if turn.get("tool_calls") else ()))
    if turn.get("function_call"):  # OpenAI's older form of a single call
        calls = (*calls, *_calls([turn["function_call"]]))
    if role != "assistant" and (calls or thoughts):
        kind = "tool calls" if calls else "thoughts"
        raise NoConversationError(f"a turn of {name} holds {kind}, which are the assistant's")
    text = "" if calls and content.text is None else sound(content.text, what)
    if role != "tool":
        return Message(role, text, calls, trained=trained, thoughts=thoughts)
    return Message("tool", text, (), _name(turn, "tool_call_id"), _name(turn, "name"))


def unread_keys(turn: Mapping[str, Any]) -> set[str]:
    """Returns the non-empty keys of a turn that aren't read."""
    if turn.keys() <= _PLAIN:
        return set()
    keys = {key for key in turn.keys() - _READ if turn[key] not in EMPTY_VALUES}
    if keys and ROLES.get(str(turn.get(present_key(turn, ROLE_KEYS)))) == "tool":
        keys -= {*_OF_RESULTS}
    return keys


def present_key(turn: Mapping[str, Any], keys: tuple[str, str]) -> str:
    """Returns the one of two keys with a value; else a present key, or an empty text."""
    first, second = keys
    if turn.get(first) is not None or (first in turn and turn.get(second) is None):
        return first
    return second if second in turn else ""


def _check_keys(turn: Mapping[str, Any], keys: set[str]) -> None:
    """Raises InputError if one of these keys would change what is trained."""
    for key in sorted(keys):
        if key in MEDIA:
            raise InputError(f"a turn has {key!r}, and hasten trains text alone: {_NO_MEDIA}")
        if is_preference(key) or is_label(key, turn[key]):
            raise InputError(
                f"a turn has {key!r}, which judges an answer: write the label as a column for "
                "stage: kto, or for sft leave bad answers and the key out"
            )
        if _ON_LOSS.search(key):
            raise InputError(
                f"a turn has {key!r}, and hasten trains whole turns: if it is 0 or 1, name it in "
                f"columns (train_tag: {key}), else leave it out"
            )


def _is_trained(turn: Mapping[str, Any], role: str) -> bool:
    """Reads other trainers' flags: OpenAI's, LLaMA-Factory's, ms-swift's, axolotl's.

    Raises:
        InputError: a flag requests something unsupported.
    """
    trained = True
    for key in FLAGS:
        flag = turn.get(key)
        if flag is None or flag == "":
            continue
        if flag not in (0, 1):
            raise InputError(
                f"a turn's {key!r} is {flag!r}: hasten takes 0 and 1 alone, so write one of them"
            )
        # OpenAI's weight and ms-swift's loss only have an effect on answers.
        if role != "assistant" and flag and key in ("train", "loss_weight"):
            raise InputError(
                f"a turn of {role} has {key!r}, and hasten trains answers alone: write 0, or leave "
                "it out"
            )
        trained = trained and bool(flag)
    return trained or role != "assistant"


def _thoughts(turn: Mapping[str, Any], role: str) -> str:
    thoughts = next((turn[key] for key in THOUGHTS if turn.get(key)), None)
    if thoughts is None:
        return ""
    return sound(_joined(thoughts, THOUGHTS[0], role).text, THOUGHTS[0])


class _Content(NamedTuple):
    """The combined parts of a turn's content."""

    text: Any  # a text, or what replaces it
    thoughts: str = ""
    calls: tuple[ToolCall, ...] = ()


_NO_MEDIA = "take examples without images, audio and video"


def _joined(content: Any, key: str, role: str) -> _Content:
    """Joins the parts of OpenAI's and LLaMA-Factory's content; returns other content unchanged."""
    if not isinstance(content, list):
        return _Content(content)
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise NoConversationError(f"{key!r} is an array with {kind_of(part)} in it, not a text")
        if any(word in kind for word in MEDIA_PARTS):
            raise InputError(f"{key!r} has a part of type {kind!r}: {_NO_MEDIA}")
        for flag in filter(_ON_LOSS.search, part):
            if part[flag] is not None and not (role == "assistant" and part[flag] in (1, True)):
                raise InputError(
                    f"a part of {key!r} has {flag!r}, and hasten trains whole turns: leave it out, "
                    "or flag the turn"
                )
        names = (name for name in ("text", "value", "content", kind) if name in part)
        inner = part.get(next(names, ""))
        if kind in ("text", "input_text", "output_text"):
            texts.append(sound(inner, "text"))
        elif kind in ("reasoning", "thinking"):
            thoughts.append(sound(inner, kind))
        elif kind == "tool_call":
            calls += _calls(read_json(inner, kind) if isinstance(inner, str) else inner)
        else:
            raise NoConversationError(
                f"{key!r} has a part of type {kind!r}: write texts as type text, calls as "
                "tool_calls, and results as turns of the role tool"
            )
    text = None if calls and not texts else "".join(texts)
    return _Content(text, "".join(thoughts), tuple(calls))


def tools_turn(tool_list: Any) -> tuple[Message, ...]:
    """Returns the callable tools as a turn, from a list or its JSON; empty without tools."""
    if not tool_list or (isinstance(tool_list, str) and not tool_list.strip()):
        return ()
    listed = rows_of(read_json(tool_list, "tools") if isinstance(tool_list, str) else tool_list)
    tools = []
    for one in listed if isinstance(listed, list) else [listed] if listed else ():
        tool = read_json(one, "tools") if isinstance(one, str) else one
        wrapped = tool if isinstance(tool, dict) and "function" in tool else {"function": tool}
        function = wrapped["function"]
        if not isinstance(function, dict) or not _name(function, "name"):
            raise NoConversationError("'tools' must be a list of functions, each with a name")
        if isinstance(schema := function.get("parameters"), str):  # axolotl's advice for tables
            function = function | {"parameters": read_json(schema, "parameters")}
        tools.append({"type": "function", **wrapped, "function": function})
    if not tools:
        return ()
    return (Message("tools", sound(json.dumps(tools, ensure_ascii=False), "tools")),)


def check_turns(messages: Sequence[Message]) -> None:
    """Raises NoConversationError unless the turns have a question, and end with an answer.

    Several questions or answers may follow each other, an answer or a further system text may come
    first: the chat template decides if it writes them. A call is an answer, and its results and the
    next answer follow it. A call may also be a part of an answer's text (Hermes), so results may
    follow any answer.
    """
    turns = [turn for at, turn in enumerate(messages) if not _leads(messages, at)]
    expected: tuple[str, ...] = ("user", "assistant", "system")
    for number, turn in enumerate(turns, start=1):
        if turn.role not in expected:
            wanted = " or ".join(f"{role}'s" for role in expected)
            raise NoConversationError(f"turn {number} is {turn.role}'s, expected {wanted}")
        if not turn.content.strip() and not turn.calls and turn.role != "tool":
            kind = {"user": "a question", "assistant": "an answer"}.get(turn.role, "a system text")
            raise NoConversationError(f"lacks {kind}: it is empty")
        expected = _after(turn)
    if turns and not any(turn.role == "user" for turn in turns):
        raise NoConversationError(
            f"has turns of {turns[-1].role} alone; a text without a question is written as "
            "{'text': ...}"
        )
    answers = [turn for turn in turns if turn.role == "assistant"]
    if answers and not any(answer.trained for answer in answers):
        raise NoConversationError("its flags leave no answer to train")
    if not turns or turns[-1].role != "assistant":
        last = f"its last turn is the {turns[-1].role}'s" if turns else ""
        raise NoConversationError(f"lacks an answer: {last}" if turns else "is empty")


def _after(turn: Message) -> tuple[str, ...]:
    if turn.role == "tool":
        return ("tool", "assistant")
    if turn.calls:
        return ("tool",)
    return ("user", "assistant", "system", *(["tool"] if turn.role == "assistant" else []))


def _leads(messages: Sequence[Message], at: int) -> bool:
    role, before = messages[at].role, [turn.role for turn in messages[:at]]
    return (role == "tools" and not before) or (role == "system" and before in ([], ["tools"]))


def _calls(call_list: Any) -> tuple[ToolCall, ...]:
    calls = []
    listed = rows_of(
        read_json(call_list, "tool_calls") if isinstance(call_list, str) else call_list
    )
    for one in listed if isinstance(listed, list) else [listed]:
        function = one.get("function", one) if isinstance(one, dict) else None
        if not isinstance(function, dict) or not _name(function, "name"):
            raise NoConversationError("a tool call lacks the name of its function")
        arguments = function.get("arguments")
        if arguments is None or arguments == "":
            arguments = {}
        parsed = read_json(arguments, "arguments") if isinstance(arguments, str) else arguments
        if not isinstance(parsed, dict):
            raise NoConversationError(
                f"the arguments of a tool call are {kind_of(parsed)}, not an object"
            )
        # Servers read the text and write it like this again, however the example has it.
        text = sound(json.dumps(parsed, ensure_ascii=False), "arguments")
        calls.append(ToolCall(_name(function, "name"), text, _name(one, "id")))
    if not calls:
        raise NoConversationError(f"a turn of {CALLS[0]} holds no call")
    return tuple(calls)


def read_json(text: str, key: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_number, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise NoConversationError(f"{key!r} is no JSON: {str(error)[:100]}") from None


def read_list(content: Any, key: str) -> list[Any]:
    """Returns a list, from JSON, from Python's notation (pandas' CSV), or from rows."""
    parsed = content
    if isinstance(content, str) and content.lstrip().startswith(("[", "{")):
        try:
            parsed = read_json(content, key)
        except NoConversationError:
            parsed = _literal(content)
            if parsed is None:
                raise
    parsed = rows_of(parsed)
    if not isinstance(parsed, list):
        raise NoConversationError(f"{key!r} is {kind_of(content)}, not a list")
    return parsed


def _literal(text: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of unknown escapes
            return json.loads(json.dumps(ast.literal_eval(text.strip())))  # only JSON values
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def rows_of(content: Any) -> Any:
    """Converts an object of lists of equal length to a list of objects; others don't change.

    The `datasets` library stores a list of objects so (Sequence of a dictionary).
    """
    columns = (
        {k: v for k, v in content.items() if v is not None} if isinstance(content, dict) else {}
    )
    if not columns or not all(isinstance(column, list) for column in columns.values()):
        return content
    if len({len(column) for column in columns.values()}) != 1:
        return content
    rows = (zip(columns, row, strict=True) for row in zip(*columns.values(), strict=True))
    return [{key: inner for key, inner in row if inner is not None} for row in rows]


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


def _name(holder: Mapping[str, Any], key: str) -> str:
    content = holder.get(key)
    return "" if content is None else sound(content, key)


def sound(content: Any, key: str) -> str:
    """Returns a text after a check that it is valid; escapes can contain lone surrogates."""
    if not isinstance(content, str):
        raise NoConversationError(f"{key!r} is {kind_of(content)}, not a text")
    if "\x00" in content:
        raise NoConversationError(f"{key!r} holds a NUL character")
    try:
        content.encode()
    except UnicodeEncodeError:
        raise NoConversationError(f"{key!r} holds a lone surrogate: half of a character") from None
    return content


def kind_of(content: Any) -> str:
    """Returns the name of a JSON value's type, for messages."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    names |= {bytes: "a string of bytes"}
    return "null" if content is None else names.get(type(content), "a number")
