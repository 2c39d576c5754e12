"""Exported folders and GGUF files give the answer alone, by two servers and the official client.

The models' weights are set, not trained: each writes one text, token after token, and ends.
"""

from __future__ import annotations

import json
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast, pipeline

from hasten.data.chat_template import encode
from hasten.data.conversation import Conversation
from hasten.data.prompt_formats import PROMPT_FORMATS, missing_tokens
from hasten.data.tokenize import train_bpe
from hasten.data.turns import Message, message
from hasten.models.gguf_format import check_convertible, write_gguf
from hasten.models.load import load_model
from hasten.models.presets import PRESETS
from hasten.models.save import save_model
from hasten.recipe.prepared_data import prepare_data
from hasten.recipe.schema import Recipe

openai = pytest.importorskip("openai", reason="needs the package openai, of the extra dev")

QUESTION = "How many apples does she have?"
THOUGHT, ANSWER = "kq", "xé zw"  # no token occurs twice; é is two
TAGS = ["<think>", "</think>"]  # ordinary added tokens, as DeepSeek's and Qwen's tokenizers have
PRESET = {
    "llama": "deepseek-llm-tiny",
    "qwen2": "r1-distill-qwen-tiny",
    "qwen3": "r1-distill-qwen-tiny",
    "deepseek_v2": "v2-lite-tiny",
    "deepseek_v3": "v3-tiny",
}


class Kind(NamedTuple):
    """An architecture under a published chat template, and what its answers begin with."""

    architecture: str
    template: str
    thought: str = ""
    tokens: bool = True  # the tokenizer has the special tokens of the template

    @property
    def name(self) -> str:
        return "-".join([*self[:2], *(["thinks"] if self.thought else [])])

    @property
    def opens(self) -> bool:
        """True if the prompt has the opening tag of the thought."""
        return self.template == "deepseek-r1"

    @property
    def text(self) -> str:
        """What the model writes after a prompt."""
        tag = "<think>" if self.opens else ""
        return self.thought.removeprefix(tag) + ANSWER

    @property
    def expected(self) -> Answer:
        return Answer(ANSWER, THOUGHT if self.thought else "", "stop")


THINKS = f"<think>{THOUGHT}</think>"
KINDS = (
    Kind("llama", "deepseek-llm"),
    Kind("llama", "deepseek-r1", THINKS),
    Kind("qwen2", "qwen2.5"),
    Kind("qwen2", "deepseek-r1", THINKS),
    Kind("qwen2", "deepseek-v3"),
    Kind("qwen3", "qwen3", THINKS),
    Kind("qwen3", "deepseek-r1", THINKS),
    Kind("deepseek_v2", "deepseek-v2.5"),
    Kind("deepseek_v3", "deepseek-v3"),
    Kind("deepseek_v3", "deepseek-r1", THINKS),
)


class Answer(NamedTuple):
    text: str
    thought: str
    reason: str | None


def base(kind: Kind, folder: Path) -> Path:
    """A published model's folder: config, tokenizer and chat template."""
    tokenizer = train_bpe([QUESTION, THOUGHT, ANSWER] * 3, 320)
    tokenizer.chat_template = PROMPT_FORMATS[kind.template]
    tokenizer.add_tokens(TAGS)
    if kind.tokens and (tokens := missing_tokens(tokenizer, kind.template)):
        tokenizer.add_tokens(tokens, special_tokens=True)
        if "<|im_end|>" in tokens:
            tokenizer.eos_token = "<|im_end|>"
    fields = dict(PRESETS[PRESET[kind.architecture]].config)
    fields |= {"head_dim": 16} if kind.architecture == "qwen3" else {}
    config = CONFIG_MAPPING[kind.architecture](**fields | {"vocab_size": len(tokenizer)})
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    save_model(model, tokenizer, folder)
    return folder


