"""Samples of the model: greedy answers to the prompts of eval examples."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hasten.core.job import Indexed
from hasten.core.loop import evaluation_mode
from hasten.core.setup import Session
from hasten.parts.data.collate import IGNORED
from hasten.parts.nn.causal_lm import causal_lm

LONGEST_PROMPT = 200  # tokens
ANSWER_TOKENS = 60


@dataclass(frozen=True)
class Sample:
    """An eval prompt and the model's answer."""

    prompt: str
    answer: str


def write_samples(
    session: Session, tokenizer: Any, eval_data: Indexed, count: int = 1
) -> list[Sample]:
    """Returns answers to the first eval prompts that are short enough; [] without eval examples.

    A reward model writes none. All ranks call it between two steps; model and mode don't change.
    Ranks that hold parts of the model compute together, each with the same prompts. Of replicas
    only the first writes, and the others return [].
    """
    every = (prompt_of(eval_data[i]) for i in range(len(eval_data)))
    prompts = list(itertools.islice((p for p in every if 0 < len(p) <= LONGEST_PROMPT), count))
    is_copy = session.setup.layout.replicated and not session.setup.context.world.is_main
    if not prompts or is_copy or not hasattr(causal_lm(session.model), "lm_head"):
        return []
    # The tokens that end an answer: those of generation config and tokenizer.
    config: Any = getattr(causal_lm(session.model), "generation_config", None)
    model_ends = getattr(config, "eos_token_id", None)
    model_ends = list(model_ends) if isinstance(model_ends, list | tuple) else [model_ends]
    ends = frozenset(e for e in (*model_ends, tokenizer.eos_token_id) if e is not None)
    with evaluation_mode(session.loss_module):
        answers = continuations(session, prompts, ends)

    def text(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    return [Sample(text(p), text(a)) for p, a in zip(prompts, answers, strict=True)]


def continuations(
    session: Session, prompts: Sequence[Sequence[int]], ends: frozenset[int]
) -> list[list[int]]:
    """Returns the most probable next tokens of each prompt, without the end token.

    All rows have one length, because a model is compiled for each shape. Ranks can divide it, as
    they divide sequences. Each pass computes complete rows, because attention of a training plan
    has no cache of keys and values.
    """
    ranks, device = session.setup.layout.size, session.setup.job.device
    width = -(-(max(len(prompt) for prompt in prompts) + ANSWER_TOKENS) // ranks) * ranks
    tokens = torch.zeros(len(prompts), width, dtype=torch.long)  # (B, T)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    tokens = tokens.to(device)
    rows = torch.arange(len(prompts), device=device)
    position = torch.tensor([len(prompt) for prompt in prompts], device=device)
    answers: list[list[int]] = [[] for _ in prompts]
    waiting = set(range(len(prompts)))
    for _ in range(ANSWER_TOKENS):
        following = _next_tokens(session, tokens, rows, position - 1)
        tokens[rows, position] = following.to(device)
        position = position + 1
        for row, token in enumerate(following.tolist()):
            if token in ends:
                waiting.discard(row)
            elif row in waiting:
                answers[row].append(token)
        if not waiting:
            break
    return answers


def _next_tokens(session: Session, tokens: Tensor, rows: Tensor, last: Tensor) -> Tensor:
    """Returns the most probable token after ``last`` of each row, on the host.

    Those of the first rank count on all ranks that compute together: another rounding elsewhere
    can't make them continue with other tokens.
    """
    labels = torch.full_like(tokens, IGNORED)
    labels[rows, last] = 0
    # Attention is causal, so the unfilled positions on the right have no effect.
    with session.setup.precision.region():
        predicted, _ = session.loss_module(labels=labels, predict=True, input_ids=tokens)
    layout, predicted = session.setup.layout, predicted.cpu().double()
    if not layout.replicated:
        is_main = session.setup.context.world.is_main
        predicted = layout.all_reduce_world(predicted if is_main else torch.zeros_like(predicted))
    return predicted.long()


def prompt_of(example: Any) -> list[int]:
    """Returns the tokens before the first trained one; the first quarter if all are trained."""
    # Both answers of a pair follow the prompt.
    example = next(row for row in example.rows if row.length)
    untrained = (~example.trained).astype(int)
    first = int(example.trained.argmax()) if untrained.any() else example.length // 4
    prompt: list[int] = example.input_ids[: max(first, 1)].tolist()
    return prompt
