"""Foreign files: regular, bounded, inside their folder; and JSON that has one meaning."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.errors import InputError
from hasten.foreign_files import (
    open_regular,
    parse_json,
    path_inside,
    read_bounded,
    read_json_object,
    unwritable_character,
)


def test_a_pipe_without_a_writer_a_folder_and_a_device_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/null")):
        with pytest.raises(InputError, match="not a regular file; give the path of a report"):
            read_bounded(path, 10, "report")


def test_a_link_is_followed_only_if_asked(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("file")
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"x"
    with pytest.raises(OSError, match="link"):
        open_regular(tmp_path / "link", follow_links=False)


def test_a_file_has_at_most_the_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_bounded(tmp_path / "file", 5, "report") == b"12345"
    with pytest.raises(InputError, match="larger than 4 bytes; that is not a report"):
        read_bounded(tmp_path / "file", 4, "report")


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_a_name_that_no_file_can_have_is_a_sentence(name: str) -> None:
    with pytest.raises(InputError, match="can't be a file's name"):
        read_bounded(Path(name), 4, "report")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"a": 1, "a": 2}', "the key 'a' occurs twice"),
        ('{"b": [{"a": 1, "c": 0, "a": 1}]}', "the key 'a' occurs twice"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "beyond 64 bits"),
        ('{"a": 18446744073709551616}', "beyond 64 bits"),
        (b"\xff", "not UTF-8"),
        ('{"a"\n: }', "where:2 is not JSON"),
    ],
)
def test_json_with_two_meanings_or_none_is_refused(text: str | bytes, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as caught:
        parse_json(text, "where")
    assert len(str(caught.value)) < 200


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    )
)
def test_every_other_json_is_read_as_python_reads_it(value: object) -> None:
    assert parse_json(json.dumps(value), "where") == value


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused_in_one_sentence(data: bytes) -> None:
    refusals = []
    try:
        parse_json(data, "where")
    except InputError as error:
        refusals.append(str(error))
    assert not any("\n" in refusal for refusal in refusals)


def test_an_object_is_expected(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(InputError, match="is not a report: it holds a list, expected an object"):
        read_json_object(tmp_path / "a.json", "report")


@pytest.mark.parametrize(
    "name",
    ["../x", "a/../../x", "/etc/passwd", "..", "", None, 3, ["x"], "a\0", "a\ud800", "..\\x"],
)
def test_a_name_that_leads_out_of_its_folder_is_refused(name: object, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"leads out of|is no file name"):
        path_inside(tmp_path, name, "index")


def test_a_link_inside_that_leads_out_counts_only_in_a_cache_of_links(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "blob").write_text("x")
    (folder / "file").symlink_to("../blob")
    with pytest.raises(InputError, match="leads out of"):
        path_inside(folder, "file", "index")
    assert path_inside(folder, "file", "index", follow_links=True).read_text() == "x"
    (folder / "out").symlink_to("..")
    with pytest.raises(InputError, match="leads out of"):
        path_inside(folder, "out/blob", "index", follow_links=True)
    (folder / "own").write_text("y")
    assert path_inside(folder, "own", "index").read_text() == "y"


@pytest.mark.parametrize(
    ("text", "character"),
    [
        ("plain ünïcode 🙂", None),
        ("a\0", "a NUL character"),
        ("a\ud800", r"half a surrogate pair (\ud800)"),
        ("a\udcff", "the byte 0xff, which is not UTF-8"),
    ],
)
def test_what_no_file_can_hold_is_named(text: str, character: str | None) -> None:
    assert unwritable_character(text) == character
