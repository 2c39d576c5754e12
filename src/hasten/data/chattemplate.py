"""The chat template of a tokenizer, apart from it, and what it makes of the turns of a record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hasten.data.chatformats import FALLBACKS
from hasten.data.render import render
from hasten.data.shapes import Conversation, Message
from hasten.data.toolturns import FORMS, split_tools, template_turns
from hasten.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TURNS = 1_000  # of a dialogue: what precedes each answer is rendered apart, to find the answer


class ChatTemplate(NamedTuple):
    """The chat template of a tokenizer and what it is given; empty where there is none."""

    plain: str
    with_tools: str
    special_tokens: dict[str, Any]


def chat_template_of(tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
    """Of several templates, the one named default, or tool_use where there are tools."""
    sources = []
    choices: tuple[list[Any] | None, ...] = (None, [])
    for tools in choices:
        try:
            sources.append(str(tokenizer.get_chat_template(tools=tools)))
        except ValueError:  # none of that name, or none at all
            sources.append("")
    return ChatTemplate(sources[0], sources[1], dict(tokenizer.special_tokens_map))


def seconds_explained(dialogue: Conversation) -> float:
    """Processor time that a dialogue explains, some ten times what usual templates take."""
    turns = min(len(dialogue.messages), TURNS)
    answers = [message for message in dialogue.messages[:turns] if message.role == "assistant"]
    calls = sum(bool(answer.calls) for answer in answers)
    renderings = (2 * len(answers) + 2 * calls + 2) * (len(FORMS) if calls else 1)
    characters = sum(
        len(message.content) + sum(len(call.arguments) for call in message.calls)
        for message in dialogue.messages
    )
    return renderings * (3e-4 + 3e-5 * turns + 3e-8 * characters)


def render_turns(
    template: ChatTemplate,
    messages: Sequence[Message],
    prompt: bool,
    place: str,
    form: str,
) -> str:
    """The text of a record's turns; raises InputError where the template fails."""
    tools, turns = split_tools(messages)
    source = template.plain if tools is None else template.with_tools
    if not source:
        names = " or ".join(FALLBACKS)
        raise InputError(f"the tokenizer has no chat template, which {place} needs: use {names}")
    values = {
        **template.special_tokens,
        "messages": template_turns(turns, form),
        "tools": tools,
        "documents": None,
        "add_generation_prompt": prompt,
    }
    return render(source, place, values)
