"""What steps on several ranks say of their traffic, by plan; plain JSON values."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hasten.core.plan import Plan
from hasten.core.session import Session, assemble
from hasten.core.setup import prepare
from hasten.core.technique import Technique
from hasten.core.timing import HostClock, seconds_by_part
from hasten.machine.environment import World
from hasten.parts.nn.losses import WholeLogitsLoss
from hasten.techniques.batch import AdaptiveBatch, GradientAccumulation
from hasten.techniques.communication.compress import Quantised
from hasten.techniques.communication.local import LocalSteps, Stream
from hasten.techniques.communication.topology import Hierarchical
from hasten.techniques.layout.ddp import DDP
from tiny import examples, job_context, language_job, run, tiny_model

NAP, STEPS = 0.1, 6
PLANS: dict[str, tuple[Technique, ...]] = {
    "plain": (),
    "accumulated": (GradientAccumulation(micro_batch_size=2),),
    "late": (AdaptiveBatch(initial_size=2),),
    "int4": (Quantised(bits=4, minimum=0),),
    "hierarchical": (Hierarchical(topology="ethernet"),),
    "local_steps": (LocalSteps(every=3),),
    "stream": (Stream(fragments=2),),
}


class Late(nn.Module):
    """The plain loss; the last rank begins its backward pass long after the first has ended its."""

    def __init__(self, model: Any, world: World) -> None:
        super().__init__()
        self.inner, self.steps = WholeLogitsLoss(model), 0
        self.late = not world.is_main
        if world.is_main:
            first = model.get_input_embeddings().weight  # its gradient is the last
            first.register_post_accumulate_grad_hook(lambda weight: self._place().touch())

    def _place(self) -> Path:
        return Path(os.environ["HASTEN_RENDEZVOUS"] + f".backward-{self.steps}")

    def forward(self, **inputs: Any) -> Any:
        self.steps += 1
        loss, count = self.inner(**inputs)
        if self.late:
            loss.register_hook(lambda grad: self._wait())
        return loss, count

    def _wait(self) -> None:
        end = time.monotonic() + 60
        while not self._place().exists() and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(NAP)


def session_on(world: World, *techniques: Technique, loss: Any = WholeLogitsLoss) -> Session:
    job = language_job(tiny_model, data=examples(32), steps=STEPS, loss=loss)
    plan = Plan((DDP(bucket_cap_mb=1), *techniques))
    session = assemble(prepare(job, plan, job_context(job, world=world)))
    session.setup.clock = HostClock()
    return session


def told(world: World) -> dict[str, Any]:
    """Of every plan the steps' figures, and what they should have sent."""
    found: dict[str, Any] = {}
    for name, techniques in PLANS.items():
        session = session_on(world, *techniques)
        found[name] = {"steps": [m.to_dict() for m in run(session)], "sent": _expected(session)}
        found[name]["split"] = seconds_by_part(list(session.setup.clock.steps))
    slow = session_on(world, loss=lambda model: Late(model, world))
    found["one is slow"] = {"steps": [m.to_dict() for m in run(slow)]}
    found["unclocked"] = _unclocked(world)
    job = language_job(tiny_model, data=examples(32), steps=2)
    plan = Plan((DDP(bucket_cap_mb=0),))
    measured = assemble(prepare(job, plan, job_context(job, world=world)))
    run(measured)
    found["buckets"] = DDP(bucket_cap_mb=0).check_effect(measured).evidence
    return found


def _expected(session: Session) -> Any:
    """Bytes of a step, from the communication method's own prediction or the ring's formula."""
    communication: Any = session.setup.communication
    trained = [p for p in session.loss_module.parameters() if p.requires_grad]
    if hasattr(communication, "compressor"):
        return communication.compressor.predicted(trained)
    if hasattr(getattr(communication, "part", None), "predicted_bytes"):
        return communication.part.predicted_bytes
    world = dist.get_world_size()
    return 2 * (world - 1) * sum(p.nbytes for p in trained) // world


def _unclocked(world: World) -> dict[str, Any]:
    from hasten.core.timing import NoPhaseTimer

    session = session_on(world)
    session.setup.clock = NoPhaseTimer()
    torch.manual_seed(0)
    return run(session)[-1].to_dict()
