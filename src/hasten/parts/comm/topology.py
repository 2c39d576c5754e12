"""Topologies: which ranks share a host, and the link speeds within and between hosts.

Hosts are found by exchange: each rank sends its machine and its network. Links come
from a name (figures of data sheets), from data of the system (``detect``), or from a
measurement (``measure``, in ``link_model``). A name is a claim; only a measurement is
reliable.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hasten.formatting import did_you_mean
from hasten.machine.gpu import Gpus

GIGABIT = 1e9 / 8  # bytes per second
ROUTES = Path("/proc/net/route")


@dataclass(frozen=True)
class Link:
    """Latency of an empty message in seconds, and bytes per second in each direction."""

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and self.bandwidth > 0):
            raise ValueError(
                f"a link with a latency of {self.latency} s and {self.bandwidth} bytes/s: the one "
                "is at least 0, the other more than 0"
            )

    def seconds(self, size: float) -> float:
        """Returns the time for a message of so many bytes."""
        return self.latency + size / self.bandwidth

    def __str__(self) -> str:
        if math.isinf(self.bandwidth):
            return "nothing"
        return f"{self.bandwidth * 8 / 1e9:.3g} Gbit/s, {self.latency * 1e6:.3g} µs"


# By name: the link of a rank within its host, the link of a host to others, and the source.
# Latencies are rough estimates for one step of a collective.
NAMED: Mapping[str, tuple[Link, Link, str]] = {
    "dgx_a100": (
        Link(5e-6, 300e9),
        Link(10e-6, 8 * 200 * GIGABIT),
        "NVIDIA DGX A100: NVLink 600 GB/s both ways, 8 x 200 Gbit/s InfiniBand",
    ),
    "dgx_h100": (
        Link(5e-6, 450e9),
        Link(10e-6, 8 * 400 * GIGABIT),
        "NVIDIA DGX H100: NVLink 900 GB/s both ways, 8 x 400 Gbit/s InfiniBand",
    ),
    "fat_tree": (
        Link(10e-6, 25e9),
        Link(15e-6, 100 * GIGABIT),
        "assumed: PCIe 4.0 x16 within, 100 Gbit/s per host without blocking between",
    ),
    "pcie": (
        Link(10e-6, 25e9),
        Link(30e-6, 25 * GIGABIT),
        "assumed: PCIe 4.0 x16 within, 25 Gbit/s Ethernet between",
    ),
    "ethernet": (
        Link(20e-6, 5e9),
        Link(50e-6, 10 * GIGABIT),
        "assumed: memory of one machine within, 10 Gbit/s Ethernet between",
    ),
}
ASSUMED_WITHIN = Link(20e-6, 5e9)  # gloo over the loopback interface, measured 2-6 GB/s
ASSUMED_LATENCY, ASSUMED_GIGABITS = 50e-6, 1.0  # of a network without a reported speed
CHOICES = (*NAMED, "detect", "measure")


@dataclass(frozen=True)
class Topology:
    """``hosts`` has the ranks of each host; a host's ranks share its link ``between`` hosts."""

    hosts: tuple[tuple[int, ...], ...]
    within: Link
    between: Link
    source: str

    def __post_init__(self) -> None:
        ranks = sorted(self.order)
        if ranks != list(range(len(ranks))) or not ranks or not all(self.hosts):
            raise ValueError(
                f"hosts {self.hosts}: every rank from 0 on must be on exactly one host, and no "
                "host may be empty"
            )

    @property
    def order(self) -> tuple[int, ...]:
        """Returns all ranks, host by host: a ring in this order leaves each host once."""
        return tuple(rank for host in self.hosts for rank in host)

    @property
    def ranks(self) -> int:
        return len(self.order)

    @property
    def uniform(self) -> bool:
        """Returns True if all hosts have the same number of ranks."""
        return len({len(host) for host in self.hosts}) == 1

    def host_of(self, rank: int) -> int:
        return next(i for i, host in enumerate(self.hosts) if rank in host)

    def crossings(self, order: Sequence[int]) -> int:
        """Returns the largest number of times that a ring in this order leaves one host."""
        leaving = [0] * len(self.hosts)
        for rank, following in zip(order, (*order[1:], order[0]), strict=True):
            if self.host_of(rank) != self.host_of(following):
                leaving[self.host_of(rank)] += 1
        return max(leaving)

    def __str__(self) -> str:
        sizes = ", ".join(str(len(host)) for host in self.hosts)
        return (
            f"{len(self.hosts)} host(s) with {sizes} rank(s); within {self.within}; "
            f"between {self.between} ({self.source})"
        )


