"""AVERAGE: which running average of the weights is kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from hasten.core.context import JobContext
from hasten.core.layout import Layout, SplitsModel
from hasten.core.loop import eval_loss, evaluation_mode
from hasten.core.setup import Session, Setup
from hasten.core.slot import Slot
from hasten.core.technique import EffectCheck, Fidelity, Forecast, Technique, knob, setting
from hasten.parts.optim.weight_average import WeightAverage as WeightAveragePart


@dataclass(frozen=True)
class WeightAverage(Technique):
    """An exponential mean of the true weights, float32 on the host, saved with the model."""

    slot = Slot.AVERAGE
    decay: float = knob(0.999, "share of the mean that stays per update", choices=(0.99, 0.999))
    save: str = setting(
        "both",
        "both: model and model_average; average: model is the mean; last: no mean saved",
        only=("both", "average", "last"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        WeightAveragePart(self.decay)  # raises ValueError

    @property
    def fidelity(self) -> Fidelity:
        """Training stays exact; with ``save: average`` the saved model is another one."""
        return Fidelity.LOSSY if self.save == "average" else Fidelity.EXACT

    def apply(self, setup: Setup) -> None:
        setup.average = SavedAverage(self.decay, self.save)

    def forecast(self, context: JobContext) -> Forecast:
        on_device = 0.0 if context.on_gpu else 4.0 * context.model.parameters
        return Forecast(resident_bytes=on_device)

    def check_effect(self, session: Session) -> EffectCheck:
        average = session.setup.average
        if not isinstance(average, SavedAverage) or not average.updates:
            return EffectCheck(False, "no average was kept")
        text = f"mean of {average.updates} updates, {average.state_bytes / 1e6:.2f} MB"
        last_loss, average_loss = _losses(session, average)
        if last_loss is not None and average_loss is not None:
            text += f"; eval loss {average_loss:.4f} with it, {last_loss:.4f} with the last weights"
        return EffectCheck(True, text)


class SavedAverage(WeightAveragePart):
    """A weight average and the folders it is saved to."""

    def __init__(self, decay: float, save: str) -> None:
        super().__init__(decay)
        self.save = save
        self._split: SplitsModel | None = None  # the layout, if ranks hold parts of weights

    def attach(self, weights: Mapping[str, Tensor], layout: Layout) -> None:
        """See `hasten.core.setup.Average`; a mean of each rank's own shards is exact."""
        self.name_weights(weights)
        self._split = layout if isinstance(layout, SplitsModel) else None

    def means_by_name(self) -> dict[str, Tensor]:
        """See `hasten.core.setup.Average`."""
        split, means = self._split, self.means  # none before the first update
        pairs = zip(self.named.items(), means, strict=False)
        return {n: mean if split is None else split.placed(w, mean) for (n, w), mean in pairs}

    def versions(self, parameters: Sequence[Tensor]) -> Iterator[str]:
        """See `hasten.core.setup.Average`; without any update there is no mean."""
        if not self.replaces_model:
            yield ""
        if self.save != "last" and self.updates:
            with self.swapped(parameters):
                yield "" if self.replaces_model else "_average"

    @property
    def replaces_model(self) -> bool:
        """See `hasten.core.setup.Average`."""
        return self.save == "average" and self.updates > 0


def _losses(session: Session, mean: WeightAveragePart) -> tuple[float | None, float | None]:
    precision = session.setup.precision
    with evaluation_mode(session.loss_module):
        last_loss = eval_loss(session)
        with mean.swapped(precision.parameters()):
            precision.update_model_weights()
            average_loss = eval_loss(session)
    precision.update_model_weights()
    return last_loss, average_loss
