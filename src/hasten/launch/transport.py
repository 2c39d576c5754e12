"""Transport settings: variables that select how gloo, NCCL and UCX send bytes.

``hasten check`` shows them with hints. They are set only if the recipe does so
(``transport``). A wrong interface or a disabled InfiniBand costs more than any codec
saves.

Sources: NCCL's user guide ("Environment Variables"), torch.distributed's page ("Common
environment variables"), UCX's FAQ.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from hasten.machine import environment
from hasten.parts.comm.topology import interface_speeds

PREFIXES = ("GLOO_", "NCCL_", "TORCH_NCCL_", "UCX_")
LOADING = ("PLUGIN", "MODULE", "LIBRARY", "CONF_FILE")  # variables that load code or settings
SHOWN: Mapping[str, str] = {
    "GLOO_SOCKET_IFNAME": "gloo's interface",
    "NCCL_SOCKET_IFNAME": "NCCL's interface for bootstrap and TCP",
    "NCCL_IB_DISABLE": "1: no InfiniBand and no RoCE",
    "NCCL_IB_HCA": "the InfiniBand or RoCE devices to use",
    "NCCL_IB_GID_INDEX": "which address of a RoCE port",
    "NCCL_NET_GDR_LEVEL": "how far GPU and card may be apart for direct access",
    "NCCL_P2P_DISABLE": "1: no direct copies between GPUs",
    "NCCL_ALGO": "ring, tree and so on; NCCL's own choice is usually better",
    "NCCL_DEBUG": "INFO shows which transport is used",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0: a lost rank is a hang",
    "UCX_TLS": "UCX's transports",
    "UCX_NET_DEVICES": "UCX's devices",
}


def checked(values: Mapping[object, object]) -> dict[str, str]:
    """Returns the variables of a recipe as text.

    Raises:
        ValueError: a name isn't a transport's variable, or it loads code; a value isn't a text,
            number or boolean.
    """
    variables = {}
    for name, setting in values.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Z][A-Z0-9_]*", name):
            raise ValueError(f"{name!r} isn't a variable's name: write it like NCCL_DEBUG")
        if not name.startswith(PREFIXES):
            raise ValueError(
                f"{name} isn't a transport's variable; it must begin with {', '.join(PREFIXES)}"
            )
        if any(word in name for word in LOADING):
            raise ValueError(
                f"{name} names something to be loaded, which a recipe may not: set it in the shell"
            )
        if isinstance(setting, bool):
            setting = int(setting)
        if not isinstance(setting, str | int | float) or not re.fullmatch(r"[ -~]*", str(setting)):
            raise ValueError(f"{name} is {setting!r}; give a text or a number on one line")
        variables[name] = str(setting)
    return variables


def shown(wanted: Mapping[str, str]) -> str:
    """Returns the variables in effect; those of the recipe override those of the shell."""
    present = {name: (environment.variable(name), "shell") for name in SHOWN}
    present |= {name: (setting, "recipe") for name, setting in wanted.items()}
    settings = [
        f"{name}={setting} ({source})" for name, (setting, source) in present.items() if setting
    ]
    return ", ".join(settings) or "nothing set: gloo and NCCL choose"


def hints(
    wanted: Mapping[str, str],
    on_gpu: bool,
    root: Path = Path("/"),
    variable: Callable[[str], str | None] = environment.variable,
) -> list[str]:
    """Returns settings that may be useful here, a sentence each; nothing is set."""
    from hasten.machine.host import rdma_devices  # loads torch, which recipes don't need

    def setting(name: str) -> str:
        return wanted.get(name) or variable(name) or ""

    name = "NCCL_SOCKET_IFNAME" if on_gpu else "GLOO_SOCKET_IFNAME"
    net = root / "sys/class/net"
    suggestions = _about_interface(name, setting(name), interface_speeds(root), net)
    kinds = {card.name: card.kind for card in rdma_devices(root)}
    roce = [card for card, kind in kinds.items() if kind == "roce"]
    if on_gpu and kinds and setting("NCCL_IB_DISABLE") == "1":
        suggestions.append(
            f"NCCL_IB_DISABLE=1 while {', '.join(kinds)} is there: without it NCCL uses RDMA"
        )
    if on_gpu and roce and not setting("NCCL_IB_GID_INDEX"):
        suggestions.append(
            f"{', '.join(roce)} is RoCE: if NCCL finds no path, NCCL_IB_GID_INDEX names the port's "
            "address of RoCE v2 (often 3; show_gids lists them)"
        )
    return suggestions


def _about_interface(
    name: str, chosen: str, up: Mapping[str, float | None], net: Path
) -> list[str]:
    if chosen.startswith("^"):  # a list of excluded interfaces, which don't have to exist
        return []
    interfaces = sorted(path.name for path in net.iterdir()) if net.is_dir() else []
    first = chosen.lstrip("=").split(",")[0]
    if chosen and interfaces and not any(interface.startswith(first) for interface in interfaces):
        return [f"{name}={chosen}: no such interface; there are {', '.join(interfaces)}"]
    if chosen or len(up) < 2:
        return []
    listed = ", ".join(
        f"{name} {speed * 8 / 1e9:.3g} Gbit/s" if speed else name for name, speed in up.items()
    )
    return [f"several interfaces are up ({listed}): across hosts {name} should name one of them"]
