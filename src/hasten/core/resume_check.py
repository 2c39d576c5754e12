"""What decides a training, as JSON in every checkpoint, and what of it may change on the way.

A run that goes on with another seed, batch, learning rate or data is neither the one run nor the
other, and nothing in its results shows it. So a checkpoint notes them, and a difference is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from hasten.core.job import GlobalBatch, Schedule
from hasten.core.setup import Setup
from hasten.core.slot import Slot
from hasten.core.technique import Fidelity, Technique
from hasten.errors import InputError

MAY_CHANGE = ("max_steps", "epochs", "max_tokens", "ranks")
SCHEDULE = {  # key -> field of Schedule
    "lr_schedule": "kind",
    "warmup_steps": "warmup_steps",
    "total_steps": "total_steps",
    "min_lr_ratio": "floor",
}
COMPARED_STEPS = 10_000  # of two schedules at most, evenly spread


def resume_check(setup: Setup) -> dict[str, Any]:
    """Flat, under the recipe's keys; ``job.terms`` brings what only the job's maker knows."""
    job, schedule = setup.job, asdict(setup.job.schedule)
    settings = {
        # Where the user brings batches, nothing that follows comes from the seed.
        "seed": job.seed if job.stream is None else None,
        **(batch_record(job.batch) if job.stream is None else {}),
        "max_grad_norm": job.max_grad_norm,
        **{key: schedule[field] for key, field in SCHEDULE.items()},
        "max_steps": job.stop.steps,
        "epochs": job.stop.epochs,
        "max_tokens": job.stop.tokens,
        "ranks": setup.context.world.size,
        "plan": {technique.name(): _entry(technique) for technique in setup.plan},
        **job.terms,
    }
    return _as_json(settings)


def batch_record(batch: GlobalBatch) -> dict[str, Any]:
    """A global batch in the words of a recipe."""
    return {"global_batch_size": batch.examples, "global_batch_tokens": batch.tokens}


def changes_since(meta: Mapping[str, Any], setup: Setup) -> list[str]:
    """What of the job has changed since a checkpoint, a phrase each, where it may.

    Raises:
        InputError: it may not.
    """
    return check_same_job(meta["job"], resume_check(setup), meta["progress"]["step"])


def check_same_job(
    saved: Mapping[str, Any], new_settings: Mapping[str, Any], step: int
) -> list[str]:
    """What differs from a record that was saved after ``step`` and may, a phrase each.

    Keys that only one of the two has are not compared.

    Raises:
        InputError: something differs that decides the training, with both values.
    """
    new_settings = _as_json(new_settings)
    refused: list[str] = []
    allowed: list[str] = []
    for key in new_settings:
        if key not in saved or saved[key] == new_settings[key]:
            continue
        if key == "plan":
            alone = min(saved.get("ranks", 1), new_settings["ranks"]) == 1
            for name in {**saved[key], **new_settings[key]}:
                _compare(
                    name, saved[key].get(name), new_settings[key].get(name), alone, refused, allowed
                )
            continue
        free = key in MAY_CHANGE or (key in SCHEDULE and _same_rates(saved, new_settings, step))
        name = (
            f"{key} (of lr_schedule {new_settings['lr_schedule']})" if key == "total_steps" else key
        )
        (allowed if free else refused).append(_phrase(name, saved[key], new_settings[key]))
    if refused:
        raise InputError(
            f"the checkpoint is of another training: {', '.join(refused)}; go on with what was, or "
            "start a new run in another output (its model may be the folder of saved weights)"
        )
    return allowed


def _entry(technique: Technique) -> dict[str, Any]:
    return {
        "slot": technique.slot.name,
        "fidelity": technique.fidelity.name,
        "settings": technique.settings(),
        "may_change": technique.may_change(),
    }


def _compare(
    name: str,
    saved_entry: Mapping[str, Any] | None,
    new_entry: Mapping[str, Any] | None,
    alone: bool,
    refused: list[str],
    allowed: list[str],
) -> None:
    """One technique of a plan; ``alone``: one of the two runs has a single rank, and no
    communication method.
    """
    if saved_entry == new_entry:
        return
    either = [entry for entry in (saved_entry, new_entry) if entry is not None]
    lossy = any(entry["fidelity"] == Fidelity.LOSSY.name for entry in either)
    communication = alone and any(entry["slot"] == Slot.COMMUNICATION.name for entry in either)
    if saved_entry is None or new_entry is None:
        states = (
            f"on ({_words(entry['settings'])})" if entry else "off"
            for entry in (saved_entry, new_entry)
        )
        (refused if lossy and not communication else allowed).append(
            _phrase(f"plan: {name}", *states)
        )
        return
    for key, value in new_entry["settings"].items():
        before = saved_entry["settings"].get(key)
        if before != value:
            free = not lossy or communication or key in new_entry["may_change"]
            (allowed if free else refused).append(_phrase(f"plan: {name}: {key}", before, value))


def _same_rates(saved: Mapping[str, Any], new_settings: Mapping[str, Any], step: int) -> bool:
    """Whether the steps that are done had the learning rate that the schedule of now gives them."""
    old, new = (
        Schedule(**{field: record[key] for key, field in SCHEDULE.items()})
        for record in (saved, new_settings)
    )
    steps = [*range(0, step, step // COMPARED_STEPS + 1), *([step - 1] if step else [])]
    return all(math.isclose(old(s), new(s), abs_tol=1e-12) for s in steps)


def _phrase(key: str, saved: Any, new: Any) -> str:
    return f"{key} was {_words(saved)} and is {_words(new)} now"


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_words(item)}" for key, item in value.items()) or "as usual"
    return "none" if value is None else str(value)


def _as_json(value: Mapping[str, Any]) -> dict[str, Any]:
    """As it comes back from a checkpoint: tuples are lists."""
    decoded: dict[str, Any] = json.loads(json.dumps(value))
    return decoded
