"""Renders a conversation with the chat template, and marks the tokens that are trained.

  (1) the template renders the whole conversation to one text; it adds its own bos
      token.
  (2) rendered prefixes show where each answer begins and ends in that text. Some
      templates write an earlier answer differently from a last one (without its
      thought). Then a placeholder shows its position. A conversation is rejected if an
      answer isn't found.
  (3) the text is tokenised once, as a model would read it. The offsets of the tokens
      show which of them belong to an answer, its end-of-turn token included.
  (4) `too_long` decides about examples that are longer than `cutoff_len`:

      - truncate: a dialogue is cut at the end; a plain text continues in the next piece
      - split: a dialogue continues too; pieces without part of an answer are left out
      - drop: dialogue or text, it is left out completely

Pieces overlap by one token. Therefore every trained token is predicted exactly once.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from hasten.data import renderer
from hasten.data.conversation import Conversation
from hasten.data.prompt_formats import STANDARD
from hasten.data.template_sandbox import UnrenderedError, render
from hasten.data.tool_calls import (
    FORMS,
    TOOL_ADVICE,
    CallForm,
    ToolsNotRenderedError,
    check_seen,
    shared_length,
    split_tools,
    template_turns,
)
from hasten.data.turns import Message
from hasten.errors import InputError
from hasten.parts.data.collate import TokenizedExample, tokenized_example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TURNS = 1_000  # limit of a dialogue, because the text before each answer is rendered separately


class ChatTemplate(NamedTuple):
    """A tokenizer's chat template, and its special tokens; empty if it has none."""

    plain: str
    with_tools: str
    special_tokens: dict[str, Any]


