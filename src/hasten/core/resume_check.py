"""What decides a training, as JSON in every checkpoint, and what of it may change on the way.

A run that goes on with another seed, batch, learning rate or data is neither the one run nor the
other, and nothing in its results shows it. So a checkpoint notes them, and a difference is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from hasten.core.job import GlobalBatch, Schedule
from hasten.core.setup import Setup
from hasten.core.slot import Slot
from hasten.core.technique import Fidelity, Technique
from hasten.errors import InputError

ENDS = ("max_steps", "epochs", "max_tokens")
MAY_CHANGE = (*ENDS, "ranks")
SCHEDULE = {  # key -> field of Schedule
    "lr_schedule": "kind",
    "warmup_steps": "warmup_steps",
    "total_steps": "total_steps",
    "min_lr_ratio": "floor",
    "schedule_steps": "shape_steps",
    "constant_from": "constant_from",
}
COMPARED_STEPS = 10_000  # of two schedules at most, evenly spread


def resume_check(setup: Setup) -> dict[str, Any]:
    """Flat, under the recipe's keys; ``job.terms`` brings what only the job's maker knows."""
    job, schedule = setup.job, asdict(setup.job.schedule)
    found = {
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
    return _as_json(found)


def batch_record(batch: GlobalBatch) -> dict[str, Any]:
    """A global batch in the words of a recipe."""
    return {"global_batch_size": batch.examples, "global_batch_tokens": batch.tokens}


def changes_since(meta: Mapping[str, Any], setup: Setup) -> list[str]:
    """What of the job has changed since a checkpoint, a phrase each, where it may.

    A run with another end has its schedule extended (`extended`), in ``setup``.

    Raises:
        InputError: it may not.
    """
    saved, step = meta["job"], meta["progress"]["step"]
    schedule = extended(saved, resume_check(setup), setup.job.schedule, step)
    setup.job = replace(setup.job, schedule=schedule)
    return check_same_job(saved, resume_check(setup), step)


def extended(
    saved: Mapping[str, Any], here: Mapping[str, Any], schedule: Schedule, step: int
) -> Schedule:
    """The schedule of a run that resumes after ``step``, perhaps with another end.

    It is laid out over all steps of the run, or with ``extend: constant`` keeps the rate of the
    last step before the checkpoint. A run that was extended so once keeps that rate.

    Raises:
        InputError: the rate to be kept is zero.
    """
    if schedule.extend == "stretch" or not step:
        return schedule
    old = _schedule(saved)
    if old.constant_from is None and not _other_end(saved, here):
        return schedule
    longer = replace(
        schedule,
        warmup_steps=old.warmup_steps,
        shape_steps=old.shape_steps or old.total_steps,
        constant_from=old.constant_from or step,
    )
    if longer(step) <= 1e-12:
        raise InputError(
            f"extend: constant keeps the learning rate of step {step:,}, the last one, and "
            f"lr_schedule {longer.kind} has reached 0 there: use extend: stretch, or resume from "
            "an earlier checkpoint"
        )
    return longer


def check_same_job(saved: Mapping[str, Any], here: Mapping[str, Any], step: int) -> list[str]:
    """What differs from a record that was saved after ``step`` and may, a phrase each.

    Keys that only one of the two has are not compared.

    Raises:
        InputError: something differs that decides the training, with both values.
    """
    here = _as_json(here)
    refused: list[str] = []
    allowed: list[str] = []
    for key in here:
        if key not in saved or saved[key] == here[key]:
            continue
        if key == "plan":
            alone = min(saved.get("ranks", 1), here["ranks"]) == 1
            for name in {**saved[key], **here[key]}:
                _compare(name, saved[key].get(name), here[key].get(name), alone, refused, allowed)
            continue
        free = key in MAY_CHANGE or (
            key in SCHEDULE and (_same_rates(saved, here, step) or _is_stretched(key, saved, here))
        )
        name = f"{key} (of lr_schedule {here['lr_schedule']})" if key == "total_steps" else key
        (allowed if free else refused).append(_phrase(name, saved[key], here[key]))
    if refused:
        raise InputError(
            f"the checkpoint is of another training: {', '.join(refused)}; go on with what was, or "
            "start a new run in another output (its model may be the folder of saved weights)"
        )
    if step and "total_steps" in here and "total_steps" in saved:
        old, new = _schedule(saved), _schedule(here)
        if not math.isclose(old(step), new(step), abs_tol=1e-12):
            allowed.append(
                f"the next step has {new(step):.3g} of the peak learning rate, and "
                f"{old(step):.3g} without the change (extend)"
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
    there: Mapping[str, Any] | None,
    here: Mapping[str, Any] | None,
    alone: bool,
    refused: list[str],
    allowed: list[str],
) -> None:
    """One technique of a plan; ``alone``: one of the two runs has a single rank, and no
    communication method.
    """
    if there == here:
        return
    either = [entry for entry in (there, here) if entry is not None]
    lossy = any(entry["fidelity"] == Fidelity.LOSSY.name for entry in either)
    communication = alone and any(entry["slot"] == Slot.COMMUNICATION.name for entry in either)
    if there is None or here is None:
        words = (f"on ({_words(entry['settings'])})" if entry else "off" for entry in (there, here))
        (refused if lossy and not communication else allowed).append(
            _phrase(f"plan: {name}", *words)
        )
        return
    for key, value in here["settings"].items():
        before = there["settings"].get(key)
        if before != value:
            free = not lossy or communication or key in here["may_change"]
            (allowed if free else refused).append(_phrase(f"plan: {name}: {key}", before, value))


def _same_rates(saved: Mapping[str, Any], here: Mapping[str, Any], step: int) -> bool:
    """True if the steps that are done had the learning rate that the schedule of now gives them."""
    old, new = _schedule(saved), _schedule(here)
    steps = [*range(0, step, step // COMPARED_STEPS + 1), *([step - 1] if step else [])]
    return all(math.isclose(old(s), new(s), abs_tol=1e-12) for s in steps)


def _schedule(record: Mapping[str, Any]) -> Schedule:
    return Schedule(**{field: record[key] for key, field in SCHEDULE.items() if key in record})


def _other_end(saved: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
    return any(key in saved and saved[key] != here[key] for key in ENDS)


def _is_stretched(key: str, saved: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
    """True if the schedule covers another number of steps only since the run has another end.

    A warm-up that is the same share of all steps is stretched with it.
    """
    if not _other_end(saved, here) or _schedule(saved).constant_from or here["constant_from"]:
        return False
    if key != "warmup_steps":
        return key == "total_steps"
    pairs = [(record[key], record["total_steps"]) for record in (saved, here)]
    # ceil(share * total) steps: the shares that give so many are in (low, high].
    low, high = (max((w - 1) / t for w, t in pairs), min(w / t for w, t in pairs))
    return bool(low < high)


def _phrase(key: str, there: Any, here: Any) -> str:
    return f"{key} was {_words(there)} and is {_words(here)} now"


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_words(item)}" for key, item in value.items()) or "as usual"
    return "none" if value is None else str(value)


def _as_json(value: Mapping[str, Any]) -> dict[str, Any]:
    """As it comes back from a checkpoint: tuples are lists."""
    found: dict[str, Any] = json.loads(json.dumps(value))
    return found