def hosts_of(names: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Returns ranks by host, hosts in the order of their first rank; ``names`` is by rank."""
    host_ranks: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        host_ranks.setdefault(name, []).append(rank)
    return tuple(tuple(ranks) for ranks in host_ranks.values())


def host_name() -> str:
    """Returns a unique name of this host: its name, its current boot, and its network.

    NCCL uses name and boot (``getHostHash``). The network is added because gloo's messages
    between two containers of one machine leave one network and enter another.
    """
    boot = _read(Path("/proc/sys/kernel/random/boot_id"))
    try:
        network = str(os.stat("/proc/self/ns/net").st_ino)
    except OSError:  # not on Linux
        network = ""
    return "/".join((platform.node(), boot, network))


def with_named_links(name: str, hosts: tuple[tuple[int, ...], ...]) -> Topology:
    """Returns these hosts with the links of a named topology."""
    check_name(name)
    within, between, source = NAMED[name]
    return Topology(hosts, within, between, f"{name}: {source}")


def check_name(name: str) -> None:
    """Raises ValueError unless the name is one of ``CHOICES``."""
    if name not in CHOICES:
        hint = did_you_mean(name, CHOICES)
        raise ValueError(f"topology is {name!r}{hint}; it must be one of {', '.join(CHOICES)}")


def with_detected_links(
    hosts: tuple[tuple[int, ...], ...], within: Link | None = None, interface: str = ""
) -> Topology:
    """Returns these hosts with this host's links as the system reports them.

    In the result, ``source`` lists missing data. ``within`` has the links between the
    host's GPUs, if available. The network ``interface`` is by default that of the default
    route.
    """
    interface = interface or default_interface()
    speed = interface_speeds().get(interface)
    speed_source = (
        f"{interface} says so" if speed else f"{interface or 'no interface'} says nothing"
    )
    between = Link(ASSUMED_LATENCY, speed or ASSUMED_GIGABITS * GIGABIT)
    inside = "links of the GPUs" if within else "assumed within"
    return Topology(hosts, within or ASSUMED_WITHIN, between, f"detected: {speed_source}, {inside}")


def interface_speeds(root: Path = Path("/")) -> dict[str, float | None]:
    """Returns bytes per second by active network interface; None if the driver has no value."""
    from hasten.machine.host import interfaces  # imports torch, which reading a recipe must not

    rates = {card.name: card.bits_per_second for card in interfaces(root)}
    return {name: None if rate is None else rate / 8 for name, rate in rates.items()}


def default_interface(routes: Path = ROUTES) -> str:
    """Returns the network interface of the default route; "" if there is none."""
    for line in _read(routes).splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[1] == fields[7] == "00000000":  # destination and mask
            return fields[0]
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


# The link between a host's GPUs from NVIDIA's driver: active NVLinks, or PCIe.
#
# The first GPU's links are used for all GPUs of the host. Rates are the hardware's, without
# protocol overhead; a measurement is more exact.

NVLINK = 25e9  # bytes per second and link in each direction: NVLink 2 to 4; NVLink 5 has twice that
LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}  # by PCIe generation
NVLINK_LATENCY, PCIE_LATENCY = 5e-6, 10e-6


def gpu_link() -> Link | None:
    """Returns the link of the first GPU to the others; None without a driver, or for one GPU."""
    gpus = Gpus()
    if len(gpus) < 2:
        return None
    if up := gpus.nvlinks(0):
        return Link(NVLINK_LATENCY, up * NVLINK)
    generation, lanes = gpus.pcie(0)
    if not lanes or generation not in LANE:
        return None
    return Link(PCIE_LATENCY, lanes * LANE[generation])
