"""Converts a model's folder with pickled weights to safetensors.

Older published models (``pytorch_model.bin``) and files of other trainers (``.pt``,
``.pth``) are pickles. Reading a pickle can run code. A separate process with narrow
limits (`hasten.models.pickled`) reads each file and writes it as safetensors. Nothing
in this module unpickles.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path

from safetensors import safe_open

from hasten.errors import InputError
from hasten.models.load import check_weights, read_config
from hasten.models.pickled import REFUSED, SECONDS, SECONDS_PER_GB
from hasten.models.save import appearing_at_once
from hasten.models.weights import ADAPTER, own_name

PACKAGES = Path(__file__).parents[2]  # hasten's path for the reading process
PICKLED = ("*.bin", "*.pt", "*.pth")
ADAPTER_PICKLE = "adapter_model.bin"  # peft's name
COPIED_FILES = ("*.json", "*.jinja", "*.txt", "tokenizer.model")  # other files of a model's folder
INDEXES = ("pytorch_model.bin.index.json", "model.safetensors.index.json")


def convert(source: Path, to: Path, tell: Callable[[str], None] = lambda text: None) -> int:
    """Writes ``source``, a model's folder or one pickled file, as a folder with safetensors.

    Returns the number of tensors. The folder appears under its name when all of it is there.

    Raises:
        InputError: nothing to convert, a file that holds more than weights, or no room.
    """
    files = pickled_files(source)
    with appearing_at_once(to) as folder:
        placed: dict[str, str] = {}
        total = 0
        for number, file in enumerate(files, start=1):
            name = "adapter_model" if file.name == ADAPTER_PICKLE else "model"
            if len(files) > 1:
                name += f"-{number:05d}-of-{len(files):05d}"
            out = folder / f"{name}.safetensors"
            tell(f"reading {file.name} ({number}/{len(files)}, {file.stat().st_size / 1e9:.2f} GB)")
            _read_apart(file, out)
            total += out.stat().st_size
            with safe_open(out, framework="pt") as weights:
                placed |= dict.fromkeys(weights.keys(), out.name)
        if len(files) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
            (folder / INDEXES[1]).write_text(json.dumps(index, indent=1))
        # Config, tokenizer and templates, but no code and no index of the old weights.
        others = chain.from_iterable(source.glob(pattern) for pattern in COPIED_FILES)
        for file in others if source.is_dir() else ():
            if file.is_file() and file.name not in INDEXES:
                shutil.copyfile(file, folder / file.name)
        if (folder / "config.json").is_file() and not (folder / ADAPTER).is_file():
            _check_fit(source, folder, placed, tell)
    return len(placed)


def _check_fit(
    source: Path, folder: Path, names: Iterable[str], tell: Callable[[str], None]
) -> None:
    """Raises InputError if the written weights aren't those of the config's model.

    Other programs fill what a name doesn't reach with noise.
    """
    try:
        config = read_config(str(folder))
    except InputError as error:
        tell(f"the weights' names weren't compared with a model's: {error}")
        return
    check_weights(str(source), folder, config)
    if foreign := [name for name in names if own_name(name) != name]:
        raise InputError(
            f"the weights of {source} have names of a wrapper around the model, as {foreign[0]}: "
            "save the state of the model inside it"
        )


def pickled_files(source: Path) -> list[Path]:
    """Returns the pickled weights of a folder, in order, or the single file."""
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise InputError(f"{source} doesn't exist; name a model's folder or a file of weights")
    for pattern in ("pytorch_model*.bin", ADAPTER_PICKLE, *PICKLED):
        paths = sorted(p for p in source.glob(pattern) if p.name != "training_args.bin")
        if paths:
            return paths
    raise InputError(f"{source} has no pickled weights ({', '.join(PICKLED)}): nothing to convert")


def _read_apart(file: Path, out: Path) -> None:
    """Runs the process with limits; its sentence becomes the error."""
    seconds = SECONDS + SECONDS_PER_GB * file.stat().st_size // 2**30
    paths = [str(path.resolve()) for path in (file, out)]
    command = [sys.executable, "-P", "-s", "-m", "hasten.models.pickled", *paths]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PACKAGES)}
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=environment,
            cwd="/",
            timeout=2 * seconds,
        )
    except subprocess.TimeoutExpired as error:
        raise InputError(
            f"{file} wasn't read within {2 * seconds} s: it isn't plain weights"
        ) from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        if done.returncode == REFUSED:
            raise InputError(lines[-1])
        raise InputError(
            f"reading {file} broke the limits of its process or ended with code "
            f"{done.returncode}: {lines[-1][:200]}"
        )
