"""The command ``hasten``: its commands in their order, and the exit codes.

A command returns its exit code, or None. Its file declares it and imports what it needs in its
body: nothing that ``hasten --help`` imports loads torch, so that it answers at once.

Exit codes are listed in docs/metrics.md; 2 is the user's to mend, 5 to 7, 75 and 130 are a run's.
"""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from hasten.cli.chat import chat
from hasten.cli.check import doctor
from hasten.cli.checkpoint import app as checkpoint
from hasten.cli.data import app as data
from hasten.cli.demo import demo
from hasten.cli.eval import eval_
from hasten.cli.export import export
from hasten.cli.hardware import bench, hardware
from hasten.cli.import_ import import_
from hasten.cli.init import init
from hasten.cli.launch import launch
from hasten.cli.monitor import monitor
from hasten.cli.plan import plan
from hasten.cli.profile import profile
from hasten.cli.report import regress, report
from hasten.cli.serve import serve
from hasten.cli.speedup import speedup
from hasten.cli.train import train
from hasten.cli.tune import tune
from hasten.cli.verify import verification
from hasten.errors import INTERRUPTED, InputError, SameOnAllRanksError, StoppedError
from hasten.formatting import shown
from hasten.machine.environment import bound_compiled_products, world


def _leave(code: int | None, **_: Any) -> None:
    raise typer.Exit(code or 0)


app = typer.Typer(
    name="hasten",
    help="Fast training of DeepSeek-family language models, proven on your own job.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    result_callback=_leave,
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


COMMANDS: tuple[Callable[..., int | None], ...] = (
    *(demo, init, train, speedup, plan, tune, launch, monitor, profile, doctor, import_),
    *(export, verification, hardware, bench, report, regress, chat, serve, eval_),
)
for command in COMMANDS:
    app.command(command.__name__.rstrip("_"))(command)


def run(interruptible: bool = False) -> None:
    """Runs the command and turns an error in the user's input into a sentence and exit code 2.

    Args:
        interruptible: an interrupt ends the process so far; in here it becomes exit code 130.
    """
    bound_compiled_products()
    for stream in (sys.stdout, sys.stderr):
        # Names may have bytes that aren't UTF-8, and a terminal may show ASCII alone.
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", None):
            stream.reconfigure(errors="backslashreplace")
    try:
        if interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)
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


def _refuse_other_flags(arguments: list[str]) -> None:
    """Raise InputError where ``hasten train`` is given the flags of another trainer's script."""
    if arguments[:1] != ["train"]:
        return
    command: Any = typer.main.get_command(app)
    options = {option for p in command.commands["train"].params for option in p.opts} | {"--help"}
    flags = [word.partition("=")[0] for word in arguments if word.startswith("--")]
    strange = [flag for flag in flags if "_" in flag and flag.replace("_", "-") not in options]
    if strange:
        shown_ones = ", ".join(flag for flag in flags if flag not in options)
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
    return processes is not None and bool(processes.write_exit_reason(error))
