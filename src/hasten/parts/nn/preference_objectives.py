"""Objectives of preference training: losses of a pair's two log-ratios, and their settings.

An objective reads two numbers per pair: the summed log-probabilities of the chosen and of the
rejected answer, less those of a reference model. With ``b`` for beta, ``c`` and ``r`` for these
log-ratios, DPO's loss is ``-log sigmoid(b (c - r))`` (Rafailov et al., arXiv:2305.18290).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _noisy(o: Objective, margin: Tensor) -> Tensor:
    """Conservative DPO: a share of the labels is wrong; without, -log sigmoid(margin)."""
    e = o.label_smoothing
    return -(1 - e) * F.logsigmoid(margin) - e * F.logsigmoid(-margin)


def _robust(o: Objective, margin: Tensor) -> Tensor:
    """Returns the unbiased loss of wrong labels (arXiv:2403.00409)."""
    e = o.label_smoothing
    return (-(1 - e) * F.logsigmoid(margin) + e * F.logsigmoid(-margin)) / (1 - 2 * e)


def _log_odds(mean: Tensor) -> Tensor:
    """Returns log(p / (1 - p)) of p = exp(mean); finite also for p = 1, an empty answer."""
    x = mean.clamp(max=-1e-12)
    return x - torch.where(x < -math.log(2), torch.log1p(-x.exp()), (-torch.expm1(x)).log())


def _kto(o: Objective, c: Tensor, r: Tensor, kl: Tensor | float) -> tuple[Tensor, Tensor]:
    """Returns the losses of a good and of a bad answer judged alone (arXiv:2402.01306, eq. 7)."""
    return 1 - torch.sigmoid(o.beta * (c - kl)), 1 - torch.sigmoid(o.beta * (kl - r))


LOSSES: dict[str, Callable[[Objective, Tensor, Tensor], Tensor]] = {
    "sigmoid": lambda o, c, r: -F.logsigmoid(o.beta * (c - r)),
    "robust": lambda o, c, r: _robust(o, o.beta * (c - r)),
    "cdpo": lambda o, c, r: _noisy(o, o.beta * (c - r)),
    "hinge": lambda o, c, r: torch.relu(1 - o.beta * (c - r)),
    "ipo": lambda o, c, r: (c - r - 1 / (2 * o.beta)).square(),
    "sigmoid_norm": lambda o, c, r: -F.logsigmoid(o.beta * (c - r)),
    "apo_zero": lambda o, c, r: 1 - torch.sigmoid(o.beta * c) + torch.sigmoid(o.beta * r),
    "apo_down": lambda o, c, r: torch.sigmoid(o.beta * c) + torch.sigmoid(-o.beta * (c - r)),
    "nca": lambda o, c, r: (
        -F.logsigmoid(o.beta * c) - (F.logsigmoid(-o.beta * c) + F.logsigmoid(-o.beta * r)) / 2
    ),
    "bco_pair": lambda o, c, r: -F.logsigmoid(o.beta * c) - F.logsigmoid(-o.beta * r),
    "sppo": lambda o, c, r: (c - 0.5 / o.beta).square() + (r + 0.5 / o.beta).square(),
    "orpo": lambda o, c, r: -o.beta * F.logsigmoid(_log_odds(c) - _log_odds(r)),
    "simpo": lambda o, c, r: _noisy(o, o.beta * (c - r) - o.gamma),
    "cpo": lambda o, c, r: _noisy(o, o.beta * (c - r)),
    "bradley_terry": lambda o, c, r: -F.logsigmoid(c - r) + o.centre * (c + r).square(),
}
# Losses of each kind of training; the first one is the default.
STAGES: dict[str, tuple[str, ...]] = {
    "dpo": (
        *("sigmoid", "robust", "cdpo", "hinge", "ipo", "sigmoid_norm", "apo_zero", "apo_down"),
        *("nca", "bco_pair", "sppo"),
    ),
    "orpo": ("orpo",),
    "simpo": ("simpo", "cpo"),
    "rm": ("bradley_terry",),
    "kto": ("kto", "apo_zero_unpaired"),
}
ALONE = STAGES["kto"]  # for answers that were judged alone
WITH_REFERENCE = (*STAGES["dpo"], *ALONE)
BY_TOKEN = ("ipo", "sigmoid_norm", "orpo", "simpo")  # log-ratios are divided by the labels
SMOOTHED = ("robust", "cdpo", "simpo", "cpo")
MEANS = ("tokens", "examples")
SPANS = ("answer", "all")


@dataclass(frozen=True)
class Objective:
    """A loss of preference pairs, with its settings.

    Args:
        loss: one of ``LOSSES`` or ``ALONE``.
        beta: factor of the log-ratios; ORPO's weight of the odds.
        label_smoothing: share of wrong labels, for ``SMOOTHED`` losses.
        sft_weight: weight of the chosen row's cross-entropy; 1 in ORPO.
        sft_mean: its mean over the step's ``tokens``, or of the ``examples``' means.
        sft_span: tokens in it: of the chosen ``answer``, or ``all`` of its row; None: all in
            ORPO, else answer.
        gamma: SimPO's margin between ``beta`` times the answers' mean log-probabilities.
        length_normalised: divide log-ratios by the answers' labels; None: as the loss does.
        ld_alpha: factor of log-probabilities beyond the shorter answer's length; None: 1.
        centre: weight of the squared sum of a pair's rewards, for a reward model.
        desirable_weight: factor of the losses of good answers that were judged alone.
        undesirable_weight: factor of those of bad ones.

    Raises:
        ValueError: a value out of range, or one without effect.
    """

    loss: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    sft_weight: float = 0.0
    sft_mean: str = "tokens"
    sft_span: str | None = None
    gamma: float = 0.5
    length_normalised: bool | None = None
    ld_alpha: float | None = None
    centre: float = 0.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        choices = {
            "loss": (self.loss, (*LOSSES, *ALONE)),
            "sft_mean": (self.sft_mean, MEANS),
            "sft_span": (self.sft_span, (None, *SPANS)),
        }
        for name, (setting, allowed) in choices.items():
            if setting not in allowed:
                names = ", ".join(str(choice) for choice in allowed if choice)
                raise ValueError(f"{name} is {setting!r}; give one of {names}")
        if not (self.beta > 0 and math.isfinite(self.beta)):
            raise ValueError(f"beta is {self.beta}; give a number above 0")
        for name in ("sft_weight", "gamma", "centre", "desirable_weight", "undesirable_weight"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name} is {value}; give 0 or a number above 0")
        if self.ld_alpha is not None and not 0 <= self.ld_alpha <= 1:
            raise ValueError(f"ld_alpha is {self.ld_alpha}; give a number from 0 to 1")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(
                f"label_smoothing is {self.label_smoothing}; give at least 0 and less than 0.5"
            )
        self._refuse_without_effect()

    def _refuse_without_effect(self) -> None:
        of_pairs = {*LOSSES} - {*STAGES["rm"]}
        losses_with = {
            "beta": of_pairs | {*ALONE},
            "label_smoothing": {*SMOOTHED},
            "sft_weight": of_pairs,
            "sft_span": of_pairs,
            "gamma": {"simpo"},
            "length_normalised": of_pairs,
            "ld_alpha": of_pairs,
            "centre": {*STAGES["rm"]},
            "desirable_weight": {*ALONE},
            "undesirable_weight": {*ALONE},
        }
        for field in fields(self):
            losses = losses_with.get(field.name)
            setting = getattr(self, field.name)
            if losses is not None and setting != field.default and self.loss not in losses:
                hint = "; cdpo and robust have it" if losses == {*SMOOTHED} else ""
                raise ValueError(
                    f"the loss {self.loss} has no {field.name} ({setting} here){hint}; leave it out"
                )
        if self.loss == "orpo" and self.sft_weight not in (0, 1):
            raise ValueError(
                f"sft_weight is {self.sft_weight}, and orpo's weight is always 1; change beta"
            )
        if self.ld_alpha is not None and self.nll_weight:
            raise ValueError(
                "ld_alpha scales the log-probabilities from which the cross-entropy of sft_weight "
                "(or orpo) would be summed; give one of them"
            )

    @property
    def needs_reference(self) -> bool:
        """Returns True if the loss compares with a reference model."""
        return self.loss in WITH_REFERENCE

    @property
    def needs_kl(self) -> bool:
        """Returns True if the loss needs an estimate of the divergence from the reference."""
        return self.loss == "kto"

    @property
    def nll_weight(self) -> float:
        """Returns the weight of the chosen row's cross-entropy."""
        return 1.0 if self.loss == "orpo" else self.sft_weight

    @property
    def sequences(self) -> int:
        """Returns how many sequences of a pair have labels.

        2: the answers; 3: also the chosen row's prompt; 0: a reward model reads the rows' ends.
        """
        if self.loss == "bradley_terry":
            return 0
        span = self.sft_span or ("all" if self.loss == "orpo" else "answer")
        return 3 if self.nll_weight and span == "all" else 2

    @property
    def layout(self) -> dict[str, Any]:
        """Returns the arguments for a layout of pairs (:mod:`hasten.parts.data.pairs`)."""
        return {"sequences": self.sequences, "ld_alpha": self.ld_alpha}

    def __call__(
        self,
        sums: Tensor,
        reference: Tensor | None,
        counts: Tensor,
        nll_unit: Tensor | float | None = None,
        kl: Tensor | float = 0.0,
    ) -> Tensor:
        """Returns the losses (P,).

        Args:
            sums: summed log-probabilities (P, S), float64.
            reference: those of the reference (P, 2); None: 0.
            counts: labels (P, S). An answer judged alone is missing if it has none.
            nll_unit: pairs of the step over :meth:`nll_tokens` of the step; None: these pairs'.
            kl: estimate of the divergence from the reference, for KTO.
        """
        chosen, rejected = self.scores(sums, reference, counts).unbind(1)
        if self.loss in ALONE:
            good, bad = _kto(self, chosen, rejected, kl)
            weights = counts.new_tensor(
                [self.desirable_weight, self.undesirable_weight], dtype=chosen.dtype
            )
            return (torch.stack([good, bad], 1) * (counts[:, :2] > 0) * weights).sum(1)
        losses = LOSSES[self.loss](self, chosen, rejected)
        if not self.nll_weight:
            return losses
        tokens, nll = self.nll_tokens(counts), -sums[:, 0] - sums[:, 2:].sum(1)
        if self.sft_mean == "examples":
            return losses + self.nll_weight * nll / tokens.clamp(min=1)
        unit = len(tokens) / tokens.sum().clamp(min=1) if nll_unit is None else nll_unit
        return losses + self.nll_weight * nll * unit

    def nll_tokens(self, counts: Tensor) -> Tensor:
        """Returns the labels in each pair's cross-entropy (P,)."""
        return counts[:, 0] + counts[:, 2:].sum(1)

    def scores(self, sums: Tensor, reference: Tensor | None, counts: Tensor) -> Tensor:
        """Returns the log-ratios (P, 2) that the loss compares."""
        ratios = sums[:, :2] if reference is None else sums[:, :2] - reference
        by_token = self.loss in BY_TOKEN
        if by_token if self.length_normalised is None else self.length_normalised:
            ratios = ratios / counts[:, :2].clamp(min=1)
        return ratios

    def rewards(self, sums: Tensor, reference: Tensor | None, counts: Tensor) -> Tensor:
        """Returns ``beta`` times the log-ratios (P, 2): sums, and without a reference scores."""
        if self.needs_reference:
            return self.beta * (sums[:, :2] if reference is None else sums[:, :2] - reference)
        return self.beta * self.scores(sums, reference, counts)
