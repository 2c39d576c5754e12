"""A conversation as tokens, rendered by the tokenizer's chat template, loss on the answers alone.

  (1) the template renders the whole conversation to one text; it brings its own bos token
  (2) rendered prefixes tell where each answer begins and ends in that text; what a template drops
      or rewrites there (the thoughts of earlier turns) is not trained
  (3) the text is tokenised once, as a model would see it; the offsets of the tokens say which of
      them belong to an answer, its end-of-turn token included
  (4) what is longer than `cutoff_len` meets `too_long`:

      truncate    a dialogue is cut at the end; a plain text goes on in the next piece
      split       a dialogue goes on too; pieces without any part of an answer are left out
      drop        dialogue or text, it is left out whole

Pieces overlap by one token, so every trained token of the whole is predicted exactly once.
"""

from __future__ import annotations

import difflib
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from hasten.data import renderer
from hasten.data.conversation import THOUGHTS, Conversation, Message, ToolCall
from hasten.data.template_sandbox import TemplateFailedError, check_syntax, render
from hasten.errors import InputError
from hasten.formatting import open_regular
from hasten.parts.data.collate import TokenRecord, token_record

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# The chat formats that DeepSeek's models were trained with, and which of them a job uses.
#
# They stand in for the template that a tokenizer may lack, and a recipe can ask for one by name or
# give a file of its own.

# deepseek-llm: DeepSeek-AI 2024, the model card of deepseek-llm-7b-chat.
#
# deepseek-v3: DeepSeek-AI 2024, tokenizer_config.json of DeepSeek-V3-0324, with calls of tools and
# their results; how tools are declared is not part of it. As published only the first results of a
# dialogue are opened and a call after results doesn't close them; here all are.
#
# deepseek-r1: DeepSeek-AI 2025, the model card of DeepSeek-R1, no tools: the prompt opens the
# thought, and later turns don't see the thoughts of earlier ones. As published it cuts the thought
# off the last answer too; here it stays, since it is what is trained.

