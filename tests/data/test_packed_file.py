"""The file of packed rows: every token once, nothing predicted across examples, whole or absent."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.data import packed_file
from hasten.data.packed_file import write_packed
from hasten.errors import InputError
from hasten.parts.data.collate import TokenizedExample, tokenized_example
from sample_data import InMemory


def read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    with pa.ipc.open_stream(path) as stream:
        return stream.read_all().to_pylist()


def made(count: int = 40) -> InMemory:
    draw = np.random.default_rng(0)
    sizes = draw.integers(2, 30, count)
    return InMemory(
        [tokenized_example(draw.integers(0, 99, n), draw.random(n) < 0.5) for n in sizes]
    )


formats = pytest.mark.parametrize("suffix", [".arrow", ".parquet"])


@formats
@settings(max_examples=25)
@given(
    rows=st.lists(
        st.lists(st.tuples(st.integers(0, 200), st.booleans()), min_size=1, max_size=20),
        min_size=1,
        max_size=30,
    ),
    row_tokens=st.integers(20, 50),
    batch=st.sampled_from([10, 100, 1 << 20]),
)
def test_rows_hold_every_record_once_with_labels_of_its_own(
    suffix: str,
    rows: list[list[tuple[int, bool]]],
    row_tokens: int,
    batch: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    examples = InMemory([tokenized_example(*zip(*row, strict=True)) for row in rows])
    path = tmp_path_factory.mktemp("packed") / f"rows{suffix}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_file, "BATCH_TOKENS", batch)
        found = write_packed(examples, path, row_tokens)
    read_rows = read(path)
    assert len(read_rows) == found.rows
    seen = []
    for row in read_rows:
        assert 0 < len(row["input_ids"]) <= row_tokens
        assert row["position_ids"] == [i for n in row["seq_lengths"] for i in range(n)]
        ends = [0, *itertools.accumulate(row["seq_lengths"])]
        assert ends[-1] == len(row["input_ids"]) == len(row["labels"])
        seen += [(row["input_ids"][a:b], row["labels"][a:b]) for a, b in itertools.pairwise(ends)]
    expected = [
        ([i for i, _ in row], [-100, *(i if trained else -100 for i, trained in row[1:])])
        for row in rows
    ]
    assert sorted(seen) == sorted(expected)


def test_the_seed_decides_the_order(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_packed(made(), tmp_path / f"{name}.arrow", 64, seed)
    a, b, c = ((tmp_path / f"{name}.arrow").read_bytes() for name in "abc")
    assert a == b != c


@formats
def test_a_row_becomes_one_batch_of_transformers_default_collator(
    suffix: str, tmp_path: Path
) -> None:
    from transformers import DefaultDataCollator

    write_packed(made(), tmp_path / f"rows{suffix}", 64)
    row = read(tmp_path / f"rows{suffix}")[0]
    batch = DefaultDataCollator()([{k: v for k, v in row.items() if k != "seq_lengths"}])
    assert batch["input_ids"].shape == batch["position_ids"].shape == batch["labels"].shape
    assert (batch["position_ids"] == 0).sum() == len(row["seq_lengths"])


def test_flattening_takes_a_row_for_one_record(tmp_path: Path) -> None:
    from transformers import DataCollatorWithFlattening

    write_packed(made(), tmp_path / "rows.arrow", 64)
    row = next(r for r in read(tmp_path / "rows.arrow") if len(r["seq_lengths"]) > 1)
    batch = DataCollatorWithFlattening()([row])
    assert (batch["position_ids"] == 0).sum() == 1


@formats
def test_the_old_file_stands_until_the_new_one_is_whole(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows{suffix}"
    write_packed(made(), path, 64)
    before = path.read_bytes()

    class Failing(InMemory):
        def __getitem__(self, index: int) -> TokenizedExample:
            raise OSError(28, "No space left on device")

    with pytest.raises(InputError, match="No space left"):
        write_packed(Failing([made()[i] for i in range(40)]), path, 64)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_progress_ends_with_all_rows(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    found = write_packed(
        made(), tmp_path / "x.arrow", 64, on_progress=lambda *call: calls.append(call)
    )
    assert calls[-1] == (found.rows, found.rows)


def test_a_record_longer_than_a_row_and_an_unknown_format_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="rows of 10 tokens can't hold the longest example of 29"):
        write_packed(made(), tmp_path / "x.arrow", 10)
    with pytest.raises(InputError, match=r"ends in \.arrow or \.parquet"):
        write_packed(made(), tmp_path / "x.csv", 64)
    assert not list(tmp_path.iterdir())
