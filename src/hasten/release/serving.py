"""A run's model behind OpenAI's HTTP interface, by the server of transformers or by vLLM.

    transformers: the handlers of ``transformers serve`` in this process, on the loaded model with
        the run's adapter and exact tokenizer. Its own loader would replace both.
    vLLM: ``vllm serve`` as a child process on the saved weights or adapter.

    POST /v1/chat/completions, /v1/completions   whole or streamed, by the handlers
    GET  /v1/models, /health

All other routes of their servers stay closed: they load any model, or unload this one. Requests
pass `CheckedAccess` first. Interface: https://platform.openai.com/docs/api-reference.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from hasten.errors import InputError, require_packages
from hasten.foreign_files import parse_json, read_json_object
from hasten.machine.environment import child_environment
from hasten.models.load import quiet, read_config
from hasten.models.presets import PRESETS
from hasten.models.weights import ADAPTER
from hasten.monitor.server import (
    App,
    CheckedServer,
    Receive,
    Scope,
    Send,
    bearer_tokens,
    is_same_origin,
    is_token,
    listen,
    names_for,
    names_this_server,
    url_of,
)
from hasten.release.trained_model import (
    LoadedModel,
    adapter_base,
    check_adapter_base,
    recipe_of,
    weights_folder,
)

STARTING_SECONDS = 1800.0  # vLLM compiles and loads before it answers
LOOPBACK = ("127.0.0.1", "::1", "localhost")
LARGEST_REQUEST = 8 << 20  # bytes
REQUEST_SECONDS = 30.0  # for a client to send its request whole
NEW_TOKENS = 1024  # where a request names no number, as in the server of transformers
LIMITS = ("max_completion_tokens", "max_tokens")
# The handlers ignore these fields, compute something else for them, or complete a text after
# its suffix. A generation_config would replace the model's, without its end of a text. Each has
# the value with which it changes nothing.
UNSUPPORTED: dict[str, Any] = {
    **dict.fromkeys(("n", "best_of"), 1),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), 0),
    **dict.fromkeys(("logprobs", "echo"), False),
    "suffix": "",
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    **dict.fromkeys(("top_logprobs", "functions", "function_call", "audio", "prediction"), None),
    **dict.fromkeys(("reasoning_effort", "verbosity", "web_search_options", "moderation"), None),
    "generation_config": None,
}


def address_url(host: str, port: int) -> str:
    """The base address for OpenAI's clients."""
    return f"{url_of(host, port)}/v1"


class CheckedAccess:
    """An application that answers requests with the token, under its own name, of its own origin.

    Without a token, on loopback, the Host and Origin headers keep other pages' scripts away.
    """

    def __init__(self, app: App, token: str | None, names: frozenset[str]) -> None:
        self._app, self._token, self._names = app, token, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(scope["headers"])):
            await error_response(*refusal)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, headers: list[tuple[bytes, bytes]]) -> tuple[int, str] | None:
        if not names_this_server(headers, self._names):
            return 421, "this name is not the server's; use the address that it printed"
        if not is_same_origin(headers):
            return 403, "pages of other origins are refused"
        if self._token is None:
            return None
        if any(is_token(word, self._token) for word in bearer_tokens(headers)):
            return None
        return 401, "the token is missing or wrong; give it to the client as api_key"


def error_response(status: int, message: str) -> Response:
    """An error in the form that OpenAI's clients read."""
    message = message.encode(errors="backslashreplace").decode()  # half a surrogate pair
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status)


def application(loaded: LoadedModel) -> Starlette:
    """The four routes over a loaded model, answered by transformers' handlers.

    Raises:
        InputError: a package that the handlers need is missing, or transformers has other ones.
    """
    check_transformers()
    try:
        from transformers.cli.serving.chat_completion import ChatCompletionHandler
        from transformers.cli.serving.completion import CompletionHandler
        from transformers.cli.serving.model_manager import ModelManager, TimedModel
        from transformers.cli.serving.utils import GenerationState

        manager = ModelManager(model_timeout=-1)
        key = manager.process_model_name(loaded.name)
        manager.loaded_models[key] = TimedModel(loaded.model, -1, loaded.tokenizer)
        manager.force_model = loaded.name
        state = GenerationState()
        chat = ChatCompletionHandler(manager, state, chat_template_kwargs={})
        completion = CompletionHandler(manager, state)
    except (ImportError, TypeError, AttributeError) as error:
        raise InputError(
            f"the installed transformers has another form of its server ({error}): install the "
            "version in the constraints file"
        ) from error

    def answered_by(handler: Any, source: str) -> Callable[[Request], Any]:
        follow_openai(handler)

        async def respond(request: Request) -> Response:
            try:
                body = supported_fields(await request_body(request), source, loaded.name)
                limit_new_tokens(body, loaded, len(prompt_of(handler, body, loaded.tokenizer)))
                if (seed := body.pop("seed", None)) is not None:
                    # In the queue, directly before its answer: not during another's.
                    state.get_manager(key).submit(torch.manual_seed, seed)
                response: Response = await handler.handle_request(body, uuid.uuid4().hex)
            except InputError as error:
                return error_response(400, str(error))
            except HTTPException as error:  # FastAPI's is one
                return error_response(error.status_code, str(error.detail))
            except Exception as error:  # of a library, for whatever a client sends
                return error_response(400, f"{type(error).__name__}: {error}")
            return openai_answer(response, loaded.name, body.get("stop", []))

        return respond

    async def models(request: Request) -> Response:
        entry = {"id": loaded.name, "object": "model", "created": 0, "owned_by": "hasten"}
        return JSONResponse({"object": "list", "data": [entry]})

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", answered_by(chat, "messages"), methods=["POST"]),
            Route("/v1/completions", answered_by(completion, "prompt"), methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
        ]
    )
    app.router.redirect_slashes = False
    return app


