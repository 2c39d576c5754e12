"""A switch in user space: TUN devices of the hosts, joined with a rate, a delay and losses.

The kernel's own tool for delay is netem, which many kernels lack. ``packet_link.cpp`` does the same
in one process; without a compiler the loop below does, at some tens of Mbit/s. The keeper changes
the settings in shared memory while packets flow. The keeper runs it as ``python packet_link.py
SETTINGS TUN...`` with descriptors.
"""

from __future__ import annotations

import collections
import ctypes
import mmap
import os
import random
import select
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hasten.parts.kernels.build import LoadedLibrary, build_library

DELAY, LOSS, STOP, HOSTS = 0, 1, 2, 4  # where in the settings; see packet_link.cpp
SEED = 20261121
ROOM_WITHOUT_LIMIT = 64e6


class LinkSettings:
    """The link's settings as float64 in memory that two processes share."""

    def __init__(self, hosts: int, descriptor: int | None = None) -> None:
        size = 8 * (HOSTS + 2 * hosts)
        self.descriptor = os.memfd_create("netlab") if descriptor is None else descriptor
        if descriptor is None:
            os.ftruncate(self.descriptor, size)
        self._memory = mmap.mmap(self.descriptor, size)
        self.numbers = (ctypes.c_double * (size // 8)).from_buffer(self._memory)

    def rate(self, host: int, bits: float) -> None:
        """Limit a host's link to so many bits a second, both ways; 0: no limit."""
        self.numbers[HOSTS + 2 * host] = bits / 8

    def cut(self, host: int, cut: bool) -> None:
        """Cut a host's link, or heal it."""
        self.numbers[HOSTS + 2 * host + 1] = float(cut)


def forward(tuns: Sequence[int], numbers: ctypes.Array[ctypes.c_double]) -> None:
    """The loop of ``packet_link.cpp`` without a compiler; returns when STOP is set."""
    chance = random.Random(SEED)
    ways: list[collections.deque[tuple[float, bytes]]] = [collections.deque() for _ in tuns]
    queued = [0] * len(tuns)
    up, down = [0.0] * len(tuns), [0.0] * len(tuns)
    while not numbers[STOP]:
        now = time.monotonic()
        due = min((way[0][0] for way in ways if way), default=now + 0.05)
        ready = select.select(tuns, (), (), min(max(due - now, 0.0), 0.05))[0]
        for i in map(tuns.index, ready):
            for packet in _packets(tuns[i]):
                j = packet[19] - 1
                if packet[0] >> 4 != 4 or not 0 <= j < len(tuns) or j == i:
                    continue
                cut = numbers[HOSTS + 2 * i + 1] or numbers[HOSTS + 2 * j + 1]
                if cut or chance.random() < numbers[LOSS]:
                    continue
                first, second = numbers[HOSTS + 2 * i], numbers[HOSTS + 2 * j]
                delay, size = numbers[DELAY], len(packet)
                room = second * (0.2 + 2 * delay) + 65536 if second else ROOM_WITHOUT_LIMIT
                if queued[j] > room:
                    continue
                begun = max(up[i], time.monotonic())
                up[i] = begun + (size / first if first else 0.0)
                busy = size / second if second else 0.0
                down[j] = max(max(down[j], begun) + busy, up[i])
                ways[j].append((down[j] + delay, packet))
                queued[j] += size
        now = time.monotonic()
        for j, way in enumerate(ways):
            while way and way[0][0] <= now:
                packet = way.popleft()[1]
                queued[j] -= len(packet)
                if not numbers[HOSTS + 2 * j + 1]:
                    _deliver(tuns[j], packet)


def _packets(tun: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < 64:  # then the next host has its turn
        try:
            packet = os.read(tun, 65536)
        except OSError:  # none left, or the device isn't up yet
            break
        if len(packet) >= 20:
            found.append(packet)
    return found


def _deliver(tun: int, packet: bytes) -> None:
    try:
        os.write(tun, packet)
    except OSError:
        return  # a host that has no room drops the packet, as a real one would


def compiled() -> LoadedLibrary:
    """The loop in C++, or the reason why it can't be compiled here."""
    return build_library("packet_link", sources=Path(__file__).parent)


def main(arguments: Sequence[str]) -> None:
    """Carry packets until the keeper says stop or ends this process."""
    descriptor, *tuns = map(int, arguments)
    settings = LinkSettings(len(tuns), descriptor)
    library = compiled().library
    print("compiled" if library else "plain", flush=True)
    if library is None:
        forward(tuns, settings.numbers)
        return
    fds = (ctypes.c_int * len(tuns))(*tuns)
    library.packet_link(len(tuns), fds, settings.numbers, ctypes.c_uint64(SEED))


if __name__ == "__main__":
    main(sys.argv[1:])
