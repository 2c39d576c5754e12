"""One line in somebody's script: the techniques that their trainer can carry, without trials.

trainer = hasten.speed_up(Trainer(model, arguments, train_dataset=rows))
trainer.train()
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from hasten.core.plan import Plan
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.techniques import CATALOGUE
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.collate import Packed

AnyTrainer = TypeVar("AnyTrainer")
Carry = Callable[[Sequence[Technique]], None]  # raises InputError where the trainer can't
_LOG = logging.getLogger(__name__)


def speed_up(trainer: AnyTrainer, plan: Iterable[Any] | None = None) -> AnyTrainer:
    """The same trainer with the techniques that it can carry; call it before it trains.

    Without a plan these are the techniques that usually help and keep the mathematics, as far as
    nothing stands in their way on this model, machine and trainer. A warning of the logger
    ``hasten`` names them, and what ``hasten train`` would have beside them. In Lightning they join
    when ``fit`` is called.

    Args:
        trainer: of transformers, TRL or Lightning.
        plan: techniques of one's own choice: objects, names, or ``{name: settings}``.

    Raises:
        InputError: a trainer of another kind, or a technique of the plan that can't work here.
    """
    own = None if plan is None else list(_techniques(plan))
    if _is_lightning(trainer):
        _at_fit(trainer, own)
        return trainer
    from transformers import Trainer

    if not isinstance(trainer, Trainer):
        raise InputError(
            f"speed_up: {type(trainer).__name__} is no trainer of transformers, TRL or Lightning; "
            "hasten.integrations.loop has techniques for a loop of your own"
        )
    from hasten.integrations import transformers as host

    chosen = own if own is not None else _carried(lambda some: host.check(trainer, some))
    return host.with_techniques(trainer, chosen)


def _techniques(plan: Iterable[Any]) -> Iterable[Technique]:
    for entry in plan:
        if isinstance(entry, Technique):
            yield entry
        else:
            yield from Plan.from_list([entry], CATALOGUE)


def _carried(check: Carry) -> list[Technique]:
    """The usual techniques that a trainer can carry together; the others are told of, once."""
    found: list[Technique] = []
    left: list[str] = []
    for technique in Plan(kind() for kind in CATALOGUE if kind.auto == "usual"):
        packs = any(isinstance(t, Packed) for t in found)
        if isinstance(technique, DocumentAttention) and not packs:
            continue  # rows that aren't packed have one document each
        try:
            check([*found, technique])
        except InputError as error:
            left.append(str(error))
        else:
            found.append(technique)
    names = ", ".join(t.name() for t in found) or "no technique"
    rest = "" if not left else f"; not here: {'; '.join(left)}"
    _LOG.warning("speed_up: %s joined%s", names, rest)
    return found


def _is_lightning(trainer: Any) -> bool:
    kinds = [kind for kind in type(trainer).__mro__ if kind.__name__ == "Trainer"]
    return any(kind.__module__.partition(".")[0].endswith("lightning") for kind in kinds)


def _at_fit(trainer: Any, own: list[Technique] | None) -> None:
    """Lightning's trainer meets model and loader in ``fit`` alone."""
    usual = trainer.fit

    def fit(model: Any, train_dataloaders: Any = None, *rest: Any, **more: Any) -> Any:
        from torch.utils.data import DataLoader

        from hasten.integrations import lightning as host

        if not isinstance(train_dataloaders, DataLoader):
            raise InputError(
                "speed_up: give fit the module and a torch DataLoader; other sources of batches "
                "aren't changed"
            )
        chosen = own
        if chosen is None:
            chosen = _carried(lambda some: host.check(trainer, model, train_dataloaders, some))
        trainer.fit = usual  # a second fit finds the module as it is
        module, loader = host.with_techniques(trainer, model, train_dataloaders, chosen)
        return usual(module, loader, *rest, **more)

    trainer.fit = fit  # this instance alone
