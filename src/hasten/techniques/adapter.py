"""ADAPTER: which parameters are trained."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from hasten.core.context import JobContext
from hasten.core.setup import Session, Setup
from hasten.core.slot import Slot
from hasten.core.technique import Claim, EffectCheck, Fidelity, Forecast, Technique, knob, setting
from hasten.models import adapters
from hasten.models.memory import ADAMW_FLOAT32, routed_weights
from hasten.parts.nn.quantised import KINDS, Kind


@dataclass(frozen=True)
class LoRA(Technique):
    """Low-rank adapters on frozen weights: Hu et al., arXiv:2106.09685, through PEFT.

    ``targets`` is ``auto`` (the attention's projections, found by architecture: MLA's too),
    ``all-linear`` (every linear layer but head and router), a list of module names, or a regular
    expression that matches their full names. Routed experts need the name ``experts``.

    With another ``resolver``, PEFT resolves ``targets``, as for other trainers.
    """

    slot = Slot.ADAPTER
    fidelity = Fidelity.LOSSY
    rank: int = knob(16, "rank of the update", choices=(4, 8, 16, 32, 64, 128), least=1)
    alpha: int = knob(
        32, "the update is scaled by alpha / rank", choices=(16, 32, 64, 128, 256), least=1
    )
    dropout: float = knob(0.0, "dropout before the adapter", low=0.0, high=0.2)
    targets: Any = setting("auto", "auto, all-linear, or a list of module names")
    rslora: bool = setting(False, "scale by alpha / sqrt(rank), which suits high ranks")
    dora: bool = setting(False, "learn direction and length of a weight separately (DoRA)")
    resolver: adapters.Resolver = setting(
        "hasten",
        "what reads targets: hasten; peft; linear_names: peft, all-linear being a list of names",
        only=adapters.RESOLVERS,
    )
    base: Kind | None = setting(
        None, "frozen linear layers in int8 or nf4; None: as they are", only=(None, *KINDS)
    )
    # The number of examples per second is measured; an epoch's duration follows from it.
    claims = (
        Claim(
            "tokens_per_second",
            round(32 / 21.5, 2),
            "the articles' LoRA run: an epoch 32 -> 21.5 min",
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; it must be in [0, 1)")
        if self.base and self.dora:
            raise ValueError(
                f"dora measures the base weight in each pass, which base {self.base} keeps in few "
                "bits; switch one of them off"
            )
        if isinstance(self.targets, list):
            object.__setattr__(self, "targets", tuple(self.targets))

    def apply(self, setup: Setup) -> None:
        setup.adapter = partial(self.adapt, seed=setup.job.seed)

    def adapt(self, model: nn.Module, seed: int = 0) -> nn.Module:
        """Wraps the model with PEFT adapters drawn from ``seed``; all other weights are frozen."""
        targets = list(self.targets) if isinstance(self.targets, tuple) else self.targets
        any_model: Any = model
        adapted: nn.Module = adapters.add_lora(
            any_model,
            rank=self.rank,
            alpha=self.alpha,
            dropout=self.dropout,
            targets=targets,
            seed=seed,
            rslora=self.rslora,
            dora=self.dora,
            base=self.base,
            resolver=self.resolver,
        )
        return adapted

    def unsupported_reasons(self, context: JobContext) -> tuple[str, ...]:
        if context.model.vocabulary:
            return ()
        return (f"needs a Hugging Face language model; this is a {context.model.architecture}",)

    def forecast(self, context: JobContext) -> Forecast:
        # Removes weight gradients (a third of the products), and gradients and moments of the base;
        # routed experts are never quantised.
        model = context.model
        few = {None: model.weight_bytes, "int8": 1.0, "nf4": 0.5 + 4 / 64}[self.base]
        sizes = model.hidden_size, model.layers, model.vocabulary
        experts = routed_weights(model.parameters, *sizes, model.tied_head) if model.experts else 0
        base = few * (model.parameters - experts) + model.weight_bytes * experts
        learning = ADAMW_FLOAT32 * (model.adapter_weights - model.parameters)
        return Forecast(flops=2 / 3, resident_bytes=base + learning)

    def check_effect(self, session: Session) -> EffectCheck:
        learn = sum(p.numel() for p in session.model.parameters() if p.requires_grad)
        total = sum(p.numel() for p in session.model.parameters())
        # The second matrix starts as zeros, so other values show that it was trained.
        second = [p for n, p in session.model.named_parameters() if "lora_B" in n]
        moved = sum(bool(p.detach().count_nonzero()) for p in second)
        evidence = (
            f"{learn:,} of {total:,} parameters learn; {moved} of {len(second)} adapters moved"
        )
        effective = 0 < learn < total and moved > 0
        if not self.base:
            return EffectCheck(effective, evidence)
        resting = adapters.quantised_layers(session.model)
        effective = effective and resting > 0
        return EffectCheck(
            effective, f"{evidence}; {resting} frozen layers in {self.base} beside them"
        )
