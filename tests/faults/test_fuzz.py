"""Any foreign file is read or refused in one sentence, in bounded time.

A harness starts from a sound file. It damages its bytes; what was found once is in ``FOUND`` and is
tried first. Or it puts any value in the place of one of its values. ``make campaign`` runs the same
with more examples (HASTEN_FUZZ).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import os
import re
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save as packed

from hasten.core.technique import Technique
from hasten.data.json_reader import scan_json, scan_lines
from hasten.data.readers import read_examples
from hasten.data.template_sandbox import UnrenderedError, render
from hasten.errors import InputError
from hasten.foreign_files import read_json_object
from hasten.models.architecture import Architecture
from hasten.models.load import read_config, skeleton_of
from hasten.models.presets import PRESETS, build_config
from hasten.models.weights import INDEX, weight_files
from hasten.monitor.run import Run
from hasten.monitor.server import MonitorServer
from hasten.parts import checkpoint
from hasten.parts.distributed.deepspeed_config import INSIDE, TOP, TrainerSettings, fill_auto
from hasten.planner.inputs import cluster_of, predicted_lines, predicted_section
from hasten.recipe.build import requested_plan
from hasten.recipe.importers import FORMATS
from hasten.recipe.importers import read as read_import
from hasten.recipe.schema import Recipe, load_recipe, recipe_from
from hasten.recipe.shorthands import meaning_of
from hasten.report.page import render_markdown, write_report
from hasten.report.runs import read_runs
from hasten.techniques import CATALOGUE
from saved import save
from watched import TOKEN, get, serving, write_run

EXAMPLES = int(os.environ.get("HASTEN_FUZZ", "8"))
ROWS = [{"question": f"{n}?", "answer": "é\u2028" * n} for n in range(5)]
PIECES = (
    *(b"", b"\0", b"\xff", b"\xef\xbb\xbf", b'"', b"{", b"}", b"[" * 2000, b"]", b"\\ud800", b"\n"),
    *(b"1e999", b"-1", b"9" * 5000, b"NaN", b"'", b",", b":", b"&a", b"*a", b"!!python/name:os"),
    *(b"../../x", b"/etc/passwd", b"\x1b[2J", b"\x00\x00\x00\x80", b"<<: *a", b"{% for i in x %}"),
)
# Places are shares of the file, so that a case means the same in files of all sizes.
DAMAGES = st.lists(
    st.tuples(st.floats(0, 1), st.integers(0, 40), st.sampled_from(PIECES) | st.binary(max_size=8)),
    min_size=1,
    max_size=4,
)
Damages = list[tuple[float, int, bytes]]
FOUND: tuple[Damages, ...] = (
    [(0.0, 10**6, b"")],  # an empty file
    [(1.0, 0, b'"')],
    [(0.5, 10**6, b"")],  # a file that is cut
    [(0.0, 0, b"[" * 3000)],
    [(0.0, 10**6, b"9" * 5000)],
)


def damaged(data: bytes, damages: Damages) -> bytes:
    for share, cut, piece in damages:
        at = int(share * len(data))
        data = data[:at] + piece + data[at + cut :]
    return data


def fuzzed(test: Callable[[Damages], None]) -> Callable[[], None]:
    """A test with the found cases and new ones."""
    wrapped = given(damages=DAMAGES)(settings(max_examples=EXAMPLES)(test))
    return functools.reduce(lambda each, case: example(damages=case)(each), FOUND, wrapped)


@contextlib.contextmanager
def file_of(name: str, data: bytes) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run", name)
        path.parent.mkdir()
        path.write_bytes(data)
        yield path


def refused_in_a_sentence(call: Callable[[], object], *kinds: type[Exception]) -> None:
    try:
        call()
    except (InputError, *kinds) as error:
        text = str(error)
    else:
        return
    assert text, "an error without words"
    assert "\n" not in text
    assert len(text) < 1500
    assert "Traceback" not in text


@fuzzed
def test_a_recipe(damages: Damages) -> None:
    text = b"model: deepseek-llm-tiny\ndataset: [stdlib]\nplan:\n- packed\nseed: 7\nmax_steps: 3\n"
    with file_of("recipe.yaml", damaged(text, damages)) as path:
        refused_in_a_sentence(lambda: load_recipe(path))


@fuzzed
def test_an_override(damages: Damages) -> None:
    text = b"model: deepseek-llm-tiny\ndataset: stdlib\nmax_steps: 3\n"
    word = damaged(b"learning_rate=1e-3", damages).decode("utf-8", "surrogateescape")
    with file_of("recipe.yaml", text) as path:
        refused_in_a_sentence(lambda: load_recipe(path, [word]))


@fuzzed
def test_a_configuration_of_another_trainer(damages: Damages) -> None:
    text = b"model_name_or_path: a\nstage: sft\ndataset: d\ntemplate: qwen\nlearning_rate: 1e-4\n"
    with file_of("config.yaml", damaged(text, damages)) as path:
        refused_in_a_sentence(lambda: read_import(path).to_yaml("config.yaml"))


@fuzzed
def test_examples_in_json(damages: Damages) -> None:
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
    for scan, data in ((scan_lines, lines), (scan_json, json.dumps(ROWS).encode())):
        for value in scan(io.BytesIO(damaged(data, damages))):
            assert (value.value is None) or (value.reason is None)


@functools.cache
def tables() -> dict[str, bytes]:
    table = pa.Table.from_pylist(ROWS)
    arrow, parquet = io.BytesIO(), io.BytesIO()
    with pa.ipc.new_file(arrow, table.schema) as writer:
        writer.write_table(table)
    pq.write_table(table, parquet)
    csv = "question,answer\n" + "".join(f'{n}?,"a,{n}\n"\n' for n in range(5))
    return {"x.arrow": arrow.getvalue(), "x.parquet": parquet.getvalue(), "x.csv": csv.encode()}


@pytest.mark.parametrize("name", ["x.arrow", "x.parquet", "x.csv"])
def test_a_table(name: str) -> None:
    @fuzzed
    def reads(damages: Damages) -> None:
        with file_of(name, damaged(tables()[name], damages)) as path:
            refused_in_a_sentence(lambda: read_examples([path], 1e9))

    reads()


@fuzzed
def test_a_weight_map(damages: Damages) -> None:
    index = json.dumps({"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}).encode()
    with file_of(INDEX, damaged(index, damages)) as path:
        (path.parent / "one.safetensors").write_bytes(packed({"a": torch.ones(2)}))
        refused_in_a_sentence(lambda: weight_files(path.parent))


@fuzzed
def test_a_header_of_safetensors(damages: Damages) -> None:
    with file_of("model.safetensors", damaged(packed({"a": torch.ones(2)}), damages)) as path:
        refused_in_a_sentence(lambda: weight_files(path.parent))


@fuzzed
def test_a_manifest(damages: Damages) -> None:
    with tempfile.TemporaryDirectory() as folder:
        saved = save(Path(folder), 1, {"w": torch.ones(3)}, {"n": 1})
        manifest = saved / checkpoint.MANIFEST
        manifest.write_bytes(damaged(manifest.read_bytes(), damages))
        refused_in_a_sentence(
            lambda: checkpoint.load(saved), checkpoint.DamagedCheckpointError, RuntimeError
        )


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json", "summary.json", "spikes.jsonl"])
def test_a_run_s_file_for_report_and_monitor(name: str) -> None:
    content = {"step": 1, "loss": 2.5, "tokens": 10, "step_seconds": 0.5, "stopped": "done"}

    @fuzzed
    def reads(damages: Damages) -> None:
        with file_of(name, damaged((json.dumps(content) + "\n").encode() * 2, damages)) as path:
            refused_in_a_sentence(lambda: read_runs(path.parent))
            run = Run("run", path.parent)
            run.look()
            json.dumps(run.standing(), allow_nan=False)

    reads()


@fuzzed
def test_a_foreign_json_object(damages: Damages) -> None:
    data = json.dumps({"a": [1, {"b": None}], "c": "é"}).encode()
    with file_of("x.json", damaged(data, damages)) as path:
        refused_in_a_sentence(lambda: read_json_object(path, "report"))


@fuzzed
def test_a_chat_template(damages: Damages) -> None:
    source = b"{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}{% endfor %}"
    text = damaged(source, [case for case in damages if len(case[2]) < 5000])
    values: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    refused_in_a_sentence(
        lambda: render(text.decode("utf-8", "replace"), "a:1", values), UnrenderedError
    )


@pytest.fixture(scope="module")
def monitor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MonitorServer]:
    with serving([write_run(tmp_path_factory.mktemp("runs") / "run")], live=False) as server:
        yield server


def answer_of(port: int, request: bytes) -> bytes:
    """All that the server sends until it closes; nothing if it refuses the bytes by a reset."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        received = b""
        with contextlib.suppress(ConnectionError):
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(1 << 16):
                received += piece
        return received


