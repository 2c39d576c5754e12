"""How much of its processes' throughput each layout keeps, with two denominators.

    python benchmarks/bench_layouts.py --minutes 30 --json layouts.json
    python benchmarks/bench_layouts.py --places 2,4 --minutes 10 --json layouts.json
    python benchmarks/bench_layouts.py --table --json layouts.json        # of what is there already

On 2 and 4 processes of this machine, and on two hosts of a lab with 1 Gbit/s and 100 Mbit/s between
them (tools/netlab/README.md) where one can be made. Every process has one thread on a core of its
own (or shares one, where there are more processes than cores) and four examples of 128 tokens a
step, of a Llama of 7 M parameters or a DeepSeek-V3 of about as many; a step's examples are dealt
out as the layout does it, so that all layouts train on the same. All variants are built in the same
processes and take turns, barrier to barrier, in another order each round. Ratios are within rounds:

    alone    one process trains by itself, the others sleep: a layout's throughput divided by the
             number of processes, as a share of this
    apart    all processes train by themselves at once and exchange nothing: the throughput of all
             of them, as a share of this

The minutes are dealt evenly over the places. What a place found is written before the next one
begins; started again, it goes on where a place lacks time. A layout that can't work is named.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gloo_rank
import torch
from layouts.table import PLACES, Place, due, rows, together
from layouts.variants import Load, variants
from smoke import arguments

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from hasten.errors import InputError
from netlab import Lab

RANK = Path(__file__).parent / "layouts" / "rank.py"
STARTING = 900.0  # seconds for imports, building and a last round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="of all places together")
    parser.add_argument("--places", default=",".join(PLACES), help=f"of {', '.join(PLACES)}")
    parser.add_argument("--variants", help="comma-separated; all that the ranks allow if left out")
    parser.add_argument("--size", default="7M", choices=("7M", "tiny"))
    parser.add_argument("--examples", type=int, default=4, help="of a process and step")
    parser.add_argument("--tokens", type=int, default=128, help="of an example")
    parser.add_argument("--rounds", type=int, default=1000, help="of a sitting, at most")
    parser.add_argument("--json", type=Path, default=Path("layouts.json"))
    parser.add_argument("--table", action="store_true", help="measure nothing more")
    given = arguments(
        parser,
        minutes=0.1,
        places="2",
        size="tiny",
        examples=2,
        tokens=16,
        rounds=2,
        STARTING=300.0,
    )
    places = given.places.split(",")
    if strange := [name for name in places if name not in PLACES]:
        parser.error(f"there is no place {strange[0]!r}; it is one of {', '.join(PLACES)}")
    known = {name for place in places for name in variants(PLACES[place].world)}
    asked = given.variants.split(",") if given.variants else []
    if strange := [name for name in asked if name not in known]:
        parser.error(
            f"there is no variant {strange[0]!r} here; it is one of {', '.join(sorted(known))}"
        )
    sittings: list[dict[str, Any]] = (
        json.loads(given.json.read_text()) if given.json.exists() else []
    )
    if not given.table:
        measure(given, places, sittings)
    for name in places:
        if any(s["place"] == name for s in sittings):
            show(name, sittings)


def measure(given: argparse.Namespace, places: list[str], sittings: list[dict[str, Any]]) -> None:
    """A sitting at each place that lacks time; each is in the file before the next begins."""
    load = Load(given.size, given.examples, given.tokens)
    for name, seconds in due(sittings, places, given.minutes).items():
        print(f"{PLACES[name].said}: a sitting of {seconds:.0f} s", flush=True)
        began, before = time.monotonic(), os.getloadavg()[0]
        try:
            found = sat(PLACES[name], given, load, seconds)
        except InputError as error:
            print(f"not measured: {error}", flush=True)
            continue
        sittings.append(
            {
                "place": name,
                "seconds": time.monotonic() - began,
                "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "load_before": before,
                "cores": len(os.sched_getaffinity(0)),
                "torch": torch.__version__,
                "of_a_process": vars(load),
                "found": found,
            }
        )
        unfinished = given.json.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(sittings, indent=1))
        unfinished.replace(given.json)


def sat(place: Place, given: argparse.Namespace, load: Load, seconds: float) -> dict[str, Any]:
    """What rank 0 found."""
    names = given.variants.split(",") if given.variants else list(variants(place.world))
    spec = {"variants": names, "load": vars(load), "seconds": seconds, "rounds": given.rounds}
    lab = Lab(place.hosts, place.ranks, place.rate, mode="auto" if place.rate else "loopback")
    with tempfile.TemporaryDirectory() as folder, lab:
        told = Path(folder) / "spec.json"
        told.write_text(json.dumps(spec))
        command = [sys.executable, "-W", "ignore", str(RANK), str(told)]
        found: dict[str, Any] = gloo_rank.answer_of(lab, command, seconds + STARTING)
    return found


def show(name: str, sittings: list[dict[str, Any]]) -> None:
    place = PLACES[name]
    rounds, models = together(sittings, name)
    last = [s for s in sittings if s["place"] == name][-1]
    each = last["of_a_process"]
    print(
        f"\n{place.said}, {each['size']}, {each['examples']} x {each['tokens']} tokens a process "
        f"and step, {last['cores']} cores, torch {last['torch']}, {last['at'][:10]}\n"
    )
    print("\n".join(rows(rounds, models, place.world)))
    for variant, reason in last["found"]["skipped"].items():
        print(f"{variant}: {reason}")


if __name__ == "__main__":
    main()
