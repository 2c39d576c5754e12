"""Variables that a job's processes start with on a cluster, each with the reason in one line.

As few as possible: NCCL and gloo find links, rings and trees by themselves, and a variable that was
right for one cluster is the reason why another is slow. What a recipe says under ``transport`` is
set by hasten later and wins. Sources: NCCL user guide, "Environment Variables"; torch.distributed,
"Common environment variables"; torch.distributed.run, ``--shutdown-timeout``.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from hasten.launch.cluster import CloudConfig

RDMA = ("fat_tree", "rail_optimized", "dgx_a100", "dgx_h100")


@dataclass(frozen=True)
class Variable:
    """A variable, its value, and why it is set."""

    name: str
    value: str
    why: str


def variables(cloud: CloudConfig, interface: str = "", grace: int = 300) -> tuple[Variable, ...]:
    """What to start with on this cluster."""
    found = [
        Variable(
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
            str(grace),
            "seconds that torchrun leaves the ranks for saving before it kills them (its own: 30)",
        ),
        Variable("PYTHONUNBUFFERED", "1", "lines reach the log when they are printed"),
    ]
    if cloud.nodes == 1:
        return tuple(found)
    if interface:
        why = "the interface between nodes, where ranks meet and TCP goes"
        found.append(Variable("NCCL_SOCKET_IFNAME", interface, why))
        found.append(Variable("GLOO_SOCKET_IFNAME", interface, why))
    found.append(
        Variable("NCCL_DEBUG", "WARN", "says why a link can't be used; INFO shows which is")
    )
    if cloud.topology == "rail_optimized":
        found.append(
            Variable(
                "NCCL_CROSS_NIC", "0", "each ring stays on its rail: switches join equal cards only"
            )
        )
    if cloud.topology in RDMA and cloud.nodes >= 64:
        found.append(
            Variable("NCCL_IB_TIMEOUT", "22", "17 s (4.096 us x 2^22) before a packet is sent anew")
        )
    if cloud.topology == "ethernet":
        found += [
            Variable("NCCL_IB_DISABLE", "1", "no InfiniBand and no RoCE here: TCP at once"),
            Variable("NCCL_SOCKET_NTHREADS", "4", "threads a connection, for links of 100 Gbit/s"),
            Variable("NCCL_NSOCKS_PERTHREAD", "4", "sockets a thread, for links of 100 Gbit/s"),
        ]
    return tuple(found)


def advice(cloud: CloudConfig, interface: str = "") -> tuple[str, ...]:
    """What only somebody who knows the cluster can say, a sentence each."""
    found = []
    if cloud.nodes > 1 and not interface:
        found.append(
            "nodes with several networks: --interface eth0 sets NCCL_ and GLOO_SOCKET_IFNAME"
        )
    if cloud.nodes > 1 and cloud.topology in RDMA:
        found.append(
            "cards of storage too: NCCL_IB_HCA (in the recipe's transport) names those to use"
        )
        found.append("RoCE: NCCL_IB_GID_INDEX names the port's address (show_gids lists them)")
    return tuple(found)


def exports(cloud: CloudConfig, interface: str = "", grace: int = 300) -> list[str]:
    """Lines of shell: a comment and an export for each variable, and the advice as comments."""
    lines = []
    for v in variables(cloud, interface, grace):
        lines += [f"# {v.why}", f"export {v.name}={shlex.quote(v.value)}"]
    return [*lines, *(f"# {sentence}" for sentence in advice(cloud, interface))]
