"""Seconds and bytes of each step's traffic on two ranks: planted waits, and formulas of bytes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hasten.core.setup import Session
from hasten.core.technique import Technique
from hasten.core.timing import HostClock, seconds_by_part
from hasten.machine.environment import World
from hasten.parts.nn.losses import WholeLogitsLoss
from hasten.techniques.batch import AdaptiveBatch, GradientAccumulation
from hasten.techniques.communication.compress import Quantised
from hasten.techniques.communication.local import LocalSteps, Stream
from hasten.techniques.communication.topology import Hierarchical
from hasten.techniques.layout.ddp import DDP
from ranks import once_on_ranks
from tiny import examples, language_job, run, session_of, tiny_model

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
    session = session_of(job, DDP(bucket_cap_mb=1), *techniques, world=world)
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
    measured = session_of(job, DDP(bucket_cap_mb=0), world=world)
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


EXPOSED, HIDDEN = "exposed_comm_seconds", "hidden_communication_seconds"


found = once_on_ranks(told)


@pytest.mark.parametrize("name", PLANS)
def test_exposed_and_hidden_seconds_add_up_and_fit_into_the_step(
    found: list[Any], name: str
) -> None:
    for rank in found:
        for step in rank[name]["steps"]:
            assert step[EXPOSED] > 0
            assert step[HIDDEN] >= 0
            assert step["comm_seconds"] == pytest.approx(step[EXPOSED] + step[HIDDEN])
            parts = (step[k] for k in ("data_seconds", "passes_seconds", "optimizer_seconds"))
            assert step[EXPOSED] + sum(parts) <= step["step_seconds"] * 1.0001


@pytest.mark.parametrize("name", PLANS)
def test_communication_is_a_part_of_the_ledger(found: list[Any], name: str) -> None:
    for rank in found:
        assert rank[name]["split"]["communication"] > 0
        assert all(value is None or value >= 0 for value in rank[name]["split"].values())


@pytest.mark.parametrize("name", ["plain", "accumulated", "late"])
def test_full_gradients_send_what_a_ring_does(found: list[Any], name: str) -> None:
    for rank in found:
        assert {step["comm_bytes"] for step in rank[name]["steps"]} == {rank[name]["sent"]}


def test_compressed_gradients_send_what_was_predicted(found: list[Any]) -> None:
    for rank in found:
        sent = [step["comm_bytes"] for step in rank["int4"]["steps"]]
        assert sent[:2] == [rank["plain"]["sent"]] * 2  # in full, since DDP forms buckets anew
        assert set(sent[2:]) == {rank["int4"]["sent"]}


def test_weights_travel_when_they_are_due(found: list[Any]) -> None:
    for rank in found:
        due = rank["local_steps"]["sent"]
        assert [s["comm_bytes"] for s in rank["local_steps"]["steps"]] == [0, 0, due, 0, 0, due]
        mean = sum(s["comm_bytes"] for s in rank["stream"]["steps"]) / 6
        assert mean == pytest.approx(rank["stream"]["sent"])
        assert all(step[HIDDEN] == 0 for step in rank["local_steps"]["steps"])


def test_gradients_that_leave_after_the_passes_hide_nothing(found: list[Any]) -> None:
    assert all(step[HIDDEN] == 0 for rank in found for step in rank["late"]["steps"])
    assert any(step[HIDDEN] > 0 for rank in found for step in rank["plain"]["steps"])


def test_waiting_for_a_slow_rank_shows_on_the_others(found: list[Any]) -> None:
    # Backward of rank 1 begins so long after that of rank 0 has ended.
    for step in found[0]["one is slow"]["steps"]:
        assert step[EXPOSED] > 0.8 * NAP


def test_traffic_is_told_without_a_clock_too(found: list[Any]) -> None:
    step = found[0]["unclocked"]
    assert step["passes_seconds"] is None
    assert step[EXPOSED] > 0
    assert step["comm_bytes"] == found[0]["plain"]["sent"]


def test_buckets_by_the_link_are_alike_on_all_ranks_and_told(found: list[Any]) -> None:
    assert found[0]["buckets"] == found[1]["buckets"]
    assert " MB for " in found[0]["buckets"]


def test_on_one_rank_nothing_is_told() -> None:
    session = session_of(language_job())
    session.setup.clock = HostClock()
    for metrics in run(session):
        assert metrics.exposed_comm_seconds is None
        assert metrics.comm_seconds is metrics.comm_bytes is None
