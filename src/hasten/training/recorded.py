"""What a run tells those who watch it: its start, its machine, and its numbers for other tools."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hasten.core.loop import Watch
from hasten.core.session import Session
from hasten.machine import environment, host
from hasten.machine.gpu import Gpus
from hasten.recipe.schema import Recipe
from hasten.training.recording import Recording


@contextmanager
def recorded(watch: Watch, session: Session, recipe: Recipe, output: Path) -> Iterator[Watch]:
    """Around a run's steps, on every rank: the watch with the recording of the run in it."""
    known = session.setup.facts
    recording = Recording(
        output,
        start_of(session, recipe),
        rank=known.world.rank,
        ranks=known.world.size,
        parts=session.setup.clock.steps,
        log_to=recipe.log_to,
        gpus=host.accelerator_uuids(known.device, environment.ranks_here(known.world)),
    )
    with recording:
        yield replace(
            watch,
            on_step=both(watch.on_step, recording.step),
            on_evaluation=both(watch.on_evaluation, recording.evaluation),
        )


def start_of(session: Session, recipe: Recipe) -> dict[str, Any]:
    """What ``run.json`` says of a run."""
    setup, price = session.setup, recipe.price
    size = setup.facts.world.size
    return {
        "model": recipe.model,
        "total_steps": setup.job.schedule.total_steps,
        "world_size": size,
        "plan": setup.plan.to_list(),
        "hardware": setup.facts.hardware.short,
        "currency": price.currency if price else None,
        "price_per_hour": price.hour * price.paid(size) if price else None,
    }


def machine() -> dict[str, Any]:
    """What the machine has besides what ``hardware`` names, for the summary and ``hardware``."""
    gpus = Gpus()
    return {
        "numa": [asdict(node) for node in host.numa_nodes()],
        "disks": [asdict(mount) for mount in host.mounts()],
        "network": [asdict(card) for card in host.cards()],
        "limits": asdict(host.limits()),
        "driver": gpus.driver,
        "gpus": [asdict(gpu) for gpu in gpus.descriptions()],
        "gpu_paths": gpus.paths(),
    }


def both(one: Callable[[Any], None], other: Callable[[Any], None]) -> Callable[[Any], None]:
    """One function that calls both."""

    def call(value: Any) -> None:
        one(value)
        other(value)

    return call
