"""``hasten export``: a finished run's model as files that others load."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from hasten.cli.arguments import AsJson
from hasten.cli.output import say
from hasten.errors import FAILED, UNSAVED, InputError
from hasten.foreign_files import read_json_object
from hasten.formatting import aligned


def export(
    run: Annotated[Path, typer.Argument(help="folder of a run", metavar="RUN")],
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", help="where results go: a new or empty folder", metavar="DIR"
        ),
    ],
    weights: Annotated[
        str, typer.Option(help="weights of the run: final, average, best or checkpoint (newest)")
    ] = "final",
    to: Annotated[
        Literal["folder", "gguf"],
        typer.Option(
            "--to", help="format to write: a Hugging Face folder, or one GGUF file for llama.cpp"
        ),
    ] = "folder",
    gguf_type: Annotated[
        str | None, typer.Option(help="number format of a GGUF file: f16 (default) or q8_0")
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="write the LoRA adapter alone, not merged")
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(help="report.json of hasten speedup: its verdicts join the model card"),
    ] = None,
    push: Annotated[
        str | None, typer.Option(help="repository on the hub to upload to", metavar="OWNER/NAME")
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="upload to a repository that all can read")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Export a run's model and compare it with the trained one.

    Prints the commands of programs that serve it: Transformers, vLLM, llama.cpp.

    Exit code 4: the written files don't give the logits of the trained model.
    """
    from hasten.cli.train import warn_of_unsaved
    from hasten.models.gguf_format import GGUFType
    from hasten.release.export import WEIGHTS, Export, check_upload, serving_commands, upload
    from hasten.release.export import export as write

    _check_choice("--weights", weights, WEIGHTS)
    if gguf_type is not None:
        _check_choice("--gguf-type", gguf_type, get_args(GGUFType))
    if to != "gguf" and (gguf_type is not None or output.suffix == ".gguf"):
        name = f"-o {output}" if gguf_type is None else f"--gguf-type {gguf_type}"
        raise InputError(f"{name} is for a GGUF file: add --to gguf, and give -o a folder")
    if adapter and to == "gguf":
        raise InputError("--adapter and --to gguf exclude each other: a GGUF file is a full model")
    if push is not None:
        check_upload(push, public)
    chosen: Any = {"form": "adapter" if adapter else to}
    chosen |= {"weights": weights, "gguf_type": gguf_type or "f16"}
    request = Export(run, output, report=_report(report), **chosen)
    exported = write(request, say if not as_json else lambda text: None)
    if as_json:
        say((output / "export.json").read_text(encoding="utf-8").strip())
    else:
        say(aligned(exported.rows()))
    for problem in exported.problems:
        say(f"warning: {problem}", file=sys.stderr)
    if not exported.is_equal:
        uploaded = "" if push is None else "; nothing was uploaded"
        say(f"{output} isn't equal to the trained model{uploaded}", file=sys.stderr)
        return FAILED
    address = None if push is None else upload(output, push, is_private=not public)
    if not as_json:
        say(f"saved: {output}" + ("" if address is None else f"; uploaded: {address}"))
        for served in serving_commands(request):
            say(f"to serve it: {served}")
    warn_of_unsaved(exported.unsaved)
    return UNSAVED if exported.unsaved else 0


def _check_choice(option: str, choice: str, choices: tuple[str, ...]) -> None:
    if choice not in choices:
        raise InputError(f"{option} {choice} is unknown: choose from {', '.join(choices)}")


def _report(path: Path | None) -> dict[str, Any] | None:
    if path is None:
        return None
    content = read_json_object(path, "report.json of an experiment")
    if not isinstance(content.get("variants"), list):
        raise InputError(f"--report {path} is not the report.json of an experiment")
    return content