_TEMPLATES = Path(__file__).with_name("chat_templates")
FALLBACKS = {
    name: (_TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8").removesuffix("\n")
    for name in ("deepseek-llm", "deepseek-v3", "deepseek-r1")
}
_LARGEST_FILE = 1 << 20  # bytes


def ensure_chat_template(
    tokenizer: PreTrainedTokenizerBase, fallback: str = "deepseek-llm"
) -> bool:
    """Give a tokenizer without a chat template one of FALLBACKS; True if it had none."""
    if fallback not in FALLBACKS:
        close = difflib.get_close_matches(fallback, FALLBACKS, n=1) or list(FALLBACKS)
        raise InputError(f"there is no chat template {fallback!r}: use {' or '.join(close)}")
    if tokenizer.chat_template:
        return False
    tokenizer.chat_template = FALLBACKS[fallback]
    return True


def choose_chat_template(tokenizer: PreTrainedTokenizerBase, choice: str) -> str:
    """Set the template that a recipe asks for; a phrase that says which one it is now.

    `auto` is the tokenizer's own, else deepseek-llm's; a name of FALLBACKS or a `.jinja` file is
    used in any case. Raises InputError for a choice that is none of these.
    """
    if choice == "auto":
        added = ensure_chat_template(tokenizer)
        return "deepseek-llm's (the tokenizer has none)" if added else "the tokenizer's own"
    if choice in FALLBACKS:
        tokenizer.chat_template = FALLBACKS[choice]
        return f"{choice}'s"
    tokenizer.chat_template = template_file(Path(choice))
    return f"that of {choice}"


def template_file(path: Path) -> str:
    """The template in a file; raises InputError where there is none."""
    if path.suffix != ".jinja":
        close = difflib.get_close_matches(str(path), FALLBACKS, n=1)
        known = close or ["auto", *FALLBACKS, "a .jinja file"]
        raise InputError(f"chat_template: there is no {str(path)!r}: use {', '.join(known)}")
    try:
        with open_regular(path) as file:
            data = file.read(_LARGEST_FILE + 1)
        text = data.decode("utf-8")
    except OSError as error:
        raise InputError(f"chat_template: {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"chat_template: {path} is not UTF-8: save it as UTF-8") from error
    if len(data) > _LARGEST_FILE:
        raise InputError(f"chat_template: {path} is larger than 1 MiB; that is not a template")
    renderer.ask(str(path), 0, check_syntax, text, str(path))  # constants are computed there
    return text


# Tool calls as a chat template takes them, and the proof that it shows them.
#
# A template that knows nothing of tools renders a dialogue without them, and a model trained on
# that text would learn to answer from nowhere. So whatever a record says of tools must be found in
# the text again; a record of which it isn't is rejected with what is missing.

# Transformers documents arguments as an object; DeepSeek's own templates add them to a text.
FORMS = ("object", "text")
_ADVICE = "choose another chat_template, or leave such records out"


class ToolsNotRenderedError(ValueError):
    """What of a record's tools or thoughts isn't in the text that a template makes of it."""


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
    """Raise ToolsNotRenderedError unless all messages' tools, calls, results, thoughts are shown.

    Thoughts may be written only while their answer is the last.
    """
    tools, turns = split_tools(messages)
    if tools:
        names = [tool["function"]["name"] for tool in tools]
        if text == render(turns) or not all(name in text for name in names):
            raise ToolsNotRenderedError(f"the chat template ignores the record's tools: {_ADVICE}")
    for at, turn in enumerate(messages):
        if turn.thoughts and turn.thoughts.strip() not in render(messages[: at + 1]):
            raise ToolsNotRenderedError(
                f"the chat template writes no {THOUGHTS[0]}: choose another chat_template, or "
                "write the thoughts into the content as <think>...</think>"
            )
        if turn.calls:
            before, upto = render(messages[:at]), render(messages[: at + 1])
            written = upto[_shared(before, upto) :]
            if not all(_shows(written, call) for call in turn.calls):
                raise ToolsNotRenderedError(
                    f"the chat template ignores the record's tool calls: {_ADVICE}"
                )
        elif turn.role == "tool" and not any(form in text for form in _written(turn.content)):
            raise ToolsNotRenderedError(f"the chat template drops the result of a tool: {_ADVICE}")


def _turn(turn: Message, form: str) -> dict[str, Any]:
    found: dict[str, Any] = {"role": turn.role, "content": turn.content}
    # Templates read thoughts under one of these names (Qwen's the first, gpt-oss's the last).
    found |= dict.fromkeys(THOUGHTS, turn.thoughts) if turn.thoughts else {}
    if turn.calls:
        found["content"] = turn.content or None  # null in OpenAI's format; V3's asks for it
        found["tool_calls"] = [_call(call, form) for call in turn.calls]
    if turn.id:
        found["tool_call_id"] = turn.id
    if turn.name:
        found["name"] = turn.name
    return found


def _call(call: ToolCall, form: str) -> dict[str, Any]:
    arguments = json.loads(call.arguments) if form == "object" else call.arguments
    function = {"name": call.name, "arguments": arguments}
    return {"type": "function", "function": function} | ({"id": call.id} if call.id else {})


def _shows(written: str, call: ToolCall) -> bool:
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


# The chat template of a tokenizer, apart from it, and what it makes of the turns of a record.

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
        len(message.content) + len(message.thoughts) + sum(len(c.arguments) for c in message.calls)
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


# A conversation as tokens: the steps (1) to (4).

TooLong = Literal["truncate", "split", "drop"]
_NONE_LEFT, _DROPPED = "no answer left", "too long"
NOT_THE_RECORDS_FAULT = (_NONE_LEFT, _DROPPED)  # how reasons begin where cutoff_len is at fault
_BATCH = 256  # texts that the tokenizer sees at once: it spreads them over the cores
_STAND_IN = "\ue000answer\ue000"  # private use characters: no template changes them
_PLAIN = ("system", "user", "assistant")
_THOUGHT = re.compile(r"(?:<think>\s*)?</think>\s*\Z|<think>\s*\Z")  # opened or left empty


class Encoded(NamedTuple):
    """The records of one conversation, or why there are none."""

    records: tuple[TokenRecord, ...]  # one for a dialogue, one per piece where it goes on
    reason: str | None
    long: bool = False  # the whole is longer than cutoff_len


class _Rendered(NamedTuple):
    text: str
    answers: list[tuple[int, int]] | None  # character spans, end exclusive; None: plain text
    reason: str = "the chat template drops or rewrites the last answer"  # where there are no spans
    failed: bool = False  # the template, and not only this record


def encode(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    cutoff_len: int,
    too_long: TooLong = "truncate",
) -> Encoded:
    """One conversation as token records of at most `cutoff_len` tokens, or a reason.

    Raises InputError for a tokenizer without offsets or template, or a template that fails.
    """
    return next(encode_all(tokenizer, (conversation,), cutoff_len, too_long))


def encode_all(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
    cutoff_len: int,
    too_long: TooLong = "truncate",
) -> Iterator[Encoded]:
    """`encode` for many, in order; a batch at a time goes through the tokenizer."""
    if cutoff_len < 2:
        raise InputError(f"cutoff_len={cutoff_len} leaves nothing to predict: 2 is the least")
    if not tokenizer.is_fast:
        raise InputError(
            f"{type(tokenizer).__name__} reports no offsets, which tell answers from questions: "
            "use the model's fast tokenizer (tokenizer.json)"
        )
    ends = tuple(token for token in tokenizer.get_added_vocab() if token.strip())
    left = iter(conversations)
    backend, template = _plain_backend(tokenizer), chat_template_of(tokenizer)
    while batch := list(islice(left, _BATCH)):
        drawn = _draw_all(template, batch, ends)
        # The template has put the special tokens into the text.
        tokens = backend.encode_batch([item.text for item in drawn], add_special_tokens=False)
        for item, source, found in zip(drawn, batch, tokens, strict=True):
            ids = found.ids
            if item.answers is None:
                whole = _text_record(tokenizer, ids)
            else:
                _check_bos(tokenizer, ids, source.place)
                whole = _dialogue_record(ids, found.offsets, item.answers)
            yield _fitted(whole, item, cutoff_len, too_long)


def _fitted(whole: TokenRecord, drawn: _Rendered, cutoff_len: int, too_long: TooLong) -> Encoded:
    """The record in pieces of at most `cutoff_len` tokens, each with something to predict."""
    long, answers = whole.length > cutoff_len, drawn.answers
    if answers == []:
        return Encoded((), drawn.reason)
    if answers is None and whole.length < 2:
        return Encoded((), "a text of one token has nothing to predict")
    if long and too_long == "drop":
        reason = f"{_DROPPED} for cutoff_len={cutoff_len}: {whole.length} tokens"
        return Encoded((), reason, long)
    pieces = _pieces(whole, cutoff_len)
    if answers is not None:
        pieces = pieces if too_long == "split" else pieces[:1]
        pieces = [piece for piece in pieces if piece.trained_tokens]
        if not pieces:
            return Encoded((), f"{_NONE_LEFT} within cutoff_len={cutoff_len}", long)
    return Encoded(tuple(pieces), None, long)


def _pieces(whole: TokenRecord, cutoff_len: int) -> list[TokenRecord]:
    """The record in pieces, each beginning with the last token of the piece before it.

    So every token but the first of all is predicted exactly once, and no piece has fewer than two.
    """
    starts = range(0, max(whole.length - 1, 1), cutoff_len - 1)
    return [
        token_record(whole.input_ids[at : at + cutoff_len], whole.trained[at : at + cutoff_len])
        for at in starts
    ]


def _plain_backend(tokenizer: PreTrainedTokenizerBase) -> Any:
    """What tokenises for the tokenizer, neither cutting nor padding.

    A call of the tokenizer sets that up; the backend's own answers come without the dictionaries of
    lists that Transformers makes of them, which cost a third of the tokenising.
    """
    tokenizer(["a"], add_special_tokens=False, truncation=False, padding=False)
    return tokenizer.backend_tokenizer


def _dialogue_record(
    ids: list[int], offsets: list[tuple[int, int]], answers: list[tuple[int, int]]
) -> TokenRecord:
    trained = np.zeros(len(ids), np.bool_)
    for first, last in answers:
        # A token across the border is trained: it has a part of the answer in it. One of no
        # width (some tokenizers report them for spaces) counts as one character. Tokens lie in the
        # order of their text, so two searches find all of an answer's.
        begin = bisect_right(offsets, first, key=lambda token: max(token[1], token[0] + 1))
        trained[begin : bisect_left(offsets, last, key=lambda token: token[0])] = True
    return token_record(ids, trained)


def _text_record(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> TokenRecord:
    """bos, text, eos: every token of it is trained."""
    bordered = (tokenizer.bos_token_id, *ids, tokenizer.eos_token_id)
    return token_record([token for token in bordered if token is not None])


def _check_bos(tokenizer: PreTrainedTokenizerBase, ids: list[int], place: str) -> None:
    bos = tokenizer.bos_token_id
    if bos is not None and ids[:2] == [bos, bos] and tokenizer.bos_token != tokenizer.eos_token:
        raise InputError(
            f"{place} begins with {tokenizer.bos_token} twice: take it out of the chat template, "
            "or out of the record's first text"
        )


def _draw_all(
    template: ChatTemplate, conversations: Sequence[Conversation], ends: tuple[str, ...]
) -> list[_Rendered]:
    """The whole text of each and where the answers are in it; templates run in another process."""
    dialogues = [each for each in conversations if each.text is None]
    drawn: Iterator[_Rendered] = iter(())
    if dialogues:
        place = f"{dialogues[0].place} to {dialogues[-1].place}"
        explained = sum(map(seconds_explained, dialogues))
        drawn = iter(renderer.ask(place, explained, _draw_dialogues, template, dialogues, ends))
    return [next(drawn) if c.text is None else _Rendered(c.text, None) for c in conversations]


def _draw_dialogues(
    template: ChatTemplate, dialogues: Sequence[Conversation], ends: tuple[str, ...]
) -> list[_Rendered]:
    drawn = [_draw(template, dialogue, ends) for dialogue in dialogues]
    if len(drawn) == _BATCH and all(item.failed for item in drawn):
        raise InputError(drawn[0].reason)  # the template is at fault: no need to try them all
    return drawn


def _draw(template: ChatTemplate, conversation: Conversation, ends: tuple[str, ...]) -> _Rendered:
    if len(conversation.messages) > TURNS:
        number = len(conversation.messages)
        return _Rendered("", [], f"a dialogue of {number:,} turns: split those of over {TURNS:,}")
    if all(message.role in _PLAIN and not message.calls for message in conversation.messages):
        try:
            return _draw_turns(template, conversation, ends, "object")
        except ToolsNotRenderedError as error:
            return _Rendered("", [], str(error))
        except TemplateFailedError as error:
            return _Rendered("", [], str(error), failed=True)
    unseen, failed = "", ""
    for form in FORMS:  # templates differ in how they take the arguments of a call
        try:
            return _draw_turns(template, conversation, ends, form)
        except ToolsNotRenderedError as error:
            unseen = unseen or str(error)
        except TemplateFailedError as error:
            failed = (
                failed or f"the chat template takes no turns of tools ({error.what}): {_ADVICE}"
            )
    return _Rendered("", [], unseen or failed)


def _draw_turns(
    template: ChatTemplate, conversation: Conversation, ends: tuple[str, ...], form: str
) -> _Rendered:
    def render(messages: Sequence[Message], prompt: bool = False) -> str:
        return render_turns(template, messages, prompt, conversation.place, form)

    *before, last = messages = conversation.messages
    text, prompt = render(messages), render(before, prompt=True)
    check_seen(messages, text, render)
    begin = _begin(text, prompt, last.content)
    if begin is None and not last.calls:
        text, begin = _force(render([*before, Message("assistant", _STAND_IN)]), prompt, last)
    if begin is None:
        return _Rendered("", [])
    answers = []
    for turn, message in enumerate(before):
        if message.role == "assistant" and message.trained:
            upto = render(messages[: turn + 1])
            start = _begin(upto, render(messages[:turn], prompt=True), message.content)
            if start is not None and text.startswith(upto):
                answers.append((start, _close(upto, ends)))
    if last.trained:
        answers.append((begin, _close(text, ends)))
    return _Rendered(text, answers)


def _begin(text: str, prompt: str, answer: str) -> int | None:
    """Where a model would begin to write `answer`, which ends `text`; None if it isn't in it.

    A prompt may open the thought itself; then the text goes on with the thought, or without any.
    """
    head = prompt if text.startswith(prompt) else _THOUGHT.sub("", prompt)
    shared = len(_THOUGHT.sub("", prompt))
    if not text.startswith(head) or _squash(answer) not in _squash(text[shared:]):
        return None
    return len(head)


def _force(frame: str, prompt: str, answer: Message) -> tuple[str, int | None]:
    """Put an answer that the template would rewrite (R1 drops thoughts) where its stand-in is."""
    if frame.count(_STAND_IN) != 1:
        return frame, None
    before, after = frame.split(_STAND_IN)
    if "<think>" in answer.content:
        before = _THOUGHT.sub("", before)
    text = before + answer.content + after
    return text, len(prompt) if text.startswith(prompt) else len(before)


def _close(text: str, ends: tuple[str, ...]) -> int:
    """Where the trained part ends: at the end-of-turn token, without the line break after it."""
    bare = text.rstrip()
    return len(bare) if bare.endswith(ends) else len(text)


def _squash(text: str) -> str:
    """The text without white space, which templates trim and add around thoughts."""
    return "".join(text.split())
