"""The cluster a user describes: nodes, devices in each, how they are wired, what matters most."""

from __future__ import annotations

from dataclasses import dataclass

from hasten.errors import InputError
from hasten.formatting import did_you_mean

TOPOLOGIES = ("single_node", "fat_tree", "rail_optimized", "dgx_a100", "dgx_h100", "ethernet")
PRIORITIES = ("low_latency", "high_bandwidth", "low_cost")


@dataclass(frozen=True)
class CloudConfig:
    """Describes the machines of a run.

    The same object plans (``hasten.planner.plan``) and launches (``hasten.launch.targets``).

    Args:
        nodes: hosts.
        gpus_per_node: devices in each host.
        topology: how hosts are wired, one of ``TOPOLOGIES``.
        network_priority: what the network is chosen for, one of ``PRIORITIES``; the planner takes
            a slower network for ``low_cost``.

    Raises:
        InputError: a number below 1, or a word that isn't known, with the nearest known one.
    """

    nodes: int = 1
    gpus_per_node: int = 1
    topology: str = "single_node"
    network_priority: str = "low_latency"

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus_per_node"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"CloudConfig: {name} is {value!r}; it must be at least 1")
        _check("topology", self.topology, TOPOLOGIES)
        _check("network_priority", self.network_priority, PRIORITIES)

    @property
    def devices(self) -> int:
        """Devices in all."""
        return self.nodes * self.gpus_per_node


def _check(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        hint = did_you_mean(value, allowed)
        raise InputError(
            f"CloudConfig: {name} is {value!r}{hint}; it must be one of {', '.join(allowed)}"
        )
