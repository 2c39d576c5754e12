"""Bounds of tables: a bomb is refused in one sentence before it is held, honest files are not."""

from __future__ import annotations

import io
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.data import containers, table_reader
from hasten.data.readers import read_examples
from hasten.data.table_reader import (
    BATCH_BYTES,
    arrow_batches,
    decoded_bytes,
    parquet_batches,
    row_slices,
)
from hasten.errors import InputError

LONG = "a long text " * 5_000  # 60 kB
MANY = 4000  # of them are 240 MB
FLOOR = 1 << 22  # a file's limit in the tests of bombs, 256 MiB outside of them
Write = Callable[[Path, Any], None]


def ipc(new: Any, codec: str | None) -> Write:
    def write(path: Path, table: Any) -> None:
        options = pa.ipc.IpcWriteOptions(compression=codec)
        with new(str(path), table.schema, options=options) as writer:
            writer.write_table(table)

    return write


WRITERS: dict[str, Write] = {
    "plain.parquet": lambda path, table: pq.write_table(table, path, use_dictionary=False),
    "zstd.parquet": lambda path, table: pq.write_table(table, path, compression="zstd"),
    "dictionary.parquet": lambda path, table: pq.write_table(table, path, use_dictionary=True),
    "prefixes.parquet": lambda path, table: pq.write_table(
        table, path, use_dictionary=False, column_encoding={"text": "DELTA_BYTE_ARRAY"}
    ),
    **{
        f"{codec}-{kind}.arrow": ipc(new, codec)
        for codec in (None, "lz4", "zstd")
        for kind, new in (("file", pa.ipc.new_file), ("stream", pa.ipc.new_stream))
    },
}


def repeated(count: int) -> Any:
    indices = pa.array([0] * count, pa.int32())
    return pa.table({"text": pa.DictionaryArray.from_arrays(indices, pa.array([LONG]))})


def bomb_of_rows(path: Path) -> None:
    """Parquet whose dictionary holds one long text, repeated by its number."""
    pq.write_table(repeated(MANY), path, compression="zstd", dictionary_pagesize_limit=1 << 30)


def bomb_in_lists(path: Path) -> None:
    texts = repeated(MANY).column(0).combine_chunks()
    turns = pa.StructArray.from_arrays([texts, texts], ["role", "content"])
    lists = pa.ListArray.from_arrays(pa.array([0, MANY], pa.int32()), turns)
    table = pa.table({"messages": lists})
    pq.write_table(table, path, compression="zstd", dictionary_pagesize_limit=1 << 30)


def bomb_of_prefixes(path: Path) -> None:
    plain = {"compression": "zstd", "use_dictionary": False}
    table = pa.table({"text": [LONG] * 400})
    pq.write_table(table, path, column_encoding={"text": "DELTA_BYTE_ARRAY"}, **plain)


def bomb_of_zeros(path: Path) -> None:
    table = pa.table({"text": ["x"], "zeros": [b"\0" * (9 << 20)]})
    if path.suffix == ".parquet":
        pq.write_table(table, path, compression="zstd", use_dictionary=False)
    else:
        ipc(pa.ipc.new_file, "zstd")(path, table)


def bomb_of_nulls(path: Path) -> None:
    pq.write_table(pa.table({"text": pa.nulls(1_000_000, pa.string())}), path)


def bomb_of_objects(path: Path) -> None:
    """500,000 empty objects, or a list of as many nulls: no bytes in the file, MBs of objects."""
    count = 500_000
    if path.stem == "objects":
        column = pa.StructArray.from_buffers(pa.struct([]), count, [None])
    else:
        column = pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), pa.nulls(count))
    table = pa.table({"messages": column})
    if path.suffix == ".parquet":
        pq.write_table(table, path, compression="zstd")
    else:
        ipc(pa.ipc.new_file, None)(path, table)


