"""Where runs stand, in the text format that Prometheus reads (exposition format 0.0.4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "hasten_"
# Field of a run's standing -> what it is. Everything is a gauge: a run that starts again goes back.
HELP = {
    "step": "steps done",
    "total_steps": "steps that the run will have",
    "tokens": "tokens of all steps, no padding",
    "seconds": "seconds of all steps",
    "eta_seconds": "seconds until the last step, at the recent rate",
    "last_sign": "when the last step was noted, in seconds since 1970",
    "loss": "loss of the last step, nats",
    "held_out_loss": "loss of the last evaluation, nats",
    "tokens_per_second": "tokens per second of the last step",
    "tokens_per_second_median": "median of the last steps",
    "step_seconds_median": "median of the last steps",
    "step_spread": "median absolute deviation of the last steps / their median",
    "mfu": "model FLOPs utilisation, 0 to 1",
    "peak_memory_bytes": "highest use of the device",
    "padding_share": "share of slots that are no tokens",
    "data_stall_share": "share of the steps' time in which they waited for data",
    "exposed_communication_share": "share of the steps' time in which they waited for other ranks",
    "wire_bytes": "bytes that the first rank sent in a step",
    "expert_load_ratio": "load of the busiest expert / the mean",
    "grad_norm": "L2 norm of the gradients before clipping",
    "learning_rate": "the highest of the optimizer's groups",
    "skipped_steps": "steps whose gradients weren't finite",
    "world_size": "ranks",
    "device_utilisation": "as the driver counts it, 0 to 1",
    "device_temperature": "degrees Celsius, the hottest device",
    "device_power_watts": "all devices together",
    "device_memory_bytes": "memory in use on all devices together",
    "host_utilisation": "of the host's processors, 0 to 1",
    "host_memory_bytes": "memory in use on the host",
    "disk_free_bytes": "room left where the run writes",
    "slowest_rank_ratio": "own work of the slowest rank / the median of the others",
    "cost": "money so far, in the price's currency",
    "unreadable_lines": "lines of the run's files that were no JSON",
}


def exposition(runs: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """All runs, by name and standing; what isn't known is left out."""
    lines = []
    for field, meaning in HELP.items():
        rows = [(name, found[field]) for name, found in runs if found.get(field) is not None]
        if rows:
            lines.append(f"# HELP {PREFIX}{field} {meaning}")
            lines.append(f"# TYPE {PREFIX}{field} gauge")
            lines += [f'{PREFIX}{field}{{run="{escaped(n)}"}} {float(v)!r}' for n, v in rows]
    lines.append(f"# HELP {PREFIX}status 1 for the run's status just now")
    lines.append(f"# TYPE {PREFIX}status gauge")
    for name, found in runs:
        labels = f'run="{escaped(name)}",status="{escaped(found["status"])}"'
        lines.append(f"{PREFIX}status{{{labels}}} 1.0")
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """A label's value: backslash, quote and line feed are written with a backslash."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
