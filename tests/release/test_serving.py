"""A served run answers OpenAI's own client as the model itself does, and strangers not at all."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hasten.data.turns import Message
from hasten.monitor.server import listen
from hasten.release import trained_model
from hasten.release.trained_model import LoadedModel, Sampling, load_run

TOKEN = "a-token-of-24-characters"
QUESTION = "how many apples does she have"


@pytest.fixture(scope="module")
def loaded(lora_run: Path) -> LoadedModel:
    return load_run(lora_run)


@pytest.fixture(scope="module")
def url(loaded: LoadedModel) -> Iterator[str]:
    for name in ("fastapi", "openai"):
        pytest.importorskip(name, reason="the server of transformers needs it (extra serve)")
    from hasten.release.serving import ModelServer, address_url

    listener = listen("127.0.0.1", 0, "the server")
    server = ModelServer(loaded, listener, "127.0.0.1", TOKEN)
    thread = threading.Thread(target=server.run)
    thread.start()
    yield address_url("127.0.0.1", listener.getsockname()[1])
    server.stop()
    thread.join(20)


def client(url: str, token: str = TOKEN) -> Any:
    import openai

    return openai.OpenAI(base_url=url, api_key=token, max_retries=0, timeout=60)


def test_chat_answers_are_the_models_own_whole_and_streamed(url: str, loaded: LoadedModel) -> None:
    expected = trained_model.answer(loaded, [Message("user", QUESTION)], Sampling(8))
    request: dict[str, Any] = {
        "model": "run",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 8,
        "temperature": 0,
    }
    openai_client = client(url)
    whole = openai_client.chat.completions.create(**request)
    assert whole.model == "run"
    assert whole.choices[0].message.content.strip() == expected
    chunks = list(openai_client.chat.completions.create(**request, stream=True))
    assert len(chunks) > 2
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert streamed.strip() == expected
    assert [m.id for m in openai_client.models.list()] == ["run"]


def test_completions_continue_a_text(url: str, loaded: LoadedModel) -> None:
    prompt = loaded.tokenizer(QUESTION)["input_ids"]
    tokens = trained_model.generate(loaded, prompt, Sampling(8))
    expected = loaded.tokenizer.decode(tokens, skip_special_tokens=True)
    request: dict[str, Any] = {
        "model": "run",
        "prompt": QUESTION,
        "max_tokens": 8,
        "temperature": 0,
    }
    assert client(url).completions.create(**request).choices[0].text == expected
    chunks = client(url).completions.create(**request, stream=True)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == expected


def ask(url: str, **fields: Any) -> Any:
    body = {"prompt": QUESTION, "max_tokens": 24, **fields}
    if "messages" in fields:
        del body["prompt"]
    path = "/completions" if "prompt" in body else "/chat/completions"
    status, answer = sent(url, path, json.dumps(body).encode())
    content = json.loads(answer)
    return content["choices"][0] if status == 200 else content["error"]["message"]


def test_a_temperature_samples_and_a_seed_repeats_while_others_ask(url: str) -> None:
    alone = {seed: ask(url, temperature=2, seed=seed)["text"] for seed in range(4)}
    assert len(set(alone.values())) == 4
    request: dict[str, Any] = {"prompt": QUESTION, "max_tokens": 24, "temperature": 2}
    stream = client(url).completions.create(model="run", stream=True, seed=1, **request)
    others = [threading.Thread(target=ask, args=(url,), kwargs={"seed": s}) for s in range(5)]
    for other in others:  # each would set the seed during the streamed answer
        other.start()
    streamed = "".join(part.choices[0].text for part in stream)
    # A stream leaves out a character whose last bytes were not generated.
    assert streamed == alone[1].rstrip("\N{REPLACEMENT CHARACTER}")
    for other in others:
        other.join()
    assert ask(url, top_p=0.99, seed=1)["text"] != ask(url, top_p=0.99, seed=2)["text"]


def test_an_answer_ends_before_its_stop_text(url: str) -> None:
    text = ask(url, temperature=0)["text"]
    stop = text[len(text) // 2 :][:3]
    for form in (stop, [stop, "never written"]):
        answer = ask(url, temperature=0, stop=form)
        assert answer["text"] == text[: text.index(stop)]
        assert answer["finish_reason"] == "stop"
    for stops in (stop, ["never written", stop], text[:1], text[-1:] + "x"):
        whole = ask(url, temperature=0, stop=stops)
        request: dict[str, Any] = {"prompt": QUESTION, "max_tokens": 24, "temperature": 0}
        parts = list(
            client(url).completions.create(**request, model="run", stream=True, stop=stops)
        )
        assert "".join(part.choices[0].text for part in parts) == whole["text"]
        assert parts[-1].choices[0].finish_reason == whole["finish_reason"]


@pytest.mark.parametrize("is_chat", [True, False])
@given(st.lists(st.text("abc", max_size=4)), st.lists(st.text("abc", min_size=1, max_size=4)))
@example(["ab", "c", "abb"], ["abcd", "bca"])
def test_a_stream_ends_before_the_first_stop_text_however_it_is_cut(
    is_chat: bool, texts: list[str], stops: list[str]
) -> None:
    serving = pytest.importorskip("hasten.release.serving")
    whole, cut, reason = "".join(texts), None, "length"
    for end in range(len(whole) + 1):  # the stop text that is complete first, the longest of those
        begins = [end - len(s) for s in stops if whole[:end].endswith(s)]
        if begins and cut is None:
            cut, reason = min(begins), "stop"

    async def chunks() -> AsyncIterator[str]:
        events: list[dict[str, Any]]
        events = [{"delta": {"content": t}} if is_chat else {"text": t} for t in texts]
        last: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
        events.append(last | {"finish_reason": "length"})
        events = [{"choices": [event]} for event in events]
        half = len(events) // 2  # several events may come in one chunk
        for some in filter(None, (events[:half], events[half:])):
            yield "".join(f"data: {json.dumps(event)}\n\n" for event in some)

    async def collected() -> list[str]:
        return [event async for event in serving.openai_events(chunks(), "run", stops)]

    *parts, done = asyncio.run(collected())
    assert done == "data: [DONE]\n\n"
    choices = [json.loads(part.removeprefix("data: "))["choices"][0] for part in parts]
    found = "".join(c["delta"].get("content", "") if is_chat else c["text"] for c in choices)
    assert (found, choices[-1]["finish_reason"]) == (whole[:cut], reason)


def test_an_error_in_a_stream_is_json(url: str) -> None:
    serving = pytest.importorskip("hasten.release.serving")

    async def chunks() -> AsyncIterator[str]:
        yield 'data: {"choices": [{"text": "a"}]}\n\ndata: {"error": "no "x" in\n\\ y"}\n\n'

    async def collected() -> list[str]:
        return [event async for event in serving.openai_events(chunks(), "run", [])]

    _, error, done = asyncio.run(collected())
    content = json.loads(error.removeprefix("data: "))["error"]
    assert (content["message"], content["code"]) == ('no "x" in\n\\ y', 500)
    assert done == "data: [DONE]\n\n"


@pytest.mark.parametrize(
    "fields",
    [
        *({"n": 2}, {"best_of": 2}, {"logprobs": 0}, {"logprobs": 5}, {"echo": True}),
        *({"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"suffix": "end"}),
        *({"logit_bias": {"5": 100}}, {"generation_config": "{}"}),
    ],
    ids=str,
)
def test_fields_that_would_be_ignored_are_refused(url: str, fields: dict[str, Any]) -> None:
    assert "isn't supported" in ask(url, **fields)


def test_a_bias_may_be_an_integer(url: str, loaded: LoadedModel) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    answer = ask(url, messages=messages, logit_bias={"5": 100}, temperature=0, max_tokens=3)
    assert answer["message"]["content"] == loaded.tokenizer.decode([5, 5, 5])
    assert "numbers from -100" in ask(url, messages=messages, logit_bias={"5": "1"})


def test_a_request_may_not_replace_the_template_or_cut_the_conversation(url: str) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    cuts: dict[str, Any] = {"truncation": True, "max_length": 2}
    for options in ({"chat_template": "a"}, cuts):
        refusal = ask(url, messages=messages, chat_template_kwargs=options)
        assert "takes variables of the template" in refusal


def test_neutral_fields_change_nothing(url: str) -> None:
    neutral: dict[str, Any] = {"n": 1, "logprobs": None, "frequency_penalty": 0, "stop": []}
    neutral |= {"user": "me", "echo": False}
    assert ask(url, temperature=0, **neutral) == ask(url, temperature=0)


def test_the_context_counts_the_tokens_of_the_chat_template(url: str, loaded: LoadedModel) -> None:
    message = Message("user", QUESTION)
    room = loaded.model.config.max_position_embeddings - len(
        trained_model.prompt_tokens(loaded, [message])
    )
    refusal = ask(url, messages=[{"role": "user", "content": QUESTION}], max_tokens=room + 1)
    assert f"from 1 to {room}," in refusal


def test_a_picture_is_refused_by_a_model_of_text(url: str) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:,"}}
    assert "text parts" in ask(url, messages=[{"role": "user", "content": [picture]}])
    assert "text parts" in ask(
        url, messages=[{"role": "user", "content": [{**picture, "text": ""}]}]
    )
    history = [{"role": "assistant", "content": "a", "tool_calls": None}]
    user = {"role": "user", "content": "a"}
    assert ask(url, messages=[user, *history, user])["message"]["role"] == "assistant"


def test_the_text_next_to_tool_calls_stays_in_a_conversation() -> None:
    serving = pytest.importorskip("transformers.cli.serving.chat_completion")
    from transformers.cli.serving.utils import Modality

    from hasten.release.serving import follow_openai

    handler: Any = serving.ChatCompletionHandler(None, None)
    follow_openai(handler)
    calls = [{"type": "function", "function": {"name": "look", "arguments": "{}"}}]
    message = {"role": "assistant", "content": "I look it up.", "tool_calls": calls}
    (turn,) = handler.get_processor_inputs_from_messages([message], Modality.LLM)
    assert turn["content"] == "I look it up."
    assert turn["tool_calls"][0]["function"]["arguments"] == {}


def test_requests_without_the_token_or_from_other_pages_are_refused(url: str) -> None:
    import openai

    with pytest.raises(openai.AuthenticationError):
        client(url, "another-token-of-length").models.list()
    with pytest.raises(openai.NotFoundError, match="the model of this server is run"):
        client(url).chat.completions.create(
            model="other", messages=[{"role": "user", "content": "a"}]
        )

    def status(path: str, **headers: str) -> int:
        request = urllib.request.Request(f"{url}{path}", headers=headers)
        request.add_header("Authorization", f"Bearer {TOKEN}")
        try:
            with urllib.request.urlopen(request, timeout=20) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code

    assert status("/models") == 200
    assert status("/models", Host="elsewhere.example") == 421
    assert status("/models", Origin="http://elsewhere.example") == 403
    assert status("/../load_model") == status("/../reset") == 404


HOSTILE = (
    *(None, True, -1, 0, 2**63, 1e308, float("nan"), "", "x", "\0", "\ud800", [], {}, [[]]),
    *([None], [{}], [{"role": 1, "content": 2}], [{"role": "user", "content": [{"type": "x"}]}]),
    *([{"role": "user", "content": "\ud800"}], [{"role": "user", "content": "a " * 10_000}]),
)
KEYS = ("model", "messages", "prompt", "max_tokens", "temperature", "top_p", "stop", "seed", "n")


def sent(url: str, path: str, data: bytes) -> tuple[int, bytes]:
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return int(response.status), response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@settings(max_examples=25)
@given(st.booleans(), st.sampled_from((*KEYS, "stream", "tools")), st.sampled_from(HOSTILE))
@example(True, "max_tokens", 2**63)
@example(False, "prompt", "a " * 10_000)
@example(False, "prompt", "\ud800")
def test_a_request_with_any_value_is_answered_or_refused_in_a_sentence(
    url: str, is_chat: bool, key: str, value: Any
) -> None:
    body: dict[str, Any] = {"model": "run", "max_tokens": 1, "temperature": 0}
    body |= {"messages": [{"role": "user", "content": "a"}]} if is_chat else {"prompt": "a"}
    path = "/chat/completions" if is_chat else "/completions"
    status, answer = sent(url, path, json.dumps(body | {key: value}).encode())
    assert status == 200 or 400 <= status < 500, answer
    if status != 200:
        assert json.loads(answer)["error"]["message"]


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"model": "run", "model": "x"}', "occurs twice"),
        (b"\xff", "not UTF-8"),
        (b"[]", "must be a JSON object"),
        (b" " * (9 << 20), "larger than 8 MiB"),
        (b'{"prompt": "a", "max_tokens": 1000000000}', "max_tokens must be a number from 1 to"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_body_that_is_no_request_is_refused(url: str, data: bytes, sentence: str) -> None:
    status, answer = sent(url, "/completions", data)
    assert status == (413 if len(data) > 8 << 20 else 400)
    assert sentence in json.loads(answer)["error"]["message"]


def test_silent_clients_hold_up_nobody(url: str) -> None:
    port = int(url.split(":")[2].split("/")[0])
    silent = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(100)]
    assert [m.id for m in client(url).models.list()] == ["run"]
    for connection in silent:
        connection.close()
