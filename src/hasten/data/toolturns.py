"""Tool calls as a chat template takes them, and the proof that it shows them.

A template that knows nothing of tools renders a dialogue without them, and a model trained on that
text would learn to answer from nowhere. So whatever a record says of tools must be found in the
text again; a record of which it isn't is rejected with what is missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hasten.data.messages import Call, Message

# Transformers documents arguments as an object; DeepSeek's own templates add them to a text.
FORMS = ("object", "text")
_ADVICE = "choose another chat_template, or leave such records out"


class UnseenError(ValueError):
    """What of a record's tools isn't in the text that a template makes of it."""


def split_tools(messages: Sequence[Message]) -> tuple[list[Any] | None, Sequence[Message]]:
    """What may be called, as Transformers passes it to templates, and the turns."""
    if messages and messages[0].role == "tools":
        return json.loads(messages[0].content), messages[1:]
    return None, messages


def template_turns(turns: Sequence[Message], form: str) -> list[dict[str, Any]]:
    """Turns with the keys of OpenAI's format; `form` is how arguments are given."""
    return [_turn(turn, form) for turn in turns]


def check_seen(
    messages: Sequence[Message], text: str, render: Callable[[Sequence[Message]], str]
) -> None:
    """Raise UnseenError unless `text` shows the tools, calls and results of all messages."""
    tools, turns = split_tools(messages)
    if tools:
        names = [tool["function"]["name"] for tool in tools]
        if text == render(turns) or not all(name in text for name in names):
            raise UnseenError(f"the chat template ignores the record's tools: {_ADVICE}")
    for at, turn in enumerate(messages):
        if turn.calls:
            before, upto = render(messages[:at]), render(messages[: at + 1])
            written = upto[_shared(before, upto) :]
            if not all(_shows(written, call) for call in turn.calls):
                raise UnseenError(f"the chat template ignores the record's tool calls: {_ADVICE}")
        elif turn.role == "tool" and not any(form in text for form in _written(turn.content)):
            raise UnseenError(f"the chat template drops the result of a tool: {_ADVICE}")


def _turn(turn: Message, form: str) -> dict[str, Any]:
    found: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.calls:
        found["content"] = turn.content or None  # null in OpenAI's format; V3's asks for it
        found["tool_calls"] = [_call(call, form) for call in turn.calls]
    if turn.id:
        found["tool_call_id"] = turn.id
    if turn.name:
        found["name"] = turn.name
    return found


def _call(call: Call, form: str) -> dict[str, Any]:
    arguments = json.loads(call.arguments) if form == "object" else call.arguments
    function = {"name": call.name, "arguments": arguments}
    return {"type": "function", "function": function} | ({"id": call.id} if call.id else {})


def _shows(written: str, call: Call) -> bool:
    """Whether a call is written with its name and every argument, and not in Python's notation."""
    arguments = json.loads(call.arguments)
    if arguments and str(arguments) in written and str(arguments) != json.dumps(arguments):
        return False  # an object put into a text as it is
    if (twice := json.dumps(call.arguments)[1:-1]) != call.arguments and twice in written:
        return False  # a text written as JSON once more
    leaves = [call.name, *_leaves(arguments)]
    return all(any(form in written for form in _written(leaf)) for leaf in leaves)


def _shared(left: str, right: str) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(left), len(right)))


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    elif isinstance(value, str):
        yield value


def _written(text: str) -> tuple[str, ...]:
    """A text as templates write it: as it is, without outer white space, or as JSON."""
    return (text.strip(), *(json.dumps(text, ensure_ascii=ascii)[1:-1] for ascii in (False, True)))
