"""A lab as tests and benchmarks use it.

with Lab(hosts=2, ranks=2, rate="100mbit") as lab:
    results = lab.run([sys.executable, "job.py"])
    sent, received = lab.bytes(0)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hasten.errors import InputError
from hasten.launch import lab
from hasten.launch.lab import MODES, Mode, Result
from hasten.launch.lab_network import bits_per_second

COUNTS = "HASTEN_NETLAB_COUNTS"  # variable: where ranks without interfaces note what they sent


class RunningCommand:
    """A command that runs on a lab's ranks."""

    def __init__(self, lab: Lab, job: int, place: Path) -> None:
        self._lab, self._job, self.place = lab, job, place

    def done(self) -> bool:
        """Whether all ranks have ended."""
        return bool(self._lab.ask("poll", job=self._job, seconds=0)["done"])

    def end(self) -> None:
        """Have all ranks ended; ``wait`` gives the results."""
        self._lab.ask("end", job=self._job)

    def log(self, rank: int) -> Path:
        """The file into which a rank speaks, while it runs too."""
        return self.place / f"rank-{rank}.log"

    def wait(self) -> list[Result]:
        """The results, by rank. The time limit given at the start ends a job that hangs."""
        return self._lab.results(self._job, self.place)


class Lab(lab.Lab):
    """Hosts with ranks on this machine, from ``start`` (or ``with``) to ``close``.

    ``rate`` limits each host's link, each way. ``delay_ms`` (one way) and ``loss`` (a share of
    packets) take a switch in user space. ``mode``: a user's own namespaces, root's, or plain
    processes on the loopback interface, which have no links; auto takes the first that works and,
    where links were asked for, has them. ``cores`` are shared out among the ranks.
    """

    KEEPER: ClassVar[Sequence[str]] = (str(Path(__file__).with_name("keeper.py")),)

    def __init__(
        self,
        hosts: int = 2,
        ranks: int = 1,
        rate: str | float | None = None,
        delay_ms: float = 0.0,
        loss: float = 0.0,
        mtu: int = 1500,
        mode: Mode = "auto",
        cores: int | None = None,
    ) -> None:
        if not 0 <= delay_ms <= 10_000 or not 0 <= loss < 1:
            raise InputError(
                f"delay_ms={delay_ms:g} and loss={loss:g}: a delay is 0 to 10,000 ms, a loss is a "
                "share below 1"
            )
        if not 576 <= mtu <= 65_000:
            raise InputError(f"mtu={mtu}: 576 to 65,000 bytes are possible")
        super().__init__(hosts, ranks, rate, mode)
        self._spec |= {
            "mtu": mtu,
            "delay": delay_ms / 1000,
            "loss": loss,
            "switch": bool(delay_ms or loss),
            "cores": cores or self._spec["cores"],
        }

    def begin(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        seconds: float = 300.0,
        grace: float = 10.0,
        cwd: Path | None = None,
    ) -> RunningCommand:
        """Start a command on every rank, as ``run`` does, without waiting for its end."""
        return RunningCommand(self, *self.started(command, env, seconds, grace, cwd))

    def cut(self, host: int) -> None:
        """Cut a host's link: what is sent is lost until ``heal``."""
        self.ask("cut", host=self.host(host), cut=True)

    def heal(self, host: int) -> None:
        """Join a host's link again."""
        self.ask("cut", host=self.host(host), cut=False)

    def limit(self, rate: str | float | None) -> None:
        """Change the rate of all links; None: no limit."""
        self.ask("limit", bits=bits_per_second(rate))


# Which kinds of lab work on this machine, found by making one of each.

ADVICE = {
    "user": "allow users their own namespaces: sysctl user.max_user_namespaces above 0, and on "
    "Ubuntu kernel.apparmor_restrict_unprivileged_userns=0",
    "root": "run it as root with CAP_SYS_ADMIN and CAP_NET_ADMIN",
}


@dataclass(frozen=True)
class LabSupport:
    """One kind of lab: what it offers, whether it works here, and if not, why and what to do."""

    mode: str
    offers: str
    works: bool
    reason: str = ""


def check() -> list[LabSupport]:
    """One finding for each kind of lab; each is made, asked for its bytes and removed."""
    found = []
    for mode, switch in [(m, s) for m in MODES for s in (False, True) if m != "loopback" or not s]:
        plain = mode == "loopback"
        offers = "processes" if plain else "rate, delay, loss, cut" if switch else "rate, cut"
        tried = Lab(2, 1, None if plain else "100mbit", delay_ms=float(switch), mode=mode)
        reason = tried.attempt(mode)
        if not reason:
            with tried:
                try:
                    tried.bytes(0)
                except InputError as error:
                    reason = str(error)
        if reason:
            reason = f"{reason}; {_advice(mode, reason)}"
        found.append(LabSupport(mode, offers, not reason, reason))
    return found


def _advice(mode: str, reason: str) -> str:
    if "iproute2" in reason:
        return "then ask again"
    if "tun" in reason.lower():
        return "load the kernel's module tun, or give the container /dev/net/tun"
    return ADVICE.get(mode, "nothing more is needed than this Python")
