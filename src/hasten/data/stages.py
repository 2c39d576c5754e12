"""Refuses examples of other trainings, such as preferences in sft, or prompts alone, or media.

The error names the kind of training. If a meaningful column were ignored, rejected
answers would be trained, or the picture that a question is about would be missing. So
the whole file is refused, for any ``max_rejected``. For a file of no known shape, the
error gives the line of ``columns`` to write.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from hasten.errors import InputError
from hasten.formatting import flow

MEDIA = ("image", "images", "image_url", "audio", "audios", "video", "videos")
# What others replace by a picture, a sound or a film (LLaVA, LLaMA-Factory, ms-swift; Qwen).
PLACEHOLDERS = (
    *("<image>", "<video>", "<audio>"),
    *("<|image_pad|>", "<|video_pad|>", "<|audio_pad|>", "<|image|>"),
)
PAIR = ("chosen", "rejected")
# Of TRL, LLaMA-Factory's v1 (chosen_messages), ms-swift (rejected_response) and OpenAI.
PREFERENCES = ("chosen_", "rejected_", "preferred_", "non_preferred_")
# Of KTO, where they hold truth values.
LABELS = ("label", "kto_tag", "desirable", "is_desirable", "is_chosen")
MASKS = ("loss_mask", "loss_masks", "train_mask", "completion_mask", "assistant_masks")
TRUTHS = ("true", "false", "True", "False", "0", "1")
_TEXT_ANSWERS = ("completion", "output", "answer", "response")
_LISTED = (*_TEXT_ANSWERS, "answers", "responses", "outputs", "candidates", "generations")
ANSWERS = (*_TEXT_ANSWERS, "messages", "conversations", "conversation")
RECORD_WEIGHTS = ("weight", "loss_weight", "loss_scale", "sample_weight", "train", "loss")
THOUGHTS = ("reasoning_content", "reasoning", "thinking", "thoughts", "chain_of_thought", "cot")
CONTRASTS = ("positive_messages", "negative_messages")  # ms-swift's
_ALONE = ("completions", "chat_template_kwargs")
SOURCES = ("context", "passage", "article", "document")  # texts that a question is about
OURS = "hasten trains on answers alone"
# Trainings that hasten lacks, and TRL's trainers for them, which `speed_up` takes.
TRAINERS = {"reinforcement learning": "GRPOTrainer", "a preference loss": "DPOTrainer"}


def elsewhere(training: str) -> str:
    """Returns another training's trainer as the end of a sentence; empty if unknown."""
    name = next((name for name in TRAINERS if name in training), None)
    return f"; for {name} use TRL's {TRAINERS[name]} with hasten.speed_up" if name else ""


def refuse_other_stage(example: Any, named: Iterable[str] = (), stage: str = "sft") -> None:
    """Refuses an example with the columns of another training.

    Args:
        example: as it was read.
        named: columns that the user has named as a shape's; they are read and not dropped.
        stage: the training, as in the recipe.

    Raises:
        InputError: the example is of another training; the message names it and what to do.
    """
    if not isinstance(example, Mapping):
        return
    telling = ((key, example[key]) for key in _telling(frozenset(example)))
    if not any(isinstance(c, list) if key in _LISTED else not _is_empty(c) for key, c in telling):
        return  # most examples
    read = {*named}
    filled = {key for key, cell in example.items() if not _is_empty(cell)} - read
    problem = None
    if stage == "sft":
        problem = _preferences(example, filled, read)
    elif stage != "kto" and not any(map(is_preference, (*filled, *read))):
        problem = _rating(example, filled, f"rates one answer, material of stage: kto, not {stage}")
    if stage == "rm" and "margin" in filled and example["margin"]:
        problem = problem or (
            f"the column 'margin' ({example['margin']!r}) changes a pair's loss in TRL, and "
            "hasten's reward models have no margins: leave it out"
        )
    problem = problem or _stage(example, filled, read) or _unused(example, filled)
    if problem is not None:
        raise InputError(problem)


@lru_cache(maxsize=256)
def _telling(keys: frozenset[str]) -> tuple[str, ...]:
    """Returns the columns that may be those of another training."""
    telling_names = {
        *MEDIA,
        *LABELS,
        *RECORD_WEIGHTS,
        *MASKS,
        *THOUGHTS,
        *SOURCES,
        *_LISTED,
        *_ALONE,
        *CONTRASTS,
        "margin",
    }
    answered = bool(keys & {*ANSWERS, *_OTHER_ANSWERS})
    columns = [key for key in keys if key in telling_names or is_preference(key)]
    return tuple(columns if answered or "prompt" not in keys else (*columns, "prompt"))


