"""A cluster for the planner: devices, nodes, and one-way bandwidths of their links.

Bandwidths are bytes per second in one direction of one device's share, as a ring of
NCCL uses them. If a vendor's figure is for both directions together, halve it. Latency
is that of one message between two neighbours, software included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hasten.errors import InputError
from hasten.launch.cluster import CloudConfig
from hasten.machine.accelerators import PCIE4, Device, device

_G = 1e9
INTRA_LATENCY, INTER_LATENCY = 3e-6, 8e-6
# Topology -> bytes/s between nodes per device, each with its own card: 200 or 400 Gbit/s.
_BETWEEN: Mapping[str, float] = {
    "single_node": 25 * _G,
    "fat_tree": 50 * _G,
    "rail_optimized": 50 * _G,
    "dgx_a100": 25 * _G,
    "dgx_h100": 50 * _G,
}
_ETHERNET = 12.5 * _G  # bytes/s of a node: its devices share one card of 100 Gbit/s
# Topology -> devices, and bytes of a node's own memory (datasheets of DGX A100 640GB and DGX H100).
CHIPS: Mapping[str, str] = {"dgx_a100": "a100-80gb", "dgx_h100": "h100-80gb"}
_HOST_MEMORY: Mapping[str, float] = {"dgx_a100": 2e12, "dgx_h100": 2e12}
_PRIORITY = {"low_latency": 1.0, "high_bandwidth": 1.0, "low_cost": 0.25}


@dataclass(frozen=True)
class Cluster:
    """``nodes`` of ``per_node`` devices.

    Args:
        inter: each device's share of its node's NICs.
        host_memory: bytes of a node's own memory; infinite: unknown.
    """

    device: Device
    nodes: int
    per_node: int
    intra: float
    inter: float
    intra_latency: float = INTRA_LATENCY
    inter_latency: float = INTER_LATENCY
    topology: str = "fat_tree"
    host_memory: float = math.inf

    def __post_init__(self) -> None:
        for field in ("nodes", "per_node", "intra", "inter", "host_memory"):
            if not getattr(self, field) > 0:
                raise InputError(f"cluster: {field} is {getattr(self, field)}; give more than 0")
        if self.intra_latency < 0 or self.inter_latency < 0:
            raise InputError("cluster: a latency is negative; give seconds, 0 at least")

    @property
    def devices(self) -> int:
        return self.nodes * self.per_node

    @classmethod
    def preset(cls, topology: str, nodes: int, per_node: int = 8, device_name: str = "") -> Cluster:
        """Returns a named topology, with the device in its name or ``device_name``.

        Raises:
            InputError: an unknown topology or device.
        """
        return cls.of(
            CloudConfig(nodes=nodes, gpus_per_node=per_node, topology=topology), device_name
        )

    @classmethod
    def of(cls, cloud: CloudConfig, device_name: str = "") -> Cluster:
        """Returns the cluster of a CloudConfig, with devices of this name."""
        name = device_name or CHIPS.get(cloud.topology, "")
        if not name:
            raise InputError(
                f"the topology {cloud.topology!r} doesn't define the devices: give the argument "
                "device_name (plan() calls it device), such as 'h100' or 'a100'"
            )
        chip = device(name)
        joined = chip.link if cloud.gpus_per_node <= chip.per_node else PCIE4 * _G
        between = _BETWEEN.get(cloud.topology, _ETHERNET / cloud.gpus_per_node)
        if cloud.topology in ("fat_tree", "rail_optimized"):
            between *= _PRIORITY[cloud.network_priority]
        slow = cloud.topology == "ethernet" or cloud.network_priority == "low_cost"
        return cls(
            *(chip, cloud.nodes, cloud.gpus_per_node, joined, between),
            inter_latency=30e-6 if slow else INTER_LATENCY,
            topology=cloud.topology,
            host_memory=_HOST_MEMORY.get(cloud.topology, math.inf),
        )


def own_machine(
    rates: Mapping[str, Any], *, memory_bytes: float, link: float, devices: int = 1
) -> Cluster:
    """Returns one node with the rates in a file of ``hasten env --bench -o``.

    ``link`` is the one-way bandwidth between its devices, in bytes per second.

    Raises:
        InputError: the file has another format, or no rate of products or copies.
    """
    try:
        if rates["kind"] != "hasten machine rates":
            raise KeyError("kind")
        best: dict[str, float] = {}
        for product in rates["products"]:
            best[product["dtype"]] = max(best.get(product["dtype"], 0.0), float(product["best"]))
        memory_rate = max(float(copy["best"]) for copy in rates["copies"])
        half = best.get("bf16") or best.get("fp16") or best["fp32"]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            "its file wasn't written by `hasten env --bench -o`: measure this machine again"
        ) from error
    single = max(best.get("fp32", 0.0), best.get("tf32", 0.0))
    on_cpu = str(rates.get("device") or "").startswith("cpu")
    chip = Device(
        name=str(rates.get("device_name") or rates.get("device") or "this machine"),
        peak16=half,
        memory_bytes=memory_bytes,
        memory_rate=memory_rate,
        link=link,
        per_node=devices,
        units=1 if on_cpu else Device.units,  # a processor has no partly filled round of tiles
        peak8=best.get("fp8", 0.0),
        peak32=single,
        reached16=half,
        reached8=best.get("fp8", 0.0),
        reached32=single,
        gloo=on_cpu,
        source=f"hasten env --bench, {rates.get('measured_at', 'undated')}",
    )
    return Cluster(chip, 1, devices, link, link, topology="single_node")
