"""``hasten serve``: vLLM's command by a stand-in, and one sentence for bad input."""

from __future__ import annotations

import json
import shlex
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Hasten = Callable[..., tuple[int, str, str]]

# A shell starts it: the path of an interpreter may have a space, which "#!" can't name.
STAND_IN = """#!/bin/sh
exec {python} {program} "$@"
"""
PROGRAM = """import http.server, json, os, sys
words = sys.argv[1:]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        key = os.environ.get("VLLM_API_KEY")
        allowed = key is None or self.headers["Authorization"] == "Bearer " + key
        body = json.dumps({"data": []}).encode()
        self.send_response(200 if allowed else 401)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *words): pass
address = words[words.index("--host") + 1], int(words[words.index("--port") + 1])
server = http.server.HTTPServer(address, Handler)
server.handle_request()
open(os.environ["STAND_IN_LOG"], "w").write(json.dumps([words, os.environ.get("VLLM_API_KEY")]))
"""


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str = STAND_IN) -> Path:
    log = folder / "log.json"
    program = folder / "vllm.py"
    program.write_text(PROGRAM)
    python = shlex.quote(sys.executable)
    (folder / "vllm").write_text(text.format(python=python, program=shlex.quote(str(program))))
    (folder / "vllm").chmod(0o755)
    monkeypatch.setenv("STAND_IN_LOG", str(log))
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return log


def after(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


def test_vllm_gets_the_base_and_the_adapter_and_the_token_stays_off_the_command_line(
    full_run: Path, lora_run: Path, hasten: Hasten, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = stand_in(tmp_path, monkeypatch)
    token = "a-token-of-24-characters"
    code, out, err = hasten("serve", lora_run, "--port", 0, "--token", token)
    assert code == 0, err
    words, key = json.loads(log.read_text())
    assert out.strip() == f"http://127.0.0.1:{after(words, '--port')}/v1"
    assert words[:2] == ["serve", str(full_run / "model")]
    assert after(words, "--lora-modules") == f"run={lora_run / 'adapter'}"
    assert after(words, "--tokenizer") == str(lora_run / "adapter")
    assert key == token
    assert token not in words
    code, _, err = hasten("serve", full_run, "--engine", "vllm", "--port", 0)
    words, key = json.loads(log.read_text())
    assert (code, key) == (0, None), err
    assert words[1] == str(full_run / "model")
    assert after(words, "--served-model-name") == "run"


def test_bad_input_is_one_sentence(
    full_run: Path, hasten: Hasten, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*words: object) -> str:
        code, out, err = hasten("serve", *words)
        assert (code, out, err.count("\n")) == (2, "", 1), (code, out, err)
        return err

    assert "there is no such folder" in refused(tmp_path / "missing")
    assert "--token must be" in refused(full_run, "--token", "short")
    assert "vllm isn't on the PATH" in refused(full_run, "--engine", "vllm")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        stand_in(tmp_path, monkeypatch, "#!/bin/sh\nexit 3\n")
        assert "give another --port" in refused(full_run, "--engine", "vllm", "--port", port)
    assert "vllm ended with code 3" in refused(full_run, "--engine", "vllm", "--port", 0)