BOMBS: dict[str, Write] = {
    "objects.arrow": lambda path, _: bomb_of_objects(path),
    "list.arrow": lambda path, _: bomb_of_objects(path),
    "list.parquet": lambda path, _: bomb_of_objects(path),
    "rows.parquet": lambda path, _: bomb_of_rows(path),
    "lists.parquet": lambda path, _: bomb_in_lists(path),
    "prefixes.parquet": lambda path, _: bomb_of_prefixes(path),
    "zeros.parquet": lambda path, _: bomb_of_zeros(path),
    "zeros.arrow": lambda path, _: bomb_of_zeros(path),
    "nulls.parquet": lambda path, _: bomb_of_nulls(path),
    "lz4.arrow": lambda path, _: ipc(pa.ipc.new_file, "lz4")(
        path, pa.table({"text": ["x"], "zeros": [b"\0" * (9 << 20)]})
    ),
    "dictionary.arrow": lambda path, _: ipc(pa.ipc.new_stream, None)(path, repeated(MANY)),
    "small.arrow": lambda path, _: ipc(pa.ipc.new_stream, "zstd")(path, repeated(MANY)),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_before_it_has_grown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(containers, "FLOOR", FLOOR)
    path = tmp_path / name
    BOMBS[name](path, None)
    assert path.stat().st_size < FLOOR // 40
    pool = pa.default_memory_pool()
    before = pool.max_memory()  # of Arrow, writing included
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=r"larger than \d+ MiB") as caught:
            read_examples([path], max_rejected=10**9)
        assert tracemalloc.get_traced_memory()[1] < 4 * FLOOR
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert pool.max_memory() - before < 4 * FLOOR


ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "text": st.text(st.characters(exclude_categories=["Cs"]), max_size=9) | st.none(),
            "id": st.integers(-9, 9),
            "tags": st.lists(st.fixed_dictionaries({"a": st.text("xy"), "n": st.integers(0, 9)})),
        }
    ),
    min_size=1,
)
TYPES = pa.schema(
    [
        ("text", pa.string()),
        ("id", pa.int64()),
        ("tags", pa.list_(pa.struct([("a", pa.string()), ("n", pa.int64())]))),
    ]
)


@settings(max_examples=8)
@given(rows=ROWS)
@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("floor", [0, 1 << 28])
def test_honest_tables_come_back_whole_whatever_their_encoding(
    tmp_path: Path, name: str, rows: list[Any], floor: int
) -> None:
    path = tmp_path / name
    WRITERS[name](path, pa.Table.from_pylist(rows, TYPES))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(containers, "FLOOR", floor)
        names, batches = parquet_batches(path) if path.suffix == ".parquet" else arrow_batches(path)
        assert names == TYPES.names
        assert [row for batch in batches for row in batch.to_pylist()] == rows


def test_a_dictionary_that_is_read_as_one_gives_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["ab" * 4000, "c", None, "d" * 900] * 200
    turns = [[{"role": "user", "content": text or "q"}, {"role": "assistant", "content": "a"}]
             for text in texts]  # fmt: skip
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"note": texts, "messages": turns}), path)
    plain = [row for batch in parquet_batches(path)[1] for row in batch.to_pylist()]
    monkeypatch.setattr(containers, "FLOOR", 0)
    names, batches = parquet_batches(path)
    found = list(batches)
    assert any(pa.types.is_dictionary(kind) for kind in found[0].schema.types)
    assert names == ["note", "messages"]
    assert [row for batch in found for row in batch.to_pylist()] == plain


TEXT, TURN = pa.string(), pa.struct([("role", pa.string()), ("content", pa.string())])
NESTED: dict[str, Any] = {  # types of a column, and its value for two texts
    "turns": (pa.list_(TURN), lambda a, b: [{"role": a, "content": b}, {"role": b}]),
    "lists": (pa.list_(pa.list_(TEXT)), lambda a, b: [[a, b], [], [b]]),
    "maps": (pa.map_(TEXT, TEXT), lambda a, b: [(b, a), ("k", b)]),
    "object": (pa.struct([("a", TEXT), ("b", TEXT)]), lambda a, b: {"a": a, "b": b}),
    "large": (pa.large_list(pa.large_string()), lambda a, b: [a, b]),
    "coded": (pa.list_(pa.dictionary(pa.int32(), TEXT)), lambda a, b: [a, b]),
}


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("ratio", [1, 10**6], ids=["counted", "plain"])
@pytest.mark.parametrize("name", NESTED)
def test_a_text_that_nested_columns_repeat_is_read_over_all_groups_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, ratio: int, suffix: str
) -> None:
    kind, value = NESTED[name]
    column = pa.array([value(LONG, f"t{n}") for n in range(100)], kind)
    table, path = pa.table({"c": column}), tmp_path / f"a.{suffix}"
    monkeypatch.setattr(containers, "FLOOR", 100 * len(LONG) // 2 if ratio == 1 else 1 << 28)
    monkeypatch.setattr(containers, "RATIO", ratio)
    if suffix == "parquet":
        pq.write_table(table, path, row_group_size=30)
    else:
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=30)
    names, batches = (parquet_batches if suffix == "parquet" else arrow_batches)(path)
    pool = pa.default_memory_pool()
    del table
    before, rows = pool.bytes_allocated(), []
    for batch in batches:
        assert pool.bytes_allocated() - before < 1 << 24
        rows += batch.column("c").to_pylist()
    assert names == ["c"]
    assert rows == column.to_pylist()


