"""What keeping ranks together costs over a slow link, and what it does to the loss.

    python benchmarks/bench_communication.py speed --rate 100mbit --json speed.json
    python benchmarks/bench_communication.py speed --rate 10mbit --delay-ms 20 --methods
    apart,diloco:50 python benchmarks/bench_communication.py loss --seeds 3 --steps 1000 --jsonl
    loss.jsonl --minutes 60 python benchmarks/bench_communication.py table --minutes 25 --json
    table.json

Two hosts of a lab (tools/netlab/README.md) with a rank each on a core of its own, a Llama of 10.8 M
parameters over bytes, 3 x 256 per rank and step (``--rows``), AdamW, bf16 autocast, layers and
attention fused.

``speed`` takes turns between all methods in the same processes, barrier to barrier, in another
order each round. It has two denominators: ``apart`` (the ranks compute at the same time and
exchange nothing) and ``alone`` (one rank computes, the other sleeps). Shares are medians over
rounds of the ratio within a round. ``table`` does so on all links of ``communication/links.py``, in
short sittings whose rounds are kept in the file: started again, it goes on until the minutes are
used.

``loss`` trains each method whole on a link without a limit, since mathematics doesn't depend on it,
and compares the eval loss with DDP's of the same seed. ``again`` is DDP from weights that
differ in the sixth digit: what two runs of the same method differ by. A line is written per run,
and runs that are in the file already aren't repeated. No run begins after ``--minutes``. The runs
of a seed come one after the other, so that seeds are paired wherever it is cut off.

The text is Python's own library, the same bytes for the same Python; ``--text`` takes another file.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gloo_rank
from communication import links
from smoke import arguments

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from hasten.measure.statistics import student_quantile
from netlab import Lab

RANK = Path(__file__).parent / "communication" / "rank.py"
SPEED = "apart,alone,ddp,half,int8,int4,powersgd:16,topk:0.05,diloco:20,stream"
LOSS = (
    "ddp,again,stream:4,stream:3,signs:4,half,bf16,int8,int4,powersgd:16,powersgd:4,topk:0.05,"
    "topk_dense:0.05,stream:14,diloco:20,diloco:50"
)
SLOW = {"ddp": 3, "half": 3, "int8": 5}  # steps of a turn over a slow link


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="?", default="speed", choices=("speed", "loss", "table"))
    parser.add_argument(
        "--methods", help="comma-separated, see benchmarks/communication/methods.py"
    )
    parser.add_argument("--size", default="10M", choices=("10M", "3M", "tiny"))
    parser.add_argument("--text", type=Path)
    parser.add_argument("--rate", default="100mbit", help="of the link, or none")
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--mtu", type=int, default=1500)
    parser.add_argument("--rows", type=int, default=3, help="examples of a rank's step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block", type=int, default=20, help="steps of a turn")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--minutes", type=float, help="table: 25 in all; loss: no limit")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--jsonl", type=Path, default=Path("communication_loss.jsonl"))
    small = {"rounds": 1, "block": 3, "seeds": 1, "steps": 12, "minutes": 0.1}
    given = arguments(
        parser, size="tiny", rate="1gbit", rows=1, methods="apart,alone,ddp,int8,diloco:2", **small
    )
    if given.minutes is None:
        given.minutes = 25.0 if given.what == "table" else float("inf")
    doing = {"speed": speed, "loss": losses, "table": tables}[given.what]
    with tempfile.TemporaryDirectory() as folder:
        text = given.text or library(Path(folder) / "text")
        doing(given, text, Path(folder))


def library(place: Path, most: int = 8_000_000) -> Path:
    """Python's own modules one after the other."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    files += sorted(Path(sysconfig.get_path("stdlib")).glob("[a-l]*/*.py"))
    place.write_bytes(b"".join(f.read_bytes() for f in files)[:most])
    return place


def on_ranks(lab: Lab, what: str, spec: dict[str, Any], folder: Path, seconds: float) -> Any:
    """What rank 0 found."""
    place = folder / "spec.json"
    place.write_text(json.dumps(spec))
    command = [sys.executable, "-W", "ignore", str(RANK), what, str(place)]
    return gloo_rank.answer_of(lab, command, seconds)


def speed(given: argparse.Namespace, text: Path, folder: Path) -> None:
    names = (given.methods or SPEED).split(",")
    slow = given.rate not in ("none", "1gbit")
    spec = {
        "methods": names,
        "size": given.size,
        "rows": given.rows,
        "text": str(text),
        "rounds": given.rounds,
        "block": given.block,
        "steps": {n: min(SLOW[n], given.block) for n in names if slow and n in SLOW},
    }
    link = None if given.rate == "none" else given.rate
    with Lab(2, 1, link, delay_ms=given.delay_ms, mtu=given.mtu) as lab:
        found = on_ranks(lab, "speed", spec, folder, 3600)
    if given.json:
        given.json.write_text(json.dumps({**vars_of(given), "found": found}, indent=1))
    print(
        f"\n{given.size}, {given.rows} x 256, {given.rate}, {given.delay_ms:g} ms, "
        f"MTU {given.mtu}, 2 hosts x 1 rank\n"
    )
    print("\n".join(links.rows(found)))