def follow_openai(handler: Any) -> None:
    """Changes a handler where it departs from OpenAI's interface without an error.

    A temperature above 0 samples, also from a model with a greedy default. The text next to tool
    calls stays in a conversation.
    """
    build, convert = handler._build_generation_config, handler.get_processor_inputs_from_messages

    def config_of(body: dict[str, Any], usual: Any, use_cb: bool = False) -> Any:
        config = build(body, usual, use_cb=use_cb)
        if body.get("temperature"):
            config.do_sample, config.top_k = True, 0
        return config

    def turns_of(messages: list[dict[str, Any]], modality: Any) -> Any:
        turns = convert(messages, modality)
        for turn, message in zip(turns, messages, strict=True):
            if "tool_calls" in message:
                text = {"role": message["role"], "content": message.get("content")}
                turn["content"] = convert([text], modality)[0]["content"]
        return turns

    handler._build_generation_config = config_of
    handler.get_processor_inputs_from_messages = turns_of


def prompt_of(handler: Any, body: dict[str, Any], tokenizer: Any) -> list[int]:
    """The tokens of a request's prompt, as its handler computes them."""
    from transformers.cli.serving.utils import Modality

    if "prompt" in body:
        return list(tokenizer(body["prompt"])["input_ids"])
    options = body.get("chat_template_kwargs", {})
    # The library's own options would replace the template, or cut the conversation.
    if taken := sorted(
        inspect.signature(tokenizer.apply_chat_template).parameters.keys() & options
    ):
        raise InputError(f"chat_template_kwargs takes variables of the template, not {taken[0]}")
    rendered = tokenizer.apply_chat_template(
        handler.get_processor_inputs_from_messages(body["messages"], Modality.LLM),
        add_generation_prompt=True,
        tools=body.get("tools"),
        return_dict=True,
        **options,
    )
    return list(rendered["input_ids"])


async def request_body(request: Request) -> dict[str, Any]:
    """The JSON object of a request.

    Raises:
        HTTPException: it is too large or too slow.
        InputError: it is something else.
    """
    received = bytearray()
    try:
        async with asyncio.timeout(REQUEST_SECONDS):
            async for chunk in request.stream():
                received += chunk
                if len(received) > LARGEST_REQUEST:
                    most = f"{LARGEST_REQUEST >> 20} MiB"
                    raise HTTPException(413, f"the request is larger than {most}")
    except TimeoutError as error:
        late = f"the request wasn't whole after {REQUEST_SECONDS:.0f} s"
        raise HTTPException(408, late) from error
    body = parse_json(bytes(received), "the request")
    if not isinstance(body, dict):
        raise InputError("the request must be a JSON object")
    return body


def supported_fields(body: dict[str, Any], source: str, model: str) -> dict[str, Any]:
    """The fields of a request that change its answer.

    Args:
        source: the field that holds the prompt.
        model: the name of the only one.

    Raises:
        HTTPException: another model is named.
        InputError: a field that the server can't follow, or a value that it can't have.
    """
    body = {name: value for name, value in body.items() if value is not None}
    if body.get("model", model) != model:
        raise HTTPException(404, f"the model of this server is {model}")
    for name, neutral in UNSUPPORTED.items():
        requested = body.pop(name, neutral)
        # 0 log-probabilities are those of the chosen tokens, not none.
        if requested != neutral or isinstance(requested, bool) is not isinstance(neutral, bool):
            raise InputError(f"{name}={requested!r} isn't supported by this server: leave it out")
    if source == "prompt":
        if not isinstance(body.get(source), str):
            raise InputError("prompt must be a text")
        if "logit_bias" in body:
            raise InputError("logit_bias isn't supported for completions: leave it out")
    else:
        body[source] = _checked_messages(body.get(source))
        if bias := _checked_bias(body.pop("logit_bias", {})):
            body["logit_bias"] = bias
    _check_values(body)
    if stops := body.pop("stop", None):
        body["stop"] = [stops] if isinstance(stops, str) else stops
    if "top_p" in body:
        body.setdefault("temperature", 1.0)  # as in OpenAI's interface
    return body