def chat_template_of(tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
    """Returns the tokenizer's chat template; of several the default, or tool_use with tools."""
    sources = []
    choices: tuple[list[Any] | None, ...] = (None, [])
    for tools in choices:
        try:
            sources.append(str(tokenizer.get_chat_template(tools=tools)))
        except ValueError:  # the tokenizer has no such template
            sources.append("")
    return ChatTemplate(sources[0], sources[1], dict(tokenizer.special_tokens_map))


def seconds_explained(dialogue: Conversation) -> float:
    """Returns the processor time to allow for a dialogue: ten times that of usual templates."""
    turns = min(len(dialogue.messages), TURNS)
    answers = [message for message in dialogue.messages[:turns] if message.role == "assistant"]
    calls = sum(bool(answer.calls) for answer in answers)
    renderings = (8 * len(answers) + 2 * calls + 4) * (len(FORMS) if calls else 1)
    characters = sum(
        len(message.content) + len(message.thoughts) + sum(len(c.arguments) for c in message.calls)
        for message in dialogue.messages
    )
    return renderings * (3e-4 + 3e-5 * turns + 3e-8 * characters)


def render_turns(
    template: ChatTemplate, messages: Sequence[Message], prompt: bool, location: str
) -> str:
    """Returns the text of turns, rendered in the process with limits.

    Raises:
        UnrenderedError: the template refuses the turns.
        InputError: it fails, or exceeds its limits.
    """
    text, reason = renderer.ask(location, 1, _text_or_reason, template, messages, prompt, location)
    if text is None:
        raise UnrenderedError(reason)
    return text


def _text_or_reason(*arguments: Any) -> tuple[str | None, str]:
    try:
        return _rendered_turns(*arguments), ""
    except UnrenderedError as error:
        return None, str(error)


def _rendered_turns(
    template: ChatTemplate,
    messages: Sequence[Message],
    prompt: bool,
    location: str,
    form: CallForm = FORMS[0],
) -> str:
    """Returns the text of an example's turns; raises InputError if the template fails."""
    tools, turns = split_tools(messages)
    source = template.plain if tools is None else template.with_tools
    if not source:
        raise InputError(
            f"the tokenizer has no chat template, which {location} needs: use {STANDARD} or another"
        )
    values = {
        **template.special_tokens,
        "messages": template_turns(turns, form),
        "tools": tools,
        "documents": None,
        "add_generation_prompt": prompt,
    }
    return render(source, location, values)


TooLong = Literal["truncate", "split", "drop"]
LossOn = Literal["answers", "last_answer", "everything"]
NONE_LEFT, DROPPED = "no answer left", "too long"
CUTOFF_REASONS = (NONE_LEFT, DROPPED)  # beginnings of reasons that cutoff_len causes
BATCH = 256  # texts of one call of the tokenizer, which uses all cores
# Private use characters, which no template changes.
_STAND_IN, _EARLIER = "\ue000answer\ue000", "\ue000earlier answer\ue000"
_PLAIN = ("system", "user", "assistant")
_THOUGHT = re.compile(r"(?:<think>\s*)?</think>\s*\Z|<think>\s*\Z")  # opened or left empty
_NO_THOUGHT = re.compile(r"<think>\s*</think>\s*\Z")
_OPENED = re.compile(r"<think>\s*\Z")
_NO_LAST = "the chat template drops or rewrites the last answer"
_Render = Callable[..., str]  # renders messages; with prompt=True up to the begin of an answer


# Counts of effects of a template that the user should know.
THOUGHTS_LEFT_OUT = "thoughts"  # answers without their thoughts in the text
UNOPENED = "unopened"  # last answers without the thought that a prompt opens
CALLS_IN_PYTHON = "in_python"  # conversations with values of calls in Python's notation
# Counts of preference pairs.
EQUAL = "equal"  # pairs with equal answers
EMPTY = "empty"  # pairs with an answer of which cutoff_len leaves nothing
MERGED = "merged"  # pairs whose prompt alone has other last tokens than before its answers
SHARED = "shared"  # tokens at the beginning of both rows of a pair, summed
NOTES = (THOUGHTS_LEFT_OUT, UNOPENED, CALLS_IN_PYTHON, EQUAL, EMPTY, MERGED, SHARED)


class Encoded(NamedTuple):
    """The examples of one conversation, or a reason if there are none."""

    examples: tuple[TokenizedExample, ...]  # one, or one for each piece of a long conversation
    reason: str | None
    long: bool = False  # the conversation is longer than cutoff_len
    notes: Mapping[str, int] = {}  # counts by the names above


class Rendered(NamedTuple):
    """The text of a conversation."""

    text: str
    trained: list[tuple[int, int]] | None  # character spans, end exclusive; None: plain text
    reason: str = _NO_LAST  # used if there are no spans
    notes: Mapping[str, int] = {}
    form: CallForm = FORMS[0]


def encode(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    cutoff_len: int,
    too_long: TooLong = "truncate",
    loss_on: LossOn = "answers",
) -> Encoded:
    """Returns a conversation as token examples of at most `cutoff_len` tokens, or a reason.

    Raises InputError for a tokenizer without offsets or template, or if the template fails.
    """
    return next(encode_all(tokenizer, (conversation,), cutoff_len, too_long, loss_on))


def encode_all(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
    cutoff_len: int,
    too_long: TooLong = "truncate",
    loss_on: LossOn = "answers",
) -> Iterator[Encoded]:
    """Yields the result of `encode` for many conversations, in order; tokenises in batches."""
    plain = PlainTokenizer(tokenizer, cutoff_len)
    ends = added_tokens(tokenizer)
    remaining = iter(conversations)
    template = chat_template_of(tokenizer)
    while batch := list(islice(remaining, BATCH)):
        # Text and trained spans of each conversation; templates run in another process.
        dialogues = [each for each in batch if each.text is None]
        answers: Iterator[Rendered] = iter(())
        if dialogues:
            location = f"{dialogues[0].location} to {dialogues[-1].location}"
            explained = sum(map(seconds_explained, dialogues))
            work = (template, dialogues, ends, loss_on)
            answers = iter(renderer.ask(location, explained, _draw_dialogues, *work))
        drawn = [next(answers) if c.text is None else Rendered(c.text, None) for c in batch]
        tokens = plain.encode([rendered.text for rendered in drawn])
        for rendered, source, encoding in zip(drawn, batch, tokens, strict=True):
            ids = encoding.ids
            if rendered.trained is None:
                # Prefix, text and eos, all trained; a prefix or eos in the text isn't repeated.
                # The tokenizer adds the same prefix when the model is used.
                eos, begin = tokenizer.eos_token, plain.prefix_of(rendered.text)
                last = eos is not None and not rendered.text.rstrip().endswith(str(eos))
                example = tokenized_example([*begin, *ids, *[tokenizer.eos_token_id][: int(last)]])
            else:
                plain.check_begin(ids, source.location)
                example = _dialogue_example(ids, encoding.offsets, rendered.trained)
            yield _fitted(example, rendered, cutoff_len, too_long)


class PlainTokenizer:
    """A fast tokenizer without truncation, padding and special tokens of its own.

    Raises:
        InputError: ``cutoff_len`` is below 2, or the tokenizer has no offsets.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, cutoff_len: int) -> None:
        if cutoff_len < 2:
            raise InputError(f"cutoff_len={cutoff_len} leaves nothing to predict: give at least 2")
        if not tokenizer.is_fast:
            raise InputError(
                f"{type(tokenizer).__name__} reports no offsets, which separate answers from "
                "questions: use the model's fast tokenizer (tokenizer.json)"
            )
        separate = tokenizer.bos_token_id is not None and tokenizer.bos_token != tokenizer.eos_token
        self._bos = tokenizer.bos_token
        self._bos_twice = [tokenizer.bos_token_id] * 2 if separate else None
        # This call switches truncation and padding of the backend off. The backend is called
        # directly: the conversion of its results by Transformers takes a third of the time.
        tokenizer("a", truncation=False, padding=False)
        self._backend: Any = tokenizer.backend_tokenizer
        # What comes before any text (bos, GLM's [gMASK]<sop>).
        before = self._backend.encode("a")
        count = [*before.special_tokens_mask, 0].index(0)
        self._prefix: list[int] = before.ids[:count]
        self._opening = "".join(before.tokens[:count])

    def encode(self, texts: Sequence[str]) -> list[Any]:
        """Returns ids and offsets of each text; a template has put special tokens into it."""
        encodings: list[Any] = self._backend.encode_batch(texts, add_special_tokens=False)
        return encodings

    def prefix_of(self, text: str) -> list[int]:
        """Returns the tokens before a text without a template; none if it begins with them."""
        return [] if text.lstrip().startswith(self._opening) else self._prefix

    def check_begin(self, ids: Sequence[int], location: str) -> None:
        """Raises InputError if the text of a template begins with two bos tokens."""
        if ids[:2] == self._bos_twice:
            raise InputError(
                f"{location} begins with {self._bos} twice: remove it "
                "from the chat template, or from the example's first text"
            )


def _fitted(
    example: TokenizedExample, drawn: Rendered, cutoff_len: int, too_long: TooLong
) -> Encoded:
    """Returns the pieces of an example of at most `cutoff_len` tokens that can be trained."""
    long, is_text = example.length > cutoff_len, drawn.trained is None
    if drawn.trained == []:
        return Encoded((), drawn.reason)
    if is_text and example.length < 2:
        return Encoded((), "a text of one token has nothing to predict")
    if long and too_long == "drop":
        reason = f"{DROPPED} for cutoff_len={cutoff_len}: {example.length} tokens"
        return Encoded((), reason, long)
    # The pieces of an example; each begins with the last token of the previous piece.
    starts = range(0, max(example.length - 1, 1), cutoff_len - 1)
    pieces = [
        tokenized_example(
            example.input_ids[at : at + cutoff_len], example.trained[at : at + cutoff_len]
        )
        for at in starts
    ]
    if not is_text:
        pieces = pieces if too_long == "split" else pieces[:1]
        pieces = [part for part in pieces if part.trained_tokens]
        if not pieces:
            return Encoded((), f"{NONE_LEFT} within cutoff_len={cutoff_len}", long)
    return Encoded(tuple(pieces), None, long, drawn.notes)


def _dialogue_example(
    ids: list[int], offsets: list[tuple[int, int]], spans: list[tuple[int, int]]
) -> TokenizedExample:
    trained = np.zeros(len(ids), np.bool_)
    for first, last in spans:
        # A token with a part of the answer is trained. A token of width 0 (some tokenizers report
        # this for spaces) counts as one character. Tokens are in the order of their text, so two
        # binary searches find those of an answer.
        begin = bisect_right(offsets, first, key=lambda token: max(token[1], token[0] + 1))
        trained[begin : bisect_left(offsets, last, key=lambda token: token[0])] = True
    return tokenized_example(ids, trained)


def _draw_dialogues(
    template: ChatTemplate,
    dialogues: Sequence[Conversation],
    ends: tuple[str, ...],
    loss_on: LossOn,
) -> list[Rendered]:
    written = _answer_end(template, ends)
    return [draw(template, dialogue, ends, loss_on, written) for dialogue in dialogues]


def draw_pairs(
    template: ChatTemplate, dialogues: Sequence[Conversation], ends: tuple[str, ...]
) -> list[tuple[str, list[Rendered | None]]]:
    """Returns the text of each prompt, and those of it with each answer.

    A prompt ends where an answer begins. Call it in the process with limits.
    """
    written = _answer_end(template, ends)
    drawn = []
    for dialogue in dialogues:
        prompt = _unbordered(dialogue, written)
        texts = [
            draw(template, complete, ends, "last_answer", written) if complete else None
            for complete in with_answers(dialogue)
        ]
        form = next((each.form for each in texts if each), FORMS[0])
        arguments = (template, prompt.messages, True, dialogue.location, form)
        text, reason = _text_or_reason(*arguments)
        if text is None:
            refused = f"the chat template fails on its prompt: {reason}"
            texts = [Rendered("", [], refused) if each else None for each in texts]
        drawn.append((text or "", texts))
    return drawn


def with_answers(dialogue: Conversation) -> list[Conversation | None]:
    """Returns the prompt with its better and with its worse answer; None for a missing one."""
    return [
        replace(dialogue, messages=(*dialogue.messages, *answer), answers=None) if answer else None
        for answer in dialogue.answers or ()
        if not isinstance(answer, str)
    ]


def draw(
    template: ChatTemplate,
    dialogue: Conversation,
    ends: tuple[str, ...],
    loss_on: LossOn,
    written: AnswerEnd | None,
) -> Rendered:
    """Returns the text of a dialogue, and notes if its last answer lacks an opened thought."""
    drawn = _draw(template, _unbordered(dialogue, written), ends, loss_on)
    opened = written.opened if written else ""
    if opened and drawn.trained:  # a prompt opens a thought: has the last answer one?
        first, last = drawn.trained[-1]
        if opened.strip() not in drawn.text[max(first - len(opened), 0) : last]:
            return drawn._replace(notes={**drawn.notes, UNOPENED: 1})
    return drawn


def _draw(
    template: ChatTemplate, conversation: Conversation, ends: tuple[str, ...], loss_on: LossOn
) -> Rendered:
    if len(conversation.messages) > TURNS:
        number = len(conversation.messages)
        return Rendered("", [], f"a dialogue of {number:,} turns: split those of over {TURNS:,}")
    plain = all(message.role in _PLAIN and not message.calls for message in conversation.messages)
    spoken = (m for m in conversation.messages if m.role == "assistant" and not m.calls)
    if any(not message.content.strip() for message in spoken):
        return Rendered("", [], "an answer is only its end token")
    unseen, failed = "", ""
    for form in FORMS[: 1 if plain else None]:
        try:
            return _draw_turns(template, conversation, ends, form, loss_on)._replace(form=form)
        except ToolsNotRenderedError as error:
            unseen = unseen or str(error)
        except UnrenderedError as error:
            failed = failed or f"the chat template fails on it: {error}"
    if failed and not plain:
        failed = f"the chat template doesn't support turns of tools: {TOOL_ADVICE}"
    return Rendered("", [], unseen or failed)


class AnswerEnd(NamedTuple):
    """The text that a chat template writes after an answer, and the end token in it."""

    text: str
    token: str = ""  # empty: ordinary text, or nothing
    bos: str = ""  # the bos token, if the template writes it before the dialogue
    prompt: str = ""  # the text up to the answer

    @property
    def opened(self) -> str:
        """Beginning of a thought at the end of the prompt; empty if the prompt opens none."""
        opened = _OPENED.search(self.prompt)
        return opened[0] if opened else ""


def answer_end(tokenizer: PreTrainedTokenizerBase) -> AnswerEnd | None:
    """Returns the end of answers in a tokenizer's template; None if it can't render a dialogue."""
    work = (chat_template_of(tokenizer), added_tokens(tokenizer))
    return renderer.ask("a question with an answer", 0, _answer_end, *work)


def _answer_end(template: ChatTemplate, ends: tuple[str, ...]) -> AnswerEnd | None:
    turns = (Message("user", "?"), Message("assistant", _STAND_IN))
    try:
        text = _rendered_turns(template, turns, False, "a question with an answer")
        prompt = _rendered_turns(template, turns[:1], True, "a question")
    except (InputError, UnrenderedError):
        return None
    before, _, after = text.partition(_STAND_IN)
    if text.count(_STAND_IN) != 1:
        return None
    bos = str(template.special_tokens.get("bos_token") or "")
    # A tokenizer prefers the longest token.
    token = max((end for end in ends if after.lstrip().startswith(end)), key=len, default="")
    return AnswerEnd(after, token, bos if bos and before.startswith(bos) else "", prompt)


def added_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    return tuple(token for token in tokenizer.get_added_vocab() if token.strip())


def _unbordered(conversation: Conversation, written: AnswerEnd | None) -> Conversation:
    """Removes bos and end tokens from the texts of a dialogue if the template adds them."""
    if written is None:
        return conversation
    turns = list(conversation.messages)
    first = next((at for at, turn in enumerate(turns) if turn.role != "tools"), 0)
    for at, turn in enumerate(turns):
        content = turn.content
        if at == first and written.bos and content.lstrip().startswith(written.bos):
            content = content.lstrip().removeprefix(written.bos)
        if turn.role == "assistant" and written.token and content.rstrip().endswith(written.token):
            content = content.rstrip().removesuffix(written.token)
        turns[at] = turn._replace(content=content)
    return replace(conversation, messages=tuple(turns))


def _draw_turns(
    template: ChatTemplate,
    conversation: Conversation,
    ends: tuple[str, ...],
    form: CallForm,
    loss_on: LossOn,
) -> Rendered:
    def render(messages: Sequence[Message], prompt: bool = False) -> str:
        return _rendered_turns(template, messages, prompt, conversation.location, form)

    *before, last = messages = conversation.messages
    is_plain = all(t.role in _PLAIN and not t.calls and not t.thoughts for t in messages)
    in_python = not is_plain and check_seen(messages, render(messages), render)
    text, begin = _full_text(render, messages)
    if begin is None:
        return Rendered("", [])
    if role := _dropped_role(messages, text):
        return Rendered(
            "", [], f"the chat template drops or rewrites a turn of {role}: {TOOL_ADVICE}"
        )
    cut = loss_on == "everything"  # if True, the spans are those that aren't trained
    spans, thoughts = [], 0
    for turn, message in enumerate(before):
        if message.role == "assistant" and message.trained != cut and loss_on != "last_answer":
            answer_span = _earlier(render, messages, turn, text, ends)
            if answer_span is None:
                reason = f"the chat template rewrites the answer of turn {turn + 1}: {TOOL_ADVICE}"
                return Rendered("", [], reason)
            first, end, is_whole = answer_span
            spans.append((first, end))
            dropped = message.thoughts and message.thoughts.strip() not in text
            thoughts += bool(dropped or not is_whole)
    if last.trained != cut:
        spans.append((begin, _close(text, ends)))
        thoughts += _squash(last.content) not in _squash(text)
    if cut:
        borders = [0, *(at for span in spans for at in span), len(text)]
        pairs = zip(borders[::2], borders[1::2], strict=True)
        spans = [(first, end) for first, end in pairs if first < end]
    notes = {THOUGHTS_LEFT_OUT: thoughts, CALLS_IN_PYTHON: int(in_python)}
    return Rendered(text, spans, "its flags leave no answer to train", notes)


def _full_text(render: _Render, messages: Sequence[Message]) -> tuple[str, int | None]:
    """Returns the text of all turns, and the begin of the last answer; None if it isn't found."""
    *before, last = messages
    text, prompt = render(messages), render(before, prompt=True)
    answer = last.content
    if _NO_THOUGHT.search(prompt):  # a format without thoughts
        answer = answer.rpartition("</think>")[2].lstrip("\n")
    begin = _begin(text, prompt, answer)
    if begin is None and not last.calls:
        frame = render([*before, last._replace(content=_STAND_IN)])
        return _force(frame, prompt, before[-1].content.strip(), answer)
    return text, begin


def _prompt(render: _Render, messages: Sequence[Message]) -> str:
    """Returns the text up to the begin of the next answer."""
    if any(message.role == "user" for message in messages):
        return render(messages, prompt=True)
    # Many templates can't render a prompt without a question, but can render a first answer.
    before = render([*messages, Message("assistant", _STAND_IN)]).partition(_STAND_IN)[0]
    dialogue = [*messages, Message("user", "?")]
    opening = render(dialogue, prompt=True).removeprefix(render(dialogue))
    return before[: before.rfind(opening) + len(opening)] if opening in before else before


def _dropped_role(messages: Sequence[Message], text: str) -> str:
    """Returns the role of the first turn that is missing in the text; empty if none is missing."""
    squashed = _squash(text)
    for turn in messages:
        parts = (turn.instruction, turn.input) if turn.input else (turn.content,)
        if turn.role in ("system", "user") and not all(_squash(p) in squashed for p in parts):
            return turn.role
    return ""


def _begin(text: str, prompt: str, answer: str) -> int | None:
    """Returns where a model would begin to write `answer`, which ends `text`.

    Returns None if `text` doesn't contain it. A prompt may open the thought itself; then
    the text continues with the thought, or without any.
    """
    head = prompt if text.startswith(prompt) else _THOUGHT.sub("", prompt)
    shared = len(_THOUGHT.sub("", prompt))
    if not text.startswith(head) or _squash(answer) not in _squash(text[shared:]):
        return None
    return len(head)


def _earlier(
    render: _Render, messages: Sequence[Message], turn: int, text: str, ends: tuple[str, ...]
) -> tuple[int, int, bool] | None:
    """Returns begin and end of an earlier answer in `text`, and True if it has its thought.

    Returns None if the answer isn't found. Templates may drop the thought of an earlier answer.
    """
    answer = messages[turn]
    upto, prompt = render(messages[: turn + 1]), _prompt(render, messages[:turn])
    begin = _begin(upto, prompt, answer.content)
    if begin is not None and text.startswith(upto):
        return begin, _close(upto, ends), True
    marked = [*messages[:turn], _marked(answer)]
    frame, _ = _full_text(render, [*marked, *messages[turn + 1 :]])
    alone = render(marked)
    if _EARLIER not in frame or _EARLIER not in alone:
        return None
    name = answer.content or answer.calls[0].name  # a tool's result may repeat the name
    head, tail = (part.replace(_EARLIER, name) for part in frame.split(_EARLIER, 1))
    opened, closed = (part.replace(_EARLIER, name) for part in alone.split(_EARLIER, 1))
    first, last = len(head), len(text) - len(tail)
    if not (text.startswith(head) and text.endswith(tail)):
        return None
    in_call = not answer.content
    shown, answer_text = _squash(text[first:last]), answer.content.rpartition("</think>")[2]
    is_whole = in_call or shown == _squash(answer.content)
    if not is_whole and (not shown or shown != _squash(answer_text)):
        return None
    # Text before the answer that the model also writes: a blank, an empty thought, a call's begin.
    lead = opened.removeprefix(prompt) if opened.startswith(prompt) else ""
    leads = (lead, lead.rpartition("</think>")[2].lstrip())
    if fitting := next((each for each in leads if each and head.endswith(each)), ""):
        first -= len(fitting)
    elif in_call:
        return None
    if (thought := _NO_THOUGHT.search(text[:first])) and not _NO_THOUGHT.search(prompt):
        first = thought.start()
    closing = closed[: _close(closed, ends)]
    if not tail.startswith(closing):
        closing = _shared_end(closed, tail, ends)
        if answer.calls and not closing:
            return None
    return first, last + len(closing), is_whole


def _marked(answer: Message) -> Message:
    """Returns the answer with a placeholder for its content, or for its first call's name."""
    if answer.content:
        return answer._replace(content=_EARLIER)
    first, *others = answer.calls
    return answer._replace(calls=(first._replace(name=_EARLIER), *others))


def _shared_end(closed: str, tail: str, ends: tuple[str, ...]) -> str:
    """Returns the end of an answer in the middle of a text.

    `closed` is the end of the same answer as the last one of a text. The result is the
    common start of both, up to an end token (Phi-3 adds another after the last turn). If
    the last answer has another end token (gpt-oss, GLM), the result is the token at that
    position.
    """
    common = closed[: shared_length(closed, tail)]
    ended = next((at for at in range(len(common), 0, -1) if common[:at].endswith(ends)), 0)
    if ended or not closed.lstrip().startswith(ends):
        return common[:ended]
    bare = tail.lstrip()
    token = max((end for end in ends if bare.startswith(end)), key=len, default="")
    return tail[: len(tail) - len(bare) + len(token)] if token else ""


def _force(frame: str, prompt: str, question: str, answer: str) -> tuple[str, int | None]:
    """Inserts an answer that the template would rewrite at its placeholder.

    For example, R1's template drops thoughts.
    """
    if frame.count(_STAND_IN) != 1:
        return frame, None
    before, after = frame.split(_STAND_IN)
    # A model would read the history as the prompt has it: Mistral's templates write the system text
    # into the last question, and only while it is last.
    bare = _THOUGHT.sub("", prompt)
    at, other = before.rfind(question), bare.rfind(question)
    if question and -1 not in (at, other) and before[:at] != bare[:other]:
        turn_part = before[at:]
        before = prompt + (
            turn_part.removeprefix(bare[other:]) if turn_part.startswith(bare[other:]) else ""
        )
    if "<think>" in answer:
        before = _THOUGHT.sub("", before)
    text = before + answer + after
    return text, len(prompt) if text.startswith(prompt) else len(before)


def _close(text: str, ends: tuple[str, ...]) -> int:
    """Returns the end of the trained part: after the end-of-turn token, before a line break."""
    bare = text.rstrip()
    return len(bare) if bare.endswith(ends) else len(text)


def _squash(text: str) -> str:
    """Returns the text without white space, which templates trim and add."""
    return "".join(text.split())
