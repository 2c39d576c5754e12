"""A cluster on this machine, its links, and commands on its ranks: ``python tools/netlab``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).parents[1]))

from hasten.errors import InputError
from netlab import Lab, Result, RunningCommand, check
from netlab.lab import MODES, Mode

app = typer.Typer(
    name="netlab",
    help="A cluster on this machine: hosts, links with a rate, ranks.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Hosts = Annotated[int, typer.Option(min=1, help="hosts, each a network namespace")]
Ranks = Annotated[int, typer.Option(min=1, help="ranks on each host")]
Rate = Annotated[str, typer.Option(help="of each host's link, each way: 100mbit, 1gbit, none")]
Delay = Annotated[float, typer.Option(help="one way, in milliseconds")]
Loss = Annotated[float, typer.Option(help="share of packets lost")]
Mtu = Annotated[int, typer.Option(help="largest packet of a link, in bytes")]
ModeName = Annotated[str, typer.Option("--mode", help=f"auto, {', '.join(MODES)}")]
Cores = Annotated[int, typer.Option(min=0, help="cores shared by all ranks; 0: this machine's")]


def _mode(name: str) -> Mode:
    for mode in ("auto", *MODES):
        if name == mode:
            return mode
    raise InputError(f"--mode {name}: it is one of auto, {', '.join(MODES)}")


@app.command("check")
def check_command(
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Say which kinds of lab work on this machine, and what the others lack."""
    found = check()
    if as_json:
        print(json.dumps([vars(f) for f in found], indent=1))
        return
    for f in found:
        print(f"{f.mode:<9} {f.offers:<23} {'works' if f.works else f'not here: {f.reason}'}")


@app.command("rehearse")
def rehearse_command(
    path: Annotated[Path, typer.Argument(help="the recipe, a YAML file", metavar="RECIPE")],
    nodes: Annotated[int, typer.Option(help="number of hosts")] = 1,
    gpus_per_node: Annotated[int, typer.Option(help="ranks on each host")] = 1,
    cluster: Annotated[str, typer.Option(help="network of the cluster: as for estimate")] = "",
    gpu: Annotated[str, typer.Option(help="GPU model of the cluster, for the links' rate")] = "",
    rate: Annotated[str, typer.Option(help="of the links: 1gbit; default: scaled")] = "",
    output: Annotated[Path, typer.Option("-o", "--output", help="where scripts and run go")] = Path(
        "rehearsal"
    ),
) -> None:
    """Run the scripts of ``hasten launch`` here for three steps, with a tiny model."""
    from hasten.launch.cluster import CloudConfig
    from netlab.rehearsal import rehearsal

    wired = cluster or ("single_node" if nodes == 1 else "fat_tree")
    cloud = CloudConfig(nodes, gpus_per_node, wired)
    raise typer.Exit(rehearsal(path, cloud, gpu, rate, output.absolute()))


@app.command("run")
def run(
    command: Annotated[list[str], typer.Argument(help="what each rank runs, after --")],
    hosts: Hosts = 2,
    ranks: Ranks = 1,
    rate: Rate = "none",
    delay_ms: Delay = 0.0,
    loss: Loss = 0.0,
    mtu: Mtu = 1500,
    mode: ModeName = "auto",
    cores: Cores = 0,
    seconds: Annotated[float, typer.Option(min=1, help="the longest it may take")] = 3600.0,
) -> None:
    """Run a command on every rank; rank 0 speaks, and who failed is named."""
    with Lab(hosts, ranks, rate, delay_ms, loss, mtu, _mode(mode), cores or None) as lab:
        running = lab.begin(command, seconds=seconds)
        try:
            _repeat(running)
        except BaseException:
            running.end()
            raise
        results = running.wait()
        _conclude(lab, results)
    raise typer.Exit(_code(results))


def _repeat(running: RunningCommand) -> None:
    """Say what rank 0 says, as it says it."""
    path: Path = running.log(0)
    place, done = 0, False
    while not done:
        done = running.done()  # before the last look, so that nothing is missed
        if path.exists():
            with path.open("rb") as file:
                file.seek(place)
                words = file.read()
            place += len(words)
            sys.stdout.write(words.decode(errors="replace"))
            sys.stdout.flush()
        if not done:
            time.sleep(0.1)


def _conclude(lab: Lab, results: Sequence[Result]) -> None:
    for r in results:
        if r.code != 0:
            words = r.output.strip().splitlines() or [""]
            said = f": {words[-1]}" if r.rank else ""
            why = f" ({r.reason})" if r.reason else ""
            print(f"rank {r.rank} on host {r.host} ended with {r.code}{why}{said}", file=sys.stderr)
    if lab.mode == "loopback":
        return
    for host in range(lab.hosts):
        sent, received = lab.bytes(host)
        print(f"host {host}: {sent:,} bytes sent, {received:,} received", file=sys.stderr)


def _code(results: Sequence[Result]) -> int:
    """The first code of a rank that failed by itself; 1 where only signals were seen."""
    codes = [r.code for r in results if r.code != 0]
    return next((c for c in codes if c is not None and c > 0), 1 if codes else 0)


if __name__ == "__main__":
    try:
        app()
    except InputError as error:
        print(f"netlab: {error}", file=sys.stderr)
        sys.exit(2)
