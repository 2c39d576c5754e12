"""``hasten export --push``: weights and card reach a hub's HTTP API, and nothing else does."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from hasten.errors import InputError
from hasten.release.export import check_upload, upload


class Hub(ThreadingHTTPServer):
    """A stand-in of the hub's API on loopback; it keeps what was committed."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        self.created: list[dict[str, Any]] = []
        self.objects: dict[str, bytes] = {}
        self.files: dict[str, bytes] = {}
        self.tokens: set[str | None] = set()
        self.refuses = False
        self.privacy: bool | None = None  # of the repository; None: there is none


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *words: object) -> None: ...

    def _answer(self, content: object, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        self.wfile.write(body)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_GET(self) -> None:
        if self.server.privacy is None and "/api/models/" in self.path:
            self._answer({"error": "Repository not found"}, 404)
            return
        private = self.server.privacy is not False
        self._answer({"id": "me/model", "sha": "0" * 40, "siblings": [], "private": private})

    def do_PUT(self) -> None:
        self.server.objects[self.path.rpartition("/")[2]] = self._body()
        self._answer({})

    def do_POST(self) -> None:
        body, hub = self._body(), self.server
        hub.tokens.add(self.headers.get("Authorization"))
        if hub.refuses:
            self._answer({"error": "You have no right to do so"}, 403)
        elif self.path.endswith("/api/repos/create"):
            hub.created.append(json.loads(body))
            self._answer({"url": f"{hub.address}/me/model", "id": "me/model"})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            modes = [
                {
                    "path": f["path"],
                    "uploadMode": "lfs" if f["path"].endswith("safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for f in files
            ]
            self._answer({"files": modes})
        elif self.path.endswith("/objects/batch"):
            objects = [
                {
                    **entry,
                    "authenticated": True,
                    "actions": {"upload": {"href": f"{hub.address}/put/{entry['oid']}"}},
                }
                for entry in json.loads(body)["objects"]
            ]
            self._answer({"transfer": "basic", "objects": objects})
        elif "/commit/" in self.path:
            for line in body.decode().splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "file":
                    hub.files[value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] == "lfsFile":
                    hub.files[value["path"]] = hub.objects[value["oid"]]
            address = f"{hub.address}/me/model/commit/" + "1" * 40
            self._answer({"success": True, "commitOid": "1" * 40, "commitUrl": address})
        else:  # validation of the card
            self._answer({"errors": [], "warnings": []})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.address)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An exported folder, with things in it that were not exported."""
    for name in ("model.safetensors", "config.json", "README.md", "export.json"):
        (tmp_path / name).write_text(f"content of {name}")
    (tmp_path / "README.md").write_text("---\ntags: [hasten]\n---\n\n# A model\n")
    for name in ("train.jsonl", "recipe.yaml", ".env", "data/tokens.arrow"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("private")
    return tmp_path


def test_weights_and_card_are_uploaded_and_no_data_and_no_recipe(hub: Hub, folder: Path) -> None:
    check_upload("me/model", is_public=False)
    address = upload(folder, "me/model", is_private=True)
    assert "me/model" in address
    assert set(hub.files) == {"model.safetensors", "config.json", "README.md", "export.json"}
    for name, content in hub.files.items():
        assert content == (folder / name).read_bytes()
    assert hashlib.sha256(b"content of model.safetensors").hexdigest() in hub.objects
    (created,) = hub.created
    assert created.get("private") is True or created.get("visibility") == "private"
    assert hub.tokens == {"Bearer hf_secret"}
    assert not any(b"hf_secret" in content for content in hub.files.values())


def test_what_the_hub_refuses_is_one_sentence_and_the_folder_stays(hub: Hub, folder: Path) -> None:
    hub.refuses = True
    with pytest.raises(InputError, match=r"--push me/model failed .* is complete") as caught:
        upload(folder, "me/model", is_private=True)
    assert "\n" not in str(caught.value)
    assert "hf_secret" not in str(caught.value)
    assert (folder / "model.safetensors").is_file()


def test_a_repository_that_all_can_read_needs_the_option_before_any_work(hub: Hub) -> None:
    hub.privacy = True
    check_upload("me/model", is_public=False)
    hub.privacy = False
    check_upload("me/model", is_public=True)
    with pytest.raises(InputError, match=r"me/model: .* is public, .*: add --public, or name"):
        check_upload("me/model", is_public=False)
    assert hub.created == []


def test_a_hub_that_fails_is_named_before_any_work(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(InputError, match="can't be checked"):
        check_upload("me/model", is_public=False)


@pytest.mark.long  # what it refuses is refused below in this process
@pytest.mark.cold
def test_a_fresh_process_checks_the_name_and_the_token(tmp_path: Path) -> None:
    """The library's modules are loaded on first use: in other tests they are all there."""
    code = "from hasten.release.export import check_upload; check_upload('me/model', False)"
    variables = {k: v for k, v in os.environ.items() if k not in ("HF_TOKEN", "HF_TOKEN_PATH")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**variables, "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert "InputError: --push me/model needs a token" in done.stderr


def test_without_a_token_nothing_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(InputError, match="needs a token"):
        check_upload("me/model", is_public=False)