def _preferences(example: Mapping[str, Any], filled: set[str], named: set[str]) -> str | None:
    """Returns the refusal of preferences in sft."""
    pair = sorted(filter(is_preference, filled))
    if pair and not any(map(is_preference, named)):
        good = any(not key.startswith(("rejected", "non_")) for key in pair)
        return (
            f"these are preference pairs ({', '.join(pair)}): write stage: dpo to train on them "
            "(or orpo, simpo, rm), or for sft "
            + ("name the good answer in columns" if good else f"leave {pair[0]} out")
        )
    return _rating(
        example,
        filled,
        "marks whether an answer is good: write stage: kto to train on it, or for sft leave the "
        "false ones and the column out",
    )


def _rating(example: Mapping[str, Any], filled: set[str], advice: str) -> str | None:
    label = next((key for key in LABELS if key in filled and is_label(key, example[key])), None)
    return f"{label!r} {advice}" if label and filled & {*ANSWERS} else None


def _stage(example: Mapping[str, Any], filled: set[str], named: set[str]) -> str | None:
    if contrast := [key for key in CONTRASTS if key in filled]:
        return (
            f"{contrast[0]!r} is for comparing texts, material of an embedding model or a "
            f"reranker; {OURS}, so take examples with one answer"
        )
    pairs = "write the better one as chosen and a worse one as rejected, with stage: dpo or rm"
    if "completions" in filled:
        if "labels" in filled:
            return (
                "these are rated steps (completions, labels), material of a process reward model; "
                f"{OURS}, so take examples with one answer"
            )
        return f"these are several answers of a prompt (completions): {pairs}"
    ranked = next((key for key in _LISTED if key in filled and _is_ranked(example[key])), None)
    if ranked:
        return (
            f"{ranked!r} lists {len(example[ranked])} answers: {pairs}, or the one to train as a "
            "text"
        )
    media = next((key for key in filled if _names_media(key)), None)
    if media:
        return (
            f"the column {media!r} holds what a text model can't read; hasten trains text alone. "
            "Take other examples, or leave the column out if the text is complete without it"
        )
    answered = filled & {*ANSWERS, *_OTHER_ANSWERS} or any(map(is_preference, filled))
    if "prompt" in filled and not named and not answered:
        return (
            f"prompts without answers are material of reinforcement learning; {OURS}, so name the "
            "column of the answers (columns: {prompt: prompt, completion: ...}) or take others"
            + elsewhere("reinforcement learning")
        )
    return None


def _unused(example: Mapping[str, Any], filled: set[str]) -> str | None:
    """Returns why a column that changes the training can't be ignored."""
    weight = next((key for key in RECORD_WEIGHTS if key in filled and _weighs(example, key)), None)
    if weight:
        return (
            f"the column {weight!r} weighs examples ({example[weight]!r}), and hasten weighs all "
            "of a source alike: leave it out, or give a file of its own a weight in the recipe"
        )
    if mask := next((key for key in MASKS if key in filled), None):
        return (
            f"the column {mask!r} selects the tokens to train, and hasten trains whole answers: "
            "give turns a weight of 0 or 1, or leave the column out"
        )
    if "chat_template_kwargs" in filled:
        return (
            "the column 'chat_template_kwargs' sets the chat template for one example. "
            "Hasten has one template for all: leave it out, or write it into a chat_template file"
        )
    thoughts = next((key for key in THOUGHTS if key in filled), None)
    if thoughts and filled & {*_TEXT_ANSWERS}:
        return (
            f"the column {thoughts!r} holds thoughts, which no turn takes up: write them into the "
            "answer as <think>...</think>, or leave the column out"
        )
    source = next((key for key in SOURCES if key in filled), None)
    question = next((key for key in ("instruction", *_QUESTIONS) if key in filled), None)
    answer = next((key for key in _ANSWERS if key in filled), None)
    if source and question and answer and not filled & {*_TURNS, "input"}:
        return (
            f"the column {source!r} belongs to the question and no shape reads it: write "
            f"columns: {{instruction: {question}, input: {source}, output: {answer}}}, or leave it "
            "out"
        )
    return None


def placeholder_in(text: str) -> str:
    """Returns the first placeholder of media in a text; empty without one."""
    return next((mark for mark in PLACEHOLDERS if mark in text), "") if "<" in text else ""


