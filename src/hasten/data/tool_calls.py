"""Tool calls in the form for a chat template, and a check that the text contains them.

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
    """Form of calls for a template: type of the arguments, and the content without a text."""

    as_text: bool = False  # arguments as JSON text for DeepSeek's templates; else an object
    empty: str | None = None  # OpenAI's null, which V3's template tests; others would print it


PYTHON_WORDS = ("None", "True", "False")  # for JSON's null, true and false
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
    """Returns turns with the keys of OpenAI's format."""
    return [_turn(turn, form) for turn in turns]


def check_seen(
    messages: Sequence[Message], text: str, render: Callable[[Sequence[Message]], str]
) -> bool:
    """Raises ToolsNotRenderedError if the text lacks a tool, call, result or thought.

    A template may drop thoughts of earlier answers. Returns True if a value of a call is written
    in Python's notation.
    """
    in_python = False
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
            written, plain = _written_calls(messages[: at + 1], render)
            faults = [fault for call in turn.calls if (fault := _fault(written, call))]
            if not turn.content and "None" in plain and "None" not in str(turn.calls):
                faults.append("writes None for the text of an answer that has only calls")
            if faults:
                raise ToolsNotRenderedError(f"the chat template {faults[0]}: {TOOL_ADVICE}")
            in_python |= any(written.count(word) > plain.count(word) for word in PYTHON_WORDS)
            nodes = (n for call in turn.calls for n in _below(json.loads(call.arguments)))
            in_python |= any(_is_in_python(written, node) for node in nodes)
        elif turn.role == "tool" and not any(form in text for form in _written(turn.content)):
            raise ToolsNotRenderedError(
                f"the chat template drops the result of a tool: {TOOL_ADVICE}"
            )
    return in_python


def _written_calls(
    messages: Sequence[Message], render: Callable[[Sequence[Message]], str]
) -> tuple[str, str]:
    """Returns the last turn's text, and the text with 0 for each null, true and false."""
    *before, turn = messages
    start, text = render(before), render(messages)
    written = text[shared_length(start, text) :]
    if not any(word in written for word in PYTHON_WORDS):
        return written, written
    plain_calls = (
        call._replace(arguments=json.dumps(_numbered(json.loads(call.arguments))))
        for call in turn.calls
    )
    plain = render([*before, turn._replace(calls=tuple(plain_calls))])
    return written, plain[shared_length(start, plain) :]


def _numbered(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _numbered(inner) for key, inner in node.items()}
    if isinstance(node, list):
        return [_numbered(inner) for inner in node]
    return 0 if node is None or isinstance(node, bool) else node


def _below(node: Any) -> Iterator[Any]:
    """Yields all values inside an object or array."""
    for inner in node.values() if isinstance(node, dict) else node:
        yield inner
        if isinstance(inner, (dict, list)):
            yield from _below(inner)


def _is_in_python(written: str, node: Any) -> bool:
    """Returns True if an array or object is written in a way that isn't JSON."""
    is_nested = isinstance(node, (dict, list))
    return is_nested and str(node) in written and str(node) != json.dumps(node)


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


def _fault(written: str, call: ToolCall) -> str:
    """Returns what a template does to a call; empty if its name and every argument are written."""
    arguments = json.loads(call.arguments)
    if _is_in_python(written, arguments):
        return "writes the arguments of tool calls in Python's notation, not as JSON"
    if (twice := json.dumps(call.arguments)[1:-1]) != call.arguments and twice in written:
        return "writes the arguments of tool calls as JSON twice"
    leaves = [call.name, *_leaves(arguments)]
    shown = all(any(form in written for form in _written(leaf)) for leaf in leaves)
    return "" if shown else "ignores the example's tool calls"


def shared_length(left_text: str, right_text: str) -> int:
    pairs = enumerate(zip(left_text, right_text, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(left_text), len(right_text)))


def _leaves(content: Any) -> Iterator[str]:
    if isinstance(content, dict):
        for key, inner in content.items():
            yield key
            yield from _leaves(inner)
    elif isinstance(content, list):
        for inner in content:
            yield from _leaves(inner)
    elif isinstance(content, str):
        yield content


def _written(text: str) -> tuple[str, ...]:
    """Returns a text as templates may write it: without outer white space, or as JSON."""
    return (text.strip(), *(json.dumps(text, ensure_ascii=ascii)[1:-1] for ascii in (False, True)))
