"""Containers: the same examples out of each, every damage with its place, nothing unbounded."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.data import containers, json_reader, table_reader
from hasten.data.conversation import conversation, shape_of
from hasten.data.json_reader import scan_lines
from hasten.data.readers import ReadExamples, other_splits, read_examples
from hasten.data.turns import NoConversationError
from hasten.errors import InputError

Rows = list[dict[str, str]]


def lines(rows: Rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def as_csv(rows: Rows, end: str = "\r\n", quoting: Any = csv.QUOTE_MINIMAL) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, ["question", "answer"], lineterminator=end, quoting=quoting)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, "zstd", asbytes=True))


def parquet(rows: Rows) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=7)
    return sink.getvalue()


def arrow(rows: Rows, new: Callable[..., Any]) -> bytes:
    table = pa.Table.from_pylist(rows)
    sink = io.BytesIO()
    with new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)
    return sink.getvalue()


# name -> the file of some rows, what is told of it, the place of the first row
WRITERS: dict[str, tuple[Callable[[Rows], bytes], str, int]] = {
    "a.jsonl": (lines, "jsonl", 1),
    "a.jsonl.gz": (lambda rows: gzip.compress(lines(rows)), "jsonl, gzip", 1),
    "two.jsonl.gz": (
        lambda rows: gzip.compress(lines(rows[:1])) + gzip.compress(lines(rows[1:])),
        "jsonl, gzip",
        1,
    ),
    "a.jsonl.zst": (lambda rows: zstd(lines(rows)), "jsonl, zstd", 1),
    "two.jsonl.zst": (
        lambda rows: zstd(lines(rows[:1])) + zstd(lines(rows[1:])),
        "jsonl, zstd",
        1,
    ),
    "a.json.gz": (lambda rows: gzip.compress(json.dumps(rows).encode()), "json, gzip", 1),
    "a.csv": (as_csv, "csv", 2),
    "bom.csv": (lambda rows: b"\xef\xbb\xbf" + as_csv(rows, "\n", csv.QUOTE_ALL), "csv", 2),
    "a.csv.gz": (lambda rows: gzip.compress(as_csv(rows)), "csv, gzip", 2),
    "a.parquet": (parquet, "parquet", 1),
    "a.arrow": (lambda rows: arrow(rows, pa.ipc.new_file), "arrow", 1),
    "stream.arrow": (lambda rows: arrow(rows, pa.ipc.new_stream), "arrow", 1),
}
GOOD = [{"question": f"q{n}", "answer": f"a{n}"} for n in range(40)]
TEXTS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1
).filter(str.strip)
every = pytest.mark.parametrize("name", WRITERS)
calm = settings(max_examples=12)


def put(folder: Path, name: str, data: bytes) -> Path:
    (folder / name).write_bytes(data)
    return folder / name


def pairs(reading: ReadExamples) -> list[tuple[str, ...]]:
    return [tuple(m.content for m in c.messages) for c in reading.conversations]


@every
@calm
@given(rows=st.lists(st.fixed_dictionaries({"question": TEXTS, "answer": TEXTS}), min_size=1))
def test_any_texts_come_back_from_every_container(name: str, rows: Rows, tmp_path: Path) -> None:
    write, told, first = WRITERS[name]
    path = put(tmp_path, name, write(rows))
    reading = read_examples([path])
    assert pairs(reading) == [(row["question"], row["answer"]) for row in rows]
    assert reading.containers == {str(path): told}
    if not name.endswith("json.gz"):
        places = [f"{path}:{first + n}" for n in range(len(rows))]
        assert [c.location for c in reading.conversations] == places


@every
def test_characters_without_a_width_are_text_like_any_other(name: str, tmp_path: Path) -> None:
    marks = ["\ufeff", "\u200b", "\u2060", "\u00ad", "\ue000", "\u2028"]
    rows = [{"question": f"{mark}q{mark}?", "answer": f"{mark}a{mark}{n}"}
            for n, mark in enumerate(marks)]  # fmt: skip
    reading = read_examples([put(tmp_path, name, WRITERS[name][0](rows))], max_rejected=0)
    assert pairs(reading) == [(row["question"], row["answer"]) for row in rows]


@every
@calm
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused_in_words(
    name: str, data: st.DataObject, tmp_path: Path
) -> None:
    whole = bytearray(WRITERS[name][0](GOOD))
    for _ in range(data.draw(st.integers(0, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)))
    path = put(tmp_path, name, bytes(whole[: len(whole) - cut]))
    try:
        reading = read_examples([path], max_rejected=1000)
    except InputError as error:
        if str(path) not in str(error):
            raise AssertionError(f"no place in {error}") from error
        return
    assert len(reading.conversations) <= 2 * len(GOOD)
    assert all(row.reason and row.line >= 1 for row in reading.rejected)


@pytest.mark.parametrize("share", [pytest.param(0.5, marks=pytest.mark.long), 0.98])
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv"])
@pytest.mark.parametrize("pack", [gzip.compress, zstd])
def test_a_cut_stream_is_refused_with_its_place_whatever_may_be_rejected(
    tmp_path: Path, pack: Callable[[bytes], bytes], kind: str, share: float
) -> None:
    draw = random.Random(0)
    rows = [{"question": f"q{n}", "answer": draw.randbytes(40).hex()} for n in range(9000)]
    plain = {
        "jsonl": lines(rows),
        "json": json.dumps(rows, indent=0).encode(),
        "csv": as_csv(rows),
    }[kind]
    whole = pack(plain)
    suffix = "gz" if pack is gzip.compress else "zst"
    path = put(tmp_path, f"a.{kind}.{suffix}", whole[: int(len(whole) * share)])
    with pytest.raises(InputError, match=rf"a\.{kind}\.{suffix}:\d+: .*lost, whatever max_rej"):
        read_examples([path], max_rejected=10**6)


CSV_ROWS = [f'"q{n}","a{n}"' for n in range(3000)]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('"never closed,a', "a quote of line 1502 isn't closed before line 1503"),
        ('q,"never closed', "a quote of line 1502 isn't closed before line 1503"),
    ],
)
def test_a_quote_that_takes_rows_that_follow_is_refused_with_its_line(
    tmp_path: Path, row: str, said: str
) -> None:
    rows = ["question,answer", *CSV_ROWS]
    rows[1501] = row
    path = put(tmp_path, "a.csv", "\n".join(rows).encode())
    with pytest.raises(InputError, match=f"a.csv:1502: .*{said}"):
        read_examples([path], max_rejected=10**6)


def test_a_quote_that_is_never_closed_is_refused_and_a_cell_of_many_lines_is_not(
    tmp_path: Path,
) -> None:
    unquoted = [f"q{n},a{n}" for n in range(3000)]
    rows = ["question,answer", 'q,"one\ntwo\n\nthree"', *unquoted]
    path = put(tmp_path, "a.csv", "\n".join(rows).encode())
    assert len(read_examples([path]).conversations) == 3001
    rows[1500] = 'q,"never closed'
    path = put(tmp_path, "b.csv", "\n".join(rows).encode())
    with pytest.raises(InputError, match=r"b\.csv:1501: .*a quote of line 1504 isn't closed"):
        read_examples([path], max_rejected=10**6)


def test_an_arrow_stream_that_is_cut_is_refused_with_its_row(tmp_path: Path) -> None:
    table = pa.table({"question": ["q"] * 3000, "answer": ["a"] * 3000})
    place = tmp_path / "a.arrow"
    with pa.ipc.new_stream(place, table.schema) as file:
        file.write_table(table, max_chunksize=500)
    place.write_bytes(place.read_bytes()[: place.stat().st_size * 2 // 3])
    with pytest.raises(InputError, match=r"a\.arrow:\d+: .*damaged here"):
        read_examples([place], max_rejected=10**6)


@pytest.mark.parametrize(("pack", "suffix"), [(gzip.compress, "gz"), (zstd, "zst")])
def test_a_decompression_bomb_is_refused_before_it_has_grown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: Callable[[bytes], bytes], suffix: str
) -> None:
    monkeypatch.setattr(containers, "FLOOR", 1 << 20)
    for kind, data in (("jsonl", b" " * (1 << 26)), ("json", b"[" + b" " * (1 << 26))):
        with pytest.raises(InputError, match="200 times the file"):
            read_examples([put(tmp_path, f"a.{kind}.{suffix}", pack(data))])


def test_a_line_without_end_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_reader, "LONGEST_LINE", 1 << 10)
    path = put(tmp_path, "a.jsonl", lines(GOOD[:1]) + b"x" * 5000 + b"\n" + lines(GOOD[1:3]))
    reading = read_examples([path], max_rejected=1)
    assert len(reading.conversations) == 3
    assert [(row.line, row.reason[:18]) for row in reading.rejected] == [(2, "a line longer than")]


def test_a_line_of_a_table_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_reader, "LONGEST_LINE", 1 << 20)
    with pytest.raises(InputError, match="a line longer than 1 MiB"):
        read_examples([put(tmp_path, "a.csv", b"text\n" + b"x" * (2 << 20))])


@pytest.mark.skipif(not hasattr(os, "SEEK_HOLE"), reason="this system knows of no holes")
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_bytes_that_were_never_written_are_refused_at_once(tmp_path: Path, name: str) -> None:
    path = put(tmp_path, name, lines(GOOD))
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(InputError, match=r"has a hole from byte [\d,]+, which was never written"):
        read_examples([path])


def test_names_and_first_bytes_must_agree(tmp_path: Path) -> None:
    packed, table = gzip.compress(lines(GOOD)), parquet(GOOD)
    for name, data, words in (
        ("a.jsonl", packed, "is gzip, not the jsonl"),
        ("b.json", table, "is parquet, not the json"),
        ("a.jsonl.gz", lines(GOOD), "isn't the gzip file that its name announces: it begins with"),
        ("a.jsonl.zst", packed, "isn't the zstd file that its name announces: it is gzip"),
        ("a.parquet", lines(GOOD), "isn't the parquet file"),
        ("b.parquet", b"", "it's empty"),
        ("c.parquet", table[:-4], "isn't a whole parquet file"),
        ("d.parquet", b"PAR1", "isn't a whole parquet file"),
        ("a.arrow", arrow(GOOD, pa.ipc.new_file)[:40], "isn't a whole arrow file"),
        ("a.xlsx", b"PK", "is none of .jsonl, .json, .csv"),
        ("a.gz", packed, "is none of"),
    ):
        with pytest.raises(InputError, match=words):
            read_examples([put(tmp_path, name, data)])


def test_a_folder_stands_for_its_files_of_every_container(tmp_path: Path) -> None:
    for name, (write, _, _) in WRITERS.items():
        put(tmp_path, name, write(GOOD))
    put(tmp_path, "notes.txt", b"x")
    put(tmp_path, "dataset_infos.json", b'{"default": {"features": {}}}')
    reading = read_examples([tmp_path])
    assert len(reading.conversations) == len(WRITERS) * len(GOOD)
    assert {Path(file).name for file in reading.containers} == {*WRITERS}


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("begin", ["", "\ufeff", "\r\n"])
def test_a_list_in_a_file_of_lines_is_read_as_a_list(
    tmp_path: Path, begin: str, indent: int | None
) -> None:
    rows = [{"text": "one"}, {"text": "two [2]"}]
    put(tmp_path, "a.jsonl", (begin + json.dumps(rows, indent=indent)).encode())
    reading = read_examples([tmp_path / "a.jsonl"], 0)
    assert [found.text for found in reading.conversations] == ["one", "two [2]"]


@pytest.mark.parametrize("name", ["data.jsonl", "data.parquet", "data.csv", "data.jsonl.gz"])
def test_a_pointer_of_git_lfs_is_named(tmp_path: Path, name: str) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    put(tmp_path, name, text.encode())
    with pytest.raises(InputError, match=rf"{name} is a pointer of Git LFS.*git lfs pull"):
        read_examples([tmp_path / name])


def test_a_folder_of_folders_names_one_of_them(tmp_path: Path) -> None:
    for name in ("eval", "main"):  # not the one that is for evaluation
        (tmp_path / name).mkdir()
        put(tmp_path / name, "a.csv", b"question,answer")
    with pytest.raises(InputError, match=f"give a folder in it, as {tmp_path / 'main'}"):
        read_examples([tmp_path])


def test_files_of_other_splits_are_named_where_others_are_for_training() -> None:
    folder = Path("d")
    names = [
        "train.jsonl",
        "test.jsonl",
        "validation-00000.parquet",
        "tests_of_math.json",
        "dev.csv",
        "my_test.jsonl",
        "gsm8k-eval-00000-of-00001.parquet",
        "latest.jsonl",
        "retrieval.jsonl",
    ]
    found = other_splits(folder, [str(folder / name) for name in names])
    assert found == [
        *("test.jsonl", "validation-00000.parquet", "dev.csv"),
        *("my_test.jsonl", "gsm8k-eval-00000-of-00001.parquet"),
    ]
    assert other_splits(folder, ["d/test.jsonl", "e/train.jsonl"]) == []


def test_what_is_no_file_in_a_folder_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    put(tmp_path, "a.jsonl", b'{"text": "one"}\n')
    for plant in (os.mkfifo, lambda path: path.symlink_to("nowhere")):
        plant(tmp_path / "b.jsonl")
        with pytest.raises(InputError, match=r"b.jsonl is a pipe, a socket, a device, or a link"):
            read_examples([tmp_path])
        (tmp_path / "b.jsonl").unlink()
    (tmp_path / "folder.jsonl").mkdir()
    assert len(read_examples([tmp_path]).conversations) == 1


def test_texts_of_a_folder_count_where_it_has_nothing_else(tmp_path: Path) -> None:
    put(tmp_path, "a.txt", b"one\n\ntwo\n")
    put(tmp_path, "b.txt.gz", gzip.compress(b"three"))
    assert [found.text for found in read_examples([tmp_path]).conversations] == [
        "one",
        "two",
        "three",
    ]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b"only", "has 1 columns, the header 2"),
        (b"q,a,more", "has 3 columns, the header 2"),
        (b"q,Fo\xffur", "isn't UTF-8 (0xff)"),
        (b"q,Fo\x00ur", "NUL"),
        (b'q,"a"b', "not CSV"),
        (b"q,", "lacks an answer"),
        (b"q," + b"x" * 200_000, "field larger"),
    ],
)
def test_a_bad_row_is_rejected_with_its_number(tmp_path: Path, row: bytes, reason: str) -> None:
    good = b'"two\r\nlines, one row",a\r\n'
    blank = b"\r\n"  # no row at all
    path = put(
        tmp_path, "a.csv", b"question,answer\r\n" + good + row + b"\r\n" + blank + good + blank
    )
    reading = read_examples([path], max_rejected=1)
    assert pairs(reading) == [("two\r\nlines, one row", "a")] * 2
    ((_, line, why),) = reading.rejected
    assert line == 3
    assert reason in why


def test_rows_without_any_text_are_no_examples(tmp_path: Path) -> None:
    path = put(tmp_path, "a.csv", b"question,answer\r\nq,a\r\n\r\n,\r\nq,b\r\n,\r\n")
    assert pairs(read_examples([path], max_rejected=0)) == [("q", "a"), ("q", "b")]


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"answer,answer", "'answer' twice"),
        (b",", "without a name"),
        (b"\xff\xfeq\x00", "isn't UTF-8"),
        (b"question;answer", "use commas"),
        (b"q,a", "none of the known shapes"),
    ],
)
def test_a_header_that_names_no_columns_is_refused(
    tmp_path: Path, header: bytes, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        read_examples([put(tmp_path, "a.csv", header + b"\nq,a\n")])


def test_a_bad_row_of_a_table_costs_itself_alone(tmp_path: Path) -> None:
    answers = [b"a", b"Fo\xffur", b"c"]
    buffers = [pa.array(answers, pa.binary()).buffers()[i] for i in range(3)]
    texts = pa.Array.from_buffers(pa.string(), 3, buffers)
    table = pa.table({"question": ["x", "y", "z"], "answer": texts})
    pq.write_table(table, tmp_path / "a.parquet")
    reading = read_examples([tmp_path / "a.parquet"], max_rejected=1)
    assert pairs(reading) == [("x", "a"), ("z", "c")]
    ((_, row, reason),) = reading.rejected
    assert (row, reason) == (2, "a byte that isn't UTF-8 (0xff)")


def test_nested_turns_come_out_of_a_table(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    pq.write_table(pa.Table.from_pylist([{"messages": turns}] * 3), tmp_path / "a.parquet")
    reading = read_examples([tmp_path])
    assert pairs(reading) == [("q", "a")] * 3


SHAPED: list[dict[str, Any]] = [
    {"question": "How many?", "answer": "Four.", "id": 7},
    {"instruction": "Add", "input": "1 2", "output": "3"},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]},
    {"prompt": "Once", "completion": "upon"},
    {"text": "A tale."},
]


@pytest.mark.parametrize("count", [15_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_fuzzed_lines_are_each_a_record_or_a_reason(count: int) -> None:
    draw = random.Random(0)
    goods = [json.dumps(example).encode() for example in SHAPED]
    data = bytearray()
    for number in range(count):
        line = bytearray(goods[number % len(goods)])
        for _ in range(draw.randrange(3)):
            line[draw.randrange(len(line))] = draw.choice(b'{}[]":,\\ux0-9eE.\xff\xf0\x00 NI')
        data += line[: draw.randrange(1, len(line) + 1)] if draw.random() < 0.2 else line
        data += draw.choice((b"\n", b"\r\n"))
    found = list(scan_lines(io.BytesIO(bytes(data))))
    assert [example.line for example in found] == list(range(1, count + 1))
    usable = dict.fromkeys(map(shape_of, SHAPED), 0)
    for example, line in zip(found, bytes(data).split(b"\n"), strict=False):
        if example.reason is None:
            assert json.loads(line) == example.value
            shape = shape_of(SHAPED[(example.line - 1) % len(SHAPED)])
            try:
                conversation(example.value, str(shape), f"a:{example.line}")
            except NoConversationError as unfit:
                reason = str(unfit)
            else:
                reason = "usable"
                usable[shape] += 1
            assert reason
    assert len(usable) == len(SHAPED)
    assert min(usable.values()) > 0.03 * count
    assert 0.2 < sum(example.reason is None for example in found) / count < 0.8


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.parquet"):
        (tmp_path / name).mkdir()
        with pytest.raises(InputError, match=f"the folder .*{name} has no file"):
            read_examples([tmp_path / name])


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "latin-1", "cp1252", "gb18030"])
def test_lines_of_another_encoding_cost_themselves_alone(tmp_path: Path, encoding: str) -> None:
    other = json.dumps({"question": "naïve é", "answer": "ü"}, ensure_ascii=False) + "\n"
    data = lines(GOOD[:3]) + other.encode(encoding) + lines(GOOD[3:5])
    reading = read_examples([put(tmp_path, "a.jsonl", data)], max_rejected=3)
    kept = {row["answer"] for row in GOOD[:5]}
    found = {pair[1] for pair in pairs(reading)}
    assert found <= kept
    assert kept - found <= {"a3"}  # UTF-16 ends a line in the middle of a character
    assert all("UTF-8" in row.reason or "NUL" in row.reason for row in reading.rejected)
    assert reading.rejected


def test_a_frame_with_a_long_window_is_refused_with_the_command(tmp_path: Path) -> None:
    path, data = tmp_path / "a.jsonl.zst", b"{}\n"
    # RFC 8878: no flags, a window of 2**31 bytes, one raw block.
    header = b"\x28\xb5\x2f\xfd\x00\xa8" + (len(data) << 3 | 1).to_bytes(3, "little")
    path.write_bytes(header + data)
    with pytest.raises(InputError, match=r"a\.jsonl\.zst was packed .* `zstd -d --long=31`$"):
        read_examples([path])
