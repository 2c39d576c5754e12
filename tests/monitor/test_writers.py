"""What other tools were given, read back by their own readers: the run's own numbers."""

from __future__ import annotations

import importlib
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hasten.formatting import number
from hasten.recipe.schema import Recipe
from hasten.training.metric_writers import BESIDE
from hasten.training.run import train
from sample_data import small

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
                if key not in BESIDE and (known := number(value)) is not None:
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
