"""``hasten data``: looking at data, and converting it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.cli import data
from hasten.data.readers import read_examples
from hasten.data.statistics import layout_advice, layouts, padding_share, statistics_of
from hasten.errors import InputError
from hasten.parts.data.collate import tokenized_example
from hasten.report.data_page import page
from sample_data import InMemory, small_recipe


@given(st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=9), min_size=1, max_size=30))
def test_statistics_are_those_of_a_plain_count(rows: list[list[int]]) -> None:
    found = statistics_of(InMemory([tokenized_example(row) for row in rows]))
    lengths = [len(row) for row in rows]
    assert found.examples == len(rows)
    assert found.tokens == sum(lengths) == sum(b.tokens for b in found.bins)
    assert sum(b.examples for b in found.bins) == len(rows)
    assert found.trained_tokens == sum(n - 1 for n in lengths)
    assert (found.shortest, found.longest) == (min(lengths), max(lengths))
    assert found.duplicates == len(rows) - len({tuple(row) for row in rows})


def test_padding_is_what_random_batches_would_have() -> None:
    assert padding_share(np.array([7] * 10, np.int32), 4) == 0
    assert padding_share(np.array([1, 3], np.int32), 2) == pytest.approx(2 / 6)


def test_inspect_shows_the_asked_number_of_records_with_their_mask(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data.inspect(small_recipe(tmp_path), [], 2)
    out = capsys.readouterr().out
    assert out.count("--- ") == 2
    assert out.count("[[") == 2
    assert "User:" in out


def test_stats_are_printed_for_people_and_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small_recipe(tmp_path, cutoff_len=1024)
    data.stats(path, [], as_json=False)
    out = capsys.readouterr().out
    assert "duplicates" in out
    assert "█" in out
    data.stats(path, [], as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["examples"] == sum(b["examples"] for b in found["bins"])
    assert 0 < found["padding_share"] < 1


def test_layouts_compare_padding_with_rows_of_three_sizes() -> None:
    draw = np.random.default_rng(0)
    lengths = draw.integers(10, 200, 2000).astype(np.int32)
    padded, grouped, *packed = layouts(lengths, 16, 100)
    assert padded.fullness == pytest.approx(1 - padding_share(lengths, 16))
    assert padded.fullness < grouped.fullness <= 1
    longest = int(lengths.max())
    assert [way.row_tokens for way in packed] == [longest, 2 * longest, 4 * longest]
    for way in packed:
        assert way.bound is not None
        assert way.bound <= way.rows
        assert way.fullness == pytest.approx(lengths.sum() / (way.rows * way.row_tokens))


def test_advice_names_a_row_that_is_full_or_groups_where_none_is() -> None:
    draw = np.random.default_rng(0)
    ragged = draw.integers(5, 50, 3000).astype(np.int32)
    assert "row_tokens: 100" in layout_advice(ragged, 16, 100)
    five_ninths = np.full(90, 56, np.int32)
    assert layout_advice(five_ninths, 16, 100).startswith("length_grouped")


def test_the_page_loads_nothing_and_holds_both_drawings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out" / "stats.html"
    data.stats(small_recipe(tmp_path), [], as_json=False, output=target)
    out = capsys.readouterr().out
    assert f"written: {target}" in out
    assert "fullest: " in out
    assert "plan: auto begins with " in out
    text = target.read_text()
    assert text.count("<svg") == 4
    assert all(word not in text for word in ("<script", "<link", "@import", " src=", "url("))
    assert [p.name for p in target.parent.iterdir()] == ["stats.html"]
    with pytest.raises(InputError, match="is a folder"):
        data.stats(small_recipe(tmp_path), [], as_json=False, output=tmp_path)


def test_a_title_cannot_break_the_page(tmp_path: Path) -> None:
    found = statistics_of(InMemory([tokenized_example([1, 2, 3])]))
    ways = layouts(np.array([3], np.int32), 1, 3)
    text = page("<script>alert(1)</script>", found, ways, "<b>")
    assert "<script" not in text
    assert "<b>" not in text


def test_packed_rows_are_written_once_and_replaced_on_demand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "rows.parquet"
    path = small_recipe(tmp_path)
    data.pack(path, [], target, None, force=False)
    out = capsys.readouterr().out
    rows = pq.read_table(target).to_pylist()
    assert f"rows       {len(rows):,} of 64 tokens" in out
    assert "bound" in out
    with pytest.raises(InputError, match="--force"):
        data.pack(path, [], target, None, force=False)
    data.pack(path, [], target, 128, force=True)
    assert pq.read_table(target).num_rows < len(rows)


def test_packing_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    missing = tmp_path / "none.yaml"
    with pytest.raises(InputError, match=r"ends in \.arrow"):
        data.pack(missing, [], tmp_path / "rows.csv", None, force=False)
    (tmp_path / "folder.arrow").mkdir()
    with pytest.raises(InputError, match="is a folder"):
        data.pack(missing, [], tmp_path / "folder.arrow", None, force=True)


def test_nothing_is_left_behind_where_conversion_fails(tmp_path: Path) -> None:
    source = tmp_path / "bad.jsonl"
    source.write_text('{"question": "a"}\n{"question": "b", "answer": "c"}\n')
    with pytest.raises(InputError, match=r"bad\.jsonl:1"):
        data.convert([source], tmp_path / "out.jsonl", 0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.jsonl"]


ALPACA = [{"instruction": f"do {i}", "input": "", "output": f"did {i} ✓"} for i in range(30)]
CALL = {"name": "f", "arguments": {"a": 1}}
CALLED = [
    {"from": "human", "value": "q"},
    {"from": "function_call", "value": json.dumps(CALL)},
    {"from": "observation", "value": "r"},
    {"from": "gpt", "value": "a"},
]
THOUGHTFUL = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "a", "loss": False},
    {"role": "user", "content": "r"},
    {"role": "assistant", "content": "b", "thinking": "hm"},
]


@pytest.mark.parametrize(
    ("rows", "trained"),
    [
        (ALPACA, [True, True]),
        ([{"conversations": CALLED, "tools": [CALL]}], [True] * 5),
        ([{"messages": THOUGHTFUL, "id": 7}], [True, False, True, True]),
    ],
    ids=["alpaca", "tool calls", "answers without loss and thoughts"],
)
def test_converted_records_are_the_same_conversations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: list[Any], trained: list[bool]
) -> None:
    source, target = tmp_path / "source.json", tmp_path / "out" / "messages.jsonl"
    source.write_text(json.dumps(rows))
    data.convert([source], target, 0.001)
    assert f"{len(rows)} examples" in capsys.readouterr().out
    before, after = (read_examples([path]).conversations for path in (source, target))
    assert [turn.trained for turn in before[0].messages] == trained
    assert [c.messages for c in before] == [c.messages for c in after]
    with pytest.raises(InputError, match="exists"):
        data.convert([source], target, 0.001)
    with pytest.raises(InputError, match=r"out.parquet: .* a name that ends in .jsonl"):
        data.convert([source], tmp_path / "out.parquet", 0.001)
