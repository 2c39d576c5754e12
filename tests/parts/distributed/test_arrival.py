"""Weights that one rank of a host has built arrive on the others, the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as some
from torch import nn

from hasten.core.setup import Session
from hasten.core.step import training
from hasten.core.technique import Technique
from hasten.machine.environment import World
from hasten.parts.distributed import weight_broadcast
from hasten.parts.distributed.weight_broadcast import WeightBroadcast, senders
from hasten.techniques.activation_checkpointing import ActivationCheckpointing
from hasten.techniques.adapter import LoRA
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.layers import FusedLayers
from hasten.techniques.layout.fsdp import FSDP2
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.precision import BF16MasterWeights
from ranks import on_ranks, once_on_ranks
from tiny import examples, language_job, session_of, tiny_model
from told import refusal

CASES: dict[str, tuple[str, tuple[Technique, ...]]] = {
    "plain": ("llama", (GradientAccumulation(micro_batch_size=2),)),
    "tied": ("tied", (LabelledTokenLoss(chunk=16),)),
    "experts": ("deepseek_v3", (LabelledTokenLoss(chunk=16), ActivationCheckpointing())),
    "older latents": ("deepseek_v2", ()),
    "adapters": ("llama", (LoRA(rank=4), FusedLayers())),
    "half a format": ("qwen2", (BF16MasterWeights(),)),
}


def built(architecture: str) -> nn.Module:
    return tiny_model(tied=True) if architecture == "tied" else tiny_model(architecture)


@dataclass(frozen=True)
class Factory:
    architecture: str

    def __call__(self) -> nn.Module:
        return built(self.architecture)

    def skeleton(self) -> nn.Module:
        with torch.device("meta"):
            return built(self.architecture)


def session(world: World, name: str, once: bool) -> Session:
    architecture, techniques = CASES[name]
    known = "llama" if architecture == "tied" else architecture
    job = language_job(Factory(architecture), data=examples(9), batch=4, steps=2)
    return session_of(job, *techniques, FSDP2(build_once=once), architecture=known, world=world)


def train(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in CASES:
        here = {once: session(world, name, once) for once in (True, False)}
        began = {once: _weights(s) for once, s in here.items()}
        found[name] = {
            "sent": here[True].setup.layout.arrived_bytes,  # type: ignore[attr-defined]
            "model": sum(p.numel() for p in built(CASES[name][0]).parameters()),
            "built": here[True].setup.layout.builds,  # type: ignore[attr-defined]
            "alike": began[True] == began[False],
            "meta": any(t.is_meta for t in here[True].module.state_dict().values()),
            "losses": [[m.loss for m in training(s)] for s in here.values()],
        }
    found["wrong"] = wrong(world)
    return found


def _weights(found: Session) -> dict[str, list[float]]:
    """Of each piece and each buffer two numbers, by name."""
    pieces = found.setup.precision.parameters()
    tensors = {str(place): piece for place, piece in enumerate(pieces)}
    tensors |= dict(found.module.named_buffers())
    wide = {name: t.detach().double() for name, t in tensors.items()}
    return {name: [float(t.sum()), float(t.square().sum())] for name, t in wide.items()}


def wrong(world: World) -> str:
    """Rank 1 has the skeleton of another model."""
    mine = nn.Linear(3, 3) if world.is_main else nn.Linear(3, 4, device="meta")
    return refusal(WeightBroadcast(world.is_main), mine)


def on_hosts(world: World) -> dict[str, Any]:
    """Four ranks of two faked hosts; on the second nobody has the model."""
    weight_broadcast.host_name = lambda: f"host-{world.rank // 2}"
    found: dict[str, Any] = {}
    for name, readers in (("each", (0, 2)), ("first", (0,))):
        reads = world.rank in readers
        torch.manual_seed(world.rank)
        module = nn.Linear(5, 3, device="cpu" if reads else "meta")
        came = WeightBroadcast(reads)
        came(module)
        rows: list[Any] = [None] * world.size
        dist.all_gather_object(rows, module.weight.detach().flatten().tolist())
        found[name] = {"equal": [rows[world.rank] == row for row in rows], "sent": came.sent_bytes}
    return found


found = once_on_ranks(train)


@pytest.mark.parametrize("name", CASES)
def test_a_run_from_skeletons_is_that_from_models(found: list[Any], name: str) -> None:
    for rank, seen in enumerate(r[name] for r in found):
        assert seen["built"] == (rank == 0)
        assert seen["alike"]
        assert not seen["meta"]
        assert seen["losses"][0] == seen["losses"][1]
        assert seen["sent"] >= 4 * seen["model"]  # buffers come on top


def test_the_skeleton_of_another_model_is_refused(found: list[Any]) -> None:
    for rank in found:
        assert "('weight', (4, 3), 'torch.float32') for ('weight', (3, 3)" in rank["wrong"]


def test_each_host_has_its_own_sender_where_it_can(tmp_path: Path) -> None:
    four = on_ranks(on_hosts, tmp_path, 4)
    assert [r["each"]["equal"] for r in four] == [
        [True, True, False, False],
        [True, True, False, False],
        [False, False, True, True],
        [False, False, True, True],
    ]
    assert all(r["first"]["equal"] == [True] * 4 for r in four)
    assert {r["first"]["sent"] for r in four} == {4 * (15 + 3)}


@given(some.lists(some.tuples(some.sampled_from("abc"), some.booleans()), min_size=1, max_size=9))
def test_every_rank_is_in_one_group_whose_first_has_the_model(told: list[tuple[str, bool]]) -> None:
    hosts, reads = [host for host, _ in told], [reading for _, reading in told]
    if not any(reads):
        with pytest.raises(ValueError, match="no rank has built"):
            senders(hosts, reads)
        return
    groups = senders(hosts, reads)
    assert sorted(rank for group in groups for rank in group) == list(range(len(told)))
    for group in groups:
        assert reads[group[0]]
        for rank in group[1:]:
            own = [r for r, host in enumerate(hosts) if host == hosts[rank] and reads[r]]
            assert group[0] in own or not own
