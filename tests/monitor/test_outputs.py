"""What other tools, Prometheus and a terminal are given is the run's own numbers."""

from __future__ import annotations

import importlib
import io
import json
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from hasten.formatting import number
from hasten.monitor.run import Run
from hasten.monitor.server import HELP, escaped, exposition
from hasten.monitor.terminal import BARS, sparkline, watch_in_terminal
from hasten.monitor.watching import RunsReader
from hasten.recipe.schema import Recipe
from hasten.training.metric_writers import BESIDE
from hasten.training.run import train
from sample_data import small
from watched import append, get, serving, write_run

Series = dict[str, dict[int, float]]  # by tag, then by step


def of_tensorboard(run: Path) -> Series:
    module: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    reader = module.EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: {e.step: e.value for e in reader.Scalars(tag)} for tag in reader.Tags()["scalars"]}


def pieces_of_wandb(data: bytes) -> Iterator[bytes]:
    """W&B's log: seven bytes, then LevelDB's blocks (its doc/log_format.md)."""
    assert data.startswith(b":W&B")
    place, piece = 7, b""
    while place + 7 <= len(data):
        if -place % 32768 < 7:  # too little of the block is left for a header
            place += -place % 32768
            continue
        size, kind = struct.unpack_from("<HB", data, place + 4)
        piece += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # full, last
            yield piece
            piece = b""


def of_wandb(run: Path) -> Series:
    pytest.importorskip("wandb")
    pieces: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    [path] = run.glob("wandb/offline-run-*/*.wandb")
    found: Series = {}
    for data in pieces_of_wandb(path.read_bytes()):
        example = pieces.Record()
        example.ParseFromString(data)
        if example.WhichOneof("record_type") != "history":
            continue
        items = example.history.item
        line = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
        for tag, value in line.items():
            if tag.startswith(("train/", "eval/")):
                found.setdefault(tag, {})[line["step"]] = value
    return found


def of_mlflow(run: Path) -> Series:
    pytest.importorskip("mlflow")
    client = importlib.import_module("mlflow.tracking").MlflowClient(
        f"sqlite:///{run.resolve() / 'mlflow' / 'mlflow.db'}"
    )
    experiment = client.get_experiment_by_name("hasten")
    [told] = client.search_runs([experiment.experiment_id])
    assert told.info.status == "FINISHED"
    assert told.data.params["model"] == "deepseek-llm-tiny"
    telemetry = importlib.import_module("mlflow.telemetry")
    assert telemetry.get_telemetry_client() is None  # nobody is told of it
    return {
        tag: {m.step: m.value for m in client.get_metric_history(told.info.run_id, tag)}
        for tag in told.data.metrics
    }


def expected(run: Path) -> Series:
    """The same from the lines of the run itself."""
    found: Series = {}
    for kind, name in (("train", "metrics.jsonl"), ("eval", "evaluations.jsonl")):
        for line in map(json.loads, (run / name).read_text().splitlines()):
            for key, value in line.items():
                known = number(int(value) if isinstance(value, bool) else value)
                if key not in BESIDE and known is not None:
                    found.setdefault(f"{kind}/{key}", {})[line["step"]] = known
    return found


READERS: dict[str, Callable[[Path], Series]] = {
    "tensorboard": of_tensorboard,
    "wandb": of_wandb,
    "mlflow": of_mlflow,
}


@pytest.mark.parametrize("name", READERS)
def test_a_tool_reads_back_the_run_s_own_numbers(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name)
    recipe = Recipe(**small(tmp_path, log_to=[name], eval_every=2, max_steps=4))
    train(recipe, tell=lambda text: None)
    run = tmp_path / "run"
    found, wanted = READERS[name](run), expected(run)
    assert set(found) == set(wanted)
    assert {"train/loss", "train/tokens_per_second", "eval/eval_loss"} <= set(found)
    assert sorted(found["train/loss"]) == [1, 2, 3, 4]
    for tag, series in wanted.items():
        assert found[tag] == pytest.approx(series, rel=1e-6)  # TensorBoard has float32


