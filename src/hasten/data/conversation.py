"""Conversations: the shapes of examples, and a user's own columns."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hasten.data.stages import is_label
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
# Preferences have a prompt and a chosen and a rejected answer. The prompt may be left out if both
# answers begin with it. Or they have a prompt, one answer, and a label, which is true for a good
# answer. If all columns of `prompt` are texts, no chat template is used.
#
# Each dialogue may have a system text, tools and a history (pairs of question and answer). Turns
# may have the keys of sharegpt or of messages in every shape.


@dataclass(frozen=True, slots=True)
class Conversation:
    """One example before tokenising: a dialogue that ends with an answer, or plain text.

    Exactly one of `messages` and `text` is set. `messages` may begin with the available
    tools and a system turn. User and assistant turns follow, with the tools' turns after
    the calls. With `answers`, both are a prompt alone: the answers are the better and the
    worse one, of which one may be missing.
    """

    messages: tuple[Message, ...]
    text: str | None
    location: str  # "file:line"
    answers: tuple[Answer | None, Answer | None] | None = None


Answer = tuple[Message, ...] | str  # as the prompt: turns, or a text


def shape_of(example: Mapping[str, Any], possible: Sequence[str] | None = None) -> str | None:
    """Returns the first of all, or of the possible shapes with columns that the example has."""
    names = SHAPES if possible is None else possible
    return next((name for name in names if example.keys() >= {*ALL_SHAPES[name].needs}), None)


def conversation(example: Any, shape: str, location: str) -> Conversation:
    """Returns the conversation in an example; raises NoConversationError if there is none."""
    if not isinstance(example, dict):
        raise NoConversationError(f"{kind_of(example)}, not an object")
    if shape not in ALL_SHAPES:
        raise NoConversationError("the file's shape is unknown: its first examples are all damaged")
    needs, read = ALL_SHAPES[shape].needs, ALL_SHAPES[shape].read
    if missing := [key for key in needs if key not in example]:
        raise NoConversationError(
            f"lacks {' and '.join(map(repr, missing))} (the file's shape is {shape})"
        )
    if ALL_SHAPES[shape].answers:
        return _preference(example, ALL_SHAPES[shape], location)
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


def _instruction(example: Mapping[str, Any]) -> Iterator[Message]:
    yield from _history(example)
    first, second = _text(example, "instruction"), _text(example, "input", optional=True)
    question = "\n".join(part for part in (first, second) if part)
    yield Message("user", question, instruction=first if second else "", input=second)


def _alpaca(answer: str) -> _Reader:
    def read(example: Mapping[str, Any]) -> Iterator[Message]:
        yield from _instruction(example)
        yield Message("assistant", _text(example, answer))

    return _framed(read)


def _question(column: str) -> _Reader:
    """Returns a reader of a question: a text, or turns without trained answers."""

    def read(example: Mapping[str, Any]) -> Iterator[Message]:
        yield from _history(example)
        turns = _as_turns(example.get(column))
        if turns is None:
            yield Message("user", _text(example, column))
        for turn in _turns(turns or [], column):
            yield turn._replace(trained=turn.role != "assistant")

    return read


def _answered(example: Mapping[str, Any], answer: str) -> list[Message]:
    turns = _as_turns(example.get(answer))
    if turns is None:
        return [Message("assistant", _text(example, answer))]
    return _turns(turns, answer)


def _pair(question: str, answer: str) -> _Reader:
    def read(example: Mapping[str, Any]) -> Iterator[Message]:
        prompt = list(_question(question)(example))
        for turns in _joined(prompt, _answered(example, answer), answer):
            yield from turns

    return _framed(read)


def _joined(
    prompt: list[Message], reply: list[Message], key: str
) -> tuple[list[Message], list[Message]]:
    """Returns the turns of a question and of its answer, which may repeat the question.

    Preference pairs often repeat the complete dialogue in each answer.
    """
    if prompt and reply[: len(prompt)] == prompt:
        return prompt, reply[len(prompt) :]
    systems = [[t for t in turns[:1] if t.role == "system"] for turns in (prompt, reply)]
    questions, dialogue = prompt[len(systems[0]) :], reply[len(systems[1]) :]
    if not (dialogue and dialogue[0].role == "user" and any(t.role == "user" for t in questions)):
        return prompt, reply
    repeated = dialogue[: len(questions)]
    pairs = [*zip(*systems, strict=False), *zip(questions, repeated, strict=False)]
    differ = any(a.role != b.role or a.content.strip() != b.content.strip() for a, b in pairs)
    if differ or len(repeated) < len(questions):
        raise NoConversationError(f"{key!r} begins with another question than its prompt")
    return [*(systems[0] or systems[1]), *questions], dialogue[len(questions) :]


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


# Preferences: a prompt with a better and a worse answer, or with one answer and a label.


def _preference(example: Mapping[str, Any], shape: _Shape, location: str) -> Conversation:
    for key in shape.answers:
        cell = example.get(key)
        if cell in EMPTY_VALUES or (isinstance(cell, str) and not cell.strip()):
            raise NoConversationError(f"lacks an answer: {key!r} is empty")
    texts = _raw_texts(example, shape)
    if texts is None:
        turns, answers = _preferred_turns(example, shape)
    else:
        turns, answers = (), texts[1:]
    text = None if texts is None else texts[0]
    if len(answers) == 2:
        return Conversation(turns, text, location, (answers[0], answers[1]))
    is_good = _is_good(example, shape.label)
    rated = (answers[0], None) if is_good else (None, answers[0])
    return Conversation(turns, text, location, rated)


def _raw_texts(example: Mapping[str, Any], shape: _Shape) -> list[Any] | None:
    """Returns prompt and answers that are texts for a model without a chat template, or None."""
    keys = shape.answers if shape.read is None else (shape.needs[0], *shape.answers)
    cells = [example.get(key) for key in keys]
    if any(not isinstance(cell, str) or _as_turns(cell) is not None for cell in cells):
        return None
    if shape.read is not None and shape.needs[0] != "prompt":
        return None
    texts = [sound(cell, key) for cell, key in zip(cells, keys, strict=True)]
    if shape.read is not None:
        return texts
    one, other = texts
    size = _shared_length(one, other)
    if one[size] != other[size] and one[size - 1 : size] == " ":  # belongs to the answers
        size -= 1
    return [one[:size], one[size:], other[size:]]


def _is_good(example: Mapping[str, Any], key: str) -> bool:
    cell = example.get(key)
    if not is_label(key, cell):
        raise NoConversationError(f"{key!r} is {cell!r:.40}, not true or false")
    return cell in (1, "1", "true", "True")


def _preferred_turns(
    example: Mapping[str, Any], shape: _Shape
) -> tuple[tuple[Message, ...], list[Answer]]:
    """Returns the turns of the prompt, and those of each answer."""
    replies = [_answered(example, key) for key in shape.answers]
    if shape.read is None:
        size = _shared_length(*replies)
        if not size:
            raise NoConversationError(
                f"{shape.answers[0]!r} and {shape.answers[1]!r} begin with different turns"
            )
        prompt, answers = replies[0][:size], [reply[size:] for reply in replies]
    else:
        question = list(shape.read(example))
        joined = [_joined(question, *each) for each in zip(replies, shape.answers, strict=True)]
        prompt = max((prompt for prompt, _ in joined), key=len)  # an answer may add a system text
        answers = [answer for _, answer in joined]
    framed = tuple(_framed(lambda _: iter(prompt))(example))
    for key, answer in zip(shape.answers, answers, strict=True):
        try:
            check_turns((*framed, *answer))
        except NoConversationError as error:
            raise NoConversationError(f"{key!r} and its prompt: {error}") from None
    return framed, [tuple(answer) for answer in answers]


def _shared_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Returns the length of the common beginning, which leaves something of both."""
    shorter = min(len(one), len(other))
    return next((at for at in range(shorter) if one[at] != other[at]), max(shorter - 1, 0))


