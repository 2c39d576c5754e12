"""Jobs on preference pairs, and their losses as plain loops."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from hasten.core.job import GlobalBatch, Job, Stop, with_pair_counts
from hasten.parts.data.collate import tokenized_example
from hasten.parts.data.pairs import PreferencePair, padded_pairs
from hasten.parts.nn.preference import Objective, PreferenceLoss
from hasten.parts.optim.weight_average import decayed_groups
from hasten.recipe.reference import ReferenceSums
from tiny import VOCABULARY, session_of

BETA = 0.3


class Pairs(list[PreferencePair]):
    """A list with the interface of stored pairs."""

    @property
    def lengths(self) -> Any:
        return np.array([pair.length for pair in self])

    @property
    def trained_counts(self) -> Any:
        return np.array([pair.trained_tokens for pair in self])


def some_pairs(count: int, seed: int = 0) -> Pairs:
    draw = np.random.default_rng(seed)
    pairs = Pairs()
    for _ in range(count):
        prompt = draw.integers(3, VOCABULARY, int(draw.integers(1, 9)))
        rows = []
        for _ in range(2):
            answer = draw.integers(3, VOCABULARY, int(draw.integers(1, 12)))
            ids = np.concatenate([prompt, answer])
            rows.append(tokenized_example(ids, np.arange(len(ids)) >= len(prompt)))
        pairs.append(PreferencePair(*rows))
    return pairs


def pair_job(
    build: Callable[[], nn.Module],
    pairs: Pairs,
    eval_pairs: Pairs | None = None,
    steps: int = 4,
    batch: int = 4,
) -> Job:
    reference = ReferenceSums(pairs, eval_pairs or Pairs(), "key")
    with_counts = partial(with_pair_counts, reference=reference)
    return Job(
        model=build,
        loss=partial(PreferenceLoss, objective=Objective("sigmoid", BETA)),
        optimizer=lambda named: torch.optim.AdamW(decayed_groups(named, 0.0), lr=1e-3),
        stop=Stop(steps=steps),
        examples=reference.train,
        lengths=pairs.lengths.tolist(),
        collate=with_counts(padded_pairs),
        with_counts=with_counts,
        unit="pairs",
        reference=reference,
        eval_data=reference.eval_data,
        batch=GlobalBatch(examples=batch),
        seed=3,
    )


def log_prob(model: Any, row: Any) -> torch.Tensor:
    """The summed log-probability of a row's answer, token by token."""
    ids = torch.from_numpy(row.input_ids.astype(np.int64)).unsqueeze(0)
    table = model(input_ids=ids).logits[0].log_softmax(-1)
    wanted = [t for t in range(1, row.length) if row.trained[t]]
    return torch.stack([table[t - 1, ids[0, t]] for t in wanted]).sum()


def plain_steps(job: Job, pairs: Pairs, steps: int) -> list[float]:
    """DPO as a plain loop with a frozen copy of the model."""
    torch.manual_seed(job.seed)
    model = job.build_model()
    frozen = copy.deepcopy(model)
    optimizer = job.optimizer(model.named_parameters())
    sampler = session_of(job).setup.sampler
    assert sampler is not None
    losses = []
    order = [step for epoch in range(steps) for step in sampler.steps(epoch)]
    for step in order[:steps]:
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for index in step:
            chosen, rejected = pairs[index].rows
            with torch.no_grad():
                base = log_prob(frozen, chosen) - log_prob(frozen, rejected)
            margin = log_prob(model, chosen) - log_prob(model, rejected) - base
            total = total - torch.nn.functional.logsigmoid(BETA * margin) / len(step)
        total.backward()
        losses.append(total.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses
