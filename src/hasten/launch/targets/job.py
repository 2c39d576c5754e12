"""A job to launch: its recipe, cluster, time limit and variables, with checked words.

Free texts (paths) may hold anything but a zero byte and are quoted where they are
written. Other words are written into a syntax of their own (``#SBATCH`` lines,
Kubernetes' names, host names). They are checked against that syntax here, so no target
has to escape them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hasten.errors import InputError
from hasten.launch.cluster import CloudConfig

TARGETS = ("torchrun", "slurm", "kubernetes", "skypilot")
MARK = "# Written by hasten launch"
# Kubernetes' names (RFC 1123) are the strictest; 50 characters leave room for a pod's suffix.
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,48}[a-z0-9])?")
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/@,=+-]*")
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:]+\]")


def script(name: str, **values: object) -> str:
    """Returns this folder's shell script of that name, with a value for each ``@key@``."""
    text = Path(__file__).with_name(f"{name}.sh").read_text(encoding="utf-8")
    substitutions = {"mark": MARK, **values}
    return re.sub(r"@([a-z]+)@", lambda match: str(substitutions[match[1]]), text)


@dataclass(frozen=True)
class Launch:
    """One job for a scheduler.

    Args:
        recipe: text of the recipe as it is to run there; written next to the scripts.
        cloud: nodes, devices in each, topology.
        name: name of the job, of lower case letters, digits and dashes.
        fewest: smallest number of nodes to continue with if some are lost or unavailable;
            all of them if left out.
        spot: True: run on machines that may be reclaimed.
        minutes: time limit of the job; None: the scheduler's own limit.
        grace: seconds for saving before the machines are lost.
        restarts: number of times that ranks, or the whole job, are started again.
        workdir: folder of the recipe's relative paths, on the nodes.
        python: the interpreter that has hasten, on the nodes.
        port: where ranks meet on the first node.
        hosts: names of the nodes, if no scheduler finds them.
        interface: network interface between nodes; libraries search for one if left out.
        image: container image; volume: claim that is mounted at ``workdir`` (Kubernetes).
        accelerator: devices' name for SkyPilot (H100, A100-80GB).
        scheduler_options: partition, account, qos, constraint, reservation (Slurm); namespace,
            rdma (Kubernetes).

    Raises:
        InputError: its scheduler wouldn't accept a word.
    """

    recipe: str
    cloud: CloudConfig
    name: str = "hasten"
    fewest: int | None = None
    spot: bool = False
    minutes: int | None = None
    grace: int = 300
    restarts: int = 3
    workdir: str = "."
    python: str = "python3"
    port: int = 29500
    hosts: tuple[str, ...] = ()
    interface: str = ""
    image: str = ""
    volume: str = ""
    accelerator: str = ""
    scheduler_options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise InputError(
                f"--name {self.name!r}: schedulers take lower case letters, digits and dashes, "
                "50 at most, a letter or digit first and last"
            )
        if self.fewest is not None and not 1 <= self.fewest <= self.cloud.nodes:
            raise InputError(
                f"--min-nodes {self.fewest}: give 1 to {self.cloud.nodes}, the number of nodes"
            )
        for host in self.hosts:
            if not HOST.fullmatch(host):
                raise InputError(f"--hosts: {host!r} is no host's name or address")
        if self.hosts and len(self.hosts) != self.cloud.nodes:
            raise InputError(
                f"--hosts names {len(self.hosts)} hosts and --nodes is {self.cloud.nodes}"
            )
        _check_numbers(self)
        for name in ("workdir", "python"):
            if "\0" in getattr(self, name) or not getattr(self, name):
                raise InputError(f"--{name} is empty or has a zero byte in it; name a path")
        options = {**self.scheduler_options, "interface": self.interface, "image": self.image}
        options |= {"volume": self.volume, "gpu": self.accelerator}
        for name, word in options.items():
            if word and not WORD.fullmatch(word):
                raise InputError(
                    f"--{name} {word!r}: only letters, digits and . _ : / @ , = + - are possible"
                )

    @property
    def least(self) -> int:
        """Smallest number of nodes."""
        return self.fewest or self.cloud.nodes

    @property
    def nodes(self) -> str:
        """Returns the number of nodes as torchrun takes it: 4, or 2:4."""
        most = self.cloud.nodes
        return str(most) if self.least == most else f"{self.least}:{most}"