def _openai(example: Mapping[str, Any]) -> Iterator[Message]:
    content = example.get("input")
    if not isinstance(content, dict) or "messages" not in content:
        raise NoConversationError("'input' lacks 'messages'")
    yield from tools_turn(content.get("tools"))
    yield from _turns(content["messages"], "input")


def _listed(key: str, last: int | None = None) -> _Reader:
    """Returns a reader of turns, or of a question; ``last``: -1 leaves the answer out."""

    def read(example: Mapping[str, Any]) -> Iterator[Message]:
        cell = example.get(key)
        if isinstance(cell, str) and not cell.lstrip().startswith(("[", "{")):
            yield Message("user", sound(cell, key))
        else:
            yield from _turns(cell, key)[:last]

    return read


_TAKES = ("system", "system_prompt", "tools", "functions", "history")


class _Shape(NamedTuple):
    needs: tuple[str, ...]
    read: _Reader | None  # None: plain text; of preferences: reads the prompt if it has a column
    takes: tuple[str, ...] = _TAKES  # columns that may be missing
    turns: bool = False  # True: the first column is a list of turns
    answers: tuple[str, ...] = ()  # a better and a worse answer, or one with a label
    label: str = ""  # column that is true if a single answer is good


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
_PROMPTS: dict[str, _Reader] = {
    "prompt": _question("prompt"),
    "instruction": _instruction,
    **{key: _question(key) for key in ("question", "query")},
    **{key: _listed(key) for key in ("conversations", "messages")},
    "input": _question("input"),
}
_ANSWER_PAIRS = (
    ("chosen", "rejected"),
    ("chosen_response", "rejected_response"),
    ("chosen_messages", "rejected_messages"),
)


