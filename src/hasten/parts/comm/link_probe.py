"""Latency and bandwidth of the links within and between hosts, by ping-pong, in under a second.

(1) two ranks of one host, then the first ranks of two hosts: small messages to and fro, the
    quickest is twice the latency; then one message, four times larger each time until it takes
    long enough to be told from the latency and from a link's burst allowance
(2) all ranks of the first host send to their fellows of the second at once: ranks share their
    host's links, or have one each, and one pair can't tell
(3) everyone learns what was found
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hasten.parts.comm.topology import Link

SMALL, FIRST, MOST = 8, 64 * 1024, 64 * 2**20  # bytes
TRIES = 8
SECONDS = 0.8

Hosts = Sequence[Sequence[int]]


def measure(
    hosts: Hosts, device: str = "cpu", seconds: float = SECONDS
) -> tuple[Link | None, Link | None]:
    """Links within and between hosts, the same on every rank, which all call it.

    None where there is nothing between: no host with two ranks, or one host.
    """
    me = dist.get_rank()
    inside = next((tuple(host[:2]) for host in hosts if len(host) > 1), None)
    across = (hosts[0][0], hosts[1][0]) if len(hosts) > 1 else None
    found: list[tuple[float, float, int] | None] = [None, None]
    for index, pair in enumerate((inside, across)):
        if pair is not None and me == pair[0]:
            found[index] = _lead(pair[1], seconds / 3, device)
        elif pair is not None and me == pair[1]:
            _follow(pair[0], device)
    within = _from(found[0], inside, device)
    between = _from(found[1], across, device)
    if between is None:
        return _link(within), None
    width = min(len(hosts[0]), len(hosts[1]))
    latency, bandwidth, size = between
    if width > 1:
        taken = _at_once(hosts, width, int(size), device)
        bandwidth = width * size / max(taken - 2 * latency, 1e-9)
    return _link(within), Link(latency, bandwidth)


def _link(found: tuple[float, float, float] | None) -> Link | None:
    return None if found is None else Link(found[0], found[1])


def _from(
    found: tuple[float, float, int] | None, pair: tuple[int, ...] | None, device: str
) -> tuple[float, float, float] | None:
    """What the pair's first rank found, on all ranks."""
    if pair is None:
        return None
    values = torch.tensor(found or (0.0, 0.0, 0), dtype=torch.float64).to(device)
    dist.broadcast(values, pair[0])
    latency, bandwidth, size = values.tolist()
    return latency, bandwidth, size


def _lead(peer: int, seconds: float, device: str) -> tuple[float, float, int]:
    """Latency, bandwidth and the largest size tried; the peer follows."""
    end = time.perf_counter() + seconds
    _round_trip(peer, SMALL, device)  # the first message makes the connection
    small = math.inf
    for _ in range(TRIES):
        small = min(small, _round_trip(peer, SMALL, device))
        if time.perf_counter() > end - 2 * seconds / 3:
            break
    size, taken = FIRST, _round_trip(peer, FIRST, device)
    while taken < seconds / 8 and size < MOST and time.perf_counter() + 4 * taken < end:
        size *= 4
        taken = _round_trip(peer, size, device)
    _send(torch.tensor([0]), peer, device)
    return small / 2, size / max((taken - small) / 2, 1e-9), size


def _round_trip(peer: int, size: int, device: str) -> float:
    payload = torch.zeros(size, dtype=torch.uint8, device=device)
    began = time.perf_counter()
    _send(torch.tensor([size]), peer, device)
    _send(payload, peer, device)
    _receive(payload, peer, device)
    return time.perf_counter() - began


def _follow(peer: int, device: str) -> None:
    while True:
        header = torch.zeros(1, dtype=torch.int64, device=device)
        _receive(header, peer, device)
        size = int(header.item())
        if not size:
            return
        payload = torch.empty(size, dtype=torch.uint8, device=device)
        _receive(payload, peer, device)
        _send(payload, peer, device)


def _at_once(hosts: Hosts, width: int, size: int, device: str) -> float:
    """Seconds until the slowest of ``width`` simultaneous transfers was acknowledged."""
    me, taken = dist.get_rank(), 0.0
    payload = torch.zeros(size, dtype=torch.uint8, device=device)
    word = torch.zeros(1, dtype=torch.uint8, device=device)
    pairs = list(zip(hosts[0][:width], hosts[1][:width], strict=True))
    for sender, receiver in pairs:  # connections first
        if me == sender:
            _send(word, receiver, device)
        elif me == receiver:
            _receive(word, sender, device)
    dist.all_reduce(torch.zeros(1, device=device))  # all begin together
    began = time.perf_counter()
    for sender, receiver in pairs:
        if me == sender:
            _send(payload, receiver, device)
            _receive(word, receiver, device)
            taken = time.perf_counter() - began
        elif me == receiver:
            _receive(payload, sender, device)
            _send(word, sender, device)
    slowest = torch.tensor([taken], dtype=torch.float64).to(device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest.item())


def _send(tensor: Tensor, peer: int, device: str) -> None:
    dist.send(tensor.to(device), peer)
    _settle(device)


def _receive(tensor: Tensor, peer: int, device: str) -> None:
    dist.recv(tensor, peer)
    _settle(device)


def _settle(device: str) -> None:
    """A measurement has to wait for the device; on a processor send and recv wait themselves."""
    if not device.startswith("cpu"):
        torch.accelerator.synchronize(device)
