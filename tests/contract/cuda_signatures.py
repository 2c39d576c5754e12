"""Signatures of what exists on CUDA alone, at both ends of the ranges in pyproject.toml.

They are read out of wheels, for no GPU and no second torch is at hand. A wheel of any system will
do: ``pip download torch==2.11.0 --no-deps --only-binary=:all: --platform macosx_11_0_variant64``.

    python tests/contract/cuda_signatures.py WHEEL...   # writes cuda_signatures.json anew
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("cuda_signatures.json")
# Name -> (file in the wheel, function)
PLACES = {
    "torch": {
        "varlen_attn": ("torch/nn/attention/varlen.py", "varlen_attn"),
        "_scaled_mm": ("torch/_C/_VariableFunctions.pyi", "_scaled_mm"),
        "grouped_mm": ("torch/nn/functional.py", "grouped_mm"),
    },
}


def of_wheel(path: Path) -> tuple[str, dict[str, str]]:
    """``torch 2.13.0`` and its parameters by name of the function, as text."""
    package, version = re.match(r"(\w+?)-([\d.]+)", path.name).groups()  # type: ignore[union-attr]
    found = {}
    with zipfile.ZipFile(path) as wheel:
        for name, (file, function) in PLACES[package].items():
            body: Any = ast.parse(wheel.read(file)).body
            node = next(n for n in body if getattr(n, "name", "") == function)
            found[name] = parameters(node.args)
    return f"{package} {version}", found


def parameters(arguments: ast.arguments) -> str:
    """Names, order and what may be left out; types and values don't decide whether a call fits."""
    nothing = ast.Constant(None)
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    arguments.defaults = [nothing] * len(arguments.defaults)
    arguments.kw_defaults = [d and nothing for d in arguments.kw_defaults]
    return ast.unparse(arguments)


def stand_in(written: str, heard: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """A function of this signature that hands what it was called with to ``heard``."""
    space: dict[str, Any] = {"heard": heard}
    exec(f"def function({written}): return heard(locals())", space)  # of our own file
    found: Callable[..., Any] = space["function"]
    return found


def of_installed(function: Callable[..., Any]) -> str:
    """The same text of a Python function that is here."""
    signature = inspect.signature(function)
    plain = [
        p.replace(annotation=p.empty, default=p.empty if p.default is p.empty else None)
        for p in signature.parameters.values()
    ]
    written = str(inspect.Signature(plain))[1:-1]
    return parameters(ast.parse(f"def f({written}): ...").body[0].args)  # type: ignore[attr-defined]


if __name__ == "__main__":
    told = dict(of_wheel(Path(wheel)) for wheel in sys.argv[1:])
    FILE.write_text(json.dumps(told, indent=1, sort_keys=True) + "\n")