def _preference_shapes() -> Iterator[_Shape]:
    preferred = ("preferred_output", "non_preferred_output")
    yield _Shape(("input", *preferred), _openai, answers=preferred)
    for pair in _ANSWER_PAIRS:
        for prompt, read in _PROMPTS.items():
            takes = ("input", *_TAKES) if prompt == "instruction" else _TAKES
            turns = prompt in ("conversations", "messages")
            yield _Shape((prompt, *pair), read, takes, turns, pair)
    pair = ("messages", "rejected_response")  # ms-swift: a dialogue, and a worse last answer
    yield _Shape(pair, _listed("messages", -1), turns=True, answers=pair)
    pair = ("response", "rejected_response")
    yield _Shape(("query", *pair), _question("query"), answers=pair)
    for pair in (("messages", "rejected_messages"), *_ANSWER_PAIRS):
        yield _Shape(pair, None, turns=True, answers=pair)


def _rated_shapes() -> Iterator[_Shape]:
    rated = (
        *(("prompt", "completion"), ("instruction", "output"), ("question", "answer")),
        *(("query", "response"), ("conversations", ""), ("messages", "")),
    )
    for label in ("label", "kto_tag"):
        for prompt, answer in rated:
            needs = (prompt, answer, label) if answer else (prompt, label)
            read = _PROMPTS[prompt] if answer else _listed(prompt, -1)
            takes = ("input", *_TAKES) if prompt == "instruction" else _TAKES
            yield _Shape(needs, read, takes, not answer, (answer or prompt,), label)


PAIR_SHAPES = {", ".join(shape.needs): shape for shape in _preference_shapes()}
RATED_SHAPES = {", ".join(shape.needs): shape for shape in _rated_shapes()}
ALL_SHAPES = SHAPES | PAIR_SHAPES | RATED_SHAPES


def shapes_of(stage: str) -> dict[str, _Shape]:
    """Returns the shapes of a stage's examples."""
    pairs = PAIR_SHAPES | RATED_SHAPES if stage == "kto" else PAIR_SHAPES
    return SHAPES if stage == "sft" else pairs


def unread(example: Mapping[str, Any], shape: str, read_columns: Collection[str]) -> set[str]:
    """Returns unread columns and keys of turns that aren't empty."""
    others = example.keys() - read_columns
    columns = {key for key in others if example[key] not in EMPTY_VALUES}
    for name in ALL_SHAPES[shape].needs:
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


@dataclass(frozen=True)
class ColumnNames:
    """The user's names for a shape's columns and tags; without `shape` it is detected."""

    names: Mapping[str, str] = field(default_factory=dict)  # a shape's column -> the user's
    tags: Mapping[str, str] = field(default_factory=dict)
    shape: str | None = None  # if set, only the columns in `names` are read
    stage: str = "sft"  # decides which shapes examples may have

    def shapes(self) -> tuple[str, ...]:
        """Returns the shapes that have these names, in the order of the table."""
        if self.shape:
            return (self.shape,)
        table = shapes_of(self.stage).items()
        fit = ((n, s) for n, s in table if {*s.needs, *s.takes} >= self.names.keys())
        return tuple(name for name, shape in fit if shape.turns or not self.tags)

    def renamed(self, example: Any, shape: str | None = None) -> Any:
        """Returns the example with the shape's names instead of the user's."""
        if not isinstance(example, dict):
            return example
        taken = {*self.names.values()} - self.names.keys()
        left_out = {*example} if self.shape else {*self.names, *taken}
        fields = {k: v for k, v in example.items() if k not in left_out}
        fields |= {k: example[user] for k, user in self.names.items() if user in example}
        known_shape = ALL_SHAPES.get(shape or "")
        if self.tags and known_shape:
            for key in fields.keys() & {known_shape.needs[0], *known_shape.answers}:
                cell = fields[key]
                if isinstance(cell, dict) and rows_of(cell) is cell:
                    fields[key] = self._turn(cell)
                elif key == known_shape.needs[0] or not isinstance(cell, str):
                    fields[key] = [self._turn(turn) for turn in read_list(cell, key)]
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


def columns_of(mapping: Mapping[str, str], stage: str = "sft") -> ColumnNames:
    """Reads a recipe's columns; raises InputError for a name that no shape has."""
    shapes = shapes_of(stage).values()
    available = list(dict.fromkeys(n for shape in shapes for n in (*shape.needs, *shape.takes)))
    for key, user_name in mapping.items():
        if key not in (*available, *TAGS):
            close = difflib.get_close_matches(key, (*available, *TAGS), n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(available)}"
            raise InputError(f"columns: no shape has a column {key!r}: {hint}")
        if not user_name:
            raise InputError(f"columns: {key} has no name: write {key}: and your column's name")
    names = {key: user_name for key, user_name in mapping.items() if key not in TAGS}
    tags = {key: user_name for key, user_name in mapping.items() if key in TAGS}
    columns = ColumnNames(names, tags, stage=stage)
    if not columns.shapes():
        raise InputError(
            f"columns: {', '.join(mapping)} don't belong to one shape; see the shapes in the "
            "quick start"
        )
    return columns
