"""The user's description of a cluster: nodes, devices in each, network, priority."""

from __future__ import annotations

from dataclasses import dataclass

from hasten.errors import InputError
from hasten.formatting import did_you_mean

TOPOLOGIES = ("single_node", "fat_tree", "rail_optimized", "dgx_a100", "dgx_h100", "ethernet")
PRIORITIES = ("low_latency", "high_bandwidth", "low_cost")


@dataclass(frozen=True)
class CloudConfig:
    """Describes the machines of a run.

    ``hasten.planner.plan`` and ``hasten.launch.targets`` read it.

    Args:
        nodes: number of hosts.
        gpus_per_node: devices in each host.
        topology: network between hosts, one of ``TOPOLOGIES``.
        network_priority: one of ``PRIORITIES``; for ``low_cost`` the planner assumes a slower
            network.

    Raises:
        InputError: a number below 1, or an unknown word.
    """

    nodes: int = 1
    gpus_per_node: int = 1
    topology: str = "single_node"
    network_priority: str = "low_latency"

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus_per_node"):
            setting = getattr(self, name)
            if not isinstance(setting, int) or isinstance(setting, bool) or setting < 1:
                raise InputError(f"CloudConfig: {name} is {setting!r}; it must be at least 1")
        _check("topology", self.topology, TOPOLOGIES)
        _check("network_priority", self.network_priority, PRIORITIES)

    @property
    def devices(self) -> int:
        """Number of devices of all nodes."""
        return self.nodes * self.gpus_per_node


def _check(name: str, setting: str, allowed: tuple[str, ...]) -> None:
    if setting not in allowed:
        hint = did_you_mean(setting, allowed)
        raise InputError(
            f"CloudConfig: {name} is {setting!r}{hint}; it must be one of {', '.join(allowed)}"
        )
