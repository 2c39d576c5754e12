"""The command ``hasten``: parses arguments, imports the one command that is meant, sets exit codes.

Nothing here imports torch, so that ``hasten --help`` answers at once.

Exit codes are listed in docs/metrics.md; 2 is the user's to mend, 5 to 7, 75 and 130 are a run's.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from hasten.cli.arguments import Overrides, RecipePath
from hasten.cli.checkpoint import app as checkpoint
from hasten.cli.options import app as data
from hasten.cli.options import guard, import_, launch, monitor, plan, speedup, tune
from hasten.errors import INTERRUPTED, InputError, SameOnAllRanksError, StoppedError
from hasten.formatting import shown
from hasten.machine.environment import bound_compiled_products, world

STARTED = time.perf_counter()

app = typer.Typer(
    name="hasten",
    help="Fast training of DeepSeek-family language models, proven on your own job.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

app.add_typer(data, name="data")
app.add_typer(checkpoint, name="checkpoint")


@app.callback()
def launched(
    local_rank: Annotated[
        int | None, typer.Option("--local_rank", "--local-rank", hidden=True)
    ] = None,
) -> None:
    """Fast training of DeepSeek-family language models, proven on your own job."""
    # DeepSpeed's launcher puts --local_rank=N first; LOCAL_RANK says the same.


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="folder of the demo's run")] = Path("runs/demo"),
) -> None:
    """Train a small DeepSeek model with and without hasten's techniques and compare (minutes)."""
    from hasten.cli.demo import demo as command

    command(output, STARTED)


@app.command()
def init(
    model: Annotated[str, typer.Argument(help="a preset, a Hugging Face folder, or a hub name")],
    dataset: Annotated[str, typer.Argument(help="a data file or folder, stdlib, or stdlib-text")],
    recipe: Annotated[Path, typer.Option(help="the file to write")] = Path("recipe.yaml"),
) -> None:
    """Look at a model, a data set and this machine, and write a first recipe."""
    from hasten.cli.init import init as command

    command(model, dataset, recipe)


@app.command()
def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            min=0, help="restarts after a rank has died or hangs, instead of the recipe's"
        ),
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="processes on this machine, instead of the recipe's")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="gloo or nccl between ranks, instead of the recipe's")
    ] = None,
    choose_only: Annotated[
        bool,
        typer.Option("--choose-only", help="show what plan: auto chooses, and why; no training"),
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="race plans again, whatever was chosen before")
    ] = False,
) -> None:
    """Train as a recipe says."""
    from hasten.cli.train import train as command

    given = {"max_restarts": max_restarts, "nproc": nproc, "backend": backend}
    more = [f"{key}={value}" for key, value in given.items() if value is not None]
    raise typer.Exit(command(recipe, [*(overrides or []), *more], STARTED, choose_only, fresh))


app.command()(speedup)
app.command()(plan)
app.command()(tune)
app.command()(launch)
app.command()(monitor)


@app.command()
def profile(
    recipe: RecipePath,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="steps to measure")] = 8,
    output: Annotated[
        Path | None, typer.Option(help="folder to write into; the recipe's output if left out")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print profile.json")] = False,
) -> None:
    """Show where a step's time and memory go, by part, operator and owner."""
    from hasten.cli.profile import profile as command

    raise typer.Exit(command(recipe, overrides or [], steps, output, as_json))


@app.command()
def doctor(
    recipe: Annotated[
        Path | None, typer.Argument(help="the recipe, a YAML file", metavar="RECIPE")
    ] = None,
    overrides: Overrides = None,
    ds_config: Annotated[
        Path | None,
        typer.Option(help="show what becomes of each key of a ds_config.json"),
    ] = None,
    faults: Annotated[
        bool, typer.Option("--faults", help="kill, damage and resume this job, and compare")
    ] = False,
) -> None:
    """Check a recipe without training: data, model, plan, obstacles, disk."""
    if ds_config is not None:
        from hasten.cli.doctor import ds_config as show

        raise typer.Exit(show(ds_config, recipe, overrides or []))
    if recipe is None:
        raise InputError("doctor: give a recipe, or --ds-config FILE")
    if faults:
        from hasten.training.fault_test import doctor_faults

        raise typer.Exit(doctor_faults(recipe, overrides or []))
    from hasten.cli.doctor import doctor as command

    raise typer.Exit(command(recipe, overrides or []))


app.command("import")(import_)


