"""The GPU benchmark without a GPU: its rehearsal, its row ``smoke``, its files, its page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from gpu import measure, peer, results, rows, run, stages  # noqa: E402
from gpu.predictions import choice_key, kept_steps, simulated_step  # noqa: E402
from gpu.rows import ROWS, Row, row_named  # noqa: E402

from hasten.techniques.experts import ExpertsImplementation  # noqa: E402

SMOKE = row_named("smoke")
H200, H100 = 139 * 2**30, 78 * 2**30  # bytes that a program finds


# What a GPU machine may lack of hasten's libraries, the ones that come with others among them.
LACKING = (
    *("pydantic", "pydantic_core", "optuna", "cmaes", "ruamel", "alembic", "sqlalchemy"),
    *("typer", "liger_kernel", "starlette", "uvicorn", "datasets", "deepspeed"),
)


def called(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks/gpu/run.py"), *arguments]
    env = {**os.environ, **env}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=500, check=False, env=env
    )


@pytest.fixture
def lacking(tmp_path: Path) -> str:
    """A folder for PYTHONPATH with which Python finds none of those libraries."""
    folder = tmp_path / "lacking"
    folder.mkdir()
    text = f"import sys\nsys.modules.update(dict.fromkeys({LACKING!r}))\n"  # None: can't be found
    (folder / "sitecustomize.py").write_text(text)
    return str(folder)


def test_the_script_starts_without_the_libraries_that_a_gpu_machine_may_lack(lacking: str) -> None:
    done = called("--list", PYTHONPATH=lacking)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == results.listed()


@pytest.mark.timeout(600)
@pytest.mark.skipif(torch.cuda.is_available(), reason="traced with the CPU build of torch")
@pytest.mark.long
def test_the_whole_script_runs_on_a_pretended_gpu(tmp_path: Path, lacking: str) -> None:
    """Every stage, each in its process, without the libraries that a GPU machine may lack."""
    out = tmp_path / "rows"
    done = called("--all", "--out", str(out), "--rehearse", "h100", PYTHONPATH=lacking)
    assert done.returncode == 0, done.stderr[-2000:]
    found = {f["row"]: f for f in results.read(out)}
    assert list(found) == sorted(rows.NAMES)
    for name, row in found.items():
        assert row["status"] == "complete", (name, row["said"], done.stderr[-2000:])
        assert row["machine"]["device"] == "cuda:0"
    for row in ROWS:
        assert {len(turns) for turns in found[row.name]["repeats"].values()} == {measure.REHEARSED}
        assert found[row.name]["variants"]["hasten"]["left_out"] == []
        assert found[row.name]["variants"]["hasten"]["parts"]["forward"] >= 0
    assert "hasten / hf_trainer" in found["trainer-1b"]["summary"], found["trainer-1b"]["peers"]
    report = (out / "report.md").read_text()
    assert "no figure here was measured" in report
    assert report.count("| rehearsed |") == sum(row.needs_gpu for row in ROWS)
    assert "tests collected" in report or "selected" in report


@pytest.mark.timeout(600)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the toy row is for a processor")
@pytest.mark.long
@pytest.mark.timing
def test_the_smoke_row_is_measured_from_end_to_end(tmp_path: Path) -> None:
    file = tmp_path / "smoke.json"
    done = called("--row", "smoke", "--json", str(file), "--minutes", "15")  # at most: it has few
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert found["status"] == "complete"
    assert {len(turns) for turns in found["repeats"].values()} == {5}
    assert found["summary"]["hasten"]["median"] > 0
    assert found["summary"]["hasten / plain"]["low"] > 0
    hasten = found["variants"]["hasten"]
    assert hasten["plan_words"][0] == "packed"
    assert not any("NO EFFECT" in proof for proof in hasten["proofs"])
    assert hasten["mfu_measured"] > 0
    assert hasten["mfu_datasheet"] is None, "no maker promises a processor's rate here"
    assert found["machine"]["versions"]["torch"] == metadata.version("torch")
    assert [path.name for path in tmp_path.iterdir()] == ["smoke.json"]


def test_rows_are_listed_and_others_refused() -> None:
    assert "full-8b-bf16" in results.listed()
    with pytest.raises(SystemExit, match="there is no row 'gpt'; the rows are kernels, lora"):
        row_named("gpt")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *((["--row", "smoke", "--minutes", minutes], "give 0.05 to") for minutes in ("0", "nan")),
        (
            ["--all", "--rehearse", "nonsense"],
            "--rehearse: no figures are known of the device 'nonsense'",
        ),
        (["--report", "/nowhere"], "is no folder; give the one of --out"),
    ],
)
def test_bad_words_are_refused(
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", *words])
    with pytest.raises(SystemExit):
        run.main()
    assert said in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
@pytest.mark.parametrize("name", [n for n in rows.NAMES if n != "smoke"])
def test_without_a_gpu_a_row_says_so_and_measures_nothing(name: str, tmp_path: Path) -> None:
    found = stages.run_row(name, tmp_path / "row.json", 1.0)
    assert (found["status"], found["said"]) == ("failed", "there is no GPU here")
    assert json.loads((tmp_path / "row.json").read_text()) == found
    line = next(x for x in results.table(results.read(tmp_path)).splitlines() if name in x)
    assert line.startswith(f"| {name} | | not measured (there is no GPU here) |")


def test_every_choice_was_traced_and_nothing_else() -> None:
    keys = {
        row.name: {choice_key(row, c) for choices in row.variants.values() for c in choices}
        for row in ROWS
    }
    kept = {name: set(steps) for name, steps in kept_steps().items()}
    assert kept == keys, "trace anew: python benchmarks/gpu/simulated.py"


@pytest.mark.parametrize("row", [r for r in ROWS if r.needs_gpu], ids=lambda row: row.name)
@pytest.mark.parametrize("memory", [H200, H100], ids=["H200", "H100"])
def test_every_row_has_a_choice_for_both_gpus(row: Row, memory: int) -> None:
    for choices in row.variants.values():
        steps = [simulated_step(row, choice) for choice in choices]
        assert any(step.needed_bytes <= measure.SHARE * memory for step in steps if step)


def test_a_full_8b_has_masters_on_an_h200_and_none_on_an_h100() -> None:
    row = row_named("full-8b-bf16")

    def first(memory: int) -> str:
        steps = [(c, simulated_step(row, c)) for c in row.variants["hasten"]]
        fits = (c for c, step in steps if step and step.needed_bytes <= 0.92 * memory)
        return ", ".join(str(t) for t in next(fits).plan)

    assert "bf16_master_weights" in first(H200)
    assert "bf16_master_weights" not in first(H100)


def test_what_cannot_fit_is_not_tried_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "device_memory", lambda device: 10**9)
    tried: list[Any] = []
    with pytest.raises(
        MemoryError, match=r"no choice of smoke fits 1 GB: .*needs 3 of 1 GB by simulation"
    ):
        measure.first_that_fits(SMOKE, "hasten", "cpu", measure.examples_of(SMOKE), tried)
    assert len(tried) == 1


def test_a_choice_that_runs_out_of_memory_gives_way_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choice = SMOKE.variants["hasten"][0]
    row = replace(SMOKE, variants={"hasten": (replace(choice, examples=4), choice)})
    steps = measure.HastenVariant.steps

    def short(self: measure.HastenVariant, count: int) -> Any:
        if not any(t.name() == "gradient_accumulation" for t in self.plan):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return steps(self, count)

    monkeypatch.setattr(measure.HastenVariant, "steps", short)
    tried: list[Any] = []
    _, kept = measure.first_that_fits(row, "hasten", "cpu", measure.examples_of(row), tried)
    assert [t["outcome"] for t in tried] == ["ran out of memory: CUDA out of memory", "fits"]
    assert kept["plan_words"][1] == "gradient_accumulation(micro_batch_size=2)"


class Clockwork:
    """A variant of known speed that fails at a given turn."""

    def __init__(self, fails_at: int = 99) -> None:
        self.turns, self.fails_at = 0, fails_at

    def steps(self, count: int) -> measure.Work:
        self.turns += 1
        if self.turns == self.fails_at:
            raise KeyboardInterrupt
        return measure.Work(100 * count, 0, 0.5 * count)


def test_a_stopped_row_keeps_the_repeats_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one(*given: Any) -> Any:
        return Clockwork(fails_at=4), {"left_out": [], "plan_words": ["packed"], **flops}

    flops = {"flops_per_token": 1.0, "flops_per_pair": 0.0}
    monkeypatch.setattr(measure, "first_that_fits", one)
    monkeypatch.setattr(stages, "machine", lambda *given: {"device_name": "toy"})
    row = replace(SMOKE, peers=(), variants={"hasten": SMOKE.variants["hasten"]})
    monkeypatch.setattr(stages, "row_named", lambda name: row)
    with pytest.raises(KeyboardInterrupt):
        stages.run_row("smoke", tmp_path / "s.json", 1.0)
    found = json.loads((tmp_path / "s.json").read_text())
    assert found["status"] == "partial"
    assert found["said"] == "KeyboardInterrupt: "
    assert [t["tokens_per_second"] for t in found["repeats"]["hasten"]] == [200.0, 200.0]
    assert found["summary"]["hasten"]["median"] == 200.0


@given(st.lists(st.floats(1.0, 1e6), min_size=1, max_size=5), st.floats(1.1, 9.0))
def test_ratios_are_those_of_hasten_to_the_others(rates: list[float], factor: float) -> None:
    repeats = {
        "plain": [{"tokens_per_second": r} for r in rates],
        "hasten": [{"tokens_per_second": factor * r} for r in rates],
    }
    found = results.summary(repeats)
    assert found["hasten / plain"]["median"] == pytest.approx(factor)


def test_the_trainer_stays_in_bf16_from_turn_to_turn() -> None:
    """Taken out of its autocast after a turn it would be slow, and a ratio to it worth nothing."""
    pytest.importorskip("accelerate")
    model: Any = measure.model_on(SMOKE, "cpu", "float32")
    seen: list[torch.dtype] = []
    model.model.layers[0].mlp.gate_proj.register_forward_hook(
        lambda layer, given, out: seen.append(out.dtype)
    )
    variant = peer.TrainerVariant(SMOKE, model, measure.examples_of(SMOKE))
    done = [variant.steps(2) for _ in range(2)]
    assert seen == [torch.bfloat16] * 4
    assert all(work.tokens > 0 and work.seconds for work in done)
    assert len(variant._optimizer.state) == len(list(model.parameters()))


def test_the_peer_gets_labels_for_tokens_alone() -> None:
    batch = peer.padded(measure.examples_of(SMOKE)[:3])
    assert torch.equal(batch["labels"] == -100, batch["attention_mask"] == 0)


def test_the_page_shows_what_the_files_say_and_else_not_measured(tmp_path: Path) -> None:
    empty = results.table([])
    assert empty.count("not measured") == len(rows.NAMES) - 1  # smoke isn't on the page
    page = (ROOT / "benchmarks/results/gpu.md").read_text()
    (tmp_path / "notes.json").write_text("[1]")
    assert results.table(results.read(tmp_path)) == empty
    for row in ROWS:
        assert (f"| {row.name} |" in page) == row.needs_gpu
    seconds = {"h200": {"forward": 9.0}, "h100-80gb": {"forward": 0.1, "backward": 0.2}}
    paper = {"peak_bytes": 9e8, "syncs": 1, "tokens": 1000, "seconds": seconds}
    variant = {"plan_words": ["packed"], "peak_memory_bytes": 10**9, "mfu_measured": 0.5}
    variant |= {"paper": paper, "syncs": 3, "parts": {"forward": 0.25, "backward": 0.3}}
    found = {
        "kind": "hasten gpu row",
        "row": "full-8b-bf16",
        "machine": {"device_name": "NVIDIA H100 80GB HBM3"},
        "status": "partial",
        "said": "",
        "variants": {"hasten": variant},
        "summary": {"hasten": {"median": 1234.5, "low": 1200.0, "high": None}},
    }
    (tmp_path / "row.json").write_text(json.dumps(found))
    line = results.table(results.read(tmp_path)).splitlines()[4]
    assert line.startswith("| full-8b-bf16 | NVIDIA H100 80GB HBM3 | 1,234 (partial) | ≥ 8,200 / ")
    assert "| 37.0% |  | 50.0% | 1.0 GB |" in line  # 1000 tokens in 0.3 s by simulation
    said = results.said_of(found)
    assert "waits 3, by simulation 1; peak 1.0 GB, by simulation 0.9 GB" in said
    assert "forward 250 ms (100), backward 300 ms (200), optimizer 0 ms (0); in brackets" in said


def test_rows_go_without_the_kernels_that_were_found_wrong(tmp_path: Path) -> None:
    verdicts = [{"kernel": "swiglu", "why": "bfloat16: off by 1", "repeats": True}]
    (tmp_path / "kernels.json").write_text(json.dumps({"verdicts": verdicts}))
    kept = stages.kept_verdicts(tmp_path / "smoke.json")
    assert {name: verdict.failed for name, verdict in kept.items()} == {
        "swiglu": "bfloat16: off by 1"
    }
    assert stages.kept_verdicts(tmp_path / "elsewhere" / "smoke.json") == {}


def test_a_row_of_experts_is_known_to_have_them() -> None:
    """Or a choice of their code would be left out as having nothing to choose for."""
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 96}
    plain = replace(SMOKE, architecture="llama", shape=shape)
    mixed = replace(SMOKE, architecture="deepseek_v2", shape={**shape, "n_routed_experts": 8})
    assert measure.context_of(plain, "cpu", [3]).model.experts == 0
    known = measure.context_of(mixed, "cpu", [3])
    assert known.model.experts == 8
    assert not ExpertsImplementation("grouped_mm").unsupported_reasons(known)


def test_the_tests_of_a_gpu_find_the_package_where_it_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def started(command: list[str], env: dict[str, str], **other: Any) -> Any:
        assert env["PYTHONPATH"].split(os.pathsep) == [str(ROOT / "src"), "/elsewhere"]
        return subprocess.CompletedProcess(command, 0, "3 passed", "")

    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setattr(stages.subprocess, "run", started)
    assert stages.gpu_tests(time.monotonic() + 9, False)["said"] == "3 passed"
