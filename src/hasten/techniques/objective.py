"""OBJECTIVE: terms that are minimised in addition to the loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from hasten.core.context import JobContext
from hasten.core.setup import Session, Setup
from hasten.core.slot import Slot
from hasten.core.technique import EffectCheck, Fidelity, Forecast, Technique, setting
from hasten.errors import as_input_error
from hasten.parts.nn import multi_token
from hasten.parts.nn.multi_token import MultiToken

STATE_BYTES = 16  # bytes of a weight in float32 with its gradient and AdamW's two moments


@dataclass(frozen=True)
class MultiTokenPrediction(Technique):
    """Trains the model to predict further tokens too, with modules only for training.

    This is DeepSeek-V3's objective. The modules are separate from the model: checkpoints
    contain them, the saved model doesn't.
    """

    slot = Slot.OBJECTIVE
    depth: int = setting(1, "how many tokens behind the next one are predicted")
    weight: float = setting(
        0.3,
        "of their mean loss (0.3, later 0.1 in the paper); 0: not trained, not run",
        may_change=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        multi_token.check(self.depth, self.weight)

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.LOSSY if self.weight else Fidelity.EXACT

    def apply(self, setup: Setup) -> None:
        def add(loss_module: nn.Module) -> None:
            with as_input_error(self.name()):
                model = multi_token.model_of(loss_module)
                ahead = MultiToken(model, self.depth, self.weight)
            multi_token.add_to_loss(loss_module, ahead)

        setup.objective = add

    def unsupported_reasons(self, context: JobContext) -> tuple[str, ...]:
        return context.model.why_not_of(multi_token.ARCHITECTURES)

    def forecast(self, context: JobContext) -> Forecast:
        model = context.model
        head = model.vocabulary * model.hidden_size
        body = max(model.parameters - head * (1 if model.tied_head else 2), 1)
        module = body / max(model.layers, 1) + 2 * model.hidden_size**2
        run = self.depth * (module + head) if self.weight else 0.0
        state = STATE_BYTES if self.weight else STATE_BYTES / 4
        return Forecast(flops=1 + run / (body + head), resident_bytes=state * self.depth * module)

    def check_effect(self, session: Session) -> EffectCheck:
        ahead = getattr(session.loss_module, "ahead", None)
        if not isinstance(ahead, MultiToken):
            return EffectCheck(False, "no module predicts tokens further ahead")
        # Summed, because the first rank reports and another one may run the modules (pipeline).
        sums = torch.zeros(self.depth + 1, 2, dtype=torch.float64)
        sums[0, 0] = ahead.passes
        for number, (loss, count) in enumerate(ahead.last, start=1):
            sums[number] = torch.stack([loss.double(), count.double()])
        summed = session.setup.layout.all_reduce_world(sums.flatten()).view(-1, 2).tolist()
        (passes, _), *losses = summed
        means = ", ".join(f"{loss / count:.3f}" for loss, count in losses if count)
        suffix = f"; loss of a token ahead in the last pass {means}" if means else ""
        return EffectCheck(
            passes > 0,
            f"{self.depth} module(s) of {ahead.size:,} weights, run in {passes:.0f} passes of all "
            f"ranks{suffix}",
        )
