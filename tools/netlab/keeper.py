"""The keeper of a lab whose links can be changed while it runs: rate, delay, loss, cut.

Without a delay and a loss, links are those of ``hasten.launch.lab_network``. Else each
host has a TUN device, and a switch in user space (``packet_link``) joins them: it can delay and
lose packets too, and costs a share of a core.
Nothing here imports torch, whose threads would keep this process out of namespaces of users. Run as
``python tools/netlab/keeper.py FOLDER``.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

sys.path.insert(0, str(Path(__file__).parents[1]))

from hasten.launch import lab, lab_network
from hasten.machine.processes import end_with_parent
from netlab.lab import COUNTS
from netlab.packet_link import DELAY, LOSS, LinkSettings

TUNSETIFF, TUN_WITHOUT_HEADER = 0x400454CA, 0x0001 | 0x1000  # IFF_TUN | IFF_NO_PI


class ChangeableNetwork(lab_network.Network, Protocol):
    """A network whose links can be delayed and cut."""

    def shape(self, delay: float, loss: float) -> None: ...
    def cut(self, host: int, cut: bool) -> None: ...


class CutBridge(lab_network.VethBridge):
    """Hosts on a bridge, from which each can be taken."""

    def shape(self, delay: float, loss: float) -> None:
        if delay or loss:
            raise OSError("these links have no delay and no loss: make the lab with one of them")

    def cut(self, host: int, cut: bool) -> None:
        lab_network.ip([f"link set p{host} {'down' if cut else 'up'}"])


class UserSpaceSwitch:
    """Hosts on a switch in user space."""

    def __init__(self, hosts: int, mtu: int) -> None:
        self._hosts = [lab_network.new_network() for _ in range(hosts)]
        devices = []
        for host, fd in enumerate(self._hosts):
            with lab_network.inside(fd):
                devices.append(_open_tun(lab_network.NIC))
                lab_network.ip(lab_network.lines_inside(host, mtu))
        self._settings = LinkSettings(hosts)
        given = [self._settings.descriptor, *devices]
        self._switch = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("packet_link.py")), *map(str, given)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            pass_fds=given,
            preexec_fn=end_with_parent,  # the keeper's first thread, which lasts
        )
        assert self._switch.stdout is not None
        if not self._switch.stdout.readline():
            raise OSError("the switch in user space did not start: see keeper.log")
        for device in devices:
            os.close(device)

    def namespace(self, host: int) -> int | None:
        return self._hosts[host]

    def limit(self, bits: float) -> None:
        for host in range(len(self._hosts)):
            self._settings.rate(host, bits)

    def shape(self, delay: float, loss: float) -> None:
        self._settings.numbers[DELAY] = delay
        self._settings.numbers[LOSS] = loss

    def cut(self, host: int, cut: bool) -> None:
        self._settings.cut(host, cut)

    def counted(self, host: int) -> tuple[int, int]:
        with lab_network.inside(self._hosts[host]):
            return lab_network.interface_bytes(lab_network.NIC)


class NoLinks(lab_network.LoopbackNetwork):
    """Plain processes."""

    def shape(self, delay: float, loss: float) -> None:
        if delay or loss:
            raise OSError("plain loopback processes have no links to delay")

    def cut(self, host: int, cut: bool) -> None:
        raise OSError("plain loopback processes have no links to cut")


def _open_tun(name: str) -> int:
    """A network device of this thread's namespace whose packets are read and written here."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), TUN_WITHOUT_HEADER))
    except OSError:
        os.close(device)
        raise
    return device


class NetlabKeeper(lab.Keeper):
    """A keeper that changes links, and counts without interfaces."""

    VERBS: ClassVar[tuple[str, ...]] = (*lab.Keeper.VERBS, "limit", "shape", "cut")
    network: ChangeableNetwork

    def connect(self) -> None:
        hosts, mtu = self.spec["hosts"], self.spec["mtu"]
        if self.apart:
            self.network = (UserSpaceSwitch if self.spec["switch"] else CutBridge)(hosts, mtu)
        else:
            self.network = NoLinks()
        self.network.limit(self.spec["bits"])
        self.network.shape(self.spec["delay"], self.spec["loss"])

    def rank_environment(self, rank: int, folder: Path, master: tuple[str, int]) -> dict[str, str]:
        found = super().rank_environment(rank, folder, master)
        found["HASTEN_NETLAB_RANKS_PER_HOST"] = str(self.spec["ranks"])
        if not self.apart:
            counts = folder / "counts"
            counts.mkdir(exist_ok=True)
            found[COUNTS] = str(counts)
        return found

    def counted(self, host: int) -> dict[str, Any]:
        """Bytes that a host sent and received so far; without interfaces, what ranks counted."""
        if self.apart:
            return super().counted(host)
        ranks = self.spec["ranks"]
        sent = received = 0
        for path in self.folder.glob("job-*/counts/*.json"):
            noted: Mapping[str, Any] = json.loads(path.read_text())
            home = noted["rank"] // ranks
            for rank, size in noted["to"].items():
                if int(rank) // ranks != home:
                    sent += round(size) * (home == host)
                    received += round(size) * (int(rank) // ranks == host)
        return {"sent": sent, "received": received}

    def limit(self, bits: float) -> dict[str, Any]:
        """Change the rate of all links."""
        self.network.limit(bits)
        return {}

    def shape(self, delay: float, loss: float) -> dict[str, Any]:
        """Change delay and loss of all links."""
        self.network.shape(delay, loss)
        return {}

    def cut(self, host: int, cut: bool) -> dict[str, Any]:
        """Cut a host's link, or heal it."""
        self.network.cut(host, cut)
        return {}


if __name__ == "__main__":
    lab.watchdog(Path(sys.argv[1]), NetlabKeeper)
