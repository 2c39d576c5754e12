"""Models by their names on the hub: from its cache, from a hub on loopback, or one sentence."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from hasten.data.tokenize import train_bpe
from hasten.errors import InputError
from hasten.models.architecture import Architecture
from hasten.models.load import load_model, load_tokenizer, read_config, stop_tokens
from hasten.models.save import save_model
from told import Hasten

NAME, COMMIT = "some-owner/some-model", "a" * 40


class Hub(ThreadingHTTPServer):
    """A hub with one model; it keeps the names of the files that were fetched."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.fetched = folder, set[str]()


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *words: object) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        name, files = self.path.rpartition("/")[2], self.server.folder.iterdir()
        listing = [{"type": "file", "path": f.name, "size": 1, "oid": "0" * 40} for f in files]
        answer: object = {"id": NAME, "sha": COMMIT, "siblings": []}
        if "/resolve/" in self.path:
            body = (self.server.folder / name).read_bytes()
        else:
            body = json.dumps(listing if "/tree/" in self.path else answer).encode()
        self.send_response(200 if f"/{NAME}" in self.path else 404)
        self.send_header("X-Error-Code", "" if f"/{NAME}" in self.path else "RepoNotFound")
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
            self.server.fetched |= {name} if "/resolve/" in self.path else set()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published model's folder: weights, tokenizer, and nothing of the machine's paths."""
    folder = tmp_path_factory.mktemp("published")
    tokenizer = train_bpe(["a question and its answer"], 300)
    model = load_model("deepseek-llm-tiny", vocab_size=300, eos_token_id=2, stop_token_id=7)
    save_model(model, tokenizer, folder)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, which is offline."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


@pytest.fixture
def hub(cache: Path, saved: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub(saved)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    yield server
    server.shutdown()
    server.server_close()


def download(cache: Path, source: Path, *names: str) -> None:
    """Files of a model in the cache, as the hub's client lays them out."""
    model = cache / f"models--{NAME.replace('/', '--')}"
    snapshot = model / "snapshots" / COMMIT
    snapshot.mkdir(parents=True, exist_ok=True)
    (model / "refs").mkdir(exist_ok=True)
    (model / "refs" / "main").write_text(COMMIT)
    for file in source.iterdir():
        if not names or file.name in names:
            shutil.copy(file, snapshot)


def recipe(folder: Path) -> Path:
    rows = [{"text": f"a question {n} and its answer"} for n in range(8)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"model": NAME, "dataset": "data.jsonl", "max_steps": 1, "global_batch_size": 2}
    values |= {"output": "run", "eval_data": 0, "finetuning_type": "lora", "data_workers": 1}
    (folder / "recipe.yaml").write_text(json.dumps(values))
    return folder / "recipe.yaml"


def test_a_model_that_was_downloaded_is_estimated_by_its_name(
    cache: Path, saved: Path, hasten: Hasten
) -> None:
    download(cache, saved)
    assert Architecture.from_config(NAME).parameters() == sum(
        weight.numel() for weight in load_model(str(saved)).parameters()
    )
    where = ("--gpu", "rtx4090", "--gpus-per-node", "1", "--global-batch", "4", "--json")
    by_name, by_folder = (hasten("estimate", model, *where) for model in (NAME, saved))
    assert by_name[0] == 0, by_name
    named, plain = (json.loads(found[1]) for found in (by_name, by_folder))
    assert named["model"].pop("name") == NAME
    plain["model"].pop("name")
    assert named == plain
    assert hasten("estimate", recipe(Path.cwd()), *where[:4])[0] == 0


def test_an_estimate_fetches_the_config_alone(hub: Hub, hasten: Hasten) -> None:
    code, said, _ = hasten("estimate", NAME, "--gpu", "h100", "--gpus-per-node", "1")
    assert code == 0
    assert NAME in said
    assert hub.fetched == {"config.json"}


def test_a_check_before_the_download_fetches_no_weights(hub: Hub, hasten: Hasten) -> None:
    _, said, _ = hasten("check", recipe(Path.cwd()))
    assert "weights      not fetched yet" in said
    assert "FAIL" not in said, said
    assert "tokenizer.json" in hub.fetched
    assert not [name for name in hub.fetched if name.endswith(".safetensors")]


def test_what_was_read_by_name_is_what_the_folder_has(cache: Path, saved: Path) -> None:
    download(cache, saved)
    by_name, by_folder = read_config(NAME), read_config(str(saved))
    assert by_name.to_diff_dict() == by_folder.to_diff_dict()
    assert by_name.name_or_path == NAME
    assert stop_tokens(NAME) == stop_tokens(str(saved)) == [2, 7]
    named, plain = load_tokenizer(NAME), load_tokenizer(str(saved))
    assert named.backend_tokenizer.to_str() == plain.backend_tokenizer.to_str()
    assert named.name_or_path == NAME


@pytest.mark.parametrize("reachable", [False, True])
def test_what_can_not_be_had_is_one_sentence_with_its_cause(
    cache: Path, saved: Path, hasten: Hasten, monkeypatch: pytest.MonkeyPatch, reachable: bool
) -> None:
    cause = "HF_HUB_OFFLINE is set"
    if reachable:  # by its settings; nothing listens there
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
        cause = "the hub can't be reached"
    expected = f"{NAME} is no folder here and not in the hub's local cache, and {cause}: run `hf "
    for read in (Architecture.from_config, read_config, load_tokenizer):
        with pytest.raises(InputError) as refused:
            read(NAME)
        assert str(refused.value).startswith(expected)
        assert str(refused.value).endswith("or give the folder of a copy")
    code, _, said = hasten("estimate", NAME)
    assert code == 2
    assert expected in said
    _, said, _ = hasten("check", recipe(Path.cwd()))
    assert said.count(expected) >= 2
    assert "sentencepiece" not in said
    download(cache, saved, "config.json")  # as after an estimate
    with pytest.raises(InputError, match=r"has no tokenizer\.json: run `hf download"):
        load_tokenizer(NAME)


def test_a_name_that_the_hub_does_not_have_is_called_so(hub: Hub) -> None:
    with pytest.raises(InputError, match="the hub has no such model for you: check the name"):
        Architecture.from_config("some-owner/another")
