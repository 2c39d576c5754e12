"""What is launched, where and for how long, with every word checked that a scheduler will read.

Free texts (paths) may hold anything but a zero byte and are quoted where they are written. Words
that land in places with a syntax of their own (``#SBATCH`` lines, Kubernetes' names, host names)
are held to that syntax here, so that no target has to escape them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hasten.errors import InputError
from hasten.launch.cluster import CloudConfig

TARGETS = ("torchrun", "slurm", "kubernetes", "megatron", "skypilot")
MARK = "# Written by hasten launch"
# Kubernetes' names (RFC 1123) are the strictest of all targets': 50, as pods get a suffix.
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,48}[a-z0-9])?")
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/@,=+-]*")
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:]+\]")


@dataclass(frozen=True)
class Launch:
    """One job for a scheduler.

    Args:
        recipe: text of the recipe as it is to run there; written beside the scripts.
        cloud: nodes, devices in each, topology.
        name: of the job, in lower case, digits and dashes.
        fewest: nodes to go on with where some are lost or not to be had; as many as there are
            if left out.
        spot: on machines that may be taken away.
        minutes: the longest it may run; none: the scheduler's own limit.
        grace: seconds for saving before the machines go.
        restarts: times that ranks, or the whole job, are started again.
        workdir: folder in which relative paths of the recipe lie, as the nodes see it.
        python: the interpreter that has hasten, as the nodes see it.
        port: where ranks meet on the first node.
        hosts: names of the nodes, where no scheduler finds them.
        interface: network interface between nodes; libraries look for one if left out.
        image: container image; volume: claim that is mounted at ``workdir`` (Kubernetes).
        accelerator: devices' name for SkyPilot (H100, A100-80GB).
        words: partition, account, qos, constraint, reservation (Slurm); namespace, rdma
            (Kubernetes).
        config: fields of the model's Hugging Face config; layout, batch: of the plan (Megatron).

    Raises:
        InputError: a word that its scheduler wouldn't take.
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
    words: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    layout: Mapping[str, Any] = field(default_factory=dict)
    batch: Mapping[str, Any] = field(default_factory=dict)

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
                f"--hosts names {len(self.hosts)} hosts and --nodes says {self.cloud.nodes}"
            )
        _check_numbers(self)
        for name in ("workdir", "python"):
            if "\0" in getattr(self, name) or not getattr(self, name):
                raise InputError(f"--{name} is empty or has a zero byte in it; name a path")
        words = {**self.words, "interface": self.interface, "image": self.image}
        words |= {"volume": self.volume, "gpu": self.accelerator}
        for name, word in words.items():
            if word and not WORD.fullmatch(word):
                raise InputError(
                    f"--{name} {word!r}: only letters, digits and . _ : / @ , = + - are possible"
                )

    @property
    def least(self) -> int:
        """Nodes that it needs at least."""
        return self.fewest or self.cloud.nodes

    @property
    def nodes(self) -> str:
        """As torchrun takes it: 4, or 2:4."""
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
    """A job's name out of any text: what schedulers take of it, or ``hasten``."""
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:50].strip("-")
    return plain or "hasten"
