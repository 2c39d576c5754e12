"""Published measurements become cases of the planner, or are refused with a reason."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "planner"))

from held_out import read_records
from published import read_record

from hasten.errors import InputError

MEASUREMENTS = Path(__file__).parents[2] / "benchmarks" / "planner" / "measurements.json"
ROWS = json.loads(MEASUREMENTS.read_text(encoding="utf-8"))
SOUND = ROWS[0]


def written(folder: Path, rows: Any) -> Path:
    path = folder / "figures.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def test_a_record_without_its_micro_batch_is_left_out(tmp_path: Path) -> None:
    assert read_record({**SOUND, "mbs": None}) is None
    assert len(read_records(written(tmp_path, [SOUND, {**SOUND, "mbs": None}]))) == 1


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({key: value for key, value in SOUND.items() if key != "model"}, "lacks 'model'"),
        ({**SOUND, "gpu": "tpu_v9"}, "tpu_v9"),
        ({**SOUND, "precision": "int3"}, "int3"),
        ({**SOUND, "measured": {"tokens_per_s_per_gpu": "fast"}}, "fast"),
        ({**SOUND, "measured": {"memory_GB": 0}}, "memory_GB is 0"),
        ({**SOUND, "measured": {"iter_s": -2}}, "iter_s is -2"),
        ({**SOUND, "measured": {"iter_s": [1]}}, "can't be used"),
        ("no record", "record 0 can't be used"),
    ],
)
def test_what_cant_be_read_is_refused_with_its_reason(
    tmp_path: Path, row: Any, reason: str
) -> None:
    with pytest.raises(InputError, match=reason):
        read_records(written(tmp_path, [row]))


def test_ranks_that_do_not_multiply_to_the_devices_follow_the_devices() -> None:
    row = copy.deepcopy(SOUND)
    odd = read_record({**row, "tp": 2, "cp": 2, "dp": row["gpus"] // 2})
    assert odd is not None
    assert odd.layout.devices == row["gpus"]


@pytest.mark.parametrize(
    ("told", "word"), [(None, "none"), (False, "none"), (True, "full"), ("light", "light")]
)
def test_recomputation_is_read_as_people_write_it(told: object, word: str) -> None:
    record = read_record({**SOUND, "recompute": told})
    assert record is not None
    assert record.layout.recompute == word


def test_what_a_record_leaves_open_is_filled_in_sensibly() -> None:
    bare = read_record({key: SOUND[key] for key in ("gpus", "gpu", "mbs", "gbs", "seq", "model")})
    assert bare is not None
    assert bare.layout.devices == SOUND["gpus"]


@pytest.mark.parametrize("rows", [[], {}, "text", [{}]])
def test_a_file_without_a_usable_record_is_refused(tmp_path: Path, rows: Any) -> None:
    with pytest.raises(InputError, match=r"figures\.json"):
        read_records(written(tmp_path, rows))


def test_unknown_recomputation_is_the_least_that_fits(tmp_path: Path) -> None:
    row = copy.deepcopy(next(r for r in ROWS if r["stack"] == "maxtext"))
    record = read_record(row)
    assert record is not None
    assert record.layout.recompute == "full"
    small = read_record({**row, "seq": 128, "mbs": 1, "gbs": 256})
    assert small is not None
    assert small.layout.recompute == "none"
