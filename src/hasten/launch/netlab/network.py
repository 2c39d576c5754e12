"""The hosts' network namespaces and their links, made and held by a lab's keeper.

Two kinds of link, both with the name eth0 inside a host and the address 10.77.0.(host + 1):

- ``Veths``: a pair per host, its other end on a bridge in the keeper's own namespace; the rate is
  held by tbf on both ends. The kernel does the work.
- ``Tuns``: a TUN device per host, joined by a switch in user space (``packet_link``) that can delay
  and lose packets too. It costs a share of a core.

The machine's own network namespace is never entered, so that nothing in it can be changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Protocol

from hasten.launch.netlab import system
from hasten.launch.netlab.packet_link import DELAY, LOSS, Settings
from hasten.launch.netlab.rates import burst_bytes

NIC = "eth0"
SECONDS = 20  # a call of ip or tc that takes longer is given up


def address(host: int) -> str:
    """The address of a host."""
    return f"10.77.0.{host + 1}"


class Network(Protocol):
    """What a keeper can do with its hosts; ``namespace`` is None where a host has none."""

    def namespace(self, host: int) -> int | None: ...
    def limit(self, bits: float) -> None: ...
    def shape(self, delay: float, loss: float) -> None: ...
    def cut(self, host: int, cut: bool) -> None: ...
    def counted(self, host: int) -> tuple[int, int]: ...


class Veths:
    """Hosts on a bridge."""

    def __init__(self, hosts: int, mtu: int) -> None:
        self._hosts = [system.new_network() for _ in range(hosts)]
        lines = [f"link add br0 mtu {mtu} type bridge", "link set br0 addrgenmode none up"]
        for host, fd in enumerate(self._hosts):
            lines += [
                f"link add p{host} mtu {mtu} type veth peer name {NIC} mtu {mtu}",
                f"link set {NIC} netns /proc/self/fd/{fd}",
                f"link set p{host} master br0 addrgenmode none up",
            ]
        _ip(lines, self._hosts)
        for host, fd in enumerate(self._hosts):
            with system.inside(fd):
                _ip(_inside(host, mtu))

    def namespace(self, host: int) -> int | None:
        return self._hosts[host]

    def limit(self, bits: float) -> None:
        for host, fd in enumerate(self._hosts):
            _token_bucket(f"p{host}", bits)
            with system.inside(fd):
                _token_bucket(NIC, bits)

    def shape(self, delay: float, loss: float) -> None:
        if delay or loss:
            raise OSError("these links have no delay and no loss: make the lab with one of them")

    def cut(self, host: int, cut: bool) -> None:
        _ip([f"link set p{host} {'down' if cut else 'up'}"])

    def counted(self, host: int) -> tuple[int, int]:
        with system.inside(self._hosts[host]):
            return system.interface_bytes(NIC)


class Tuns:
    """Hosts on a switch in user space."""

    def __init__(self, hosts: int, mtu: int) -> None:
        self._hosts = [system.new_network() for _ in range(hosts)]
        devices = []
        for host, fd in enumerate(self._hosts):
            with system.inside(fd):
                devices.append(system.open_tun(NIC))
                _ip(_inside(host, mtu))
        self._settings = Settings(hosts)
        given = [self._settings.descriptor, *devices]
        self._switch = subprocess.Popen(
            [sys.executable, "-m", "hasten.launch.netlab.packet_link", *map(str, given)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            pass_fds=given,
            preexec_fn=system.die_with_parent,  # the keeper's first thread, which lasts
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
        with system.inside(self._hosts[host]):
            return system.interface_bytes(NIC)


class Nothing:
    """Hosts that are groups of processes on the machine's loopback interface."""

    def namespace(self, host: int) -> int | None:
        return None

    def limit(self, bits: float) -> None:
        if bits:
            raise OSError("plain loopback processes have no links to limit")

    def shape(self, delay: float, loss: float) -> None:
        if delay or loss:
            raise OSError("plain loopback processes have no links to delay")

    def cut(self, host: int, cut: bool) -> None:
        raise OSError("plain loopback processes have no links to cut")

    def counted(self, host: int) -> tuple[int, int]:
        raise OSError("plain loopback processes have no interface of their own")


def _inside(host: int, mtu: int) -> list[str]:
    return [
        "link set lo up",
        f"link set {NIC} addrgenmode none mtu {mtu} txqueuelen 1000",
        f"addr add {address(host)}/24 dev {NIC}",
        f"link set {NIC} up",
    ]


def _token_bucket(device: str, bits: float) -> None:
    if not bits:
        _run(["tc", "qdisc", "del", "dev", device, "root"], may_fail=True)  # there may be none
        return
    rate, burst = f"{round(bits)}bit", str(burst_bytes(bits))
    kind = ["tbf", "rate", rate, "burst", burst, "latency", "200ms"]
    _run(["tc", "qdisc", "replace", "dev", device, "root", *kind])


def _ip(lines: Sequence[str], descriptors: Sequence[int] = ()) -> None:
    _run(["ip", "-batch", "-"], "\n".join(lines) + "\n", descriptors)


def _run(
    command: list[str], text: str = "", descriptors: Sequence[int] = (), may_fail: bool = False
) -> None:
    """Run a tool where this thread is; what it complains of becomes the error."""
    if shutil.which(command[0]) is None:
        raise OSError(f"the command {command[0]} is missing: install iproute2")
    try:
        found = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            pass_fds=descriptors,
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"{' '.join(command[:2])} did not end within {SECONDS} s") from None
    if found.returncode and not may_fail:
        words = found.stderr.strip().splitlines() or ["no reason given"]
        raise OSError(f"{' '.join(command[:2])}: {words[0].removeprefix('Error: ')}")