def test_an_http_request(monitor: MonitorServer) -> None:
    lines = (
        *("GET /metrics?run=run HTTP/1.1", f"Host: 127.0.0.1:{monitor.port}"),
        *(f"Authorization: Bearer {TOKEN}", f"Origin: http://127.0.0.1:{monitor.port}"),
        *("Cookie: a=b; c=d", "Content-Length: 2", "Connection: close", "", "{}"),
    )
    request = "\r\n".join(lines).encode()

    @fuzzed
    def answers(damages: Damages) -> None:
        answer = answer_of(monitor.port, damaged(request, damages))
        status = answer.partition(b"\r\n")[0]
        assert not answer or re.match(rb"HTTP/1\.1 (200|[34]\d\d) ", status), status

    answers()
    assert get(monitor.port, "/metrics")[0] == 200


# Files that are what they should be, with any value under a key that is known.

LEAVES = (
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6)),
    st.sampled_from(("../../x", "/dev/zero", "a\nb: c", "1e999", "[1]", "{}", "auto", "\x1b[2J")),
)
ANY = st.recursive(
    st.one_of(LEAVES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


def values_of(keys: Iterable[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(sorted(keys)), ANY, min_size=1, max_size=4)


def replaced(content: Any) -> st.SearchStrategy[Any]:
    """A JSON value in which one value is another."""

    @st.composite
    def one_other(draw: st.DrawFn) -> Any:
        changed = json.loads(json.dumps(content))
        *path, last = draw(st.sampled_from([*paths(changed)]))
        functools.reduce(lambda part, key: part[key], path, changed)[last] = draw(ANY)
        return changed

    return one_other()


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every part of a JSON value."""
    if path:
        yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from paths(inner, (*path, key))


FUZZED = settings(max_examples=EXAMPLES, deadline=None)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: str(form.NAME))
def test_a_key_of_another_trainer_with_any_value(form: Any) -> None:
    @FUZZED
    @given(values=values_of(form.KEYS))
    def reads(values: dict[str, Any]) -> None:
        marks = dict.fromkeys(form.MARKS, "a")
        with file_of("x.json", json.dumps(marks | values).encode()) as path:
            refused_in_a_sentence(lambda: read_import(path).to_yaml("x.json"))

    reads()


@FUZZED
@given(values=values_of(Recipe.model_fields))
def test_a_key_of_a_recipe_with_any_value(values: dict[str, Any]) -> None:
    good = {"model": "deepseek-llm-tiny", "dataset": "stdlib", "max_steps": 3}
    refused_in_a_sentence(lambda: requested_plan(recipe_from(good | values, "x.yaml")))


@FUZZED
@given(data=st.data(), technique=st.sampled_from(CATALOGUE))
def test_a_setting_of_a_technique_with_any_value(data: Any, technique: type[Technique]) -> None:
    entry = {technique.name(): data.draw(ANY)}
    if names := [field.name for field in dataclasses.fields(technique)]:
        entry = {technique.name(): data.draw(values_of(names))}
    good = {"model": "deepseek-llm-tiny", "dataset": "stdlib", "max_steps": 3, "plan": [entry]}
    refused_in_a_sentence(lambda: requested_plan(recipe_from(good, "x.yaml")))


@FUZZED
@given(data=st.data())
def test_a_key_of_deepspeed_with_any_value(data: Any) -> None:
    config: dict[str, Any] = {"train_batch_size": 8, "zero_optimization": {"stage": 1}}
    if section := data.draw(st.sampled_from([None, *INSIDE])):
        config[section] = data.draw(values_of(INSIDE[section]))
    else:
        config |= data.draw(values_of(TOP))
    refused_in_a_sentence(lambda: meaning_of(config, {"nproc": 2}, []), ValueError)
    known = TrainerSettings(world=2, hidden=8)
    refused_in_a_sentence(lambda: fill_auto(config, known), ValueError)


CONFIG: dict[str, Any] = build_config(PRESETS["v3-tiny"]).to_dict()


@FUZZED
@given(values=values_of((*CONFIG, "rope_scaling", "layer_types", "auto_map", "dtype")))
def test_a_key_of_a_model_s_config_with_any_value(values: dict[str, Any]) -> None:
    with file_of("config.json", json.dumps(CONFIG | values).encode()) as path:
        refused_in_a_sentence(lambda: skeleton_of(read_config(str(path.parent))))
        refused_in_a_sentence(lambda: Architecture.from_config(path.parent))


DEVICE = {"name": "x", "peak16": 1e14, "memory_bytes": 8e10, "memory_rate": 2e12, "link": 1e11}
RATES = {
    "kind": "hasten machine rates",
    "products": [{"dtype": "bf16", "best": 1e12}],
    "copies": [{"what": "copy", "best": 1e10}],
}
STEP = {"step": 1, "loss": 2.5, "tokens": 10, "step_seconds": 0.5, "positions": 512}
RUN_RECIPE = {"model": "deepseek-llm-tiny", "cutoff_len": 512, "vocabulary": 4096, "plan": ["ddp"]}
SUMMARY = {
    "stopped": "done",
    "world_size": 1,
    "tokens": 10,
    "hardware": {"accelerators": [], "memory_limit_bytes": 24e9},
    "cost": {"total": 1.0, "currency": "EUR"},
}


@pytest.mark.parametrize("figures", [DEVICE, RATES], ids=["a device", "measured rates"])
def test_the_figures_of_a_device_with_any_value(figures: dict[str, Any]) -> None:
    @FUZZED
    @given(changed=replaced(figures))
    def reads(changed: Any) -> None:
        with file_of("gpu.json", json.dumps(changed).encode()) as path:
            refused_in_a_sentence(lambda: cluster_of("fat_tree", str(path), 1, 8, 16.0))

    reads()


@FUZZED
@given(step=replaced(STEP), recipe=replaced(RUN_RECIPE), summary=replaced(SUMMARY))
def test_a_run_of_others_with_any_value(step: Any, recipe: Any, summary: Any) -> None:
    with file_of("metrics.jsonl", (json.dumps(step) + "\n").encode() * 9) as path:
        folder = path.parent
        (folder / "recipe.yaml").write_text(json.dumps(recipe))
        (folder / "summary.json").write_text(json.dumps(summary))
        (folder / "run.json").write_text(json.dumps(summary | recipe))
        for read in (predicted_lines, predicted_section, read_runs):
            refused_in_a_sentence(lambda read=read: read(folder))  # type: ignore[misc]
        run = Run("run", folder)
        run.look()
        json.dumps(run.standing(), allow_nan=False)


REPORT = json.loads((Path(__file__).parents[1] / "report/data/report_full.json").read_text())


@FUZZED
@given(changed=replaced(REPORT))
def test_a_report_of_others_with_any_value(changed: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        refused_in_a_sentence(lambda: write_report(changed, Path(folder)))
        refused_in_a_sentence(lambda: render_markdown(changed))