def prepared(model: Path, folder: Path, answer: str, **changes: Any) -> Any:
    """The tokenizer of a run on ten examples."""
    folder.mkdir()
    rows = [{"question": f"{QUESTION} {n}", "answer": answer} for n in range(10)]
    rows = rows if answer else [{"text": f"{QUESTION} {n}"} for n in range(10)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    fields = {"model": str(model), "dataset": str(folder / "data.jsonl"), "eval_data": 2}
    fields |= {"cutoff_len": 256, "max_steps": 1, "output": str(folder)}
    return prepare_data(Recipe(**fields | changes), folder / "data").tokenizer


def set_weights(model: Any, tokenizer: Any, text: str, end: int) -> None:
    """Makes the model write this text after a prompt, and the token ``end``."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_dict=False
    )
    script = [*tokenizer(text, add_special_tokens=False)["input_ids"], end]
    chain = [prompt[-1], *script]
    assert len(set(chain)) == len(chain)
    for name, weight in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            weight.data.zero_()  # then a token's logits depend on the token before it alone
    generator = torch.Generator().manual_seed(0)
    embedding, head = model.get_input_embeddings().weight.data, model.lm_head.weight.data
    embedding.copy_(torch.randn(embedding.shape, generator=generator))
    head.zero_()
    for before, after in zip(chain, script, strict=False):
        head[after] += embedding[before]


class Written(NamedTuple):
    """An exported model."""

    folder: Path
    file: Path


Writer = Callable[[Kind], Written]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Writer:
    """Exports models by the functions of ``hasten export``, each once."""
    folder, made = tmp_path_factory.mktemp("exported"), dict[Kind, Written]()

    def export(kind: Kind) -> Written:
        if kind not in made:
            name = f"{kind.name}-{len(made)}"
            source = base(kind, folder / f"{name}-base")
            tokenizer = prepared(source, folder / f"{name}-run", kind.thought + ANSWER)
            model: Any = load_model(str(source), eos_token_id=tokenizer.eos_token_id)
            set_weights(model, tokenizer, kind.text, tokenizer.eos_token_id)
            made[kind] = Written(folder / name, folder / f"{name}.gguf")
            save_model(model, tokenizer, made[kind].folder)
            check_convertible(model, tokenizer)
            write_gguf(model, tokenizer, made[kind].file, "f16", "a model")
        return made[kind]

    return export


def asked(address: str, model: str) -> tuple[Answer, Answer]:
    """The answer to the question, whole and streamed."""
    client = openai.OpenAI(base_url=address, api_key="any", max_retries=0, timeout=60)
    request: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}]}
    request |= {"model": model, "temperature": 0, "max_tokens": 30}
    (choice,) = client.chat.completions.create(**request).choices
    thought = getattr(choice.message, "reasoning_content", None) or ""
    whole = Answer(choice.message.content or "", thought, choice.finish_reason)
    chunks = client.chat.completions.create(**request, stream=True)
    parts = [chunk.choices[0] for chunk in chunks if chunk.choices]
    text = "".join(part.delta.content or "" for part in parts)
    thought = "".join(getattr(part.delta, "reasoning_content", None) or "" for part in parts)
    return whole, Answer(text, thought, parts[-1].finish_reason)


@pytest.fixture(scope="module")
def transformers_server() -> Iterator[str]:
    """The address of ``transformers serve``; a request names its model's folder."""
    pytest.importorskip("fastapi", reason="the server of transformers needs it (extra dev)")
    from transformers.cli.serve import Serve

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = Serve(host="127.0.0.1", port=port, device="cpu", log_level="error", non_blocking=True)
    deadline = time.monotonic() + 60
    while not server.server.started and time.monotonic() < deadline:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{port}/v1"
    server.kill_server()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_transformers_serve_gives_the_answer_alone(
    kind: Kind, written: Writer, transformers_server: str
) -> None:
    whole, streamed = asked(transformers_server, str(written(kind).folder))
    assert whole == streamed == kind.expected


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # A prompt that opens a thought, and no answer of the run with one.
        (Kind("qwen2", "deepseek-r1"), Answer(ANSWER, "", "stop")),
        # ChatML with the end token of another family.
        (Kind("qwen2", "qwen2.5", tokens=False), Answer(ANSWER, "", "stop")),
    ],
    ids=["unopened", "other-end"],
)
def test_what_a_run_trained_decides_what_is_an_answer(
    kind: Kind, expected: Answer, written: Writer, transformers_server: str
) -> None:
    assert asked(transformers_server, str(written(kind).folder)) == (expected, expected)


