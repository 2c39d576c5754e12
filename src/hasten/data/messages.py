"""Messages: the turns of a dialogue, with the tools that it may call, its calls and their results.

Calls are read as OpenAI's chat format has them (`tool_calls`, a tool's turn that may name its
call) and as ShareGPT files do (`function_call`: JSON of one call or a list, `observation`). What
may be called comes first, as a turn of its own whose role is `tools` and whose content is JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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


class Call(NamedTuple):
    """One call of a tool."""

    name: str
    arguments: str  # JSON of an object
    id: str = ""


class Message(NamedTuple):
    """One turn."""

    role: str  # system, user, assistant or tool; tools: not a turn, but what may be called
    content: str
    calls: tuple[Call, ...] = ()  # the assistant's
    id: str = ""  # a tool's turn: the call that it answers
    name: str = ""  # a tool's turn: the tool, where the record says it
    trained: bool = True  # the assistant's: whether it carries loss


class UnfitError(ValueError):
    """Why a record has no conversation in it."""


def message(turn: Mapping[str, Any], role: str, content: str) -> Message:
    """The message of a turn whose keys are `role` and `content`.

    Raises:
        UnfitError: it is none.
        InputError: a key of it means what hasten doesn't do, so that no such record is usable.
    """
    for key in (role, content):
        if key not in turn and not (key == content and turn.get("tool_calls")):
            raise UnfitError(f"lacks {key!r}")
    name = sound(turn[role], role)
    if name not in ROLES:
        raise UnfitError(f"the role {name[:40]!r} is not one of {', '.join(ROLES)}")
    trained = _is_trained(turn, ROLES[name])
    if name == CALLS:
        called = _calls(_parsed(sound(turn.get(content), content), CALLS))
        return Message("assistant", "", called, trained=trained)
    calls = _calls(turn["tool_calls"]) if turn.get("tool_calls") else ()
    if turn.get("function_call"):  # OpenAI's older form of a single call
        calls = (*calls, *_calls([turn["function_call"]]))
    if calls and ROLES[name] != "assistant":
        raise UnfitError(f"a turn of {name} holds tool calls, which are the assistant's")
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
            raise UnfitError(f"{key!r} has a part that is no text")
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
            raise UnfitError("'tools' must be a list of functions, each with a name")
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
            raise UnfitError(f"turn {number} is {turn.role}'s, expected {wanted}")
        if not turn.content.strip() and not turn.calls and turn.role != "tool":
            kind = "a question" if turn.role == "user" else "an answer"
            raise UnfitError(f"lacks {kind}: it is empty")
        expected = _after(turn)
    if turns and not any(turn.trained for turn in turns if turn.role == "assistant"):
        raise UnfitError("its flags leave no answer to train")
    if not turns or turns[-1].role != "assistant":
        last = f"its last turn is the {turns[-1].role}'s" if turns else ""
        raise UnfitError(f"lacks an answer: {last}" if turns else "is empty")


def _after(turn: Message) -> tuple[str, ...]:
    if turn.role == "tool":
        return ("tool", "assistant")
    if turn.calls:
        return ("tool",)
    return ("assistant",) if turn.role == "user" else ("user",)


def _leads(messages: Sequence[Message], at: int) -> bool:
    role, before = messages[at].role, [turn.role for turn in messages[:at]]
    return (role == "tools" and not before) or (role == "system" and before in ([], ["tools"]))


def _calls(given: Any) -> tuple[Call, ...]:
    calls = []
    for one in given if isinstance(given, list) else [given]:
        function = one.get("function", one) if isinstance(one, dict) else None
        if not isinstance(function, dict) or not _name(function, "name"):
            raise UnfitError("a tool call lacks the name of its function")
        arguments = function.get("arguments")
        if arguments is None or arguments == "":
            arguments = {}
        parsed = _parsed(arguments, "arguments") if isinstance(arguments, str) else arguments
        if not isinstance(parsed, dict):
            raise UnfitError(f"the arguments of a tool call are {kind_of(parsed)}, not an object")
        plain = sound(json.dumps(parsed, ensure_ascii=False), "arguments")  # without its escapes
        text = arguments if isinstance(arguments, str) else plain
        calls.append(Call(_name(function, "name"), text, _name(one, "id")))
    if not calls:
        raise UnfitError(f"a turn of {CALLS} holds no call")
    return tuple(calls)


def _parsed(text: str, key: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise UnfitError(f"{key!r} is no JSON: {str(error)[:100]}") from None


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


def _name(holder: Mapping[str, Any], key: str) -> str:
    value = holder.get(key)
    return "" if value is None else sound(value, key)


def sound(value: Any, key: str) -> str:
    """`value` if it is a text that survives UTF-8; escapes can hide what raw bytes can't."""
    if not isinstance(value, str):
        raise UnfitError(f"{key!r} is {kind_of(value)}, not a text")
    if "\x00" in value or "\ufeff" in value:
        raise UnfitError(f"{key!r} holds a NUL character or a byte order mark")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UnfitError(f"{key!r} holds a lone surrogate: half of a character") from None
    return value


def kind_of(value: Any) -> str:
    """What a JSON value is, for people."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")
