"""Names on the hub and folders of `save_to_disk`: the library's examples, or one sentence."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from hasten.data.readers import ReadExamples, read_examples
from hasten.data.sources import HubName, hub_files, hub_name
from hasten.errors import InputError

ROWS = [{"question": f"q{n}", "answer": f"a{n}"} for n in range(7)]
ASKED = HubName("me/set", None, "train")


def arrow(path: Path, rows: list[dict[str, str]]) -> Path:
    table = pa.Table.from_pylist(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)
    return path


def saved(folder: Path) -> Path:
    """As `save_to_disk(folder, num_shards=2)` writes it, the shards listed against their order."""
    names = ["b.arrow", "a.arrow"]
    for name, rows in zip(names, (ROWS[:3], ROWS[3:]), strict=True):
        arrow(folder / name, rows)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def answers(reading: ReadExamples) -> list[str]:
    return [conversation.messages[-1].content for conversation in reading.conversations]


def loader(*files: Path, rows: int = 7) -> Callable[..., Any]:
    class Loaded:
        cache_files = [{"filename": str(file)} for file in files]  # noqa: RUF012

        def __len__(self) -> int:
            return rows

    return lambda *given, **named: Loaded()


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("me/set", ASKED),
        ("me/set-v1.5:test", HubName("me/set-v1.5", None, "test")),
        ("openai/gsm8k:main:test", HubName("openai/gsm8k", "main", "test")),
        ("me/set:20231101.en:train", HubName("me/set", "20231101.en", "train")),
        *((path, None) for path in ("set", "a/b/c", "./me/set", "../set", "/me/set", "me/a.jsonl")),
        *((path, None) for path in ("me/a.txt:x", "me/set:a:b:c", "me/set:train[:5]", "me/set:")),
    ],
)
def test_what_can_be_a_hub_name_is_told_from_paths(name: str, asked: HubName | None) -> None:
    assert hub_name(name) == asked


def test_a_name_in_a_folder_that_is_here_is_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train").mkdir()
    assert hub_name("data/trian") is None
    with pytest.raises(InputError, match="did you mean train"):
        read_examples([Path("data/trian")])


def test_the_library_is_asked_for_the_set_its_configuration_and_split(tmp_path: Path) -> None:
    asked: list[Any] = []

    def load(*given: Any, **named: Any) -> Any:
        asked.append((given, named))
        return loader(tmp_path / "x.arrow")()

    assert hub_files(HubName("me/set", "main", "test"), load) == [tmp_path / "x.arrow"]
    assert asked == [(("me/set", "main"), {"split": "test"})]


def test_a_hub_name_gives_the_records_of_its_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = (arrow(tmp_path / "1.arrow", ROWS[:4]), arrow(tmp_path / "2.arrow", ROWS[4:]))
    library = SimpleNamespace(__version__="5.2.0", load_dataset=loader(*files))
    monkeypatch.setitem(sys.modules, "datasets", library)
    reading = read_examples([Path("me/set:test")])
    assert answers(reading) == [row["answer"] for row in ROWS]
    assert reading.containers == dict.fromkeys(map(str, files), "arrow")
    library.__version__ = "3.6.0"
    with pytest.raises(InputError, match=r"3\.6\.0 may run scripts"):
        read_examples([Path("me/set:test")])


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("Dataset scripts are no longer supported, but found a.py"), "never run"),
        (ConnectionError("Couldn't reach 'me/set' on the Hub (Offline)"), "can't be reached"),
        (ValueError('Unknown split "train". Should be one of [..]'), "Unknown split"),
        (ValueError("Config name is missing.\nPlease pick one among: ['a']"), r"among: \['a'\]"),
        (SystemError(), "SystemError"),
    ],
)
def test_what_the_library_says_becomes_one_sentence(error: Exception, words: str) -> None:
    def load(*given: Any, **named: Any) -> Any:
        raise error

    with pytest.raises(InputError, match=words) as caught:
        hub_files(ASKED, load)
    assert "me/set" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_set_without_records_is_refused(tmp_path: Path) -> None:
    for load in (loader(), loader(tmp_path / "a.arrow", rows=0)):
        with pytest.raises(InputError, match="has no examples"):
            hub_files(ASKED, load)


def test_a_saved_folder_is_read_in_the_order_of_its_list(tmp_path: Path) -> None:
    assert answers(read_examples([saved(tmp_path / "set")])) == [row["answer"] for row in ROWS]


def test_a_saved_folder_of_splits_wants_one_named(tmp_path: Path) -> None:
    saved(tmp_path / "all" / "train")
    listing = tmp_path / "all" / "dataset_dict.json"
    listing.write_text('{"splits": ["train"]}')
    assert len(answers(read_examples([tmp_path / "all"]))) == len(ROWS)
    listing.write_text('{"splits": ["train", "test"]}')
    with pytest.raises(InputError, match=r"name one of them: .*all/train"):
        read_examples([tmp_path / "all"])
    assert len(answers(read_examples([tmp_path / "all" / "train"]))) == len(ROWS)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a list of a data set's files"),
        ("{}", "lists no data files"),
        ('{"_data_files": [3]}', "is no file name"),
        ('{"_data_files": [{"filename": "../a.arrow"}]}', "leads out of"),
        ('{"_data_files": [{"filename": "c.arrow"}]}', "lacks c.arrow"),
        ('{"_data_files": [{"filename": "state.json"}]}', "none of the known shapes"),
        *(
            (f'{{"_data_files": [{{"filename": "a.arrow"}}], "{key}": [{{"filename": "i"}}]}}', key)
            for key in ("_indices_files", "_indices_data_files")
        ),
    ],
)
def test_a_damaged_list_of_a_saved_folder_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (saved(tmp_path / "set") / "state.json").write_text(text)
    with pytest.raises(InputError, match=words):
        read_examples([tmp_path / "set"])


def test_the_library_itself_saves_and_loads_what_is_read_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    source = tmp_path / "hub" / "set"
    source.mkdir(parents=True)
    for split, rows in (("train", ROWS), ("test", ROWS[:2])):
        (source / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def load(name: str, config: str | None, split: str) -> Any:
        return datasets.load_dataset(str(source), config, split=split, cache_dir=str(tmp_path))

    for split, rows in (("train", ROWS), ("test", ROWS[:2])):
        reading = read_examples(hub_files(HubName("hub/set", None, split), load))
        assert answers(reading) == [row["answer"] for row in rows]
    with pytest.raises(InputError, match="Unknown split"):
        hub_files(HubName("hub/set", None, "other"), load)
    with pytest.raises(InputError, match=r"other.* not found"):
        hub_files(HubName("hub/set", "other", "train"), load)
    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(str(tmp_path / "saved"), num_shards=2)
    assert answers(read_examples([tmp_path / "saved"])) == [row["answer"] for row in ROWS]
    whole.select([4, 2]).save_to_disk(str(tmp_path / "chosen"))
    assert answers(read_examples([tmp_path / "chosen"])) == ["a4", "a2"]
    (source / "set.py").write_text("raise SystemExit")
    for file in source.glob("*.jsonl"):
        file.unlink()
    with pytest.raises(InputError, match="is a script, which is never run"):
        hub_files(HubName("hub/set", None, "train"), load)
