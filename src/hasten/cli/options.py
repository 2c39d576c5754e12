"""The options of ``hasten`` speedup, tune, guard, plan, launch, data, import and monitor.

The commands, and torch or numpy with them, are imported when one of them runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from hasten.cli.arguments import Overrides, RecipePath, chosen
from hasten.errors import InputError

Fresh = Annotated[bool, typer.Option("--fresh", help="measure anew, whatever was measured before")]
Write = Annotated[
    bool, typer.Option("--write", help="put what paid into the recipe; comments stay")
]
WriteTo = Annotated[
    Path | None, typer.Option("--write-to", help="the same into a new file", metavar="NEW.yaml")
]


def speedup(
    recipe: RecipePath,
    overrides: Overrides = None,
    arms: Annotated[
        Literal["plan", "ladder", "alone", "left-out", "all", "climb"],
        typer.Option(
            help="plan: baseline and plan; ladder: one technique more at a time; alone: each by "
            "itself; left-out: the plan without each; all: both; climb: one more at a time, only "
            "what pays is kept"
        ),
    ] = "plan",
    only: Annotated[
        str | None,
        typer.Option(help="arms of these techniques alone", metavar="NAME[,NAME...]"),
    ] = None,
    order: Annotated[
        Literal["slots", "gain"], typer.Option(help="in which a climb tries techniques")
    ] = "slots",
    rounds: Annotated[
        int | None,
        typer.Option(min=2, help="turns of each arm; 8, or as many as the budget allows"),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="steps of a turn")] = 4,
    warmup: Annotated[
        int, typer.Option(min=1, help="least steps before the first round; 8 more if they differ")
    ] = 2,
    budget: Annotated[
        str | None,
        typer.Option(help="what it may take: 90s, 20m, 2h; arms are left out to keep it"),
    ] = None,
    builds: Annotated[
        int | None,
        typer.Option(
            min=1, max=8, help="fresh builds of each arm, a share of rounds on each; 2 from 8 on"
        ),
    ] = None,
    noise: Annotated[
        bool | None,
        typer.Option(
            "--noise/--no-noise", help="a second baseline takes turns; on from 4 rounds on"
        ),
    ] = None,
    max_load: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="share of the machine others may use in a round that counts; 1: any"
        ),
    ] = 0.25,
    group: Annotated[
        Literal["auto", "together", "groups", "fresh"],
        typer.Option("--grouping", help="which arms are alive at once; auto: what memory holds"),
    ] = "auto",
    fresh: Fresh = False,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="write report.json here as well")
    ] = None,
    bundle: Annotated[
        Path | None, typer.Option(help="write a .zip for hasten regress here", metavar="FILE.zip")
    ] = None,
    plan: Annotated[
        str | None, typer.Option(help="a preset plan in place of the recipe's: article")
    ] = None,
    write: Write = False,
    write_to: WriteTo = None,
    guard: Annotated[
        bool, typer.Option("--guard/--no-guard", help="prove beforehand that quality is kept")
    ] = True,
    seeds: Annotated[
        int, typer.Option(min=0, help="paired trainings for techniques of other mathematics")
    ] = 0,
) -> None:
    """Measure what the recipe's techniques gain on its own job."""
    from hasten.cli.arguments import WriteBack
    from hasten.cli.speedup import SpeedupOptions
    from hasten.cli.speedup import speedup as command

    changes = [*(overrides or []), *([f"plan={plan}"] if plan is not None else [])]
    back = WriteBack(recipe, write, write_to)
    options = chosen(SpeedupOptions, locals(), grouping=group)
    code = command(recipe, changes, options, json_out, bundle, back)
    raise typer.Exit(code)


