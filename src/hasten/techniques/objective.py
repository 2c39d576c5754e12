"""OBJECTIVE: terms that are minimised in addition to the loss."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from hasten.core.context import JobContext
from hasten.core.setup import Session, Setup
from hasten.core.slot import Slot
from hasten.core.technique import EffectCheck, Fidelity, Forecast, Technique, setting
from hasten.errors import InputError, as_input_error
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
            if not setup.layout.replicated:
                raise InputError(
                    "multi_token_prediction needs the whole model on every rank, and the plan's "
                    "layout splits it; take ddp as the layout, or leave one of them out"
                )
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
        size = sum(p.numel() for p in ahead.parameters())
        losses = [f"{float(loss) / max(int(count), 1):.3f}" for loss, count in ahead.last]
        suffix = f"; loss of a token ahead in the last pass {', '.join(losses)}" if losses else ""
        return EffectCheck(
            ahead.passes > 0,
            f"{self.depth} module(s) of {size:,} weights, run in {ahead.passes} passes{suffix}",
        )