def _is_ranked(cell: Any) -> bool:
    """Returns True for a list of answers: texts, or objects that aren't turns."""
    if not isinstance(cell, list) or len(cell) < 2:
        return False
    return all(
        isinstance(one, str) or (isinstance(one, dict) and not one.keys() & {"role", "from"})
        for one in cell
    )


def _names_media(key: str) -> bool:
    return key in MEDIA or (is_preference(key) and key.rpartition("_")[2] in MEDIA)


def is_preference(key: str) -> bool:
    """Returns True if a column has an answer that is better or worse than another."""
    return key in PAIR or key.startswith(PREFERENCES)


def is_label(key: str, cell: Any) -> bool:
    """Returns True if a column marks an answer as good or bad."""
    return key in LABELS and (cell in TRUTHS if isinstance(cell, str) else cell in (0, 1))


def _weighs(example: Mapping[str, Any], key: str) -> bool:
    cell = example[key]
    if key == "loss":  # a number is what another model lost on it
        return cell is False
    return isinstance(cell, int | float) and cell != 1


def _is_empty(cell: Any) -> bool:
    """Returns True for values with which tables fill missing columns."""
    return cell is None or (isinstance(cell, (str, list, tuple, dict)) and not cell)


def missing_answers(example: Mapping[str, Any], stage: str) -> str:
    """Returns what an example lacks for a stage of preferences, as the end of a sentence."""
    better = next((key for key in example if is_preference(key)), None)
    if better:
        return (
            f"stage: {stage} needs a prompt, a better and a worse answer: name their columns "
            "(columns: {prompt: ..., chosen: ..., rejected: ...})"
        )
    what = "a chosen and a rejected answer of each prompt"
    if stage == "kto":
        what += ", or one answer with a label (completion, label)"
    return f"stage: {stage} needs {what}; for examples with one answer write stage: sft"


# What to write for an example of no known shape.

_TURNS = ("messages", "conversations", "conversation", "dialog", "dialogue", "turns", "chat")
_QUESTIONS = ("question", "query", "prompt", "problem", "user", "human", "instruction", "input")
_OTHER_ANSWERS = ("text", "instruction", "generation", "target", "assistant", "reply", "summary")
_ANSWERS = ("answer", "response", "completion", "output", "solution", *_OTHER_ANSWERS[2:])
_TEXTS = ("text", "content", "body", "document", "article")
# Examples that no columns can help.
_ELSEWHERE = {
    "input_ids": "these are tokens already (input_ids), and hasten tokenises by itself: give the "
    "examples that they were made from",
    "segments": "hasten doesn't read segments of a text with a label each: write them as turns of "
    "messages, with weight: 0 for what isn't trained",
    "chat": "'chat' has a whole dialogue in one text: write it as messages of role and content",
    "answers": "'answers' has several answers or calls in one text: write messages of role and "
    "content, with calls as tool_calls",
}


def advice(example: Mapping[str, Any]) -> str:
    """Returns advice for an example of no known shape, as the end of a sentence."""
    hint = next((hint for key, hint in _ELSEWHERE.items() if example.get(key)), None)
    if hint and not isinstance(example.get("chat"), list):
        return hint
    keys = [key for key, cell in example.items() if not _is_empty(cell)]
    lower = {key.lower(): key for key in reversed(keys)}

    def column_of(names: Iterable[str]) -> str | None:
        return next((lower[name] for name in names if name in lower), None)

    turns, answer = column_of(_TURNS), column_of(_ANSWERS)
    question = column_of(_QUESTIONS) or column_of(SOURCES)
    listed = example[turns] if turns else None  # a list of turns, or a table's object of lists
    if isinstance(listed[0] if isinstance(listed, list) and listed else listed, dict):
        return f"write columns: {{messages: {turns}}}"
    if isinstance(listed, list):
        return f"{turns!r} lists texts: write each as a turn of role and content"
    if question and answer:
        source = column_of(SOURCES) or next((k for k in example if k.lower() == "input"), None)
        shape = (
            f"instruction: {question}, input: {source}, output: {answer}"
            if source and source != question
            else f"question: {question}, answer: {answer}"
        )
        return f"if that is what they mean, write columns: {{{shape}}}"
    is_short = {key: len(key) <= 40 for key in example}
    texts = [key for key, cell in example.items() if isinstance(cell, str) and is_short[key]]
    if text := column_of(_TEXTS) or (texts[0] if len(texts) == 1 else None):
        return f"if that is what to train, write columns: {flow({'text': text})}"
    if texts:
        roles = flow(dict(zip(("instruction", "output"), texts, strict=False)))
        return f"write which is which, for example columns: {roles}"
    return "hasten trains texts or turns: no column is a text or a list of turns"
