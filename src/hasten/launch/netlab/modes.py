"""Which kinds of lab work on this machine, found by making one of each."""

from __future__ import annotations

from dataclasses import dataclass

from hasten.errors import InputError
from hasten.launch.netlab.lab import MODES, Lab, Mode

ADVICE = {
    "user": "allow users their own namespaces: sysctl user.max_user_namespaces above 0, and on "
    "Ubuntu kernel.apparmor_restrict_unprivileged_userns=0",
    "root": "run it as root with CAP_SYS_ADMIN and CAP_NET_ADMIN",
}


@dataclass(frozen=True)
class Finding:
    """One kind of lab: what it offers, whether it works here, and if not, why and what to do."""

    mode: str
    offers: str
    works: bool
    reason: str = ""


def check() -> list[Finding]:
    """One finding for each kind of lab; each is made, asked for its bytes and removed."""
    kinds: list[tuple[Mode, bool]] = [
        (m, switch) for m in MODES if m != "loopback" for switch in (False, True)
    ]
    found = []
    kinds.append(("loopback", False))
    for mode, switch in kinds:
        plain = mode == "loopback"
        offers = "processes" if plain else "rate, delay, loss, cut" if switch else "rate, cut"
        rate = None if plain else "100mbit"
        try:
            with Lab(2, 1, rate, delay_ms=1.0 if switch else 0.0, mode=mode) as lab:
                lab.bytes(0)
            found.append(Finding(mode, offers, True))
        except InputError as error:
            reason = str(error).partition(f"({mode}: ")[2].partition("): see")[0] or str(error)
            found.append(Finding(mode, offers, False, f"{reason}; {_advice(mode, reason)}"))
    return found


def _advice(mode: str, reason: str) -> str:
    if "iproute2" in reason:
        return "then ask again"
    if "tun" in reason.lower():
        return "load the kernel's module tun, or give the container /dev/net/tun"
    return ADVICE.get(mode, "nothing more is needed than this Python")
