"""A small problem trained apart on several ranks, and the same ranks simulated in one process."""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

from hasten.machine.environment import World
from hasten.parts.comm.codecs import codec
from hasten.parts.comm.local_sgd import Buffers, DriftError, LocalSteps, same_start
from hasten.parts.comm.streaming_local_sgd import Stream
from netlab.counting import CollectiveBytes

SHAPES = ((37, 11), (300,), (7,))  # 714 weights
NUMBERS = sum(torch.Size(s).numel() for s in SHAPES)
STEPS, RATE = 23, 0.1
SHORT = datetime.timedelta(seconds=2)


@dataclass(frozen=True)
class Coarse:
    """Whole codes of 8 bits with one float32 scale for a message: a codec in four lines."""

    name: str = "coarse"

    def message_bytes(self, numbers: int) -> int:
        return -(-(numbers + 4) // 16) * 16

    def encode(self, flat: Tensor, out: Tensor | None = None) -> Tensor:
        scale = (flat.abs().max() / 100).clamp_min(1e-30)
        message = torch.zeros(self.message_bytes(len(flat)), dtype=torch.uint8)
        message[:4] = scale.reshape(1).view(torch.uint8)
        message[4 : 4 + len(flat)] = (flat / scale).round().to(torch.int8).view(torch.uint8)
        return message if out is None else out.copy_(message)

    def decode(
        self, message: Tensor, numbers: int, out: Tensor | None = None, add: bool = False
    ) -> Tensor:
        scale = message[:4].clone().view(torch.float32)
        found = message[4 : 4 + numbers].view(torch.int8).float() * scale
        return found if out is None else out.copy_(found)

    def finite(self, message: Tensor, numbers: int) -> Tensor:
        return message[:4].clone().view(torch.float32).isfinite().all()


COARSE: Any = Coarse()


def gradient(weights: Tensor, rank: int, step: int) -> Tensor:
    """Of a quadratic bowl that is another one on each rank, with noise."""
    draw = torch.Generator().manual_seed(7 * rank + 1)
    target = torch.randn(NUMBERS, generator=draw, dtype=torch.float64)
    steepness = torch.rand(NUMBERS, generator=draw, dtype=torch.float64) + 0.2
    draw.manual_seed(1000 * step + rank)
    noise = torch.randn(NUMBERS, generator=draw, dtype=torch.float64)
    return steepness * (weights.double() - target) + 0.1 * noise


def tokens_of(rank: int, step: int) -> int:
    return 3 + (5 * rank + step) % 4


def trained(world: World, build: Callable[[list[Tensor]], Any]) -> dict[str, Any]:
    """Weights after some steps on this rank, before and after the ranks have synchronized."""
    weights = [torch.zeros(s) for s in SHAPES]
    part = build(weights)
    with CollectiveBytes() as counted:
        for step in range(STEPS):
            change = gradient(_flat(weights), world.rank, step).float()
            for w, piece in zip(weights, _like(change), strict=True):
                w.sub_(piece, alpha=RATE)
            part.after_step(tokens_of(world.rank, step))
        sent = sum(counted.to.values())
        unsettled = _flat(weights).tolist()
        synchronized = part.synchronize()
        again = part.synchronize()
    return {
        "unsettled": unsettled,
        "synchronized": _flat(weights).tolist(),
        "anchor": part.drift.anchor.tolist(),
        "did": [synchronized, again],
        "exchanges": part.exchanges,
        "sent": sent,
        "predicted": part.predicted_bytes * part.exchanges,
    }


def _like(flat: Tensor) -> list[Tensor]:
    pieces = flat.split([torch.Size(s).numel() for s in SHAPES])
    return [p.view(s) for p, s in zip(pieces, SHAPES, strict=True)]


def _flat(weights: list[Tensor]) -> Tensor:
    return torch.cat([w.flatten() for w in weights])


BUILDS: dict[str, Callable[[list[Tensor]], Any]] = {
    "exact": lambda w: LocalSteps(w, 5),
    "coarse": lambda w: LocalSteps(w, 5, codec=COARSE),
    "momentum": lambda w: LocalSteps(w, 4, "nesterov", COARSE),
    "exact momentum": lambda w: LocalSteps(w, 4, "nesterov", None),
    "every step": lambda w: LocalSteps(w, 1),
    "stream": lambda w: Stream(w, COARSE, 2),
    "stream of one": lambda w: Stream(w, COARSE, 1),
    "int4": lambda w: Stream(w, codec("int4"), 2),
    "sign": lambda w: Stream(w, codec("sign"), 2),
}


def all_parts(world: World) -> dict[str, Any]:
    found = {name: trained(world, build) for name, build in BUILDS.items()}
    found["auto"] = trained(world, lambda w: Stream(w, COARSE))
    return found


class OverALink(Stream):
    """A stream that takes its link for one of so many bytes a second."""

    rate = 1.0

    def _probe(self, size: int) -> float:
        return size / self.rate


def formats(world: World) -> list[Any]:
    """What travels over a fast and over a slow link, with how many fragments, and a checkpoint."""
    found = []
    for rate, given in ((1e12, None), (1.0, None), (1.0, 2), (1.0, codec("int4"))):
        weights = [torch.zeros(64, 256)]
        if isinstance(given, int):
            part = OverALink(weights, fragments=given)
        else:
            part = OverALink(weights, given)
        part.rate = rate
        for _ in range(12):
            weights[0].add_(torch.randn(64, 256))
            part.after_step()
        part.synchronize()
        again = Stream([weights[0].clone()], given if not isinstance(given, int) else None)
        again.load_state_dict(part.state_dict())
        found.append([part.codec.name, part.fragments, again.codec.name, again.fragments])
    return found


def no_numbers(world: World) -> list[str]:
    """What each rank is told when rank 1's weights are no numbers any more."""
    found = []
    for build in (BUILDS["exact"], BUILDS["coarse"], BUILDS["stream"]):
        weights = [torch.zeros(s) for s in SHAPES]
        part, said = build(weights), "nothing"
        try:
            for step in range(8):
                if world.rank == 1 and step == 2:
                    weights[1].fill_(float("nan"))
                part.after_step()
        except DriftError as error:
            said = f"{error}; finite {all(bool(w.isfinite().all()) for w in weights)}"
        found.append(said)
    return found


def running_sums(world: World) -> dict[str, Any]:
    """Buffers that a step changes, one of them on one rank only, and one that nobody changes."""
    module = torch.nn.BatchNorm1d(3)
    module.register_buffer("constant", torch.full((2,), float(world.rank)))
    torch.nn.init.constant_(module.weight, float(world.rank))
    same_start(module)
    weights = list(module.parameters())
    started = [float(p.sum()) for p in weights] + module.constant.tolist()
    part = LocalSteps(weights, 3)
    buffers = Buffers(module, part.drift)
    if world.rank == 1:
        module(torch.full((4, 3), 8.0) + torch.arange(4.0)[:, None])
    buffers.average()
    mean, constant = module.running_mean, module.constant
    return {"started": started, "mean": mean.tolist(), "constant": constant.tolist()}


def a_rank_is_silent(world: World) -> str:
    """Rank 1 is there but never takes part."""
    weights = [torch.zeros(s) for s in SHAPES]
    stream = Stream(weights, COARSE, 2, timeout=SHORT)
    told = Path(os.environ["HASTEN_RENDEZVOUS"]).with_name("told")
    if world.rank == 1:
        end = time.monotonic() + 120
        while not told.exists() and time.monotonic() < end:
            time.sleep(0.02)
        return ""
    said = _said(stream)
    told.touch()
    return said


def _said(stream: Stream) -> str:
    try:
        for _ in range(10):
            stream.after_step()
    except DriftError as error:
        whole = all(bool((w == 0).all()) for w in stream.drift.parameters)
        return f"{error} | whole {whole}"
    return "nothing"