def test_what_pyarrow_cannot_read_and_a_disk_that_fails_are_not_called_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", "b"]}), path)

    def failing(error: Exception) -> Any:
        yield pa.record_batch({"text": ["a"]})
        raise error

    for error, words in (
        (pa.ArrowNotImplementedError("no such type"), "has what pyarrow can't read: no such"),
        (pa.ArrowInvalid("bad offset"), "is damaged here: bad offset"),
        (OSError(5, "Input/output error"), r"a\.parquet can't be read: Input/output error"),
    ):
        opened = (["text"], failing(error))
        monkeypatch.setattr(table_reader, "parquet_batches", lambda _, opened=opened: opened)
        with pytest.raises(InputError, match=words):
            read_examples([path])


@pytest.mark.parametrize(
    ("array", "texts", "values"),
    [
        (pa.array(["abc", None, "d"]), 4, 3),
        (pa.array(["abc", "d", "abc"]).dictionary_encode(), 7, 3),
        (pa.array(["abc", "d", "abc"], pa.large_string()).dictionary_encode(), 7, 3),
        (pa.array([7, 8] * 100).dictionary_encode(), 0, 200),
        (pa.array(["x" * 100, "d", None], pa.string_view()).slice(1), 1, 2),
        (pa.array([["abc"] * 3, []]), 9, 5),
        (pa.array([{"a": "abc"}, {"a": "abc"}]), 6, 2 + 2 * 3),
        (pa.StructArray.from_buffers(pa.struct([]), 9, [None]), 0, 9 * 3),
        (pa.array([[("k", "vv")]] * 9, pa.map_(pa.string(), pa.string())).slice(8), 3, 4),
        (pa.nulls(1000), 0, 1000),
        (pa.array([[None] * 1000], pa.list_(pa.null(), 1000)), 0, 1001),
    ],
)
def test_what_values_take_as_python_objects_is_counted_for_each_of_them(
    array: Any, texts: int, values: int
) -> None:
    assert texts + 56 * values <= decoded_bytes(array) <= texts + 80 * values


def test_objects_are_made_of_few_rows_and_bytes_at_a_time() -> None:
    batch = pa.record_batch({"text": ["x"] * 2000 + ["x" * (BATCH_BYTES // 2)] * 3})
    parts = list(row_slices(batch))
    assert pa.Table.from_batches([rows for rows, _ in parts]).equals(pa.Table.from_batches([batch]))
    assert max(rows.num_rows for rows, _ in parts) <= table_reader.ROWS
    assert max(size for _, size in parts) <= BATCH_BYTES


def test_a_row_that_takes_more_than_any_record_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_reader, "FLOOR", 1 << 16)
    monkeypatch.setattr(table_reader, "BATCH_BYTES", 1 << 16)
    pq.write_table(pa.table({"text": ["a", "b" * (1 << 16)]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="row 2 takes over 0 MiB: write it as several"):
        read_examples([tmp_path / "a.parquet"])


def test_kinds_that_may_overlap_themselves_are_named(tmp_path: Path) -> None:
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([10**9], pa.int32()), pa.array(["x"]))
    ipc(pa.ipc.new_stream, None)(tmp_path / "a.arrow", pa.table({"text": runs}))
    with pytest.raises(InputError, match=r"run_end_encoded.* are not read"):
        read_examples([tmp_path / "a.arrow"])


def test_declared_sizes_are_those_that_arrow_unpacks(tmp_path: Path) -> None:
    table = pa.table({"text": ["some text"] * 5000, "n": range(5000)})
    for codec in ("lz4", "zstd", None):
        ipc(pa.ipc.new_stream, codec)(tmp_path / "a.arrow", table)
        sizes = [
            size for _, size in table_reader._declared(pa.memory_map(str(tmp_path / "a.arrow")))
        ]
        assert table.nbytes <= sum(sizes) <= table.nbytes + 1024


def test_a_structs_null_is_an_absent_key(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    other = {"type": "function", "function": {"name": "g", "arguments": {"b": "x"}}}
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call, other]},
    ]
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([{"messages": turns}]), sink)
    (tmp_path / "a.parquet").write_bytes(sink.getvalue())
    (found,) = read_examples([tmp_path]).conversations
    assert [call.arguments for call in found.messages[-1].calls] == ['{"a": 1}', '{"b": "x"}']