@app.command()
def card(
    run: Annotated[Path, typer.Argument(help="the folder of a finished run")],
    report: Annotated[
        Path | None, typer.Option(help="report.json of hasten speedup: gains and verdicts join")
    ] = None,
) -> None:
    """Write a finished run's model card, README.md beside the weights."""
    from hasten.cli.report import card as command

    command(run, report)


app.command()(guard)


@app.command()
def hardware(
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    rates: Annotated[
        Path | None, typer.Option(help="a file of hasten bench, to show its rates too")
    ] = None,
    disk: Annotated[
        Path | None, typer.Option(help="a folder of the disk to measure; this one if left out")
    ] = None,
    no_measure: Annotated[
        bool, typer.Option("--no-measure", help="measure neither the disk, by 64 MiB, nor kernels")
    ] = False,
) -> None:
    """Show what this machine has: cores, memory, accelerators, disks, network, limits."""
    from hasten.cli.hardware import hardware as command

    command(as_json, rates, disk, not no_measure)


@app.command()
def bench(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="bf16, fp32, fp16, tf32 or fp8, repeatable; all if left out"),
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="about how long to measure ceilings; 0 leaves them out")
    ] = 30.0,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="write the rates here, for a recipe's ceiling")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="measure the kernels again, whatever is kept of them")
    ] = False,
) -> None:
    """Measure what kernels gain on this machine, kept for plans, and its ceilings."""
    from hasten.cli.hardware import bench as command

    command(device, dtype, seconds, json_out, fresh)


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="folders of runs, a report.json, or another trainer's trainer_state.json",
            metavar="RUN...",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Show a run's results, or compare several; of one experiment, write report.html anew."""
    from hasten.cli.report import report as command

    command(runs, as_json)


@app.command()
def regress(
    bundle: Annotated[
        Path, typer.Argument(help="a file of speedup --bundle, or an experiment's folder")
    ],
    overrides: Overrides = None,
    rounds: Annotated[
        int | None, typer.Option(min=2, help="turns of each arm; as many as then if left out")
    ] = None,
    margin: Annotated[
        float, typer.Option(help="share of a gain that may go without being called lost")
    ] = 0.02,
    output: Annotated[Path, typer.Option(help="folder of the new experiment")] = Path(
        "runs/regress"
    ),
    budget: Annotated[
        str | None, typer.Option(help="time for all of it: 20m, 1h30m; else as then")
    ] = None,
) -> None:
    """Do an experiment again on today's installation and say which switch gains less."""
    from hasten.cli.report import regress as command

    raise typer.Exit(command(bundle, overrides or [], rounds, margin, output, budget))


@app.command()
def merge(
    run: Annotated[Path, typer.Argument(help="the folder of a finished LoRA run")],
    to: Annotated[
        Path | None, typer.Option(help="folder of the full model; RUN/merged if left out")
    ] = None,
    adapter: Annotated[
        str, typer.Option(help="which of the run's folders: adapter, adapter_average or best")
    ] = "adapter",
) -> None:
    """Add a run's LoRA adapter into the full weights and save them as one model."""
    from hasten.cli.checkpoint import merge as command

    raise typer.Exit(command(run, to, adapter))


def run() -> None:
    """Run the command and turn what a user got wrong into one sentence and exit code 2."""
    bound_compiled_products()
    try:
        _refuse_other_flags(sys.argv[1:])
        app()
    except InputError as error:
        _say(error)
        sys.exit(2)
    except KeyboardInterrupt:
        print("hasten: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except StoppedError as error:
        _say(error)
        sys.exit(error.code)
    except Exception as error:
        if not _told(error):
            raise
        sys.exit(1)


def _refuse_other_flags(words: list[str]) -> None:
    """Raise InputError where ``hasten train`` is given the flags of another trainer's script."""
    if words[:1] != ["train"]:
        return
    whole: Any = typer.main.get_command(app)
    known = {option for p in whole.commands["train"].params for option in p.opts} | {"--help"}
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    strange = [flag for flag in flags if "_" in flag and flag.replace("_", "-") not in known]
    if strange:
        shown_ones = ", ".join(flag for flag in flags if flag not in known)
        raise InputError(
            f"these look like another trainer's flags ({shown_ones}); hasten train takes a recipe: "
            "put them in a YAML file and `hasten import` it"
        )


def _say(error: Exception) -> None:
    if _told(error):
        return
    if not isinstance(error, SameOnAllRanksError) or world().is_main:
        print(f"hasten: {shown(str(error))}", file=sys.stderr)


def _told(error: Exception) -> bool:
    """Whether a supervisor says it, once for all ranks."""
    processes = sys.modules.get("hasten.machine.processes")  # a rank has imported it
    return processes is not None and bool(processes.leave_words(error))
