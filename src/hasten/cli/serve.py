"""``hasten serve``: a run's model for clients of OpenAI's interface."""

from __future__ import annotations

import secrets
import shutil
import sys
from typing import Annotated, Literal

import typer

from hasten.cli.arguments import check_token
from hasten.cli.chat import Run, Weights
from hasten.cli.output import say
from hasten.errors import require_packages


def serve(
    run: Run,
    engine: Annotated[
        Literal["auto", "transformers", "vllm"],
        typer.Option(help="what answers; auto: vllm if it is installed"),
    ] = "auto",
    host: Annotated[
        str,
        typer.Option(help="address to listen on: any but a loopback address requires a token"),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="port to listen on; 0: any free port")
    ] = 8000,
    token: Annotated[
        str | None,
        typer.Option(help="access token: clients send it as api_key; default: none, or a new one"),
    ] = None,
    weights: Weights = "",
) -> int:
    """Serve a run's model to clients of OpenAI's interface."""
    check_token(token)
    require_packages("serve", "serve", "starlette", "uvicorn")
    from hasten.monitor.server import listen
    from hasten.release import serving
    from hasten.release.trained_model import check_template, load_run, weights_folder

    weights_folder(run, weights)
    if token is None and host not in serving.LOOPBACK:
        token = secrets.token_urlsafe(24)

    def announce() -> None:
        say(serving.address_url(host, port), flush=True)
        say(f"model: {run.name}; api_key: {token or 'any'}; Ctrl-C ends it", file=sys.stderr)

    if engine == "vllm" or (engine == "auto" and shutil.which("vllm")):
        port = serving.free_port(host, port)
        command = serving.vllm_command(run, weights, host, port)
        return serving.run_vllm(command, serving.address_url(host, port), token, announce)
    serving.check_transformers()
    listener = listen(host, port, "the server")  # taken ports are refused before the model loads
    try:
        port = listener.getsockname()[1]
        loaded = load_run(run, weights)
        check_template(loaded)
        server = serving.ModelServer(loaded, listener, host, token)
    except BaseException:
        listener.close()
        raise
    announce()
    server.run()
    return 0