def llama_cpp(file: Path) -> Any:
    """llama.cpp's own server on one thread; it ends with the object."""
    xllamacpp = pytest.importorskip("xllamacpp", reason="it contains llama.cpp (extra dev)")
    settings = xllamacpp.CommonParams()
    settings.model.path = str(file)
    settings.n_ctx, settings.n_parallel, settings.warmup = 512, 1, False
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    return xllamacpp.Server(settings)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_llama_cpp_gives_the_answer_alone(kind: Kind, written: Writer) -> None:
    server = llama_cpp(written(kind).file)
    whole, streamed = asked(f"{server.listening_address}/v1", "any")
    assert whole == streamed
    # It keeps the line break at the end of a prompt that opens a thought.
    assert whole._replace(thought=whole.thought.strip()) == kind.expected


def test_llama_cpp_stops_at_every_end_token_of_the_model(tmp_path: Path) -> None:
    kind = Kind("llama", "deepseek-llm")
    tokenizer = train_bpe([QUESTION, ANSWER] * 3, 320)
    tokenizer.add_tokens(["<x>", "<y>", "<z>"], special_tokens=True)  # names that it doesn't know
    ends = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(["<x>", "<y>"])]
    model: Any = load_model(PRESET[kind.architecture], vocab_size=len(tokenizer))
    model.generation_config.eos_token_id = ends
    assert check_convertible(model, tokenizer) == []
    for end in ends:
        set_weights(model, tokenizer, ANSWER, end)
        write_gguf(model, tokenizer, tmp_path / "model.gguf", "f16", "a model")
        server = llama_cpp(tmp_path / "model.gguf")
        assert asked(f"{server.listening_address}/v1", "any")[0] == kind.expected
        del server
    model.generation_config.eos_token_id = [tokenizer.convert_tokens_to_ids("<z>"), *ends]
    (warning,) = check_convertible(model, tokenizer)
    assert "<z> is left out" in warning


@pytest.mark.parametrize("kind", [KINDS[5], KINDS[8]], ids=lambda kind: kind.name)
def test_llama_cpp_writes_tool_calls_as_they_are_trained(kind: Kind, written: Writer) -> None:
    """The trained text of a dialogue is what llama.cpp's model reads of it later."""
    arguments = '{"town":"K\\u00f6ln","days":[1,2]}'
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
    ]
    server, folder = llama_cpp(written(kind).file), written(kind).folder
    request = urllib.request.Request(
        f"{server.listening_address}/apply-template",
        json.dumps({"messages": turns}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        prompt = json.load(response)["prompt"]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    begin = tokenizer.bos_token or ""  # llama.cpp leaves it to the tokens
    dialogue = Conversation((*map(message, turns), Message("assistant", ANSWER)), None, "a:1")
    (trained,) = encode(tokenizer, dialogue, 1000).examples
    text = tokenizer.decode(trained.input_ids)
    assert '{"town": "Köln", "days": [1, 2]}' in prompt
    assert text.removeprefix(begin).startswith(prompt.removeprefix(begin))


def test_a_pipeline_returns_the_parts_of_the_answer(written: Writer) -> None:
    folder = written(Kind("qwen2", "deepseek-r1", THINKS)).folder
    write = pipeline("text-generation", str(folder), device="cpu", max_new_tokens=30)
    (result,) = write([{"role": "user", "content": QUESTION}], do_sample=False)
    message = {"role": "assistant", "content": ANSWER, "thinking": THOUGHT}
    assert result["generated_text"][-1] == message


def test_a_rule_that_came_with_a_tokenizer_stays_while_its_template_does(tmp_path: Path) -> None:
    kind, published = Kind("qwen2", "qwen2.5"), {"start_anchor": "x", "fields": {"content": {}}}
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base(kind, tmp_path / "base"))
    tokenizer.response_template = published
    tokenizer.save_pretrained(tmp_path / "base")

    def rule(name: str, model: Path, answer: str = ANSWER, **changes: Any) -> Any:
        found = prepared(model, tmp_path / name, answer, **changes)
        found.save_pretrained(tmp_path / "base")  # the next run starts there
        return found.response_template

    assert rule("kept", tmp_path / "base") == published
    assert rule("text", tmp_path / "base", "") == published
    other = rule("other", tmp_path / "base", chat_template="deepseek-r1")
    assert other == rule("same", tmp_path / "base")
    assert (
        other["start_anchor_pattern"]
        != rule("thinks", tmp_path / "base", THINKS + ANSWER)["start_anchor_pattern"]
    )
    assert rule("chatml", tmp_path / "base", chat_template="qwen2.5") is None  # the server's own
