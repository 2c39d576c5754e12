"""``hasten eval``: the table, the file, and one sentence for bad input."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

Hasten = Callable[..., tuple[int, str, str]]


def test_a_run_is_compared_with_its_base(full_run: Path, hasten: Hasten, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    rows = [{"question": f"{n} apples", "answer": "more apples"} for n in range(3)]
    pairs.write_text("\n".join(map(json.dumps, rows)))
    result = tmp_path / "result.json"
    code, out, err = hasten("eval", full_run, "--tasks", pairs, "--limit", 2, "-o", result)
    assert code == 0, err
    assert out.splitlines()[0].split()[:5] == ["task", "metric", "examples", "before", "after"]
    metrics = json.loads(result.read_text())["metrics"]
    assert [m["metric"] for m in metrics] == ["eval loss", "exact match"]
    assert all(m["examples"] == 2 and m["before"] is not None for m in metrics)


def test_a_result_that_finds_no_room_is_printed_all_the_same(
    full_run: Path, hasten: Hasten, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("hasten.cli.arguments.write_atomic", full)
    result = tmp_path / "result.json"
    code, out, err = hasten("eval", full_run, "--limit", 2, "--compare", "none", "-o", result)
    assert (code, err.count("\n")) == (2, 1)
    assert "eval loss" in out
    assert "result.json can't be written: No space left on device; make room" in err


def test_bad_input_is_one_sentence(full_run: Path, hasten: Hasten, tmp_path: Path) -> None:
    def refused(*words: object) -> str:
        code, out, err = hasten("eval", *words)
        assert (code, out, err.count("\n")) == (2, "", 1), (code, out, err)
        return err

    assert "there is no such folder" in refused(tmp_path / "missing")
    assert "missing.jsonl" in refused(full_run, "--tasks", tmp_path / "missing.jsonl")
    assert "missing.yaml" in refused(full_run, "--tasks", tmp_path / "missing.yaml")
    assert "can't be written" in refused(full_run, "-o", tmp_path / "no" / "result.json")
    assert "is no preset" in refused(full_run, "--compare", "nothing")
