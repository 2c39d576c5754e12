"""hasten's own examples with the articles' classes, run as scripts; none is an article's block."""

from __future__ import annotations

import runpy
import warnings
from pathlib import Path

import pytest

from hasten.core import context as facts
from hasten.techniques.precision import Autocast


def test_the_appendix_example_runs_and_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    snippet = str(Path(__file__).parent / "appendix_example.py")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        names = runpy.run_path(snippet)
    summary = names["summary"]
    here = not Autocast().unsupported_reasons(facts.seen_at_start())
    losses = summary["epoch_losses"]
    assert losses[2] < losses[0]
    assert summary["steps"] < 24  # of 8 batches an epoch: larger steps, which is said
    assert summary["switches"] == {
        "compress_gradients": "off",  # with one rank no gradient travels
        "mixed_precision": "autocast" if here else "off",  # a processor may have no bf16 products
        "dynamic_batch": "adaptive_batch(grow=True)",
    }
    assert summary["effective"]["dynamic_batch"]["effective"]
    assert summary["examples_per_step"]["most"] > 32
    assert not summary["effective"]["compress_gradients"]["effective"]
    assert summary["effective"]["mixed_precision"]["effective"] == here
    assert "quantised" not in [switch["technique"] for switch in summary["plan"]]
    assert not [w for w in caught if "compress" in str(w.message)]
    out = capsys.readouterr().out
    assert "no checkpoint yet" in out
    assert "32 devices" in out
    assert "hasten launch" in out
    assert "with one rank no gradient travels" in out
    assert "the learning rate stays as it is" in out
    kept = sorted(p.name for p in Path("checkpoints").iterdir())
    assert len(kept) == 3  # one an epoch
    assert kept[-1] == f"step-{summary['steps']:08d}"


def test_the_dynamic_batch_example_trains_on_every_record_and_stays_in_its_budget() -> None:
    names = runpy.run_path(str(Path(__file__).parent / "dynamic_batch_example.py"))
    assert sum(names["sizes"]) + sum(names["rest"]) == 512
    assert names["sizes"] == [64] * 8  # there is memory for whole batches, so none waits
    assert sum(rows for rows, _ in names["shapes"]) == 200
    assert all(rows * longest <= 4096 for rows, longest in names["shapes"])


def test_the_prefetch_example_takes_every_batch_and_waits_for_few() -> None:
    names = runpy.run_path(str(Path(__file__).parent / "prefetch_example.py"))
    assert len(names["batches"]) == 16
    assert len(names["losses"]) == names["prefetcher"].statistics.batches == 48
    assert names["batches"].state_dict() == {"epoch": 3, "batch": 0}


def test_the_fused_layer_trains() -> None:
    names = runpy.run_path(str(Path(__file__).parent / "fused_linear_example.py"))
    assert names["losses"][-1] < 0.5 * names["losses"][0]


def test_the_compressor_example_learns_with_a_twentieth_of_the_gradient() -> None:
    names = runpy.run_path(str(Path(__file__).parent / "compressor_example.py"))
    assert names["losses"][-1] < 0.5 * names["losses"][0]
    assert names["kept"] < 0.06
