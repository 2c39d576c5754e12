"""Formats a simulated trace as text, with its assumptions."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata

from gpu_simulation.request import RankTrace, SimulatedTrace
from gpu_simulation.roofline import (
    ATTENTION,
    FP8,
    HALF,
    HOST_CALL_SECONDS,
    LAUNCH_SECONDS,
    MEMORY_SHARE,
    SINGLE,
    SimulatedDevice,
)
from hasten.core.timing import BACKWARD, BETWEEN, FORWARD, OPTIMIZER

PARTS = (FORWARD, BACKWARD, OPTIMIZER, BETWEEN)
OPERATORS, LINES = 12, 12  # that are shown
QUANTITIES = ("calls", "launches", "bytes", "flops", "seconds")


def table(trace: SimulatedTrace, name: str, cutoff_len: int) -> str:
    """The text that `python tools/gpu_simulation` prints."""
    first, device = trace.ranks[0], trace.device
    syncs = sorted(first.by_name("syncs").items(), key=lambda item: -item[1])[:LINES]
    ranks = f", {len(trace.ranks)} ranks" if len(trace.ranks) > 1 else ""
    blocks = [
        f"{name} by simulation, {device.name}{ranks}: counted without a GPU, nothing was measured",
        f"{first.layers} layers, {first.passes} passes a step on each rank, {trace.tokens:,.0f} "
        f"tokens a step, every example {cutoff_len:,} tokens long",
        f"plan: {', '.join(first.plan) or 'none'}",
        "",
        _parts(first),
        "",
        _verdict(trace),
        "",
        f"the host waits for the device (syncs), of {first.total('syncs'):.0f}:",
        "\n".join(f"{count:5.0f} x {where}" for where, count in syncs) or "  none",
        "",
        "operators by time by simulation:",
        _operators(first),
    ]
    if first.messages:
        blocks += ["", "messages of a rank, from its own device:"]
        messages = sorted(first.messages, key=lambda message: -message[3])
        blocks += [f"{size / 1e6:10,.2f} MB {name} {where}" for name, _, where, size in messages]
    blocks += ["", "assumed: " + "; ".join(assumptions(device))]
    return "\n".join(blocks)


def assumptions(device: SimulatedDevice) -> list[str]:
    """The assumptions behind the seconds."""
    tera = {unit: f"{rate / 1e12:.0f}" for unit, rate in device.rates.items()}
    return [
        f"products at {tera[HALF]} TFLOP/s in bf16, {tera[FP8]} in float8, {tera[SINGLE]} in "
        f"float32, attention at {tera[ATTENTION]}",
        f"memory at {device.memory_rate / 1e12:.2f} TB/s ({MEMORY_SHARE:.0%} of the datasheet), "
        "each operand read and written once",
        f"{LAUNCH_SECONDS * 1e6:g} us for the smallest kernel, {HOST_CALL_SECONDS * 1e6:g} us of "
        "Python for an operator",
        "time between ranks, compiled graphs and fragmentation of memory aren't counted, so "
        "tokens/s are an upper bound and the peak a lower one",
        "as if Triton is installed; experts are evenly loaded",
        f"torch {metadata.version('torch')}; {device.source}",
    ]


def _parts(rank: RankTrace) -> str:
    rows = [["part", "operators", "launches", "syncs", "GB moved", "TFLOP", "ms by simulation"]]
    for part in (*PARTS, None):
        rows.append(
            [
                part or "step",
                f"{rank.total('calls', part):,.0f}",
                f"{rank.total('launches', part):,.0f}",
                f"{rank.total('syncs', part):,.0f}",
                f"{rank.total('bytes', part) / 1e9:,.2f}",
                f"{rank.total('flops', part) / 1e12:,.2f}",
                f"{1e3 * rank.total('seconds', part):,.2f}",
            ]
        )
    return _columns(rows)


def _verdict(trace: SimulatedTrace) -> str:
    device, first = trace.device, trace.ranks[0]
    peak, between = max(r.peak_bytes for r in trace.ranks), first.total("between_steps")
    room = device.memory_bytes - peak
    fits = f"{room / 1e9:.1f} GB are left" if room >= 0 else f"{-room / 1e9:.1f} GB are missing"
    slower = "host" if first.host_seconds > first.device_seconds else "device"
    memory = (
        f"memory: peak {peak / 1e9:.2f} GB of live tensors, {between / 1e9:.2f} GB between steps; "
        f"a program may take {device.memory_bytes / 1e9:.1f} GB, {fits}"
    )
    time = (
        f"time: device {1e3 * first.device_seconds:,.2f} ms, host "
        f"{1e3 * first.host_seconds:,.2f} ms (the {slower} decides): at most "
        f"{trace.tokens / trace.step_seconds:,.0f} tokens/s, MFU {trace.mfu:.1%}"
    )
    return f"{memory}\n{time}"


def _operators(rank: RankTrace) -> str:
    values = {quantity: rank.by_name(quantity) for quantity in QUANTITIES}
    seconds = values["seconds"]
    rows = [["  operator", "calls", "launches", "GB", "TFLOP", "ms", "share"]]
    for name in sorted(seconds, key=lambda n: -seconds[n])[:OPERATORS]:
        rows.append(
            [
                f"  {name}",
                f"{values['calls'].get(name, 0):,.0f}",
                f"{values['launches'].get(name, 0):,.0f}",
                f"{values['bytes'].get(name, 0) / 1e9:,.2f}",
                f"{values['flops'].get(name, 0) / 1e12:,.2f}",
                f"{1e3 * seconds[name]:,.2f}",
                f"{seconds[name] / rank.device_seconds:.1%}",
            ]
        )
    return _columns(rows)


def _columns(rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        first, *others = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
