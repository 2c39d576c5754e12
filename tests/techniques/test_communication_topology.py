"""Hierarchical on four gloo ranks of two faked hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hasten.core.setup import Session
from hasten.core.step import training
from hasten.core.technique import Fidelity, Technique
from hasten.machine.environment import World
from hasten.parts.comm import collectives
from hasten.parts.comm.collective_plan import Route
from hasten.parts.comm.collectives import RoutedBuckets, TopoAwareCollective
from hasten.parts.comm.rank_check import CollectiveError
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.communication.topology import Hierarchical
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.precision import Autocast
from ranks import on_ranks, once_on_ranks
from tiny import examples, job_context, language_job, session_of, tiny_model
from told import refusal


def everything(world: World) -> dict[str, Any]:
    """All jobs of four ranks: a start takes longer than what they do."""
    collectives.host_name = lambda: f"host-{world.rank % 2}"
    jobs = (poisoned, sessions, drifted)
    return {job.__name__: job(world) for job in jobs}


def _backward(ddp: nn.Module, world: World, step: int) -> None:
    data = torch.Generator().manual_seed(100 * step + world.rank)
    ddp(torch.randn(5, 6, generator=data)).square().mean().backward()


def _weights(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def poisoned(world: World) -> dict[str, Any]:
    """A NaN on one rank is seen by all; skipping the step leaves what is owed as it was."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 300), nn.Linear(300, 2))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)  # type: ignore[arg-type]
    collective = TopoAwareCollective("gloo", "ethernet", timeout=60)
    buckets = RoutedBuckets(collective, Route("hierarchical", between="int4"))
    buckets.attach(ddp)
    for step in range(4):
        _backward(ddp, world, step)
        ddp.zero_grad()
        buckets.step()
    before = buckets.state_dict()["ranks"]
    if world.rank == 2:
        ddp.module[0].register_forward_hook(lambda m, i, o: o * torch.nan)
    _backward(ddp, world, 4)
    seen = all(torch.isfinite(p.grad).all() for p in ddp.parameters() if p.grad is not None)
    buckets._begin()  # the next step begins: the skipped one is forgotten
    after = buckets.state_dict()["ranks"]
    return {
        "finite": bool(seen),
        "owed": sum(len(rank) for rank in before),
        "same": all(
            torch.equal(one[name], other[name])
            for one, other in zip(before, after, strict=True)
            for name in one
        ),
    }


PLANS: dict[str, tuple[Technique, ...]] = {
    "plain": (),
    "hierarchical": (Hierarchical(topology="ethernet"),),
    "bf16": (Hierarchical(within="bf16", between="bf16", topology="ethernet"),),
    "int8": (Hierarchical(between="int8", topology="ethernet"),),
    "int8 accumulated": (
        Hierarchical(between="int8", topology="ethernet"),
        GradientAccumulation(micro_batch_size=1),
    ),
    "int8 scaled": (Hierarchical(between="int8", topology="ethernet"), Autocast(dtype="fp16")),
}


def sessions(world: World) -> dict[str, Any]:
    """Losses of a run, what the technique saw, and a checksum of the weights, by plan."""
    found: dict[str, Any] = {}
    for name, techniques in PLANS.items():
        session = _session(world, *techniques, steps=4)
        losses = [m.loss for m in training(session)]
        proofs = [
            t.check_effect(session) for t in session.setup.plan if t.slot.name == "COMMUNICATION"
        ]
        found[name] = {
            "losses": losses,
            "sum": _weights(session.module).double().sum().item(),
            "effective": [p.effective for p in proofs],
            "evidence": [p.evidence for p in proofs],
        }
    return found


def _session(world: World, *techniques: Technique, steps: int = 6, batch: int = 8) -> Session:
    job = language_job(tiny_model, data=examples(64), batch=batch, steps=steps)
    return session_of(job, *techniques, DDP(bucket_cap_mb=1), world=world)


def drifted(world: World) -> str:
    """One weight of rank 2 changes by itself: what each rank says."""
    session = _session(world, Hierarchical(topology="ethernet", check_every=2))
    try:
        for metrics in training(session):
            if metrics.step == 3 and world.rank == 2:
                with torch.no_grad():
                    next(session.module.parameters())[0, 0] += 1.0
    except CollectiveError as error:
        return str(error)
    return "nothing was seen"


def uneven(world: World) -> str:
    """Two ranks on one host and one on the other: what the start of a session says."""
    collectives.host_name = lambda: f"host-{world.rank // 2}"
    return refusal(_session, world, Hierarchical(topology="ethernet"), batch=6)


four = once_on_ranks(everything, 4)


def test_a_nan_of_one_rank_is_seen_by_all_and_owed_by_none(four: list[Any]) -> None:
    for rank in four:
        assert not rank["poisoned"]["finite"]
        assert rank["poisoned"]["owed"] > 0
        assert rank["poisoned"]["same"]


def test_losses_are_those_of_plain_replicas(four: list[Any]) -> None:
    plain = four[0]["sessions"]["plain"]["losses"]
    bounds = {"hierarchical": 1e-5, "bf16": 2e-2, "int8": 2e-2, "int8 accumulated": 2e-2}
    for name, bound in {**bounds, "int8 scaled": 5e-2}.items():
        found = [rank["sessions"][name] for rank in four]
        assert found[0]["losses"] == pytest.approx(plain, rel=bound), name
        assert len({rank["sum"] for rank in found}) == 1, name
        assert all(found[0]["effective"]), found[0]["evidence"]


def test_weights_that_drift_apart_end_the_run_and_name_the_rank(four: list[Any]) -> None:
    for rank in four:
        assert "after step 4 the weights of rank 2 are not those of rank 0" in rank["drifted"]


def test_hosts_of_unequal_size_are_an_error_at_the_start_on_all_ranks(tmp_path: Path) -> None:
    for said in on_ranks(uneven, tmp_path, 3):
        assert said.startswith("hierarchical: hosts have 2, 1 ranks")


def test_only_codecs_are_lossy() -> None:
    assert Hierarchical().fidelity is Fidelity.ROUNDING
    assert Hierarchical(between="int8").fidelity is Fidelity.LOSSY


def test_a_codec_foretells_what_it_sends() -> None:
    context = job_context(language_job(tiny_model), world=World(0, 0, 2))
    assert Hierarchical().forecast(context).comm_bytes == 1
    assert Hierarchical(between="int4").forecast(context).comm_bytes == pytest.approx(
        0.127, abs=1e-3
    )


def test_buckets_need_a_wrapped_module() -> None:
    with pytest.raises(ValueError, match="wrap the module first"):
        RoutedBuckets(TopoAwareCollective("gloo", "ethernet"), Route()).attach(tiny_model())
