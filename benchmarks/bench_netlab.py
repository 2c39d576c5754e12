"""What a lab's links carry: rate over one TCP connection, and a byte's way there and back.

    python benchmarks/bench_netlab.py [--seconds 3]

The clock is of one machine; rates are of the payload, so a link full of packets of 1,500 bytes
shows some 95 % of its rate.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from smoke import arguments

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from netlab import Lab

JOBS = Path(__file__).parents[1] / "tests/common/netlab_jobs.py"
LINKS: list[tuple[str, float, int]] = [
    *(("10mbit", 0.0, 1500), ("100mbit", 0.0, 1500), ("1gbit", 0.0, 1500), ("none", 0.0, 1500)),
    *(("10mbit", 20.0, 1500), ("100mbit", 1.0, 1500), ("1gbit", 0.1, 1500), ("1gbit", 0.1, 9000)),
    ("none", 0.001, 9000),
]
MOST = 200_000_000  # bytes of one transfer


def measure(rate: str, delay_ms: float, mtu: int, seconds: float) -> tuple[float, float]:
    """Mbit/s of payload, and milliseconds there and back."""
    with Lab(2, 1, rate, delay_ms=delay_ms, mtu=mtu) as lab:
        bits = {"10mbit": 1e7, "100mbit": 1e8, "1gbit": 1e9, "none": 4e9}[rate]
        size = min(MOST, int(bits / 8 * seconds))
        command = [sys.executable, str(JOBS)]
        ping = lab.run([*command, "ping", "20"], seconds=60)
        sent = lab.run([*command, "transfer", str(size)], seconds=120)
    found = json.loads(sent[0].output)
    return 8 * found["bytes"] / found["seconds"] / 1e6, json.loads(ping[1].output)["median"] * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a transfer")
    seconds = arguments(parser, seconds=0.05).seconds
    print("| link | rate | delay, one way | MTU | Mbit/s | there and back |")
    print("|---|---|---|---|---|---|")
    for rate, delay_ms, mtu in LINKS:
        got, back = measure(rate, delay_ms, mtu, seconds)
        kind = "switch" if delay_ms else "veth"
        print(
            f"| {kind} | {rate} | {delay_ms:g} ms | {mtu} | {got:.0f} | {back:.3f} ms |", flush=True
        )


if __name__ == "__main__":
    main()
