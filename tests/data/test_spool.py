"""Spools and choices: what was put in comes out, from disk, in memory that doesn't grow with it."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.data.conversation import Conversation
from hasten.data.readers import read_sources
from hasten.data.sources import Source, weighted
from hasten.data.spool import Selection, Spool, pack, packed, spools, unpack
from hasten.data.turns import Message, ToolCall

TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
CONVERSATIONS = st.lists(
    st.builds(
        lambda question, answer, line: Conversation(
            (Message("user", question), Message("assistant", answer)), None, f"a.jsonl:{line}"
        ),
        TEXTS,
        TEXTS,
        st.integers(1, 99),
    )
    | st.builds(lambda text: Conversation((), text, "b.jsonl:1"), TEXTS),
    max_size=12,
)


@given(first=CONVERSATIONS, second=CONVERSATIONS, data=st.data())
def test_a_choice_of_spools_and_lists_is_the_same_choice_of_lists(
    tmp_path: Path, first: list[Conversation], second: list[Conversation], data: st.DataObject
) -> None:
    with spools(tmp_path) as made:
        spool = made.new()
        for number, conversation in enumerate(first):
            spool.append(conversation)
            assert spool[number] == conversation  # reading between two writes
            assert spool[number // 2] == first[number // 2]
        whole = [*first, *second]
        rows = data.draw(st.lists(st.integers(0, max(len(whole) - 1, 0)), max_size=20 * len(whole)))
        choice = Selection([spool, second], np.array(rows, np.int64))
        assert list(choice) == [whole[row] for row in rows]
        assert list(choice[1:4]) == [whole[row] for row in rows[1:4]]
        assert list(spool) == list(spool[:]) == first
        assert list(Selection([spool, second])) == whole
        some = np.arange(len(choice))[::-2]
        assert list(choice.take(some)) == [list(choice)[i] for i in some]
        assert [packed(choice, i) for i in range(len(rows))] == [pack(whole[r]) for r in rows]
        assert [unpack(packed(choice, i)) for i in range(len(rows))] == list(choice)
    assert list(tmp_path.iterdir()) == []


def test_the_ends_of_a_spool_are_a_lists_ends(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "a.spool")
    spool.append(Conversation((), "text", "a:1"))
    assert spool[-1] == spool[0]
    for wrong in (1, -2):
        with pytest.raises(IndexError):
            spool[wrong]
    spool.close()


def test_what_a_killed_preparation_left_behind_is_gone(tmp_path: Path) -> None:
    (tmp_path / "reading").mkdir()
    (tmp_path / "reading" / "0.spool").write_bytes(b"old")
    with spools(tmp_path) as made:
        assert len(made.new()) == 0
        assert [path.name for path in (tmp_path / "reading").iterdir()] == ["0.spool"]


def test_reading_and_mixing_hold_no_record_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    row = json.dumps({"question": "q" * 2000, "answer": "a" * 2000})
    path.write_text("\n".join([row] * 4000))
    tracemalloc.start()
    try:
        with spools(tmp_path) as made:
            (reading,) = read_sources([Source(path)], gathered=made.new)
            mixed = weighted([reading.conversations], [2.5], seed=0)
            assert sum(len(packed(mixed, i)) > 4000 for i in range(len(mixed))) == 10_000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < path.stat().st_size / 4


def test_packed_records_name_no_class_so_that_keys_of_data_outlive_its_place() -> None:
    calls = (ToolCall("look", '{"at": "it"}', "1"),)
    talk = (Message("user", "go"), Message("assistant", "", calls), Message("tool", "x", (), "1"))
    for example in (Conversation(talk, None, "f:1"), Conversation((), "a text", "f:2")):
        assert unpack(pack(example)) == example
        assert b"hasten" not in pack(example)