def tables(given: argparse.Namespace, text: Path, folder: Path) -> None:
    """Sittings over all links until their minutes are used, then a table for each."""
    place = given.json or Path("communication_table.json")
    sittings: list[dict[str, Any]] = json.loads(place.read_text()) if place.exists() else []
    mine = {k: getattr(given, k) for k in ("size", "rows", "mtu", "block")}
    if any({k: sitting[k] for k in mine} != mine for sitting in sittings):
        raise SystemExit(f"{place} has sittings with other settings than {mine}: name another file")
    while (chosen := links.next_link(sittings, given.minutes)) is not None:
        name, seconds = chosen
        link = links.LINKS[name]
        note = {
            "link": name,
            "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "load_before": os.getloadavg()[0],
            "cores": len(os.sched_getaffinity(0)),
            **mine,
        }
        spec = {
            "methods": list(link.methods),
            "size": given.size,
            "rows": given.rows,
            "text": str(text),
            "rounds": 1 if given.smoke else 1000,
            "block": given.block,
            "steps": {n: min(count, given.block) for n, count in link.steps.items()},
            "seconds": max(seconds / 2, seconds - 60),  # the rest is the start of the ranks
        }
        print(f"{name}: a sitting of {seconds:.0f} s", flush=True)
        began = time.monotonic()
        with Lab(2, 1, link.rate, delay_ms=link.delay_ms, mtu=given.mtu) as lab:
            found = on_ranks(lab, "speed", spec, folder, seconds + 1800)
        sittings.append({**note, "seconds": time.monotonic() - began, "found": found})
        unfinished = place.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(sittings, indent=1))
        unfinished.replace(place)
    for name in links.LINKS:
        cores = sorted({s["cores"] for s in sittings if s["link"] == name})
        print(
            f"\n{name}, {given.size}, {given.rows} x 256, MTU {given.mtu}, 2 hosts x 1 rank, "
            f"cores: {cores}\n"
        )
        print("\n".join(links.rows(links.together(sittings, name))))
        for sitting in sittings:
            for method, row in sitting["found"].items() if sitting["link"] == name else ():
                if "fragments" in row:
                    print(f"{method}: fragments: {row['fragments']}")


def losses(given: argparse.Namespace, text: Path, folder: Path) -> None:
    names = (given.methods or LOSS).split(",")
    names = names if "ddp" in names else ["ddp", *names]
    done, end = read(given.jsonl), time.monotonic() + 60 * given.minutes
    same = {"size": given.size, "rows": given.rows, "steps": given.steps}
    same["rate"] = given.learning_rate
    runs = [{"method": n, "seed": s, **same} for s in range(given.seeds) for n in names]
    missing = [run for run in runs if key(run) not in done]
    print(f"{len(runs) - len(missing)} of {len(runs)} runs are in {given.jsonl}", flush=True)
    with Lab(2, 1, mode="loopback") as lab:
        for count, run in enumerate(missing):
            if time.monotonic() > end:
                break
            found = on_ranks(lab, "loss", {**run, "text": str(text)}, folder, 24 * 3600)
            done[key(run)] = {**run, **found}
            with given.jsonl.open("a") as lines:
                lines.write(json.dumps(done[key(run)]) + "\n")
            hours = (len(missing) - count - 1) * found["seconds"] / 3600
            print(f"{json.dumps(done[key(run)])}; {hours:.1f} h to go at this pace", flush=True)
    table([done[key(run)] for run in runs if key(run) in done], names, given.seeds)


def key(run: dict[str, Any]) -> str:
    return " ".join(f"{run[k]}" for k in ("method", "seed", "size", "rows", "steps", "rate"))


def read(place: Path) -> dict[str, dict[str, Any]]:
    """Runs that have been done; a line that was cut off is done again."""
    found = {}
    for line in place.read_text().splitlines() if place.exists() else ():
        try:
            run = json.loads(line)
        except ValueError:
            continue
        found[key(run)] = run
    return found


def table(runs: Iterable[dict[str, Any]], names: list[str], seeds: int) -> None:
    """Loss against DDP's of the same seed, in percent; every seed is shown."""
    by = {(r["method"], r["seed"]): r for r in runs}
    print("\n| method | mean loss | against DDP, mean and 95 % | every seed | same on all ranks |")
    print("|---|---|---|---|---|")
    for name in names:
        found = [by[name, s] for s in range(seeds) if (name, s) in by and ("ddp", s) in by]
        if not found:
            continue
        gaps = [100 * (r["loss"] / by["ddp", r["seed"]]["loss"] - 1) for r in found]
        wide = ""
        if len(gaps) > 1:
            error = statistics.stdev(gaps) / len(gaps) ** 0.5
            wide = f" ± {student_quantile(0.975, len(gaps) - 1) * error:.2f}"
        mean = statistics.mean(r["loss"] for r in found)
        each = ", ".join(f"{g:+.2f}" for g in gaps)
        same = "yes" if all(r["same_on_all_ranks"] for r in found) else "NO"
        print(f"| {name} | {mean:.4f} | {statistics.mean(gaps):+.2f} %{wide} | {each} | {same} |")


def vars_of(given: argparse.Namespace) -> dict[str, Any]:
    return {k: str(v) if isinstance(v, Path) else v for k, v in vars(given).items()}


if __name__ == "__main__":
    main()
