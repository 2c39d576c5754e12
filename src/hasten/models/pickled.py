"""Converts one pickled file of weights to safetensors, in a restricted process.

`hasten.models.convert` runs it as ``python -m hasten.models.pickled FILE OUT``.
torch.load with ``weights_only`` builds tensors and plain containers and refuses
everything else. If that protection ever fails, this process still has limits. They
cover memory, time, file size and open files. It has nothing of the caller's
environment.
"""

from __future__ import annotations

import re
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REFUSED = 3  # exit code; the reason is the last line of stderr
AROUND = ("state_dict", "model", "module")  # keys under which trainers store the weights
# Prefixes of torch's wrappers: torch.compile, FSDP and recomputation at any depth. ``module.`` of
# data parallelism may be a model's own, so it is removed only if all names have it.
INNER = re.compile(r"(?:^|(?<=\.))_(?:orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)\.")
OUTER = "module."
LIBRARIES = 12 * 2**30  # address space that torch reserves at its start
SECONDS, SECONDS_PER_GB = 120, 30


class Refusal(Exception):  # noqa: N818  # it is an answer, not a fault of the program
    """The reason why this file isn't read, in one sentence."""


def main(file: Path, out: Path) -> int:
    size = file.stat().st_size
    limit(size)
    import torch
    from safetensors.torch import save_file

    try:
        # torch.save never compresses, and a compressed archive has no limit of its size.
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                unfolded = sum(entry.file_size for entry in archive.infolist())
            if unfolded > size:
                raise Refusal(
                    f"{file} unfolds to more bytes than it has, which torch.save never writes"
                )
        try:
            content = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise Refusal(f"{file} isn't weights alone, or is damaged: {lines[0][:200]}") from error
        tensors = unwrapped(weights_of(content, file), file)
        # Copied, because a pickle's tensors may share memory.
        save_file({n: t.contiguous().clone() for n, t in tensors.items()}, out, {"format": "pt"})
    except Refusal as refusal:
        print(refusal, file=sys.stderr)
        return REFUSED
    return 0


def limit(size: int) -> None:
    """Limits the memory, time and files of this process, by the size of the input file."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    seconds = SECONDS + SECONDS_PER_GB * size // 2**30
    for kind, most in (
        (resource.RLIMIT_AS, LIBRARIES + 4 * size),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, 2 * size + 2**20),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (allowed, allowed))


def weights_of(content: Any, file: Path) -> Mapping[str, Any]:
    """Returns the mapping of names to tensors, under a usual key or directly."""
    import torch

    for _ in range(len(AROUND) + 1):
        if isinstance(content, Mapping) and content:
            names = [str(name) for name in content]
            if all(isinstance(tensor, torch.Tensor) for tensor in content.values()):
                return {str(name): tensor for name, tensor in content.items()}
            inner = next((content[n] for n in AROUND if isinstance(content.get(n), Mapping)), None)
            if inner is not None:
                content = inner
                continue
            raise Refusal(f"{file} holds {', '.join(names[:5])}, and no weights by name")
        break
    raise Refusal(f"{file} holds a {type(content).__name__}, not weights by name")


def unwrapped(tensors: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
    """Returns the tensors by their names without torch's wrappers."""
    names = [INNER.sub("", name) for name in tensors]
    while all(name.startswith(OUTER) for name in names):
        names = [name.removeprefix(OUTER) for name in names]
    if len(set(names)) < len(names):
        raise Refusal(f"{file} holds {max(names, key=names.count)} twice, with a wrapper's name")
    return dict(zip(names, tensors.values(), strict=True))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
