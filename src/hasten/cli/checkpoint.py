"""``hasten checkpoint``: lists, verifies and compares checkpoints; converts models' folders.

No command writes into a folder of checkpoints. ``convert`` is for pickled weights of other
programs, and for models that get sparse attention.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hasten.cli.arguments import output_option
from hasten.cli.output import say
from hasten.errors import FAILED, InputError

if TYPE_CHECKING:
    from torch import Tensor


app = typer.Typer(help="List, verify, compare or convert checkpoints.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(help="a folder of checkpoints, or one checkpoint")]
One = Annotated[Path, typer.Argument(help="one checkpoint, or a folder: its newest")]


@app.command("ls")
def ls(folder: Folder) -> None:
    """List checkpoints with size and time."""
    from hasten.parts.checkpoint.format import REASON, DamagedCheckpointError, read_manifest

    for path in _all(folder):
        when = datetime.datetime.fromtimestamp(path.stat().st_mtime).isoformat(" ", "seconds")
        try:
            manifest = read_manifest(path)
        except DamagedCheckpointError as error:
            say(f"{path.name}  DAMAGED: {error}")
            continue
        except ValueError as error:
            say(f"{path.name}  {error}")
            continue
        size = sum(entry["bytes"] for entry in manifest["files"].values())
        packed = "  packed" if manifest["packed"] else ""
        base = manifest["meta"].get("base")
        frozen = f"  without {base['weights']} frozen weights" if base else ""
        say(f"{path.name}  {size / 1e6:,.1f} MB  {when}{packed}{frozen}")
    for path in sorted(p for p in _home(folder).glob(".*-step-*") if p.is_dir()):
        if path.name[1:].partition("-")[0] in ("damaged", "aside"):
            note = path / REASON
            reason = note.read_text(encoding="utf-8").strip() if note.is_file() else ""
            say(f"{path.name}  {reason or 'of steps that the run discarded'}")


@app.command("verify")
def verify(folder: Folder) -> None:
    """Compare every byte with its hashes; exit code 4 if damaged."""
    from hasten.parts.checkpoint import verify as read_verified

    damaged = 0
    for path in _all(folder):
        try:
            read_verified(path, thorough=True)
        except ValueError as error:
            damaged += 1
            say(f"{path.name}  DAMAGED: {error}")
        else:
            say(f"{path.name}  complete")
    if damaged:
        raise typer.Exit(FAILED)


@app.command("diff")
def diff(one: One, other: One) -> None:
    """Compare two checkpoints tensor by tensor."""
    (left_path, ours, our_meta), (right_path, theirs, their_meta) = _opened(one), _opened(other)
    if our_meta.get("base") != their_meta.get("base"):
        say("base  the frozen weights differ; neither checkpoint contains them")
    equal = 0
    for name in sorted({*ours, *theirs}):  # one tensor of each at a time
        difference = _difference(ours.get(name), theirs.get(name), left_path.name, right_path.name)
        equal += not difference
        if difference:
            say(f"{name}  {difference}")
    say(f"{equal} tensors are equal bit for bit")


@app.command("convert")
def convert(
    source: Annotated[Path, typer.Argument(help="a model's folder, or a .bin, .pt or .pth file")],
    output: Annotated[Path, output_option("the folder to write")],
    to: Annotated[
        Literal["safetensors", "deepseek_v32"],
        typer.Option(help="format to write: safetensors; deepseek_v32: a V3 with new indexers"),
    ] = "safetensors",
    index_heads: Annotated[int, typer.Option(help="deepseek_v32: heads of an indexer")] = 64,
    index_width: Annotated[int, typer.Option(help="deepseek_v32: width of such a head")] = 128,
    index_topk: Annotated[int, typer.Option(help="deepseek_v32: keys for each query")] = 2048,
) -> None:
    """Write a model's folder in another format.

    A pickle is read in a process with narrow limits.
    """
    if to == "safetensors":
        from hasten.models.convert import convert as write

        count = write(source, output, say)
        say(f"{count} tensors: {output}")
        return
    from hasten.models.indexers import add_indexers

    sizes = {"heads": index_heads, "width": index_width, "topk": index_topk}
    count = add_indexers(str(source), output, **sizes, tell=say)
    say(f"{count} new tensors of indexers, which choose at random until they are trained: {output}")


def _difference(one: Tensor | None, other: Tensor | None, left_name: str, right_name: str) -> str:
    import torch

    if one is None or other is None:
        return f"only in {left_name if other is None else right_name}"
    if one.dtype != other.dtype or one.shape != other.shape:
        return f"{one.dtype} {tuple(one.shape)} and {other.dtype} {tuple(other.shape)}"
    if torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)):
        return ""
    difference: Any = (one.double() - other.double()).abs()
    count = int((difference != 0).sum())
    return f"differs by {difference.max().item():.3g} at most, in {count} of {one.numel()}"


def _all(folder: Path) -> list[Path]:
    from hasten.parts.checkpoint import MANIFEST, checkpoints

    if (folder / MANIFEST).is_file():
        return [folder]
    folders = checkpoints(_home(folder))
    if not folders:
        raise InputError(f"{folder} holds no checkpoint")
    return folders


def _home(folder: Path) -> Path:
    """Returns the folder of the checkpoints: this one, or ``checkpoints`` in a run's folder."""
    from hasten.parts.checkpoint import checkpoints

    inside = folder / "checkpoints"
    return inside if checkpoints(inside) and not checkpoints(folder) else folder


def _opened(folder: Path) -> tuple[Path, Mapping[str, Tensor], dict[str, Any]]:
    from hasten.parts.checkpoint.commit import opened, verify

    path = _all(folder)[-1]
    try:
        return path, *opened(path, verify(path))
    except ValueError as error:
        raise InputError(str(error)) from error