def tune(
    recipe: RecipePath,
    overrides: Overrides = None,
    study: Annotated[
        Literal["speed", "learning"],
        typer.Option(
            help="speed: techniques and their knobs; learning: learning rate, warm-up and batch, "
            "by the held-out loss of whole trainings"
        ),
    ] = "speed",
    budget: Annotated[
        str | None,
        typer.Option(
            help="what trials and duel may take: 90s, 8m, 1h30m; 8m if left out, of learning 1h"
        ),
    ] = None,
    sampler: Annotated[
        Literal["auto", "tpe", "gp", "random", "genetic", "cmaes", "bandit"],
        typer.Option(help="who proposes; auto: forecasts first, then what was learnt"),
    ] = "auto",
    objective: Annotated[
        Literal["tokens", "memory"],
        typer.Option(help="what counts: tokens per second, or peak memory"),
    ] = "tokens",
    only: Annotated[
        str | None,
        typer.Option(
            help="tune these techniques or slots alone; of learning: learning_rate, warmup, batch",
            metavar="NAME[,NAME...]",
        ),
    ] = None,
    lossy: Annotated[
        bool, typer.Option("--lossy", help="also techniques of other mathematics, behind the guard")
    ] = False,
    seeds: Annotated[
        int, typer.Option(min=1, help="paired trainings by which the guard proves a lossy winner")
    ] = 3,
    trials: Annotated[int | None, typer.Option(min=1, help="trials at most")] = None,
    steps: Annotated[int, typer.Option(min=1, help="steps of a round")] = 4,
    fresh: Fresh = False,
    output: Annotated[
        Path | None,
        typer.Option(help="the winning recipe; OUTPUT/tuned.yaml of the recipe if left out"),
    ] = None,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="write the study here as well")
    ] = None,
    write: Write = False,
    write_to: WriteTo = None,
) -> None:
    """Search for the fastest settings of a recipe on this machine, and prove them."""
    from hasten.cli.arguments import WriteBack
    from hasten.cli.tune import TuneArguments, named
    from hasten.cli.tune import tune as command

    if study == "learning":
        from hasten.cli.tune import learn
        from hasten.tune.learning_study import LearningOptions

        for option, differs in (
            ("--sampler", sampler != "auto"),
            ("--objective", objective != "tokens"),
            ("--lossy", lossy),
            ("--seeds", seeds != 3),
            ("--steps", steps != 4),
            ("--write", write or write_to is not None),
        ):
            if differs:
                raise InputError(
                    f"{option} is of the study of speed; that of learning looks at the held-out "
                    "loss alone"
                )
        options = LearningOptions(named(only), trials, fresh)
        raise typer.Exit(learn(recipe, overrides or [], budget or "1h", options, output, json_out))
    asked = chosen(TuneArguments, locals(), budget=budget or "8m")
    back = WriteBack(recipe, write, write_to)
    raise typer.Exit(command(recipe, overrides or [], asked, output, json_out, back))


def guard(
    recipe: RecipePath,
    overrides: Overrides = None,
    seeds: Annotated[
        int, typer.Option(min=0, help="paired trainings for each technique of other mathematics")
    ] = 0,
    tokens: Annotated[
        int, typer.Option(min=0, help="tokens of each such training; 0: those of 50 steps")
    ] = 0,
    margin: Annotated[
        float, typer.Option(help="by how much the held-out loss may be worse, a share")
    ] = 0.01,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="write the findings here as well")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="time for all of it: 20m, 1h30m; the rest is not tested")
    ] = None,
) -> None:
    """Prove that a recipe's techniques keep the model as good as they promise."""
    from hasten.cli.guard import guard as command

    raise typer.Exit(command(recipe, overrides or [], seeds, tokens, margin, json_out, budget))


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            help="a recipe, a preset, a config.json or its folder; or a run that is over",
            metavar="MODEL",
        ),
    ] = None,
    overrides: Overrides = None,
    cluster: Annotated[
        str, typer.Option(help="how it is wired: dgx_h100, dgx_a100, fat_tree, ethernet ...")
    ] = "single_node",
    gpu: Annotated[
        str,
        typer.Option(
            "--gpu",
            "--device",
            help="the device, or a .json file of its figures or of hasten bench",
        ),
    ] = "",
    paper: Annotated[
        bool, typer.Option("--paper", help="count a step of the recipe on that device, without it")
    ] = False,
    nodes: Annotated[int, typer.Option(help="hosts")] = 1,
    gpus_per_node: Annotated[int, typer.Option(help="devices in each")] = 8,
    memory: Annotated[
        float | None, typer.Option(help="GB of a device, where a file of hasten bench is given")
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="pretrain, full or lora; as the recipe says")
    ] = None,
    sequence: Annotated[int | None, typer.Option(min=1, help="tokens of a sequence")] = None,
    global_batch: Annotated[int | None, typer.Option(min=1, help="sequences of a step")] = None,
    tokens: Annotated[str | None, typer.Option(help="tokens in all: 500M, 1B, 14.8T")] = None,
    price: Annotated[
        Path | None, typer.Option(help="YAML with currency and per_device_hour")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="formats to look at: bf16,fp8", metavar="NAME[,NAME...]")
    ] = None,
    schedules: Annotated[
        str | None,
        typer.Option(help="pipeline schedules your software has", metavar="NAME[,NAME...]"),
    ] = None,
    lossy: Annotated[
        bool, typer.Option("--lossy", help="also formats and compression of other mathematics")
    ] = False,
    stack: Annotated[
        str | None, typer.Option(help="software whose measurements were fitted")
    ] = None,
    calibrate: Annotated[
        list[Path] | None,
        typer.Option(help="a run of twenty steps on this machine, to fit to it, repeatable"),
    ] = None,
    top: Annotated[int, typer.Option(min=1, max=50, help="layouts to show")] = 5,
    why: Annotated[
        list[str] | None,
        typer.Option(help="why not this layout, repeatable", metavar="tp=8,pp=2"),
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(help="gpu=a100, nodes=8, network=25 or 2x, repeatable", metavar="KEY=VALUE"),
    ] = None,
    gpus: Annotated[bool, typer.Option("--gpus", help="compare all known devices")] = False,
    shapes: Annotated[
        bool, typer.Option("--shapes", help="shapes of the same size that train faster")
    ] = False,
    measured: Annotated[
        Path | None, typer.Option(help="a run's folder, to set its parts against the plan's")
    ] = None,
    check_paper: Annotated[
        bool,
        typer.Option("--check-paper", help="count the layouts' memory on paper (minutes)"),
    ] = False,
    json_out: Annotated[Path | None, typer.Option("--json", help="write the plan here")] = None,
    html: Annotated[Path | None, typer.Option(help="write a page with drawings here")] = None,
    evaluate: Annotated[
        Path | None, typer.Option(help="a file of measurements, to predict each of them")
    ] = None,
) -> None:
    """Say whether a job fits, in which layout, how long it takes and what it costs."""
    from hasten.cli.plan import evaluation, step_on_paper
    from hasten.cli.plan import plan as command
    from hasten.planner.inputs import PlanOptions

    if evaluate is not None:
        evaluation(evaluate, json_out)
        return
    if paper:
        if sequence or global_batch or nodes != 1:
            raise InputError(
                "--paper counts the recipe's own step on one node: give cutoff_len=N, "
                "global_batch_size=N or nproc=N behind the recipe"
            )
        step_on_paper(model, overrides or [], gpu, json_out)
        return
    lists = {"calibrate": calibrate or [], "why": why or [], "what_if": what_if or []}
    options = chosen(PlanOptions, locals(), **lists)
    command(model, overrides or [], options, json_out, html)