def _check_values(body: dict[str, Any]) -> None:
    seed, stop = body.get("seed", 0), body.get("stop", [])
    if not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**63:
        raise InputError(f"seed must be a 64-bit integer, not {seed!r}")
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise InputError("stop must be a text or a list of texts, none of them empty")
    if not isinstance(body.get("stream", False), bool):
        raise InputError(f"stream must be true or false, not {body['stream']!r}")
    for name, largest in (("temperature", 2), ("top_p", 1)):
        number = body.get(name, 0)
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_number or not 0 <= number <= largest:
            raise InputError(f"{name} must be a number from 0 to {largest}, not {number!r}")


def _checked_messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise InputError("messages must be a list of messages, with one at least")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InputError("each of the messages must be an object with a role")
        content = message.get("content") or []
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        for part in parts:
            is_text = isinstance(part, dict) and part.get("type") == "text"
            if not is_text or not isinstance(part.get("text"), str):
                raise InputError("the content of a message must be a text, or text parts")
    # OpenAI's client stores tool_calls=None in answers without calls.
    return [{k: v for k, v in message.items() if v is not None} for message in messages]


def openai_answer(answer: Response, model: str, stops: Sequence[str]) -> Response:
    """An answer up to the first stop text, which the library's complete answers contain.

    The library adds a revision to the model's name.
    """
    if isinstance(answer, StreamingResponse):
        chunks: Any = answer.body_iterator
        answer.body_iterator = openai_events(chunks, model, stops)
        return answer
    body = json.loads(bytes(answer.body)) | {"model": model}
    choice = body["choices"][0]
    holder, name = _text_of(choice)
    text = holder.get(name) or ""
    if (begin := _stop_begin(text, stops)) is not None:
        holder[name], choice["finish_reason"] = text[:begin], "stop"
    return JSONResponse(body)


async def openai_events(
    chunks: AsyncGenerator[str, None], model: str, stops: Sequence[str]
) -> AsyncIterator[str]:
    """The events of a streamed answer, as OpenAI's clients expect them.

    The answer ends before the first stop text: text that could become one waits. An error is
    an object of JSON, which the library's is not, and the last event is ``[DONE]``.
    """
    pending, is_stopped = "", False
    async with contextlib.aclosing(chunks):  # a client that leaves ends the generation
        async for chunk in chunks:
            for event in chunk.removeprefix("data: ").removesuffix("\n\n").split("\n\ndata: "):
                if event.startswith(_LIBRARY_ERROR):
                    message = event.removeprefix(_LIBRARY_ERROR).removesuffix('"}')
                    yield f"data: {bytes(error_response(500, message).body).decode()}\n\n"
                    continue
                body = json.loads(event) | {"model": model}
                choice = body["choices"][0]
                holder, name = _text_of(choice)
                is_text = bool(holder.get(name))
                pending += holder.pop(name, None) or ""
                is_last = choice.get("finish_reason") is not None
                if is_stopped:
                    ready = pending = ""
                elif (begin := _stop_begin(pending, stops)) is not None:
                    ready, pending, is_stopped = pending[:begin], "", True
                else:
                    end = len(pending) - (0 if is_last else _stop_part(pending, stops))
                    ready, pending = pending[:end], pending[end:]
                if is_last and is_stopped:
                    choice["finish_reason"] = "stop"
                if ready or name == "text":
                    holder[name] = ready
                if ready or is_last or not is_text:
                    yield f"data: {json.dumps(body)}\n\n"
    yield "data: [DONE]\n\n"


_LIBRARY_ERROR = '{"error": "'