def drawn(folder: Path, width: int = 100, terminal: bool = False) -> str:
    text = io.StringIO()
    console = Console(file=text, width=width, force_terminal=terminal)
    watch_in_terminal(RunsReader([folder]), console)
    return text.getvalue()


def test_without_a_terminal_the_runs_are_printed_once(tmp_path: Path) -> None:
    write_run(tmp_path / "one", 20)
    write_run(tmp_path / "two", 10, finished=True)
    text = drawn(tmp_path)
    assert "one  running  step 20 of 40 (50%)" in text
    assert "two  done" in text
    assert "2,000 (2,000 to 2,000)" in text
    assert "not known" not in text


def test_on_a_terminal_it_draws_until_all_runs_are_finished(tmp_path: Path) -> None:
    assert "done" in drawn(write_run(tmp_path / "run", 5, finished=True), terminal=True)


@pytest.mark.parametrize("width", [20, 40, 200])
def test_any_width_will_do(tmp_path: Path, width: int) -> None:
    text = drawn(write_run(tmp_path / "run", 5), width)
    assert max(map(len, text.splitlines())) <= width


def test_texts_of_files_are_no_markup_and_no_control(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "[red]run", 5)
    append(folder / "restarts.jsonl", {"attempt": 1, "cause": "[bold]x\x1b[2J", "step": 1})
    text = drawn(folder)
    assert "[red]run" in text
    assert "[bold]x" in text
    assert "\x1b[2J" not in text


@given(st.lists(st.none() | st.floats(-1e9, 1e9)), st.integers(0, 50))
def test_a_sparkline_is_never_longer_than_wanted(values: list[float | None], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) <= min(width, len(values))
    assert set(line) <= {*BARS, " "}


def test_a_sparkline_rises_with_its_values() -> None:
    assert sparkline(list(map(float, range(8))), 8) == BARS
    assert sparkline([0.0, 0.0, 7.0, 7.0], 2) == BARS[0] + BARS[-1]


LINE = re.compile(r'^[a-z_]+\{run="(?:[^"\\\n]|\\["\\n])*"(?:,status="\w[\w ]*")?\} (\S+)$')


def parsed(text: str) -> dict[str, float]:
    found = {}
    for line in text.splitlines():
        if not line.startswith("# "):
            match = LINE.match(line)
            assert match, line
            found[line.partition("{")[0]] = float(match[1])
    return found


def test_every_known_number_of_a_run_is_there(tmp_path: Path) -> None:
    run = Run("r", write_run(tmp_path, 20))
    run.look()
    with run.lock:
        standing = run.standing()
    assert set(HELP) <= set(standing)
    found = parsed(exposition([("r", standing)]))
    known = {f"hasten_{name}" for name in HELP if standing[name] is not None}
    assert set(found) == {*known, "hasten_status"}
    assert found["hasten_step"] == 20
    assert found["hasten_tokens_per_second"] == 2000


@given(st.text())
def test_any_name_is_one_label(name: str) -> None:
    label = escaped(name)
    assert re.fullmatch(r'(?:[^"\\\n]|\\["\\n])*', label)
    unescaped = re.sub(r"\\(.)", lambda m: {"n": "\n"}.get(m[1], m[1]), label)
    assert unescaped == name


def test_a_name_that_is_not_utf_8_takes_no_other_run_along(tmp_path: Path) -> None:
    write_run(tmp_path / "good", 20)
    write_run(tmp_path / "bad\udcff\n\u202e", 20)
    with serving([tmp_path]) as server:
        status, headers, body = get(server.port, "/metrics")
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    text = body.decode()
    assert 'hasten_step{run="good"} 20.0' in text
    assert 'hasten_step{run="bad\ufffd\\n\u202e"} 20.0' in text
