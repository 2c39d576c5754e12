"""Exceptions for users: what is wrong, where, and what to do.

The command line prints only their text, without a traceback, and ends with exit code 2. Parts can
be used in any training loop, so they raise plain ValueError.
"""

import importlib.util
import math
import numbers
from collections.abc import Iterator
from contextlib import contextmanager

# Packages that pip installs for each extra of pyproject.toml. Messages don't name the project
# itself, because another project may have its name on the index.
EXTRAS = {
    "hub": "'datasets>=4.7,<6'",
    "deepspeed": "'deepspeed>=0.19,<0.20' ninja",
    "gguf": "'gguf>=0.17,<1'",
    "monitor": "'starlette>=0.45' 'uvicorn>=0.34'",
    "eval": "'lm-eval>=0.4.9'",
    "tensorboard": "'tensorboard>=2.19'",
    "wandb": "'wandb>=0.19'",
    "mlflow": "'mlflow-skinny>=2.20' 'sqlalchemy>=2' 'alembic>=1.13' 'cryptography>=43'",
}


def pip_install(extra: str) -> str:
    """Returns the command that installs the packages of an extra."""
    return f"pip install {EXTRAS[extra]}"


def require_packages(user: str, extra: str, *packages: str, instead: str = "") -> None:
    """Raises InputError if packages of an extra that ``user`` needs aren't installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"{user} needs {' and '.join(missing)}: {pip_install(extra)}{instead}")


def require_real(**settings: object) -> None:
    """Raises ValueError if a setting is no number; NaN and truth values are none."""
    for name, number in settings.items():
        if isinstance(number, bool) or not isinstance(number, numbers.Real) or math.isnan(number):
            raise ValueError(f"{name} is {number!r}; give a number")


def require_whole(**settings: object) -> None:
    """Raises ValueError if a setting is no whole number; truth values are none."""
    for name, number in settings.items():
        if isinstance(number, bool) or not isinstance(number, numbers.Integral):
            raise ValueError(f"{name} is {number!r}; give a whole number")


# Exit codes of the command line besides 0, 1 and 2 (docs/reference/metrics.md).
UNSAVED = 1  # weights are saved, but another part couldn't be
FAILED = 4
LEFT = 75  # EX_TEMPFAIL of sysexits.h: the run can be resumed
INTERRUPTED = 130


class InputError(ValueError):
    """User input can't be used; the message is one sentence of advice."""


@contextmanager
def as_input_error(where: str, advice: str = "") -> Iterator[None]:
    """Turns a part's ValueError into an InputError.

    Args:
        where: begins the sentence: a technique, or a key.
        advice: ends it.
    """
    try:
        yield
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{where}: {error}{advice}") from error


class SameOnAllRanksError(InputError):
    """An error that is the same on every rank; only the first one reports it."""


def is_panic(error: BaseException) -> bool:
    """Returns True for the panic of a library in Rust, which no ``except Exception`` catches."""
    return type(error).__name__ == "PanicException"


class StoppedError(RuntimeError):
    """A run was ended on purpose, because continuing is useless; ``code``: exit code.

    The message is one sentence: what happened, at which step, and what to do.
    """

    code = 1
