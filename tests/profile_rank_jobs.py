"""A profile that tests run on several ranks; plain JSON values."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hasten.core.plan import Plan
from hasten.core.session import assemble
from hasten.core.setup import prepare
from hasten.machine.environment import World
from hasten.measure.profile import measure
from hasten.techniques.layout.ddp import DDP
from tiny import job_facts, language_job


def profiled(world: World) -> dict[str, Any]:
    """The profile of a replicated toy job, and what each rank wrote."""
    job = language_job(steps=50)
    session = assemble(prepare(job, Plan((DDP(),)), job_facts(job, world=world)))
    with tempfile.TemporaryDirectory() as place:
        found = measure(session, 1, 3, Path(place))
        found["written"] = sorted(path.name for path in Path(place).iterdir())
    return found
