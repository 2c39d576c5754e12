"""The token store: exactly what was encoded, once, and never a damaged file."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.preparation import dialogues
from hasten.data import arrow_file
from hasten.data import tokenize as preparation
from hasten.data.chat_template import encode
from hasten.data.conversation import Conversation
from hasten.data.prompt_formats import PROMPT_FORMATS
from hasten.data.token_store import Subset, TokenStore, cache_key, inspect, split, tokenize
from hasten.data.tokenize import BOS, EOS
from hasten.data.turns import Message
from hasten.errors import InputError
from hasten.parts.data.collate import TokenizedExample, tokenized_example


def same(left: TokenizedExample, right: TokenizedExample) -> bool:
    return np.array_equal(left.input_ids, right.input_ids) and np.array_equal(
        left.trained, right.trained
    )


EXAMPLES = st.lists(
    st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), min_size=1, max_size=20).map(
        lambda pairs: tokenized_example([p[0] for p in pairs], [p[1] for p in pairs])
    ),
    max_size=12,
)


@given(examples=EXAMPLES, batch_tokens=st.sampled_from([1, 30, 10**6]))
def test_records_come_back_as_written_however_they_are_batched(
    tmp_path: Path, examples: list[TokenizedExample], batch_tokens: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrow_file, "_BATCH_TOKENS", batch_tokens)
        arrow_file.write(tmp_path / "a.arrow", iter(examples), lambda: {"rejected": []})
    store = TokenStore(tmp_path / "a.arrow")
    assert len(store) == len(examples)
    assert all(same(store[at], example) for at, example in enumerate(examples))
    assert store.lengths.tolist() == [example.length for example in examples]
    assert store.trained_counts.tolist() == [example.trained_tokens for example in examples]
    assert store.lengths.dtype == store.trained_counts.dtype == np.int32


def test_a_flipped_bit_or_a_cut_anywhere_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    arrow_file.write(path, [tokenized_example([1, 2, 3])], lambda: {"rejected": []})
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(arrow_file.DamagedError):
            TokenStore(path)
        path.write_bytes(whole[:at])
        with pytest.raises(arrow_file.DamagedError):
            TokenStore(path)


def test_other_arrow_readers_see_the_records(tmp_path: Path) -> None:
    arrow_file.write(
        tmp_path / "a.arrow", [tokenized_example([1, 2]), tokenized_example([3], [False])]
    )
    with pa.OSFile(str(tmp_path / "a.arrow")) as file:
        table = pa.ipc.open_stream(file).read_all()
    assert table.to_pydict() == {
        "input_ids": [[1, 2], [3]],
        "trained": [[True, True], [False]],
    }


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    arrow_file.write(path, [tokenized_example([1])], lambda: {"rejected": []})

    def failing() -> Any:
        yield tokenized_example([2])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        arrow_file.write(path, failing())
    assert [file.name for file in tmp_path.iterdir()] == ["a.arrow"]
    assert TokenStore(path)[0].input_ids.tolist() == [1]


def test_a_store_holds_what_encode_gives(tokenizer: Any, tmp_path: Path) -> None:
    conversations = dialogues(50)
    store = tokenize(conversations, tokenizer, tmp_path, 64)
    for at, conversation in enumerate(conversations):
        assert same(store[at], encode(tokenizer, conversation, 64).examples[0])
    assert same(store[-1], store[49])
    with pytest.raises(IndexError):
        store[50]


def test_a_record_is_a_view_of_the_file_and_read_only(tokenizer: Any, tmp_path: Path) -> None:
    example = tokenize(dialogues(3), tokenizer, tmp_path, 64)[1]
    assert not example.input_ids.flags.owndata
    assert not example.input_ids.flags.writeable


def test_tokenising_happens_once(tokenizer: Any, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    for _ in range(2):
        store = tokenize(
            dialogues(250), tokenizer, tmp_path, 64, on_progress=lambda *call: calls.append(call)
        )
    assert calls == [(250, 250)]
    assert list(tmp_path.iterdir()) == [store.path]


def test_a_damaged_cache_is_built_anew(tokenizer: Any, tmp_path: Path) -> None:
    path = tokenize(dialogues(20), tokenizer, tmp_path, 64).path
    whole = path.read_bytes()
    for damaged in (b"", whole[:-9], whole[:99] + b"\xff\xfe" + whole[101:]):
        path.unlink()
        path.write_bytes(damaged)
        assert len(tokenize(dialogues(20), tokenizer, tmp_path, 64)) == 20
        assert path.read_bytes() == whole


def test_whatever_changes_the_tokens_changes_the_key(tokenizer: Any) -> None:
    base = cache_key(dialogues(3), tokenizer, 64)
    tokenizer(["a", "b c d"], padding=True, truncation=True, max_length=2)
    assert cache_key(dialogues(3), tokenizer, 64) == base  # a call leaves settings, not content
    others = [
        cache_key(dialogues(4), tokenizer, 64),
        cache_key(dialogues(3), tokenizer, 65),
        cache_key([*dialogues(2), Conversation((), "question 2", "data.jsonl:3")], tokenizer, 64),
    ]
    tokenizer.chat_template = PROMPT_FORMATS["deepseek-v3"]
    others.append(cache_key(dialogues(3), tokenizer, 64))
    assert len({base, *others}) == 5


def test_records_too_long_are_named_and_remembered_and_cost_no_budget(
    tokenizer: Any, tmp_path: Path
) -> None:
    long = Conversation((Message("user", "x" * 99), Message("assistant", "y")), None, "d.jsonl:9")
    mixed = [*dialogues(9), long]
    for _ in range(2):
        store = tokenize(mixed, tokenizer, tmp_path, 32, max_rejected=0)
        assert len(store) == 9
        assert store.rejected == [("d.jsonl", 9, "no answer left within cutoff_len=32")]
    with pytest.raises(InputError, match="none of 1 examples is left"):
        tokenize([long], tokenizer, tmp_path, 32, max_rejected=1)


def test_a_folder_that_cannot_be_written_is_explained(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="can't be written"):
        tokenize(dialogues(1), tokenizer, tmp_path / "file", 64)


def test_a_pickled_store_is_small_and_opens_the_same_file(tokenizer: Any, tmp_path: Path) -> None:
    store = tokenize(dialogues(200), tokenizer, tmp_path, 64)
    data = pickle.dumps(store)
    assert len(data) < 1000
    assert same(pickle.loads(data)[7], store[7])


@given(total=st.integers(2, 200), share=st.floats(0.01, 0.9), seed=st.integers(0, 2**32))
def test_a_split_is_a_partition_that_the_seed_decides(total: int, share: float, seed: int) -> None:
    if max(1, round(share * total)) >= total:
        return
    train, eval_data = split(np.arange(total), share, seed)
    assert sorted([*train, *eval_data]) == list(range(total))
    assert len(eval_data) == max(1, round(share * total))
    assert all(map(np.array_equal, split(np.arange(total), share, seed), (train, eval_data)))


def test_a_split_by_count_may_be_empty_but_leaves_something_to_train_on() -> None:
    assert [len(side) for side in split(np.arange(10), 3, 0)] == [7, 3]
    assert [len(side) for side in split(np.arange(10), 0, 0)] == [10, 0]
    for eval_data in (10, -1, float("nan")):
        with pytest.raises(InputError, match="eval_data"):
            split(np.arange(10), eval_data, 0)


@given(
    sizes=st.lists(st.integers(1, 5), min_size=20, max_size=60),
    share=st.floats(0.2, 0.8),
    seed=st.integers(0, 2**32),
)
def test_a_text_is_held_out_with_all_its_pieces(sizes: list[int], share: float, seed: int) -> None:
    texts = np.repeat(np.arange(len(sizes)), sizes)
    train, eval_data = split(texts, share, seed)
    assert sorted([*train, *eval_data]) == list(range(len(texts)))
    assert not {*texts[train]} & {*texts[eval_data]}
    asked = round(share * len(texts))
    assert asked / 2 <= len(eval_data) <= asked


def test_texts_that_are_too_long_to_be_held_out_are_split_by_pieces() -> None:
    train, eval_data = split(np.repeat([0, 1], [1, 99]), 0.2, 0)
    assert (len(train), len(eval_data)) == (80, 20)


def test_pieces_of_one_text_are_known_across_chunks(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "_CHUNK_RECORDS", 2)
    texts = [Conversation((), "long word " * n, f"a:{n}") for n in (1, 40, 2, 30, 60)]
    alone = [len(tokenize([one], tokenizer, tmp_path / one.location, 16)) for one in texts]
    assert min(alone) == 1 < max(alone)
    store = tokenize(texts, tokenizer, tmp_path, 16)
    assert store.conversations.tolist() == np.repeat(np.arange(5), alone).tolist()


def test_a_subset_of_a_subset_has_the_interface_of_the_store(
    tokenizer: Any, tmp_path: Path
) -> None:
    store = tokenize(dialogues(20), tokenizer, tmp_path, 64)
    inner = Subset(Subset(store, np.arange(19, -1, -1)), np.array([0, 5]))
    assert len(inner) == 2
    assert same(inner[1], store[14])
    assert inner.lengths.tolist() == [store[19].length, store[14].length]
    assert inner.trained_counts.tolist() == [store[19].trained_tokens, store[14].trained_tokens]


def test_inspect_marks_what_is_trained(tokenizer: Any, tmp_path: Path) -> None:
    example = tokenize(dialogues(1), tokenizer, tmp_path, 64)[0]
    assert inspect(tokenizer, example) == (f"{BOS}User: question 0\n\nAssistant:[[ word {EOS}]]")
    assert "\033[32m word" in inspect(tokenizer, example, colour=True)
