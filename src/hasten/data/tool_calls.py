"""Tool calls as a chat template takes them, and the check that it shows them.

A template that ignores tools renders a dialogue without them. A model trained on that text would
learn to answer without a reason. So every tool, call and result of an example must appear in the
text, or the example is rejected with the missing part.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from hasten.data.turns import THOUGHTS, Message, ToolCall


class CallForm(NamedTuple):
    """How a template takes calls: what it gets as arguments, and as content without words."""

    as_text: bool = False  # Transformers documents an object; DeepSeek's templates add it to a text
    empty: str | None = None  # null in OpenAI's format, which V3's asks for; others write it


FORMS = (CallForm(), CallForm(True), CallForm(False, ""), CallForm(True, ""))
TOOL_ADVICE = "choose another chat_template, or leave such examples out"


class ToolsNotRenderedError(ValueError):
    """An example's tools or thoughts that are missing in the text rendered by a template."""


def split_tools(messages: Sequence[Message]) -> tuple[list[Any] | None, Sequence[Message]]:
    """Returns the callable tools, as Transformers passes them to templates, and the turns."""
    if messages and messages[0].role == "tools":
        return json.loads(messages[0].content), messages[1:]
    return None, messages


def template_turns(turns: Sequence[Message], form: CallForm = FORMS[0]) -> list[dict[str, Any]]:
    """Turns with the keys of OpenAI's format."""
    return [_turn(turn, form) for turn in turns]


def check_seen(
    messages: Sequence[Message], text: str, render: Callable[[Sequence[Message]], str]
) -> None:
    """Raise ToolsNotRenderedError unless all messages' tools, calls, results, thoughts are shown.

    Thoughts may be written only while their answer is the last.
    """
    tools, turns = split_tools(messages)
    if tools:
        names = [tool["function"]["name"] for tool in tools]
        if text == render(turns) or not all(name in text for name in names):
            raise ToolsNotRenderedError(
                f"the chat template ignores the example's tools: {TOOL_ADVICE}"
            )
    for at, turn in enumerate(messages):
        if turn.thoughts and turn.thoughts.strip() not in render(messages[: at + 1]):
            raise ToolsNotRenderedError(
                f"the chat template writes no {THOUGHTS[0]}: choose another chat_template, or "
                "write the thoughts into the content as <think>...</think>"
            )
        if turn.calls:
            before, upto = render(messages[:at]), render(messages[: at + 1])
            written = upto[shared_length(before, upto) :]
            nulls = not turn.content and "None" in written and "None" not in str(turn.calls)
            if nulls or not all(_shows(written, call) for call in turn.calls):
                raise ToolsNotRenderedError(
                    f"the chat template ignores the example's tool calls: {TOOL_ADVICE}"
                )
        elif turn.role == "tool" and not any(form in text for form in _written(turn.content)):
            raise ToolsNotRenderedError(
                f"the chat template drops the result of a tool: {TOOL_ADVICE}"
            )


def _turn(turn: Message, form: CallForm) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.input:
        fields |= {"instruction": turn.instruction, "input": turn.input}
    # Templates read thoughts under one of these names (Qwen's the first, gpt-oss's the last).
    fields |= dict.fromkeys(THOUGHTS, turn.thoughts) if turn.thoughts else {}
    if turn.calls:
        fields["content"] = turn.content or form.empty
        fields["tool_calls"] = [_call(call, form) for call in turn.calls]
    if turn.id:
        fields["tool_call_id"] = turn.id
    if turn.name:
        fields["name"] = turn.name
    return fields


def _call(call: ToolCall, form: CallForm) -> dict[str, Any]:
    arguments = call.arguments if form.as_text else json.loads(call.arguments)
    function = {"name": call.name, "arguments": arguments}
    return {"type": "function", "function": function} | ({"id": call.id} if call.id else {})


def _shows(written: str, call: ToolCall) -> bool:
    """Returns True if a call is written with its name and every argument.

    A call in Python's notation doesn't count.
    """
    arguments = json.loads(call.arguments)
    if arguments and str(arguments) in written and str(arguments) != json.dumps(arguments):
        return False  # an object put into a text as it is
    if (twice := json.dumps(call.arguments)[1:-1]) != call.arguments and twice in written:
        return False  # a text written as JSON once more
    leaves = [call.name, *_leaves(arguments)]
    return all(any(form in written for form in _written(leaf)) for leaf in leaves)


def shared_length(left_text: str, right_text: str) -> int:
    pairs = enumerate(zip(left_text, right_text, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(left_text), len(right_text)))


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