def _text_of(choice: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The object that holds the text of a complete or streamed answer, and the name in it."""
    if "text" in choice:
        return choice, "text"
    return choice["message" if "message" in choice else "delta"], "content"


def _stop_begin(text: str, stops: Sequence[str]) -> int | None:
    """The beginning of the stop text that is complete first."""
    ends = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    return min(ends)[1] if ends else None


def _stop_part(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of a text that could become a stop text."""
    sizes = (size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
    return max(sizes, default=0)


def _checked_bias(bias: Any) -> dict[str, float]:
    """The numbers to add to logits, as floats: the library refuses integers."""
    values: list[Any] = [*bias.values()] if isinstance(bias, dict) else [None]
    if not all(type(v) in (int, float) and -100 <= v <= 100 for v in values):
        raise InputError("logit_bias must be an object of tokens with numbers from -100 to 100")
    return {token: float(number) for token, number in bias.items()}


def limit_new_tokens(body: dict[str, Any], loaded: LoadedModel, prompt: int) -> None:
    """Checks that prompt and answer fit into the model's context; sets a limit if there is none.

    Without this a client could have text written that never ends.

    Args:
        prompt: its tokens, with those of the chat template.

    Raises:
        InputError: they don't fit, or a limit is no number.
    """
    context = getattr(loaded.model.config, "max_position_embeddings", None) or 2**31
    room = context - prompt
    if room < 1:
        raise InputError(f"the prompt has {prompt} tokens, the model's context {context}")
    limits = {name: body[name] for name in LIMITS if name in body}
    for name, limit in limits.items():
        if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= room:
            raise InputError(f"{name} must be a number from 1 to {room}, the rest of the context")
    if not limits:
        body["max_tokens"] = min(NEW_TOKENS, room)


def check_transformers() -> None:
    """Raise InputError if a package of ``transformers serve`` is missing."""
    require_packages("the server of transformers", "serve", "fastapi", "openai", "uvicorn")


class ModelServer(CheckedServer):
    """A loaded model at an address.

    Raises:
        InputError: the address can't be used, or packages are missing.
    """

    def __init__(
        self, loaded: LoadedModel, listener: socket.socket, host: str, token: str | None
    ) -> None:
        app = CheckedAccess(application(loaded), token, names_for(host))
        super().__init__(app, listener, log_level="warning")

    def run(self) -> None:
        with quiet():  # transformers logs each request
            super().run()


# vLLM.


def vllm_command(run: Path, weights: str, host: str, port: int) -> list[str]:
    """The command that starts vLLM on a run's saved weights, or on its base with the adapter.

    Raises:
        InputError: vLLM isn't installed, or can't serve this run's adapter.
    """
    program = shutil.which("vllm")
    if program is None:
        raise InputError("--engine vllm: the command vllm isn't on the PATH; install vLLM first")
    folder = weights_folder(run, weights)
    address = ["--host", host, "--port", str(port)]
    if not (folder / ADAPTER).is_file():
        return [program, "serve", str(folder), "--served-model-name", run.name, *address]
    recipe = recipe_of(run)
    check_adapter_base(folder, recipe)
    rounded = adapter_base(recipe)
    if recipe.model in PRESETS or rounded:
        base = f"a base rounded to {rounded}" if rounded else f"the preset {recipe.model}"
        raise InputError(
            f"--engine vllm: {folder} is an adapter of {base}, which vLLM can't load: merge the "
            "adapter into the weights first, or use --engine transformers"
        )
    read_config(recipe.model, needs_weights=True)
    rank = int(read_json_object(folder / ADAPTER, "adapter's config").get("r", 16))
    allowed = next((r for r in (8, 16, 32, 64, 128, 256, 320, 512) if r >= rank), rank)
    adapter = ["--enable-lora", "--max-lora-rank", str(allowed), "--tokenizer", str(folder)]
    modules = ["--lora-modules", f"{run.name}={folder}"]
    return [program, "serve", recipe.model, *adapter, *modules, *address]


def run_vllm(
    command: Sequence[str], url: str, token: str | None, on_ready: Callable[[], None]
) -> int:
    """Run vLLM until it ends; ``on_ready`` is called once its address answers.

    The token travels in VLLM_API_KEY, since other users can read a command line.

    Raises:
        InputError: it ended, or did not answer within half an hour.
    """
    extra = {} if token is None else {"VLLM_API_KEY": token}
    child = subprocess.Popen(command, env=child_environment(extra))
    try:
        deadline = time.monotonic() + STARTING_SECONDS
        while not _answers(url, token):
            if child.poll() is not None:
                raise InputError(f"vllm ended with code {child.returncode} before it answered")
            if time.monotonic() > deadline:
                raise InputError(f"vllm did not answer at {url} within {STARTING_SECONDS:.0f} s")
            time.sleep(0.2)
        on_ready()
        with contextlib.suppress(KeyboardInterrupt):  # a signal is how a server ends
            return child.wait()
        return 0
    finally:
        if child.poll() is None:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(10)
            child.kill()


def _answers(url: str, token: str | None) -> bool:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"{url}/models", headers=headers), timeout=5
        ) as response:
            return isinstance(json.load(response).get("data"), list)
    except (urllib.error.URLError, OSError, ValueError, AttributeError):
        return False


def free_port(host: str, port: int) -> int:
    """A port that nothing listens on: ``port``, or any if it is 0.

    Raises:
        InputError: it is taken.
    """
    with contextlib.closing(listen(host, port, "the server")) as listener:
        number: int = listener.getsockname()[1]
    return number
