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
from hasten.models.load import as_reward_model
from hasten.parts.data.collate import tokenized_example
from hasten.parts.data.pairs import EMPTY, PreferencePair, padded_pairs
from hasten.parts.nn.preference import PreferenceLoss, RewardLoss
from hasten.parts.nn.preference_objectives import Objective
from hasten.parts.optim.weight_average import decayed_groups
from hasten.recipe.reference import ReferenceSums
from tiny import VOCABULARY, session_of

BETA = 0.3
OBJECTIVES = {
    "dpo": Objective("sigmoid", BETA),
    "orpo": Objective("orpo", BETA),
    "simpo": Objective("simpo", 2.0, gamma=0.4, sft_weight=0.1, sft_mean="examples"),
    "kto": Objective("kto", BETA, undesirable_weight=1.5),
    "rm": Objective("bradley_terry", centre=0.01),
}


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


def judged_alone(pairs: Pairs) -> Pairs:
    """The pairs with one answer each, a good and a bad one by turns."""
    sides = ("rejected", "chosen")
    return Pairs(p._replace(**{sides[i % 2]: EMPTY}) for i, p in enumerate(pairs))


def pair_job(
    build: Callable[[], nn.Module],
    pairs: Pairs,
    eval_pairs: Pairs | None = None,
    steps: int = 4,
    batch: int = 4,
    objective: Objective = OBJECTIVES["dpo"],
) -> Job:
    eval_pairs = Pairs() if eval_pairs is None else eval_pairs
    reference, examples, eval_data = None, pairs, eval_pairs
    if objective.needs_reference:
        reference = ReferenceSums(pairs, eval_pairs, "key", has_others=objective.needs_kl)
        examples, eval_data = reference.train, reference.eval_data
    with_counts = partial(with_pair_counts, reference=reference, **objective.layout)
    is_reward = objective.loss == "bradley_terry"
    return Job(
        model=(lambda: as_reward_model(build())) if is_reward else build,
        loss=partial(RewardLoss if is_reward else PreferenceLoss, objective=objective),
        optimizer=lambda named: torch.optim.AdamW(decayed_groups(named, 0.0), lr=1e-3),
        stop=Stop(steps=steps),
        examples=examples,
        lengths=pairs.lengths.tolist(),
        collate=with_counts(padded_pairs),
        with_counts=with_counts,
        unit="pairs",
        reference=reference,
        eval_data=eval_data,
        batch=GlobalBatch(examples=batch),
        seed=3,
    )


def log_probs(model: Any, row: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed log-probabilities of a row's answer and of its prompt, token by token."""
    ids = torch.from_numpy(row.input_ids.astype(np.int64)).unsqueeze(0)
    table = model(input_ids=ids).logits[0].log_softmax(-1)
    found = torch.stack([table[t - 1, ids[0, t]] for t in range(1, row.length)])
    answer = torch.from_numpy(row.trained[1:])
    return found[answer].sum(), found[~answer].sum()


def odds(value: torch.Tensor) -> torch.Tensor:
    return value.exp() / (1 - value.exp())


def log_ratio(model: Any, frozen: Any, row: Any) -> torch.Tensor:
    return log_probs(model, row)[0] - log_probs(frozen, row)[0]


def pair_loss(model: Any, frozen: Any, pair: Any, term: float, o: Objective) -> torch.Tensor:
    """A pair's loss as the papers have it.

    ``term`` is KTO's divergence, or the weight of a token in ORPO's cross-entropy.
    """
    if o.loss == "kto":
        if pair.chosen.length:
            return 1 - torch.sigmoid(o.beta * (log_ratio(model, frozen, pair.chosen) - term))
        value = term - log_ratio(model, frozen, pair.rejected)
        return o.undesirable_weight * (1 - torch.sigmoid(o.beta * value))
    if o.loss == "bradley_terry":
        ids = [torch.from_numpy(row.input_ids).long().unsqueeze(0) for row in pair.rows]
        good, bad = (model(input_ids=row).logits[0, 0] for row in ids)
        return -torch.log(torch.sigmoid(good - bad)) + o.centre * (good + bad) ** 2
    if o.loss == "sigmoid":
        good, bad = (log_ratio(model, frozen, row) for row in pair.rows)
        return -torch.log(torch.sigmoid(o.beta * (good - bad)))
    (chosen, prompt), (rejected, _) = (log_probs(model, row) for row in pair.rows)
    good, bad = chosen / pair.chosen.trained_tokens, rejected / pair.rejected.trained_tokens
    if o.loss == "orpo":
        better = odds(good) / odds(bad)
        return -o.beta * torch.log(better / (1 + better)) - (chosen + prompt) * term
    margin = o.beta * (good - bad) - o.gamma
    return -torch.log(torch.sigmoid(margin)) - o.sft_weight * good


def plain_steps(
    job: Job, pairs: Pairs, steps: int, objective: Objective = OBJECTIVES["dpo"]
) -> list[float]:
    """Preference training as a plain loop with a frozen copy of the model."""
    torch.manual_seed(job.seed)
    model = job.build_model()
    frozen = copy.deepcopy(model).requires_grad_(False)
    optimizer = job.optimizer(model.named_parameters())
    sampler = session_of(job).setup.sampler
    assert sampler is not None
    losses = []
    order = [step for epoch in range(steps) for step in sampler.steps(epoch)]
    for step in order[:steps]:
        optimizer.zero_grad()
        chosen, term = [pairs[index] for index in step], 0.0
        if objective.loss == "kto":
            with torch.no_grad():
                ratios = [log_ratio(model, frozen, job.examples[index].other) for index in step]
            term = max(float(sum(ratios)) / len(step), 0.0)
        if objective.loss == "orpo":  # its cross-entropy is a mean over the step's tokens
            term = len(step) / sum(pair.chosen.length - 1 for pair in chosen)
        losses_of_step = [pair_loss(model, frozen, pair, term, objective) for pair in chosen]
        total = torch.stack(losses_of_step).mean()
        total.backward()
        losses.append(total.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses
