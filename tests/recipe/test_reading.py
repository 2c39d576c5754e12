"""Sources of a recipe: weights, columns, first examples, overlap with eval examples."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hasten.data.prepared import overlap, rejected_words
from hasten.data.selection import Conversations, Tell, read_conversations
from hasten.errors import InputError
from hasten.parts.data.collate import TokenizedExample, tokenized_example
from hasten.recipe.prepared_data import prepare_data, settings_of
from hasten.recipe.schema import Recipe, load_recipe, recipe_from


def rows(name: str, count: int) -> list[dict[str, str]]:
    return [{"question": f"{name}{n}?", "answer": f"{name}{n}"} for n in range(count)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows("a", 40)))
    mine = [{"ask": row["question"], "say": row["answer"]} for row in rows("b", 20)]
    pq.write_table(pa.Table.from_pylist(mine), tmp_path / "b.parquet")
    return tmp_path


def recipe(folder: Path, **changes: Any) -> Recipe:
    b = {"path": str(folder / "b.parquet"), "columns": {"question": "ask", "answer": "say"}}
    given = {"dataset": [{"path": str(folder / "a.jsonl"), "weight": 2.5}, b], "eval_data": 0.25}
    shape = {"model": "deepseek-llm-tiny", "vocabulary": 400, "max_steps": 1}
    return Recipe(**{**shape, **given, **changes})


def read_source(job: Recipe, tell: Tell) -> Conversations:
    return read_conversations(settings_of(job), tell)


def answers(conversations: Any) -> list[str]:
    return [conversation.messages[-1].content for conversation in conversations]


def test_weights_repeat_records_but_none_that_is_eval_data(folder: Path) -> None:
    told: list[str] = []
    found = read_source(recipe(folder), told.append)
    train, eval_data = answers(found.train), answers(found.eval_data)
    assert len(eval_data) == len({*eval_data}) == 15
    assert not {*train} & {*eval_data}
    assert {*train} | {*eval_data} == {row["answer"] for row in [*rows("a", 40), *rows("b", 20)]}
    counts = {name: train.count(name) for name in {*train}}
    assert {times for name, times in counts.items() if name[0] == "a"} == {2, 3}
    assert {times for name, times in counts.items() if name[0] == "b"} == {1}
    of_a = sum(name[0] == "a" for name in counts)
    assert f"{folder / 'a.jsonl'}: {of_a} examples to train on, weight 2.5" in told
    assert f"{folder / 'b.parquet'} (parquet): question examples" in told
    again = read_source(recipe(folder), told.append)
    assert answers(again.train) == train
    assert answers(read_source(recipe(folder, seed=1), told.append).train) != train


def test_prepared_data_is_used_again_until_a_word_on_data_changes(folder: Path) -> None:
    told: list[str] = []
    out = folder / "out"
    first = prepare_data(recipe(folder), out, told.append)
    known = len(told)
    assert prepare_data(recipe(folder), out, told.append).note == first.note
    assert len(told) == known
    changes: list[dict[str, Any]] = [{"too_long": "drop"}, {"chat_template": "deepseek-r1"}]
    for change in changes:
        assert prepare_data(recipe(folder, **change), out).note.key != first.note.key
    assert first.note.containers[str(folder / "b.parquet")] == "parquet"


def _forge(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("key", ["train", "eval_data", "tokenizer"])
@pytest.mark.parametrize("absolute", [False, True])
def test_prepared_data_outside_its_folder_is_never_read(
    folder: Path, key: str, absolute: bool
) -> None:
    files = {"dataset": str(folder / "a.jsonl"), "eval_data": str(folder / "b.jsonl")}
    (folder / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows("b", 5)))
    job, out = recipe(folder, **files), folder / "out"
    note = prepare_data(job, out).note
    name = getattr(note, key)
    (out / name).rename(folder / "elsewhere")
    _forge(out / "index.json", **{key: str(folder / "elsewhere") if absolute else "../elsewhere"})
    told: list[str] = []
    again = prepare_data(job, out, told.append).note
    assert any("tokenising" in line for line in told), "it is prepared again"
    assert getattr(again, key) == name


def test_an_exchanged_or_cut_prepared_tokenizer_is_noticed(folder: Path) -> None:
    job, out = recipe(folder), folder / "out"
    first = prepare_data(job, out)
    saved = out / "tokenizer" / "tokenizer.json"
    right = saved.read_bytes()
    content = json.loads(right)
    vocabulary = content["model"]["vocab"]
    a, b = [word for word in vocabulary if len(word) > 1][:2]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    for damaged in (json.dumps(content).encode(), right[:-50]):
        saved.write_bytes(damaged)
        assert prepare_data(job, out).tokenizer.get_vocab() == first.tokenizer.get_vocab()
        assert saved.read_bytes() == right


@pytest.mark.parametrize("fate", ["truncate", "split", "drop"])
def test_records_that_are_too_long_are_counted_and_told(folder: Path, fate: str) -> None:
    told: list[str] = []
    for path, row in (("a", rows("a", 40)), ("long", rows("long word " * 30, 3))):
        (folder / f"{path}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in row))
    files = [str(folder / name) for name in ("a.jsonl", "long.jsonl")]
    job = recipe(folder, dataset=files, eval_data=0, too_long=fate, cutoff_len=64, vocabulary=300)
    data = prepare_data(job, folder / "out", told.append)
    assert data.note.long == 3
    assert any("3 of 43 examples are longer than cutoff_len=64" in text for text in told)
    assert any(f"(too_long: {fate})" in text for text in told)
    if fate == "split":
        assert len(data.train) > 43
    else:
        assert len(data.train) == 40
        assert len(data.note.rejected) == 3
        (words,) = {reason for _, _, reason in data.note.rejected}
        assert rejected_words(data.note) == f"3 examples left out: {words}"


def test_a_listed_data_set_is_prepared_anew_when_its_file_changes(folder: Path) -> None:
    (folder / "dataset_info.json").write_text(
        json.dumps({"mine": {"file_name": "c.json", "columns": {"prompt": "q", "response": "a"}}})
    )
    job = recipe(folder, dataset=f"{folder}:mine", eval_data=0)
    keys = []
    for count in (5, 6):
        (folder / "c.json").write_text(json.dumps([{"q": "x", "a": f"y{n}"} for n in range(count)]))
        data = prepare_data(job, folder / "out")
        assert len(data.train) == count
        keys.append(data.note.key)
    assert keys[0] != keys[1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dataset": []}, "dataset: name at least one source"),
        ({"dataset": [{"path": "a", "wieght": 2}]}, "a source: unknown key 'wieght'"),
        ({"dataset": [{"path": "a", "weight": 0}]}, "a source: weight is 0; it must be greater"),
        ({"dataset": [{"path": "a", "weight": float("inf")}]}, "a source: weight"),
        ({"dataset": [{"weight": 2}]}, "'path' is missing"),
        ({"dataset": [{3: 4}]}, "keys must be texts"),
        ({"too_long": "cut"}, "too_long is 'cut'; it must be "),
        ({"columns": {"question": 3}}, "columns"),
        ({"max_steps": "abc"}, "max_steps is 'abc'; it must be a whole number"),
        ({"max_steps": 1.5}, "max_steps is 1.5; it must be a whole number"),
        ({"learning_rate": "high"}, "learning_rate is 'high'; it must be a number"),
        ({"model": 7}, "model is 7; it must be a text"),
        ({"lora_targets": 7}, "lora_targets is 7; it must be a text or be a list"),
        ({"nproc": 0}, "nproc is 0; it must be at least 1"),
        ({"eval_every": "x"}, "eval_every is 'x'; it must be a "),
        ({"plan": 7}, "plan is 7; it must be a list"),
        ({"price": {"currency": "", "per_device_hour": 1}}, "it must have at least 1 character"),
        ({"adam_betas": [0.9]}, "adam_betas is [0.9]: too few values"),
    ],
)
def test_a_source_that_says_too_much_is_named(
    tmp_path: Path, changes: dict[Any, Any], words: str
) -> None:
    good = {"model": "deepseek-llm-tiny", "dataset": "stdlib", "max_steps": 3}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**good, **changes}))
    with pytest.raises(InputError) as caught:
        load_recipe(path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_recipe_with_sources_is_the_same_once_written_out(folder: Path) -> None:
    path = folder / "recipe.yaml"
    path.write_text(recipe(folder).to_yaml())
    assert load_recipe(path) == recipe(folder)


def test_a_hub_name_without_the_library_is_answered_with_the_way_to_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"pip install 'datasets>="):
        read_source(recipe(folder, dataset="openai/gsm8k"), print)


def test_the_seed_decides_which_records_are_drawn(folder: Path) -> None:
    def drawn(seed: int) -> list[str]:
        found = read_conversations(
            settings_of(recipe(folder, max_examples=20, seed=seed)), lambda text: None
        )
        return sorted({*answers(found.train), *answers(found.eval_data)})

    assert drawn(1) == drawn(1)
    assert len({tuple(drawn(seed)) for seed in range(4)}) > 1


@pytest.mark.parametrize(
    ("example", "mark"),
    [
        ({"question": "<image>\nWho is it?", "answer": "Ann"}, "<image>"),
        ({"text": "USER: <|image_pad|> Who? ASSISTANT: Ann"}, "<|image_pad|>"),
        ({"question": "How is a picture drawn?", "answer": "Write <image> there"}, ""),
    ],
)
def test_a_placeholder_of_a_picture_is_named(
    tmp_path: Path, example: dict[str, str], mark: str
) -> None:
    (tmp_path / "a.jsonl").write_text((json.dumps(example) + "\n") * 3)
    told: list[str] = []
    read_conversations(
        settings_of(recipe(tmp_path, dataset=str(tmp_path / "a.jsonl"))), told.append
    )
    warnings = [line for line in told if line.startswith("warning")]
    expected = f"a.jsonl: 3 examples have {mark} in a question or text: it is trained as plain text"
    assert [expected in line for line in warnings] == [True] * bool(mark)


def test_columns_that_are_not_read_are_named_once(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "q", "at": 3}, {"role": "assistant", "content": "a"}]
    examples = [{"messages": turns, "source": "x", "note": ""}] * 3
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(example) + "\n" for example in examples))
    told: list[str] = []
    read_conversations(
        settings_of(recipe(tmp_path, dataset=str(tmp_path / "a.jsonl"))), told.append
    )
    place = f"{tmp_path / 'a.jsonl'} (jsonl)"
    assert told == [f"{place}: messages examples; not read: messages[].at, source"]


def written(path: Path, count: int) -> Path:
    rows = ({"prompt": f"{path.stem} {i}", "completion": f"answer {i} " * 4} for i in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_source_gives_its_first_records(tmp_path: Path) -> None:
    sources = [
        {"path": str(written(tmp_path / "a.jsonl", 20)), "max_examples": 3},
        {"path": str(written(tmp_path / "b.jsonl", 2)), "max_examples": 3},
        str(written(tmp_path / "c.jsonl", 4)),
    ]
    values = {"model": "deepseek-llm-tiny", "dataset": sources, "max_steps": 1, "eval_data": 0.0}
    found = read_source(recipe_from(values, "r.yaml"), lambda text: None).train
    texts = [example.messages[0].content for example in found]
    assert texts == [*(f"a {i}" for i in range(3)), "b 0", "b 1", *(f"c {i}" for i in range(4))]


@pytest.mark.parametrize("weight", [2.0, 0.5])
def test_a_weight_counts_the_first_records_alone(tmp_path: Path, weight: float) -> None:
    source = {"path": str(written(tmp_path / "a.jsonl", 50)), "max_examples": 10, "weight": weight}
    values = {"model": "deepseek-llm-tiny", "dataset": [source], "max_steps": 1, "eval_data": 0.0}
    found = read_source(recipe_from(values, "r.yaml"), lambda text: None).train
    assert len(found) == 10 * weight
    assert {example.messages[0].content for example in found} <= {f"a {i}" for i in range(10)}


def test_the_embedded_corpus_gives_its_first_records() -> None:
    source = {"path": "stdlib", "max_examples": 5}
    values = {"model": "deepseek-llm-tiny", "dataset": [source], "max_steps": 1}
    assert len(read_source(recipe_from(values, "r.yaml"), lambda text: None).train) == 5


class Examples(list[TokenizedExample]):
    @property
    def lengths(self) -> Any:
        return np.asarray([r.length for r in self], np.int32)

    @property
    def trained_counts(self) -> Any:
        return np.asarray([r.trained_tokens for r in self], np.int32)


class Both:
    def __init__(self, train: Any, eval_data: Any) -> None:
        self.train, self.eval_data = train, eval_data


texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=12)


@given(texts, texts)
def test_the_count_is_that_of_a_plain_search(train: list[Any], eval_data: list[Any]) -> None:
    found = overlap(
        Both(Examples(map(tokenized_example, train)), Examples(map(tokenized_example, eval_data)))
    )
    assert found.count == sum(example in train for example in eval_data)
    assert found.eval_data == len(eval_data)
    assert bool(found.advice) == (found.count > 0)


def test_nothing_eval_data_overlaps_with_nothing() -> None:
    assert overlap(Both(Examples([tokenized_example([1, 2])]), ())).advice == ""


@pytest.mark.parametrize(
    ("count", "words"), [(1, "eval examples is in"), (2, "eval examples are in")]
)
def test_the_advice_counts_and_says_what_to_do(count: int, words: str) -> None:
    eval_data = [[1, 2], [3, 4]]
    train = Examples(map(tokenized_example, eval_data[:count]))
    advice = overlap(Both(train, Examples(map(tokenized_example, eval_data)))).advice
    assert words in advice
    assert "eval_data a separate file" in advice


@pytest.mark.parametrize(("texts", "shared"), [(2, 2), (12, 0)])
def test_texts_are_held_out_whole_or_the_eval_loss_is_said_to_flatter(
    tmp_path: Path, texts: int, shared: int
) -> None:
    lines = [json.dumps({"text": f"{n} and more " * 20}) + "\n" for n in range(texts)]
    (tmp_path / "texts.jsonl").write_text("".join(lines))
    asked = recipe(tmp_path, dataset=str(tmp_path / "texts.jsonl"), cutoff_len=16)
    data = prepare_data(asked, tmp_path / "data")
    assert len(data.eval_data) == pytest.approx(len(data.train) / 3, rel=0.5)
    found = overlap(data)
    assert found.texts == shared
    assert ("too long for a split" in found.advice) == bool(shared)
