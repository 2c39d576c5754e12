"""Preference pairs for tests, and the numbers of a plain loop over them.

The loop runs each answer alone through the model, with log-softmax over whole logits. The
formulas are written with logarithms and exponentials, as in the papers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hasten.parts.data.collate import TokenizedExample, tokenized_example
from hasten.parts.data.pairs import PreferencePair
from tiny import VOCABULARY


def example(prompt: Sequence[int], answer: Sequence[int]) -> TokenizedExample:
    trained = [False] * len(prompt) + [True] * len(answer)
    return tokenized_example([*prompt, *answer], trained)


def pairs(count: int = 4, seed: int = 0, longest: int = 14) -> list[PreferencePair]:
    """Pairs of uneven lengths; answers of each third one begin with the same tokens."""
    draw = np.random.default_rng(seed)

    def tokens(least: int = 1) -> list[int]:
        return [int(n) for n in draw.integers(3, VOCABULARY, draw.integers(least, longest))]

    found = []
    for index in range(count):
        prompt, same = tokens(), tokens() if index % 3 == 1 else []
        chosen, rejected = [5, *tokens()], [7, *tokens()]  # answers differ after these
        found.append(
            PreferencePair(example(prompt, same + chosen), example(prompt, same + rejected))
        )
    return found


def token_log_probs(model: nn.Module, row: TokenizedExample) -> Tensor:
    """The log-probability of each token but the first, (tokens - 1,)."""
    ids = torch.from_numpy(row.input_ids).long()
    if not len(ids):
        return torch.zeros(0, dtype=torch.float64)
    logits = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0]
    chosen = logits.double() if logits.dtype == torch.float64 else logits.float()
    return chosen.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]].double()


def sums_of(model: nn.Module, pair: PreferencePair, alpha: float = 1.0) -> list[Tensor]:
    """Summed log-probabilities: chosen answer, rejected answer, the chosen row's prompt."""
    shorter = min(pair.chosen.trained_tokens, pair.rejected.trained_tokens)
    found = []
    for row in (pair.chosen, pair.rejected):
        log_probs = token_log_probs(model, row)[torch.from_numpy(row.trained[1:])]
        found.append(log_probs[:shorter].sum() + alpha * log_probs[shorter:].sum())
    prompt = token_log_probs(model, pair.chosen)[torch.from_numpy(~pair.chosen.trained[1:])]
    return [*found, prompt.sum()]


def softplus(x: Tensor) -> Tensor:
    """Minus the logarithm of sigmoid(-x)."""
    return torch.log(1 + torch.exp(x))


def sigma(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def log_odds(x: Tensor) -> Tensor:
    return x - torch.log(1 - torch.exp(x))


# Of log-ratios c and r: sums, or means over tokens in those of the second table.
FORMULAS: dict[str, Callable[..., Tensor]] = {
    "sigmoid": lambda c, r, b, e, g: softplus(-b * (c - r)),
    "robust": lambda c, r, b, e, g: (
        ((1 - e) * softplus(-b * (c - r)) - e * softplus(b * (c - r))) / (1 - 2 * e)
    ),
    "cdpo": lambda c, r, b, e, g: (1 - e) * softplus(-b * (c - r)) + e * softplus(b * (c - r)),
    "hinge": lambda c, r, b, e, g: (1 - b * (c - r)).clamp(min=0),
    "apo_zero": lambda c, r, b, e, g: 1 - sigma(b * c) + sigma(b * r),
    "apo_down": lambda c, r, b, e, g: sigma(b * c) + 1 - sigma(b * (c - r)),
    "nca": lambda c, r, b, e, g: softplus(-b * c) + 0.5 * softplus(b * c) + 0.5 * softplus(b * r),
    "bco_pair": lambda c, r, b, e, g: softplus(-b * c) + softplus(b * r),
    "sppo": lambda c, r, b, e, g: (c - 0.5 / b) ** 2 + (r + 0.5 / b) ** 2,
    "cpo": lambda c, r, b, e, g: (1 - e) * softplus(-b * (c - r)) + e * softplus(b * (c - r)),
}
BY_TOKEN: dict[str, Callable[..., Tensor]] = {
    "ipo": lambda c, r, b, e, g: (c - r - 1 / (2 * b)) ** 2,
    "sigmoid_norm": lambda c, r, b, e, g: softplus(-b * (c - r)),
    "orpo": lambda c, r, b, e, g: b * softplus(log_odds(r) - log_odds(c)),
    "simpo": lambda c, r, b, e, g: (
        (1 - e) * softplus(g - b * (c - r)) + e * softplus(b * (c - r) - g)
    ),
}


def loop(
    model: nn.Module, given: Sequence[PreferencePair], reference: Tensor | None, **terms: Any
) -> Tensor:
    """The mean loss of pairs, one answer at a time; ``terms`` as an objective has them."""
    name, beta = terms.get("loss", "sigmoid"), terms.get("beta", 0.1)
    noise, gamma = terms.get("label_smoothing", 0.0), terms.get("gamma", 0.5)
    weight = 1.0 if name == "orpo" else terms.get("sft_weight", 0.0)
    whole_rows = terms.get("sft_span", "all" if name == "orpo" else "answer") == "all"
    losses, entropies, tokens = [], [], []
    for index, pair in enumerate(given):
        alpha = terms.get("ld_alpha")
        chosen, rejected, prompt = sums_of(model, pair, 1.0 if alpha is None else alpha)
        entropies.append(-chosen - (prompt if whole_rows else 0))
        tokens.append(pair.chosen.length - 1 if whole_rows else max(pair.chosen.trained_tokens, 1))
        ratios = [chosen, rejected]
        if reference is not None:
            ratios = [ratio - reference[index, side] for side, ratio in enumerate(ratios)]
        if name in BY_TOKEN:
            counts = pair.chosen.trained_tokens, pair.rejected.trained_tokens
            ratios = [ratio / max(n, 1) for ratio, n in zip(ratios, counts, strict=True)]
        formula = FORMULAS.get(name) or BY_TOKEN[name]
        losses.append(formula(*ratios, beta, noise, gamma))
    if terms.get("sft_mean", "tokens") == "examples":
        entropy = sum(e / n for e, n in zip(entropies, tokens, strict=True)) / len(given)
    else:
        entropy = sum(entropies) / sum(tokens)
    return torch.stack(losses).mean() + weight * entropy


def references(given: Sequence[PreferencePair], seed: int = 0) -> Tensor:
    """Made-up sums of a reference model, (pairs, 2): near those of a random model."""
    draw = torch.Generator().manual_seed(seed)
    counts = [[p.chosen.trained_tokens, p.rejected.trained_tokens] for p in given]
    noise = torch.randn(len(given), 2, generator=draw, dtype=torch.float64)
    return -math.log(VOCABULARY) * torch.tensor(counts, dtype=torch.float64) + 3 * noise
