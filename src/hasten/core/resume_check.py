"""Settings that decide a training, as every checkpoint stores them.

Some of them may change when a run resumes, others may not.

If a resumed run had another seed, batch size, learning rate or data, it would be
neither of the two runs. Nothing in its results would show it. So a checkpoint stores
these settings as JSON, and a difference is refused.
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
COMPARED_STEPS = 10_000  # learning rates of two schedules that are compared at most, evenly spaced


def resume_check(setup: Setup) -> dict[str, Any]:
    """Returns a flat mapping of the deciding settings, under the recipe's keys.

    ``job.terms`` adds the settings that only the creator of the job has.
    """
    job, schedule = setup.job, asdict(setup.job.schedule)
    settings = {
        # With the user's own loader nothing below depends on the seed.
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
    """Returns a global batch in the words of a recipe."""
    return {"global_batch_size": batch.examples, "global_batch_tokens": batch.tokens}


def changes_since(meta: Mapping[str, Any], setup: Setup) -> list[str]:
    """Returns the permitted changes of the job since a checkpoint, one phrase each.

    Raises:
        InputError: a change isn't permitted.
    """
    saved, step = meta["job"], meta["progress"]["step"]
    schedule = extended(saved, resume_check(setup), setup.job.schedule, step)
    setup.job = replace(setup.job, schedule=schedule)
    return check_same_job(saved, resume_check(setup), step)


def extended(
    saved: Mapping[str, Any], new_settings: Mapping[str, Any], schedule: Schedule, step: int
) -> Schedule:
    """Returns the schedule of a run that resumes after ``step``, perhaps with another end.

    It is laid out over all steps of the run, or with ``extend: constant`` keeps the rate of the
    last step before the checkpoint. A run that was extended so once keeps that rate.
    """
    if schedule.extend == "stretch" or not step:
        return schedule
    old = _schedule(saved)
    if old.constant_from is None and not _other_end(saved, new_settings):
        return schedule
    return replace(
        schedule,
        warmup_steps=old.warmup_steps,
        shape_steps=old.shape_steps or old.total_steps,
        constant_from=old.constant_from or step,
    )


def check_same_job(
    saved: Mapping[str, Any], new_settings: Mapping[str, Any], step: int
) -> list[str]:
    """Returns permitted differences from a record saved after ``step``, one phrase each.

    Keys that only one of the two has are not compared.

    Raises:
        InputError: a setting that decides the training differs. Both values are given.
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
        free = key in MAY_CHANGE or (
            key in SCHEDULE
            and (_same_rates(saved, new_settings, step) or _is_stretched(key, saved, new_settings))
        )
        name = (
            f"{key} (of lr_schedule {new_settings['lr_schedule']})" if key == "total_steps" else key
        )
        (allowed if free else refused).append(_phrase(name, saved[key], new_settings[key]))
    if refused:
        raise InputError(
            f"the checkpoint is of another training: {', '.join(refused)}; continue with the old "
            "settings, or start a new run in another output (its model may be the folder of "
            "saved weights)"
        )
    if step and "total_steps" in new_settings and "total_steps" in saved:
        old, new = _schedule(saved), _schedule(new_settings)
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
    saved_entry: Mapping[str, Any] | None,
    new_entry: Mapping[str, Any] | None,
    alone: bool,
    refused: list[str],
    allowed: list[str],
) -> None:
    """Compares one technique of two plans; ``alone``: one of the two runs has a single rank."""
    if saved_entry == new_entry:
        return
    either = [entry for entry in (saved_entry, new_entry) if entry is not None]
    lossy = any(entry["fidelity"] == Fidelity.LOSSY.name for entry in either)
    communication = alone and any(entry["slot"] == Slot.COMMUNICATION.name for entry in either)
    if saved_entry is None or new_entry is None:
        states = (
            f"on ({_value_text(entry['settings'])})" if entry else "off"
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
    """Returns True if both schedules give the same learning rates for all completed steps."""
    old, new = _schedule(saved), _schedule(new_settings)
    steps = [*range(0, step, step // COMPARED_STEPS + 1), *([step - 1] if step else [])]
    return all(math.isclose(old(s), new(s), abs_tol=1e-12) for s in steps)


def _schedule(record: Mapping[str, Any]) -> Schedule:
    return Schedule(**{field: record[key] for key, field in SCHEDULE.items() if key in record})


def _other_end(saved: Mapping[str, Any], new_settings: Mapping[str, Any]) -> bool:
    return any(key in saved and saved[key] != new_settings[key] for key in ENDS)


def _is_stretched(key: str, saved: Mapping[str, Any], new_settings: Mapping[str, Any]) -> bool:
    """Returns True if the schedule covers another number of steps only because the end changed.

    A warm-up that is the same share of all steps is stretched with it.
    """
    if (
        not _other_end(saved, new_settings)
        or _schedule(saved).constant_from
        or new_settings["constant_from"]
    ):
        return False
    if key != "warmup_steps":
        return key == "total_steps"
    pairs = [(record[key], record["total_steps"]) for record in (saved, new_settings)]
    # ceil(share * total) steps: the shares that give so many are in (low, high].
    low, high = (max((w - 1) / t for w, t in pairs), min(w / t for w, t in pairs))
    return bool(low < high)


def _phrase(key: str, saved: Any, new: Any) -> str:
    return f"{key} was {_value_text(saved)} and is {_value_text(new)} now"


def _value_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_value_text(item)}" for key, item in value.items()) or "as usual"
    return "none" if value is None else str(value)


def _as_json(value: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the value in the form in which a checkpoint returns it: tuples are lists."""
    decoded: dict[str, Any] = json.loads(json.dumps(value))
    return decoded
