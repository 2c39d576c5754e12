"""Samples of the trained model: greedy answers to the prompts of eval examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hasten.core.job import Indexed
from hasten.core.loop import evaluation_mode
from hasten.core.session import Session
from hasten.models.load import take_own_attention
from hasten.parts.data.collate import TokenizedExample
from hasten.parts.nn.causal_lm import causal_lm

LONGEST_PROMPT = 200  # tokens; a sample is to be read
ANSWER_TOKENS = 60


@dataclass(frozen=True)
class Sample:
    """A held-out prompt and what the model made of it."""

    prompt: str
    answer: str


def write_samples(
    session: Session, tokenizer: Any, eval_data: Indexed, count: int = 1
) -> list[Sample]:
    """Answers to the first held-out prompts that are short enough; [] without eval examples.

    The model gets its own attention back, so call this when training is over.
    """
    model = causal_lm(session.model)
    take_own_attention(model)
    prompts = (prompt_of(eval_data[i]) for i in range(len(eval_data)))
    short = [ids for ids in prompts if 0 < len(ids) <= LONGEST_PROMPT][:count]
    samples = []
    with evaluation_mode(session.model):
        for ids in short:
            inputs = torch.tensor([ids], device=model.device)
            written = session.model.generate(
                input_ids=inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=ANSWER_TOKENS,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )
            answer = tokenizer.decode(written[0, len(ids) :], skip_special_tokens=True)
            samples.append(Sample(tokenizer.decode(ids, skip_special_tokens=True), answer))
    return samples


def prompt_of(example: TokenizedExample) -> list[int]:
    """The tokens before the first trained one; the first quarter where all are trained."""
    untrained = (~example.trained).astype(int)
    first = int(example.trained.argmax()) if untrained.any() else example.length // 4
    prompt: list[int] = example.input_ids[: max(first, 1)].tolist()
    return prompt