def launch(
    recipe: RecipePath,
    overrides: Overrides = None,
    target: Annotated[
        str, typer.Option(help="torchrun, slurm, kubernetes, megatron or skypilot")
    ] = "torchrun",
    nodes: Annotated[int, typer.Option(help="hosts")] = 1,
    gpus_per_node: Annotated[int, typer.Option(help="devices in each, a rank for each")] = 8,
    topology: Annotated[
        str, typer.Option(help="how it is wired, as hasten plan --cluster; decides variables")
    ] = "",
    min_nodes: Annotated[
        int | None, typer.Option(help="go on with so many where some are lost; all if left out")
    ] = None,
    spot: Annotated[bool, typer.Option("--spot", help="on machines that may be taken away")] = (
        False
    ),
    output: Annotated[
        Path | None, typer.Option(help="folder for the files; launch/NAME if left out")
    ] = None,
    name: Annotated[str | None, typer.Option(help="of the job; the recipe's if left out")] = None,
    time: Annotated[str | None, typer.Option(help="the longest it may run: 90m, 24h, 7d")] = None,
    grace: Annotated[int, typer.Option(help="seconds for saving before machines go")] = 300,
    restarts: Annotated[int, typer.Option(help="times that failed ranks are started again")] = 3,
    workdir: Annotated[
        str | None, typer.Option(help="where the recipe's relative paths lie, on the nodes")
    ] = None,
    checkpoints: Annotated[
        str | None, typer.Option(help="folder of checkpoints that all nodes see")
    ] = None,
    python: Annotated[
        str | None, typer.Option(help="interpreter that has hasten, on the nodes")
    ] = None,
    hosts: Annotated[
        str | None, typer.Option(help="for torchrun: the hosts", metavar="NAME[,NAME...]")
    ] = None,
    port: Annotated[int, typer.Option(help="where ranks meet on the first host")] = 29500,
    interface: Annotated[str, typer.Option(help="network interface between nodes")] = "",
    partition: Annotated[str, typer.Option(help="of Slurm")] = "",
    account: Annotated[str, typer.Option(help="of Slurm")] = "",
    qos: Annotated[str, typer.Option(help="of Slurm")] = "",
    constraint: Annotated[str, typer.Option(help="of Slurm")] = "",
    reservation: Annotated[str, typer.Option(help="of Slurm")] = "",
    image: Annotated[str, typer.Option(help="container image (Kubernetes, SkyPilot)")] = "",
    volume: Annotated[str, typer.Option(help="claim with data and checkpoints (Kubernetes)")] = "",
    namespace: Annotated[str, typer.Option(help="of Kubernetes")] = "",
    rdma: Annotated[str, typer.Option(help="resource of RDMA cards (Kubernetes)")] = "",
    gpu: Annotated[str, typer.Option(help="the device's name (SkyPilot; for the plan)")] = "",
    plan: Annotated[
        Path | None, typer.Option(help="a file of hasten plan --json, for Megatron's layout")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print, write nothing")] = False,
    submit: Annotated[bool, typer.Option("--submit", help="start the job as well")] = False,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="run the scripts here on a tiny model first")
    ] = False,
    rate: Annotated[
        str | None, typer.Option(help="of the rehearsal's links: 1gbit; scaled if left out")
    ] = None,
) -> None:
    """Write the files that start a recipe on a cluster; nothing is submitted unless asked for."""
    from hasten.cli.launch import LaunchOptions
    from hasten.cli.launch import launch as command

    words = {"partition": partition, "account": account, "qos": qos, "constraint": constraint}
    words |= {"reservation": reservation, "namespace": namespace, "rdma": rdma}
    names = tuple(h.strip() for h in (hosts or "").split(",") if h.strip())
    asked = chosen(LaunchOptions, locals(), fewest=min_nodes, hosts=names)
    raise typer.Exit(command(recipe, overrides or [], asked, dry_run, submit, rehearse))


