"""Columns under other names, and the data sets that a dataset_info.json lists."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.data.conversation import SHAPES, ColumnNames, columns_of, conversation
from hasten.data.readers import read_examples, read_sources
from hasten.data.sources import Source, source_of, weighted
from hasten.errors import InputError


def read(folder: Path, example: Any, columns: dict[str, str]) -> tuple[str, list[tuple[str, ...]]]:
    path = folder / "data.jsonl"
    path.write_text(json.dumps(example) + "\n")
    (reading,) = read_sources([Source(path, columns_of(columns))])
    return reading.shapes[str(path)], [m[:2] for m in reading.conversations[0].messages]


def test_a_users_names_stand_for_a_shapes_columns(tmp_path: Path) -> None:
    columns = {"question": "prompt_text", "answer": "reply"}
    # "instruction" and "output" would make it alpaca; the columns say what it is
    example = {"prompt_text": "q", "reply": "a", "instruction": "x", "output": "y"}
    assert read(tmp_path, example, columns) == ("question", [("user", "q"), ("assistant", "a")])
    swapped = {"question": "answer", "answer": "question"}
    assert read(tmp_path, {"question": "a", "answer": "q"}, swapped)[1][0] == ("user", "q")


def test_tags_stand_for_the_keys_and_roles_of_turns(tmp_path: Path) -> None:
    tags = {"role_tag": "who", "content_tag": "says", "user_tag": "Q", "assistant_tag": "A"}
    turns = [{"who": "Q", "says": "hello", "mood": 1}, {"who": "A", "says": "hi"}]
    expected = [("user", "hello"), ("assistant", "hi")]
    for column, shape in (("messages", "messages"), ("conversations", "sharegpt")):
        assert read(tmp_path, {"dialog": turns}, {column: "dialog", **tags}) == (shape, expected)
        assert read(tmp_path, {column: turns}, tags) == (shape, expected)


@given(data=st.data(), shape=st.sampled_from(["alpaca", "prompt", "question"]))
def test_renaming_columns_changes_nothing_else(data: st.DataObject, shape: str) -> None:
    needs = SHAPES[shape].needs
    own = data.draw(st.lists(st.text(min_size=1), min_size=2, max_size=2, unique=True))
    texts = {known: f"text of {known}" for known in needs}
    renamed = {new: texts[known] for known, new in zip(needs, own, strict=True)}
    found = columns_of(dict(zip(needs, own, strict=True))).renamed(renamed, shape)
    assert conversation(found, shape, "a:1") == conversation(texts, shape, "a:1")


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"qestion": "q"}, "did you mean 'question'"),
        ({"zzz": "q"}, "known are instruction"),
        ({"question": ""}, "has no name"),
        ({"question": "q", "output": "a"}, "don't belong to one shape"),
        ({"question": "q", "role_tag": "r"}, "don't belong to one shape"),
        ({"question": "nowhere", "answer": "a"}, "question from 'nowhere'"),
    ],
)
def test_columns_that_fit_nothing_are_named(
    tmp_path: Path, columns: dict[str, str], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        read(tmp_path, {"q": "1", "a": "2"}, columns)


ALPACA = {"goal": "g", "more": "m", "plan": "p", "sys": "s", "history": [["a", "b"]]}
TURNS = [{"r": "U", "c": "q"}, {"r": "B", "c": "a"}]
TAGS = {"role_tag": "r", "content_tag": "c", "user_tag": "U", "assistant_tag": "B"}
# entry (without its file), an example, the messages that LLaMA-Factory's documentation makes of it
ENTRIES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "plain": ({}, {"instruction": "i", "input": "n", "output": "o"}, ["i\nn", "o"]),
    "mapped": (
        {"columns": {"prompt": "goal", "query": "more", "response": "plan", "system": "sys"}},
        ALPACA,
        ["s", "g\nm", "p"],
    ),
    "unmapped columns are not read": (
        {"columns": {"prompt": "goal", "response": "plan"}},
        ALPACA | {"input": "unread", "system": "unread"},
        ["g", "p"],
    ),
    "turns": (
        {"formatting": "sharegpt", "columns": {"messages": "dialog"}, "tags": TAGS},
        {"dialog": TURNS},
        ["q", "a"],
    ),
    "default turns": (
        {"formatting": "sharegpt"},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        ["q", "a"],
    ),
    "texts": ({"columns": {"prompt": "body"}}, {"body": "A tale."}, []),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_is_read_as_llama_factory_reads_it(tmp_path: Path, name: str) -> None:
    entry, example, expected = ENTRIES[name]
    (tmp_path / "a.json").write_text(json.dumps([example]))
    listing = tmp_path / "dataset_info.json"
    listing.write_text(json.dumps({name: {"file_name": "a.json", **entry}}))
    for place in (listing, tmp_path):
        (reading,) = read_sources([source_of(f"{place}:{name}")])
        (found,) = reading.conversations
        assert [message.content for message in found.messages] == expected
        assert (found.text == "A tale.") == (not expected)
    with pytest.raises(InputError, match="add one's name"):
        read_examples([tmp_path])


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"script_url": "make.py"}, "script, which is never run"),
        ({"hf_hub_url": "a/b"}, r"isn't local \(hf_hub_url\)"),
        ({}, "no file_name"),
        ({"file_name": "../a.json"}, "leads out of"),
        ({"file_name": "/etc/passwd"}, "leads out of"),
        ({"file_name": "a.json", "formatting": "chatml"}, "none of alpaca, sharegpt, openai"),
        ({"file_name": "a.json", "formatting": []}, "none of alpaca, sharegpt"),
        ({"file_name": "a.json", "ranking": True}, "these are preference pairs"),
        ({"file_name": "a.json", "columns": {"messages": "t"}}, "column 'messages' is not read"),
        ({"file_name": "a.json", "num_samples": 3}, "'num_samples', which is not read"),
        ({"file_name": "a.json", "split": "test"}, "'split', which is not read"),
        ({"file_name": "a.json", "columns": 3}, "columns must be an object"),
        ({"file_name": "a.json", "tags": {"rol_tag": "t"}}, "tag 'rol_tag'"),
        ([], "must be an object"),
    ],
)
def test_an_entry_that_is_not_local_data_is_refused(tmp_path: Path, entry: Any, words: str) -> None:
    (tmp_path / "dataset_info.json").write_text(json.dumps({"mine": entry}))
    with pytest.raises(InputError, match=words):
        source_of(f"{tmp_path}:mine")
    with pytest.raises(InputError, match="no entry 'mien': it has mine"):
        source_of(f"{tmp_path}:mien")


def test_a_list_that_is_none_is_refused_and_a_path_with_a_colon_is_a_path(tmp_path: Path) -> None:
    for text in ("[", "[]", "\xff"):
        (tmp_path / "dataset_info.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(InputError, match=r"dataset_info\.json"):
            source_of(f"{tmp_path}:mine")
    assert source_of("folder:x/a.jsonl").path == Path("folder:x/a.jsonl")
    assert source_of("a.jsonl").columns == ColumnNames()


@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    weight=st.floats(0.01, 5),
    seed=st.integers(0, 99),
)
def test_a_weight_is_how_often_each_record_is_seen(
    sizes: list[int], weight: float, seed: int
) -> None:
    groups: list[Any] = [[(g, n) for n in range(size)] for g, size in enumerate(sizes)]
    weights = [1.0, *[weight] * (len(sizes) - 1)]
    found: list[Any] = list(weighted(groups, weights, seed))
    assert found == list(weighted(groups, weights, seed))
    for group, times in zip(groups, weights, strict=True):
        counts = [found.count(example) for example in group]
        assert {*counts} <= {int(times), int(times) + 1}
        assert abs(sum(counts) - times * len(group)) <= 0.5 + 1e-9


def test_the_seed_draws_a_part_and_each_source_its_own() -> None:
    """Of 20 halves that are drawn independently, one in a million examples is in none."""
    groups: list[Any] = [range(100), range(100, 200)]
    halves: list[Any] = [list(weighted(groups, [0.5, 0.5], seed)) for seed in range(20)]
    assert {*itertools.chain(*halves)} == {*range(200)}
    assert halves[0][50:] != [number + 100 for number in halves[0][:50]]
