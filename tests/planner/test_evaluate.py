"""The model against a file of measurements: every record answered or refused with a reason."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "planner"))

from accuracy import evaluate, main
from published import read_record

from hasten.errors import InputError

MEASUREMENTS = Path(__file__).parents[2] / "benchmarks" / "planner" / "measurements.json"
ROWS = json.loads(MEASUREMENTS.read_text(encoding="utf-8"))


def written(folder: Path, rows: Any) -> Path:
    path = folder / "figures.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return evaluate(MEASUREMENTS)


def test_every_record_is_predicted_or_has_a_reason(found: dict[str, Any]) -> None:
    named = [r["id"] for r in found["records"]] + [s["id"] for s in found["skipped"]]
    assert sorted(named) == sorted(row["id"] for row in ROWS)
    assert all(s["reason"] for s in found["skipped"])
    json.dumps(found)  # plain numbers all through


def test_a_record_has_the_figures_that_were_asked_for(found: dict[str, Any]) -> None:
    for record in found["records"]:
        predicted = record["predicted"]
        assert predicted["p10"] < predicted["tokens_per_s_per_gpu"] < predicted["p90"]
        assert predicted["memory_GB"] > 0
        assert isinstance(predicted["fits"], bool)
        assert sum(predicted["step"].values()) == pytest.approx(predicted["iteration_s"])


def test_the_summary_is_that_of_its_records(found: dict[str, Any]) -> None:
    errors = [abs(r["error"]) for r in found["records"] if r["scope"] == "core" and "error" in r]
    core = found["summary"]["by_scope"]["core"]
    assert core["records"] == len(errors)
    assert core["median"] == pytest.approx(np.median(errors))
    assert core["median"] < 0.06
    assert found["summary"]["out_of_memory"] == {"records": 2, "called_fitting": 0}


def test_what_cant_be_read_is_listed_with_its_reason(tmp_path: Path) -> None:
    sound = ROWS[0]
    lacks = {key: value for key, value in sound.items() if key != "model"}
    strange = {**sound, "gpu": "tpu_v9"}
    unsaid = {**sound, "mbs": None}
    odd = {**sound, "precision": "int3"}
    found = evaluate(written(tmp_path, [sound, lacks, strange, unsaid, odd, "no record"]))
    assert len(found["records"]) == 1
    reasons = " ".join(s["reason"] for s in found["skipped"])
    for word in ("model", "tpu_v9", "micro-batch", "int3"):
        assert word in reasons
    assert len(found["skipped"]) == 5


@pytest.mark.parametrize(
    "measured",
    [{"tokens_per_s_per_gpu": "fast"}, {"memory_GB": 0}, {"iter_s": -2}, {"iter_s": [1]}],
)
def test_a_measurement_that_is_none_is_listed_with_its_reason(
    tmp_path: Path, measured: dict[str, Any]
) -> None:
    found = evaluate(written(tmp_path, [ROWS[0], {**ROWS[0], "measured": measured}]))
    assert len(found["records"]) == len(found["skipped"]) == 1
    assert found["skipped"][0]["reason"]


def test_ranks_that_do_not_multiply_to_the_devices_follow_the_devices() -> None:
    row = copy.deepcopy(ROWS[0])
    odd = read_record({**row, "tp": 2, "cp": 2, "dp": row["gpus"] // 2})
    assert odd is not None
    assert odd.layout.devices == row["gpus"]


@pytest.mark.parametrize(
    ("told", "word"), [(None, "none"), (False, "none"), (True, "full"), ("light", "light")]
)
def test_recomputation_is_read_as_people_write_it(told: object, word: str) -> None:
    record = read_record({**ROWS[0], "recompute": told})
    assert record is not None
    assert record.layout.recompute == word


def test_what_a_record_leaves_open_is_filled_in_sensibly(tmp_path: Path) -> None:
    bare = {key: ROWS[0][key] for key in ("gpus", "gpu", "mbs", "gbs", "seq", "model")}
    found = evaluate(written(tmp_path, [bare]))["records"][0]
    assert found["predicted"]["tokens_per_s_per_gpu"] > 0


@pytest.mark.parametrize("rows", [[], {}, "text", [{}]])
def test_a_file_without_a_usable_record_is_refused(tmp_path: Path, rows: Any) -> None:
    with pytest.raises(InputError, match=r"figures\.json"):
        evaluate(written(tmp_path, rows))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere"):
        evaluate(tmp_path / "nowhere.json")


def test_unknown_recomputation_is_the_least_that_fits(tmp_path: Path) -> None:
    row = copy.deepcopy(next(r for r in ROWS if r["stack"] == "maxtext"))
    record = read_record(row)
    assert record is not None
    assert record.layout.recompute == "full"
    small = read_record({**row, "seq": 128, "mbs": 1, "gbs": 256})
    assert small is not None
    assert small.layout.recompute == "none"


def test_the_script_sums_up_and_writes_every_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "accuracy.json"
    few = written(tmp_path, ROWS[:20])
    monkeypatch.setattr(sys, "argv", ["accuracy", str(few), "--json", str(out)])
    main()
    said = capsys.readouterr().out
    assert "records predicted" in said
    assert "median" in said
    needed = {"tokens_per_s_per_gpu", "iteration_s", "memory_GB", "p10", "p90", "fits"}
    assert all(needed <= set(row["predicted"]) for row in json.loads(out.read_text())["records"])
    monkeypatch.setattr(sys, "argv", ["accuracy", str(tmp_path / "none.json")])
    with pytest.raises(SystemExit, match="No such file"):
        main()