app = typer.Typer(help="Look at a data set, or convert it.", no_args_is_help=True)


@app.command("inspect")
def data_inspect(
    recipe: RecipePath,
    overrides: Overrides = None,
    count: Annotated[int, typer.Option(min=1, help="records to show")] = 3,
) -> None:
    """Show records as the model will see them, trained parts marked."""
    from hasten.cli.data import inspect as command

    command(recipe, overrides or [], count)


@app.command("stats")
def data_stats(
    recipe: RecipePath,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    html: Annotated[Path | None, typer.Option(help="write a page with drawings here")] = None,
) -> None:
    """Show lengths, trained share, duplicates, padding and packing of a recipe's data."""
    from hasten.cli.data import stats as command

    command(recipe, overrides or [], as_json, html)


@app.command("pack")
def data_pack(
    recipe: RecipePath,
    overrides: Overrides = None,
    output: Annotated[Path, typer.Option("--to", help="the .arrow or .parquet file to write")] = (
        Path("packed.parquet")
    ),
    row_tokens: Annotated[
        int | None, typer.Option(min=1, help="tokens of a row at most; cutoff_len if left out")
    ] = None,
    force: Annotated[bool, typer.Option(help="replace a file that exists")] = False,
) -> None:
    """Write a recipe's records as packed rows, for this or another trainer."""
    from hasten.cli.data import pack as command

    command(recipe, overrides or [], output, row_tokens, force)


@app.command("convert")
def data_convert(
    sources: Annotated[list[Path], typer.Argument(help="files or folders to read")],
    output: Annotated[Path, typer.Option("--to", help="the JSONL file to write")],
    max_rejected: Annotated[float, typer.Option(min=0, help="as in a recipe")] = 0.001,
) -> None:
    """Write records of any known shape as JSONL of messages."""
    from hasten.cli.data import convert as command

    command(sources, output, max_rejected)


def import_(
    config: Annotated[Path, typer.Argument(help="YAML or JSON of another trainer")],
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="write the recipe here; else it is shown")
    ] = None,
    nproc: Annotated[int, typer.Option(min=1, help="processes that will train")] = 1,
) -> None:
    """Turn a LLaMA-Factory, axolotl, accelerate, HF or DeepSpeed configuration into a recipe."""
    from hasten.cli.import_ import import_ as command

    command(config, overrides or [], output, nproc)


def monitor(
    places: Annotated[
        list[Path], typer.Argument(help="folders of runs, or with runs in them", metavar="RUN...")
    ],
    terminal: Annotated[bool, typer.Option(help="show it here instead of as a page")] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="where to listen; 0: any that is free")
    ] = 8470,
    host: Annotated[
        str, typer.Option(help="address to listen at; others than this one let others in")
    ] = "127.0.0.1",
    token: Annotated[
        str | None, typer.Option(help="what a reader must know; a new one if left out")
    ] = None,
    alert: Annotated[
        str | None,
        typer.Option(help='command for alerts, a list of arguments: \'["notify-send", "hasten"]\''),
    ] = None,
    stall_seconds: Annotated[
        float, typer.Option(min=1, help="alert when no step is done for so long")
    ] = 300.0,
    slow_rank: Annotated[
        float, typer.Option(min=1, help="alert when a rank takes so many times as long as others")
    ] = 1.5,
    disk_gb: Annotated[
        float, typer.Option(min=0, help="alert when less than so many GB are free")
    ] = 5.0,
) -> None:
    """Watch runs live, or look at finished ones: as a page in a browser, or in the terminal."""
    from hasten.cli.monitor import monitor as command
    from hasten.monitor.alerts import AlertLimits

    limits = AlertLimits(stall_seconds, slow_rank=slow_rank, disk_bytes=disk_gb * 1e9)
    command(places, terminal, (host, port, token), alert, limits)
