"""The step benchmark's own arithmetic: what it counts, compares and refuses to compare."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import bench_step  # noqa: E402
from step import clock, common, given, machine, prepare, table, variant, where  # noqa: E402

LENGTHS = st.lists(st.integers(2, 9), min_size=1, max_size=12)


def records(lengths: list[int]) -> given.Examples:
    draw = np.random.default_rng(0)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    ids = draw.integers(3, 90, starts[-1]).astype(np.int32)
    return given.Examples(ids, draw.random(starts[-1]) < 0.5, starts)


@drawn(LENGTHS)
def test_padding_is_masked_and_only_tokens_are_counted(lengths: list[int]) -> None:
    rows = [records(lengths).features(i) for i in range(len(lengths))]
    batch = common.padded(rows)
    assert common.tokens_of(rows) == sum(lengths) == int(batch["attention_mask"].sum())
    assert (batch["labels"][batch["attention_mask"] == 0] == given.IGNORED).all()
    assert (batch["labels"][:, 0] == given.IGNORED).all()
    kept = batch["labels"] != given.IGNORED
    assert (batch["labels"][kept] == batch["input_ids"][kept]).all()


def test_records_survive_their_file(tmp_path: Path) -> None:
    ours = records([3, 5, 2])
    ours.write(tmp_path / "r.npz")
    again = given.Examples.read(tmp_path / "r.npz")
    assert [again.features(i) for i in range(3)] == [ours.features(i) for i in range(3)]


def test_steps_are_those_that_hasten_takes() -> None:
    from tiny import language_job, run, session_of

    job = language_job(steps=4, batch=8)
    settings = replace(given.Settings(), batch=8, steps=4, seed=job.seed)
    steps = prepare._steps(settings, list(job.lengths))
    theirs = [m.tokens for m in run(session_of(job))]
    assert [sum(job.lengths[i] for i in step) for step in steps] == theirs


def test_speed_is_tokens_over_seconds_of_the_steps_after_the_warm_up() -> None:
    watch = clock.Clock(warmup=1)
    watch.marks = {"opened": 0.0, "started": 1.0, "first_step_after_process": 9.0}
    watch.begins, watch.ends = [1.0, 11.0, 13.0, 16.0], [11.0, 12.0, 16.0]  # stopped for a second
    watch.tokens = [100, 100, 500]
    found = watch.result()
    assert found["step_seconds"] == [10.0, 1.0, 3.0]
    assert found["steady_tokens_per_second"] == 600 / 4
    assert found["median_tokens_per_second"] == pytest.approx((100 + 500 / 3) / 2)
    assert found["whole_tokens_per_second"] == 700 / 15


def result(name: str, rate: float, turn: int = 0, **changes: Any) -> dict[str, Any]:
    figures = ("median", "whole")
    return {
        "variant": name,
        "round": turn,
        "load_before": 0.1,
        "steady_tokens_per_second": rate,
        **{f"{figure}_tokens_per_second": rate for figure in figures},
        "first_step_seconds": 1.0,
        "compile_seconds": None,
        "peak_bytes": 1,
        "device_peak_bytes": 1,
        "eval_loss": 6.5,
        "tokens": 30,
        "step_tokens": [10, 20],
        "losses": [7.0, 6.9],
        "chose_records": False,
        **changes,
    }


def report(*runs: dict[str, Any]) -> dict[str, Any]:
    return {
        "runs": list(runs),
        "variants": ["hasten", "hf_best", "trl_packing"],
        "not_installed": {"trl_packing": ["trl"]},
        "step_tokens": [10, 20],
        "flops_per_token": 1e6,
        "ceiling": 1e9,
        "settings": {"abreast": False},
    }


def test_variants_that_take_turns_are_compared_step_by_step() -> None:
    """The machine becomes slower from step to step; the first one warms up."""
    steps = [[9.0, 1.0, 2.0, 4.0], [1.0, 2.0, 4.0, 8.0]]
    runs = [
        result(name, 1.0, step_seconds=seconds, warmup=1)
        for name, seconds in zip(("hasten", "hf_best"), steps, strict=True)
    ]
    found = report(*runs) | {"settings": {"abreast": True}}
    assert "| 0.50 [0.50, 0.50] |" in table.variants_table(found)[3]
    runs[1]["chose_records"] = True  # then its steps aren't those of the other
    assert "| 1.00 |" in table.variants_table(found)[3]


def test_ratios_are_taken_within_a_round() -> None:
    slow = [result("hasten", 100.0), result("hf_best", 50.0)]
    fast = [result("hasten", 300.0, 1), result("hf_best", 150.0, 1)]
    lines = table.variants_table(report(*slow, *fast))
    assert "| 0.50 [0.50, 0.50] |" in lines[3]
    assert "| 20.0% |" in lines[2]  # 200 tokens/s of 1e6 FLOPs, of 1e9


def test_an_variant_without_its_package_or_with_an_error_has_a_line() -> None:
    failed = {
        "variant": "hf_best",
        "round": 0,
        "load_before": 0.1,
        "error": "exit code 1: no memory",
    }
    lines = table.variants_table(report(result("hasten", 100.0), failed))
    assert "failed: exit code 1: no memory" in lines[3]
    assert "not installed: trl" in lines[4]
    assert table.mismatches(report(result("hasten", 100.0), failed)) == []


def test_runs_on_other_records_or_weights_are_called_not_comparable() -> None:
    base = result("hasten", 100.0)
    other = report(base, result("hf_best", 90.0, step_tokens=[10, 21]))
    assert "other tokens" in table.remarks(other)[0]
    weights = report(base, result("hf_best", 90.0, losses=[7.1, 7.0]))
    assert "first loss 7.1000" in table.remarks(weights)[0]
    chosen = result("hf_best", 90.0, step_tokens=[9], chose_records=True)
    assert table.remarks(report(base, chosen)) == []


def test_every_variant_but_packing_follows_the_order_where_it_is_matched() -> None:
    packing = ["trl_packing", "trl_packing_rows"]
    assert [name for name, one in variant.VARIANTS.items() if one.chooses(True)] == packing
    free = [name for name, one in variant.VARIANTS.items() if one.chooses(False)]
    sorted_ones = ["hf_best", "hf_best_4x8", "hf_compile", "hf_best_4x8_compile"]
    in_float32 = ["hf_float32_4x8", "hf_float32_4x8_compile"]
    assert free == [*sorted_ones, *in_float32, *packing]


def test_the_allocator_is_the_same_for_all_and_none_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MALLOC_TOP_PAD_", "1")
    assert "MALLOC_TOP_PAD_" not in machine.environment("none", 1)
    assert (
        machine.environment("glibc", 2).items()
        >= {**machine.KEEPING, "OMP_NUM_THREADS": "2"}.items()
    )


def event(name: str, shapes: list[Any] = [], parent: Any = None) -> Any:  # noqa: B006
    return SimpleNamespace(name=name, input_shapes=shapes, cpu_parent=parent)


def test_products_are_told_apart_by_what_they_sum_over() -> None:
    watch = object.__new__(where.StepProfile)
    watch._weight_sides = {384, 1024}
    back = event("_LinearBackward")
    rows = [100, 384]
    assert watch._group(event("aten::mm", [rows, [384, 1024]])) == "products, forward"
    product = event("hasten::product", [[100, 1024], [1024, 384], [], []], back)
    assert watch._group(product) == "products, input gradient"
    product = event("hasten::product", [[100, 1024], rows, [], []], back)
    assert watch._group(product) == "products, weight gradient"
    product = event("hasten::product_into", [rows, [100, 1024], [1024, 384], [], [], []], back)
    assert watch._group(product) == "products, input gradient"
    assert watch._group(event("aten::mm", [rows, [384, 1024]], event("_ChunkedCrossEntropy"))) == (
        "head and loss"
    )
    assert watch._group(event("aten::bmm", [rows], event("_Attend"))) == "attention"
    assert watch._group(event("hasten::swiglu_backward")) == "fused elementwise"
    assert watch._group(event("Optimizer.step#AdamW.step")) == "optimizer"


@pytest.mark.parametrize("architecture", list(prepare.PRESET))
@pytest.mark.parametrize("hidden", [64, 384, 1024])
def test_configs_have_whole_heads(architecture: str, hidden: int) -> None:
    tokenizer = _Tokenizer()
    settings = given.Settings(architecture=architecture, hidden=hidden, layers=2)
    config = prepare.config_of(settings, tokenizer)
    config.validate()
    assert config.num_attention_heads % config.num_key_value_heads == 0
    assert config.hidden_size == hidden
    if architecture in ("llama", "qwen2"):
        assert hidden % config.num_attention_heads == 0
    if architecture == "llama":
        assert hidden != 384 or config.intermediate_size == 1024
    assert config.intermediate_size % 32 == 0


class _Tokenizer:
    bos_token_id, eos_token_id, pad_token_id = 1, 2, 0

    def __len__(self) -> int:
        return 1024


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--examples", "33"], "whole steps of 32"),
        (["--hidden", "100"], "a multiple of 64"),
        (["--peers", "/nowhere/python"], "no such interpreter"),
        (["--rounds", "0"], "at least 1"),
    ],
)
def test_bad_words_are_refused_before_anything_runs(
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_step.py", *words])
    with pytest.raises(SystemExit):
        bench_step.arguments()
    assert said in capsys.readouterr().err


def test_a_file_that_can_not_be_written_is_named() -> None:
    bench = object.__new__(bench_step.Bench)
    bench.chosen, bench.found = SimpleNamespace(json=Path("/nowhere/x.json")), {}
    with pytest.raises(SystemExit, match=r"/nowhere/x\.json: No such file"):
        bench.keep()


def test_settings_survive_their_file(tmp_path: Path) -> None:
    settings = given.Settings(workload="lora", steps=3)
    given.write_settings(settings, tmp_path)
    assert given.Settings(**json.loads((tmp_path / "settings.json").read_text())) == settings
