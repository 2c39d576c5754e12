"""The program ``hasten``: its commands, and how errors become messages and exit codes.

A command returns its exit code, or None. It imports torch in its body, not at the head of its
file, so that ``hasten --help`` is fast. docs/reference/metrics.md lists the exit codes.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from hasten.cli.chat import chat
from hasten.cli.check import check
from hasten.cli.checkpoint import app as checkpoint_commands
from hasten.cli.data import app as data_commands
from hasten.cli.demo import demo
from hasten.cli.env import env
from hasten.cli.estimate import estimate
from hasten.cli.eval import eval_
from hasten.cli.export import export
from hasten.cli.help import HELP, CommandGroup
from hasten.cli.import_ import import_
from hasten.cli.init import init
from hasten.cli.keys import keys
from hasten.cli.launch import launch
from hasten.cli.monitor import monitor
from hasten.cli.output import dropped_output, prepare_streams, say, unwritable, was_printing
from hasten.cli.profile import profile
from hasten.cli.report import report
from hasten.cli.speedup import speedup
from hasten.cli.train import train
from hasten.cli.tune import tune
from hasten.cli.verify import verify
from hasten.errors import InputError, SameOnAllRanksError, StoppedError
from hasten.machine.environment import use_defaults, world
from hasten.machine.signals import report_stop
from hasten.version import __version__


def _leave(code: int | None, **_: Any) -> None:
    raise typer.Exit(code or 0)


app = typer.Typer(
    name="hasten",
    cls=CommandGroup,
    help="Fast training of DeepSeek-family language models, measured on your own job.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    result_callback=_leave,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        say(f"hasten {__version__}")
        raise typer.Exit


@app.callback()
def launched(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="print the version and exit"
        ),
    ] = False,
    local_rank: Annotated[
        int | None, typer.Option("--local_rank", "--local-rank", hidden=True)
    ] = None,
) -> None:
    """Fast training of DeepSeek-family language models, measured on your own job."""
    # DeepSpeed's launcher adds --local_rank=N, which repeats LOCAL_RANK.


COMMANDS: dict[str, Callable[..., int | None]] = {
    "demo": demo,
    "init": init,
    "import": import_,
    "check": check,
    "train": train,
    "export": export,
    "chat": chat,
    "eval": eval_,
    "speedup": speedup,
    "verify": verify,
    "tune": tune,
    "profile": profile,
    "report": report,
    "monitor": monitor,
    "env": env,
    "keys": keys,
    "estimate": estimate,
    "launch": launch,
}
for name, command in COMMANDS.items():
    app.command(name, rich_help_panel=HELP[name].group, epilog=HELP[name].epilog)(command)
for name, group in {"checkpoint": checkpoint_commands, "data": data_commands}.items():
    help_ = HELP[name]
    panel: dict[str, Any] = {"rich_help_panel": help_.group, "epilog": help_.epilog}
    app.add_typer(group, name=name, cls=CommandGroup, **panel)
    for subcommand in group.registered_commands:
        subcommand.epilog = HELP[f"{name} {subcommand.name}"].epilog


def run(take_signals: Callable[[], None] = lambda: None) -> None:
    """Runs the command and turns an error in the user's input into a message and exit code 2.

    Args:
        take_signals: called first; its exceptions are reported like those of the command.
    """
    use_defaults()
    prepare_streams()
    try:
        take_signals()
        command = _command_for(sys.argv[1:])
        _refuse_other_flags(command, sys.argv[1:])
        command()
    except SystemExit:
        if reason := dropped_output(sys.stdout):
            _say(unwritable(reason))
            sys.exit(1)
        raise
    except InputError as error:
        _say(error)
        sys.exit(2)
    except KeyboardInterrupt as interrupt:
        sys.exit(report_stop(interrupt))
    except StoppedError as error:
        _say(error)
        sys.exit(error.code)
    except Exception as error:
        if isinstance(error, OSError) and was_printing(error):
            _say(unwritable(error.strerror or str(error)))
            sys.exit(1)
        if not _reported_by_supervisor(error):
            raise
        sys.exit(1)
    finally:  # unwritten output, as on a full disk, would change the exit code
        for stream in (sys.stdout, sys.stderr):
            dropped_output(stream)


def _command_for(arguments: list[str]) -> Any:
    """Returns the group of all commands, or of the named one: typer takes 4 ms to read each."""
    part = copy.copy(app)
    if arguments and arguments[0] in HELP:
        part.registered_commands = [c for c in app.registered_commands if c.name == arguments[0]]
        part.registered_groups = [g for g in app.registered_groups if g.name == arguments[0]]
    return typer.main.get_command(part)


def _refuse_other_flags(command: Any, arguments: list[str]) -> None:
    """Raises InputError if ``hasten train`` gets the flags of another trainer's script."""
    if arguments[:1] != ["train"]:
        return
    options = {"--help", "-h"}
    options |= {option for p in command.commands["train"].params for option in p.opts}
    flags = [word.partition("=")[0] for word in arguments if word.startswith("--")]
    strange = [flag for flag in flags if "_" in flag and flag.replace("_", "-") not in options]
    if strange:
        unknown = ", ".join(flag for flag in flags if flag not in options)
        raise InputError(
            f"these look like another trainer's flags ({unknown}); hasten train takes a recipe: "
            "put them in a YAML file and `hasten import` it"
        )


def _say(error: Exception) -> None:
    if _reported_by_supervisor(error):
        return
    if not isinstance(error, SameOnAllRanksError) or world().is_main:
        text = " ".join(str(error).splitlines())  # a name may have line ends
        with contextlib.suppress(OSError, StoppedError):  # stderr may be a file on a full disk
            say(f"hasten: {text}", file=sys.stderr)


def _reported_by_supervisor(error: Exception) -> bool:
    """Returns True if a supervisor reports the error, once for all ranks."""
    processes = sys.modules.get("hasten.machine.processes")  # every rank imports this module
    return processes is not None and bool(processes.write_exit_reason(error))