def _check_numbers(launch: Launch) -> None:
    limits = {"port": (1, 65535), "grace": (1, 86_400), "restarts": (0, 1000)}
    for name, (low, high) in limits.items():
        if not low <= getattr(launch, name) <= high:
            raise InputError(f"--{name} is {getattr(launch, name)}; give {low} to {high}")
    if launch.minutes is not None and launch.minutes * 60 <= launch.grace:
        raise InputError(
            f"--time is {launch.minutes} minutes, not longer than the {launch.grace} seconds of "
            "--grace that are kept for saving"
        )


def name_of(text: str) -> str:
    """Returns a job name for any text, from its valid characters; ``hasten`` if there are none."""
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:50].strip("-")
    return plain or "hasten"


# Environment variables of a job's processes on a cluster, each with its reason.
#
# As few as possible: NCCL and gloo find links, rings and trees by themselves, and a setting that
# is right for one cluster makes another slow. The recipe's ``transport`` is applied later and
# overrides these. Sources: NCCL user guide, "Environment Variables";
# torch.distributed, "Common environment variables"; torch.distributed.run, ``--shutdown-timeout``.

RDMA = ("fat_tree", "rail_optimized", "dgx_a100", "dgx_h100")


def variables(
    cloud: CloudConfig, interface: str = "", grace: int = 300
) -> dict[str, tuple[str, str]]:
    """Returns the environment variables to start with on this cluster: value, and reason."""
    settings = {
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": (
            str(grace),
            "seconds that the ranks have for saving before torchrun kills them (default: 30)",
        ),
        "PYTHONUNBUFFERED": ("1", "lines reach the log when they are printed"),
    }
    if cloud.nodes == 1:
        return settings
    if interface:
        named = (interface, "the interface between nodes, where ranks meet and TCP goes")
        settings |= {"NCCL_SOCKET_IFNAME": named, "GLOO_SOCKET_IFNAME": named}
    settings["NCCL_DEBUG"] = ("WARN", "prints why a link can't be used; INFO shows which is")
    if cloud.topology == "rail_optimized":
        reason = "each ring stays on its rail: switches join equal cards only"
        settings["NCCL_CROSS_NIC"] = ("0", reason)
    if cloud.topology in RDMA and cloud.nodes >= 64:
        reason = "17 s (4.096 us x 2^22) before a packet is sent again"
        settings["NCCL_IB_TIMEOUT"] = ("22", reason)
    if cloud.topology == "ethernet":
        settings["NCCL_IB_DISABLE"] = ("1", "no InfiniBand and no RoCE here: TCP at once")
        for name, what in (
            ("NCCL_SOCKET_NTHREADS", "threads a connection"),
            ("NCCL_NSOCKS_PERTHREAD", "sockets a thread"),
        ):
            settings[name] = ("4", f"{what}, for links of 100 Gbit/s")
    return settings


def advice(cloud: CloudConfig, interface: str = "") -> tuple[str, ...]:
    """Returns hints, a sentence each, on settings that need knowledge of the cluster."""
    hints = []
    if cloud.nodes > 1 and not interface:
        hints.append(
            "nodes with several networks: --interface eth0 sets NCCL_ and GLOO_SOCKET_IFNAME"
        )
    if cloud.nodes > 1 and cloud.topology in RDMA:
        hints.append(
            "cards of storage too: NCCL_IB_HCA (in the recipe's transport) names those to use"
        )
        hints.append("RoCE: NCCL_IB_GID_INDEX names the port's address (show_gids lists them)")
    return tuple(hints)


def exports(cloud: CloudConfig, interface: str = "", grace: int = 300) -> list[str]:
    """Returns shell lines: a comment and an export for each variable, then advice as comments."""
    lines = []
    for name, (text, reason) in variables(cloud, interface, grace).items():
        lines += [f"# {reason}", f"export {name}={shlex.quote(text)}"]
    return [*lines, *(f"# {sentence}" for sentence in advice(cloud, interface))]
