"""Preference pairs: shapes of examples, tokens of prompt and answers, and the store of pairs."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.data.chat_template import EQUAL, MERGED, SHARED
from hasten.data.conversation import (
    ALL_SHAPES,
    PAIR_SHAPES,
    RATED_SHAPES,
    Conversation,
    columns_of,
    conversation,
)
from hasten.data.pair_tokens import encode_pairs
from hasten.data.prepared import PreparedData, overlap
from hasten.data.readers import read_sources
from hasten.data.sources import source_of
from hasten.data.spool import pack, unpack
from hasten.data.statistics import layouts, statistics_of
from hasten.data.token_store import Pairs, Subset, inspect, row_lengths, split, tokenize
from hasten.data.turns import Message, NoConversationError
from hasten.errors import InputError
from hasten.parts.data.pairs import PreferencePair
from hasten.recipe.prepared_data import prepare_data
from hasten.recipe.schema import recipe_from

Q, GOOD, BAD = "What is it?", "A test.", "No idea."


def user(text: str = Q) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def read(
    folder: Path,
    examples: list[dict[str, Any]],
    stage: str = "dpo",
    columns: dict[str, str] | None = None,
    max_rejected: float = 0,
) -> list[Conversation]:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(example) + "\n" for example in examples))
    source = source_of(str(path), columns_of(columns or {}, stage))
    return list(read_sources([source], max_rejected)[0].conversations)


def texts(found: Conversation) -> tuple[Any, Any, Any]:
    """The contents of prompt, chosen and rejected; with the role before all but plain texts."""
    assert found.answers is not None

    def of(side: Any) -> Any:
        if side is None or isinstance(side, str):
            return side
        return [f"{turn.role}: {turn.content}" for turn in side]

    prompt = of(found.messages) if found.text is None else found.text
    return (prompt, *map(of, found.answers))


ASKED, YES, NO = [f"user: {Q}"], [f"assistant: {GOOD}"], [f"assistant: {BAD}"]
TURNS = (ASKED, YES, NO)
DIALOGUE = [user(), said(GOOD)]
FROM = {"from": "human", "value": Q}
PAIRS: dict[str, tuple[dict[str, Any], Any]] = {
    "TRL, texts": ({"prompt": Q, "chosen": GOOD, "rejected": BAD}, (Q, GOOD, BAD)),
    "TRL, implicit texts": ({"chosen": f"{Q} A", "rejected": f"{Q} B"}, (Q, " A", " B")),
    "TRL, turns": (
        {"prompt": [user()], "chosen": [said(GOOD)], "rejected": [said(BAD)]},
        TURNS,
    ),
    "TRL, implicit turns": (
        {"chosen": DIALOGUE, "rejected": [user(), said(BAD)]},
        TURNS,
    ),
    "prompt beside complete dialogues": (
        {"prompt": Q, "chosen": DIALOGUE, "rejected": [user(), said(BAD)], "messages": DIALOGUE},
        TURNS,
    ),
    "LLaMA-Factory, alpaca": (
        {"instruction": "What is", "input": "it?", "chosen": GOOD, "rejected": BAD},
        (["user: What is\nit?"], YES, NO),
    ),
    "LLaMA-Factory, sharegpt": (
        {
            "conversations": [FROM],
            "chosen": {"from": "gpt", "value": GOOD},
            "rejected": {"from": "gpt", "value": BAD},
        },
        TURNS,
    ),
    "LLaMA-Factory v1": (
        {"chosen_messages": DIALOGUE, "rejected_messages": [user(), said(BAD)]},
        TURNS,
    ),
    "axolotl, chat_template": (
        {"messages": [user()], "chosen": said(GOOD), "rejected": said(BAD)},
        TURNS,
    ),
    "axolotl, intel": (
        {"system": "Be brief.", "question": Q, "chosen": GOOD, "rejected": BAD},
        (["system: Be brief.", *ASKED], YES, NO),
    ),
    "axolotl, argilla": (
        {"instruction": Q, "chosen_response": GOOD, "rejected_response": BAD},
        TURNS,
    ),
    "axolotl, icr": ({"input": Q, "chosen": GOOD, "rejected": BAD}, TURNS),
    "ms-swift, rejected_response": ({"messages": DIALOGUE, "rejected_response": BAD}, TURNS),
    "ms-swift, rejected_messages": (
        {"messages": DIALOGUE, "rejected_messages": [user(), said(BAD)]},
        TURNS,
    ),
    "ms-swift, query": ({"query": Q, "response": GOOD, "rejected_response": BAD}, TURNS),
    "OpenAI": (
        {
            "input": {"messages": [user()], "tools": [], "parallel_tool_calls": True},
            "preferred_output": [said(GOOD)],
            "non_preferred_output": [said(BAD)],
        },
        TURNS,
    ),
    "a greeting before the question": (
        {"messages": [said("Hello."), *DIALOGUE], "rejected_response": BAD},
        (["assistant: Hello.", *ASKED], YES, NO),
    ),
    "equal answers": (
        {"chosen": DIALOGUE, "rejected": DIALOGUE},
        (ASKED, YES, YES),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("stage", ["dpo", "kto"])
def test_pairs_of_every_shape_are_read(tmp_path: Path, name: str, stage: str) -> None:
    example, expected = PAIRS[name]
    (found,) = read(tmp_path, [example], stage)
    assert texts(found) == expected
    assert unpack(pack(found)) == found


RATED: dict[str, tuple[dict[str, Any], Any]] = {
    "TRL, texts": ({"prompt": Q, "completion": GOOD, "label": True}, (Q, GOOD, None)),
    "TRL, turns": (
        {"prompt": [user()], "completion": [said(BAD)], "label": False},
        (ASKED, None, NO),
    ),
    "LLaMA-Factory, alpaca": (
        {"instruction": Q, "input": "", "output": BAD, "kto_tag": False},
        (ASKED, None, NO),
    ),
    "LLaMA-Factory, sharegpt": (
        {"conversations": [FROM, {"from": "gpt", "value": GOOD}], "kto_tag": True},
        (ASKED, YES, None),
    ),
    "ms-swift": ({"messages": DIALOGUE, "label": True}, (ASKED, YES, None)),
    "numbers": ({"query": Q, "response": BAD, "label": 0}, (ASKED, None, NO)),
    "texts of a table": ({"query": Q, "response": GOOD, "label": "True"}, (ASKED, YES, None)),
}


@pytest.mark.parametrize("name", RATED)
def test_rated_answers_of_every_shape_are_read_for_kto_alone(tmp_path: Path, name: str) -> None:
    example, expected = RATED[name]
    (found,) = read(tmp_path, [example], "kto")
    assert texts(found) == expected
    with pytest.raises(InputError, match="material of stage: kto, not dpo"):
        read(tmp_path, [example])


def test_columns_may_have_other_names(tmp_path: Path) -> None:
    example = {"ask": Q, "best": GOOD, "worst": BAD, "id": 3}
    columns = {"chosen": "best", "rejected": "worst"}
    for prompt, expected in (("prompt", (Q, GOOD, BAD)), ("question", TURNS)):
        (found,) = read(tmp_path, [example], columns={prompt: "ask", **columns})
        assert texts(found) == expected
    with pytest.raises(InputError, match="did you mean 'chosen'"):
        columns_of({"choosen": "best"}, "dpo")


ENTRIES: dict[str, tuple[str, dict[str, Any], dict[str, Any], Any]] = {
    "alpaca": (
        "dpo",
        {
            "ranking": True,
            "columns": {"prompt": "ask", "query": "more", "chosen": "a", "rejected": "b"},
        },
        {"ask": "What is", "more": "it?", "a": GOOD, "b": BAD},
        (["user: What is\nit?"], YES, NO),
    ),
    "sharegpt with other tags": (
        "rm",
        {
            "ranking": True,
            "formatting": "sharegpt",
            "columns": {"messages": "turns", "chosen": "a", "rejected": "b"},
            "tags": {"role_tag": "who", "content_tag": "what", "user_tag": "U"},
        },
        {
            "turns": [{"who": "U", "what": Q}],
            "a": {"who": "gpt", "what": GOOD},
            "b": {"who": "gpt", "what": BAD},
        },
        TURNS,
    ),
    "rated": (
        "kto",
        {
            "formatting": "sharegpt",
            "columns": {"messages": "messages", "kto_tag": "label"},
            "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user"},
        },
        {"messages": DIALOGUE, "label": False},
        (ASKED, None, YES),
    ),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_listed_data_sets_with_ranking_or_kto_tag_are_read(tmp_path: Path, name: str) -> None:
    stage, entry, example, expected = ENTRIES[name]
    (tmp_path / "a.json").write_text(json.dumps([example]))
    listing = tmp_path / "dataset_info.json"
    listing.write_text(json.dumps({"a": {"file_name": "a.json", **entry}, "s": {"file_name": "a"}}))
    source = source_of(f"{listing}:a", columns_of({}, stage))
    (found,) = read_sources([source], 0)[0].conversations
    assert texts(found) == expected
    with pytest.raises(InputError, match=r"stage: (dpo|kto)"):
        source_of(f"{listing}:a")
    with pytest.raises(InputError, match="s has no ranking: stage: orpo needs a chosen and a"):
        source_of(f"{listing}:s", columns_of({}, "orpo"))


def test_a_margin_of_rewards_is_refused_for_reward_models_alone(tmp_path: Path) -> None:
    pair = {"prompt": Q, "chosen": GOOD, "rejected": BAD, "margin": 2}
    with pytest.raises(InputError, match=r"data.jsonl.*the column 'margin' \(2\)"):
        read(tmp_path, [pair], "rm")
    assert len(read(tmp_path, [pair]))
    assert len(read(tmp_path, [pair | {"margin": 0}], "rm"))


BAD_INPUT: dict[str, tuple[dict[str, Any], str]] = {
    "no rejected answer": ({"prompt": Q, "chosen": GOOD}, "needs a prompt, a better and a worse"),
    "an empty answer": (
        {"prompt": Q, "chosen": GOOD, "rejected": " "},
        "lacks an answer: 'rejected' is empty",
    ),
    "sft": ({"prompt": Q, "completion": GOOD}, "one answer write stage: sft"),
    "prompts": ({"prompt": Q}, "material of reinforcement learning"),
    "ranked": ({"prompt": Q, "responses": [GOOD, BAD]}, "'responses' lists 2 answers: write the"),
    "another question": (
        {"prompt": [user("Why?")], "chosen": DIALOGUE, "rejected": DIALOGUE},
        "'chosen' begins with another question",
    ),
    "different questions": (
        {"chosen": DIALOGUE, "rejected": [user("Why?"), said(BAD)]},
        "begin with different turns",
    ),
    "an answer without text": (
        {"prompt": [user()], "chosen": [said(GOOD)], "rejected": [said("")]},
        "'rejected' and its prompt: lacks an answer",
    ),
    "a question for an answer": (
        {"prompt": [user()], "chosen": [user()], "rejected": [said(BAD)]},
        "'chosen' and its prompt: lacks an answer: its last turn is the user's",
    ),
    "a picture": (
        {"prompt": Q, "chosen": GOOD, "rejected": BAD, "images": ["a.png"]},
        "a text model can't read",
    ),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_preferences_are_refused_in_a_sentence(tmp_path: Path, name: str) -> None:
    example, reason = BAD_INPUT[name]
    with pytest.raises(InputError, match=f"data.jsonl.*{reason}"):
        read(tmp_path, [example])


def test_a_pair_without_a_worse_answer_counts_as_rejected(tmp_path: Path) -> None:
    good = {"prompt": Q, "chosen": GOOD, "rejected": BAD}
    bad = good | {"rejected": None}
    with pytest.raises(InputError, match=r"1 of 3 examples can't be used and max_rejected=0"):
        read(tmp_path, [good, bad, good])
    assert len(read(tmp_path, [good, bad, good], max_rejected=1)) == 2


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text("a [{", max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "from", "value", "messages", "tools"]),
            inner | st.sampled_from(["user", "assistant", "gpt"]),
            max_size=3,
        )
    ),
    max_leaves=8,
)


@given(shape=st.sampled_from(sorted(PAIR_SHAPES | RATED_SHAPES)), more=st.data())
def test_any_values_are_read_or_refused(shape: str, more: st.DataObject) -> None:
    example = {key: more.draw(JSON, label=key) for key in ALL_SHAPES[shape].needs}
    try:
        found = conversation(example, shape, "a:1")
    except (NoConversationError, InputError):
        return
    assert unpack(pack(found)) == found
    assert any(found.answers or ())


# Tokens.

WORDS = st.text("abc \n.Ü世", max_size=12)
SIDES = st.tuples(WORDS, WORDS, WORDS)


def common(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))


def expected_pair(
    prompt: list[int], chosen: list[int], rejected: list[int]
) -> tuple[int, list[int], list[int]]:
    """The rule of TRL 1.16's DPOTrainer, as its documentation has it."""
    size = min(common(prompt, chosen[: len(prompt)]), common(prompt, rejected[: len(prompt)]))
    return size, chosen, rejected


@given(sides=st.lists(SIDES, min_size=1, max_size=4))
def test_both_answers_of_texts_have_the_same_prompt_tokens(tokenizer: Any, sides: Any) -> None:
    conversations = [
        Conversation((), prompt, "a:1", (chosen, rejected)) for prompt, chosen, rejected in sides
    ]
    for (prompt, *answers), encoded in zip(
        sides, encode_pairs(tokenizer, conversations, 999), strict=True
    ):
        rows = [tokenizer(f"{prompt}{a}{tokenizer.eos_token}")["input_ids"] for a in answers]
        size, *expected = expected_pair(tokenizer(prompt)["input_ids"], *rows)
        assert [row.input_ids.tolist() for row in encoded.examples] == expected
        for row in encoded.examples:
            assert row.trained.tolist() == [False] * size + [True] * (row.length - size)


@settings(max_examples=20)
@given(
    sides=st.lists(
        st.tuples(*[st.text("abc .Ü世", min_size=1, max_size=9)] * 3), min_size=1, max_size=3
    )
)
def test_answers_of_dialogues_begin_after_the_rendered_prompt(tokenizer: Any, sides: Any) -> None:
    sides = [[text.strip() or "x" for text in side] for side in sides]
    conversations = [
        Conversation(
            (Message("user", q),),
            None,
            "a:1",
            ((Message("assistant", c),), (Message("assistant", r),)),
        )
        for q, c, r in sides
    ]
    for (question, *answers), encoded in zip(
        sides, encode_pairs(tokenizer, conversations, 999), strict=True
    ):
        prompt, *rows = (
            tokenizer.apply_chat_template(turns, add_generation_prompt=more, return_dict=False)
            for turns, more in (
                ([user(question)], True),
                *(([user(question), said(answer)], False) for answer in answers),
            )
        )
        size, *expected = expected_pair(prompt, *rows)
        assert [row.input_ids.tolist() for row in encoded.examples] == expected
        assert [int((~row.trained).sum()) for row in encoded.examples] == [size, size]


def test_a_token_that_joins_prompt_and_answer_belongs_to_the_answer(tokenizer: Any) -> None:
    word = next(w for w in ("return", "value", "apples") if len(tokenizer.tokenize(f" {w}")) == 1)
    prompt, answer = f"a {word[:2]}", word[2:]
    pair = Conversation((), prompt, "a:1", (answer, "zz"))
    (encoded,) = encode_pairs(tokenizer, [pair], 99)
    chosen, rejected = encoded.examples
    assert encoded.notes[MERGED] == 1
    (size,) = {int((~row.trained).sum()) for row in (chosen, rejected)}
    assert size < len(tokenizer(prompt)["input_ids"])
    assert chosen.input_ids[:size].tolist() == rejected.input_ids[:size].tolist()
    assert tokenizer.decode(chosen.input_ids[chosen.trained]).startswith(f" {word}")


def sides(count: int = 6) -> list[Conversation]:
    return [
        Conversation((), f"Question {n}: ", f"a:{n + 1}", ("yes " * (n + 1), "no"))
        for n in range(count)
    ]


def test_a_limit_cuts_both_rows_alike_and_a_full_prompt_leaves_the_pair_out(tokenizer: Any) -> None:
    (whole,) = encode_pairs(tokenizer, sides()[5:], 999)
    chosen, rejected = whole.examples
    start = int((~chosen.trained).sum())
    for limit in range(2, chosen.length + 2):
        (cut,) = encode_pairs(tokenizer, sides()[5:], limit)
        (dropped,) = encode_pairs(tokenizer, sides()[5:], limit, "drop")
        assert cut.long == dropped.long == (limit < chosen.length)
        assert bool(dropped.examples) == (not cut.long)
        if limit <= start:
            assert not cut.examples
            assert cut.reason == f"no answer left within cutoff_len={limit}"
            continue
        for row, complete in zip(cut.examples, (chosen, rejected), strict=True):
            assert row.input_ids.tolist() == complete.input_ids[:limit].tolist()
            assert row.trained.tolist() == complete.trained[:limit].tolist()


@pytest.fixture
def store(tmp_path: Path, tokenizer: Any) -> Pairs:
    pairs = [*sides(), Conversation((), "Same: ", "a:7", ("yes", "yes"))]
    return Pairs(tokenize(pairs, tokenizer, tmp_path, 99, stage="dpo"))


def test_a_store_returns_pairs_with_their_lengths(store: Pairs, tokenizer: Any) -> None:
    assert len(store) == 7
    assert isinstance(store[-1], PreferencePair)
    for numbers, of in ((store.lengths, "length"), (store.trained_counts, "trained_tokens")):
        assert numbers.tolist() == [getattr(store[at], of) for at in range(7)]
    assert [*row_lengths(store)[2]] == [store[2].chosen.length, store[2].rejected.length]
    again = pickle.loads(pickle.dumps(Subset(store, np.array([5, 0]))))
    assert again[0].chosen.input_ids.tolist() == store[5].chosen.input_ids.tolist()
    assert again.lengths.tolist() == store.lengths[[5, 0]].tolist()
    assert store.rows.notes[EQUAL] == 1
    shared = [common(*(row.input_ids.tolist() for row in store[at][:2])) for at in range(7)]
    assert store.rows.notes[SHARED] == sum(shared)
    assert store.shared_share == sum(shared) / store.lengths.sum()
    assert inspect(tokenizer, store[0]).splitlines() == [
        "prompt: <｜begin▁of▁sentence｜>Question 0: ",
        "chosen: [[yes <｜end▁of▁sentence｜>]]",
        "rejected: [[no<｜end▁of▁sentence｜>]]",
    ]


def test_a_split_keeps_pairs_and_counts_them(store: Pairs) -> None:
    ours, theirs = split(store.conversations, 2, seed=0)
    assert len(theirs) == 2
    assert sorted([*ours, *theirs]) == [*range(7)]


def test_statistics_count_pairs_and_their_longest_row(store: Pairs) -> None:
    statistics = statistics_of(store)
    assert (statistics.examples, statistics.duplicates) == (7, 0)
    assert statistics.tokens == statistics.trained_tokens + 2 * sum(
        int((~store[at].chosen.trained).sum()) for at in range(7)
    )
    assert statistics.longest_row == max(store[at].chosen.length for at in range(7))
    assert statistics.shared_share == store.shared_share
    padded = layouts(store.lengths, 7, 50, row_lengths(store))[0]
    assert padded.fullness == pytest.approx(
        store.lengths.sum() / (14 * statistics.longest_row), abs=1e-12
    )


def test_kto_makes_a_one_sided_pair_of_each_answer(tmp_path: Path, tokenizer: Any) -> None:
    rated = Conversation((), "Rated: ", "a:9", (None, "bad"))
    store = Pairs(tokenize([*sides(2), rated], tokenizer, tmp_path, 99, stage="kto"))
    filled = [
        (bool(pair.chosen.length), bool(pair.rejected.length))
        for pair in map(store.__getitem__, range(5))
    ]
    assert filled == [(True, False), (False, True)] * 2 + [(False, True)]
    assert store.conversations.tolist() == [0, 0, 1, 1, 2]
    assert store[4].trained_tokens == store[4].length - len(tokenizer("Rated: ")["input_ids"])


def test_the_first_pair_is_shown_with_each_part_cut(tmp_path: Path, tokenizer: Any) -> None:
    pair = Conversation((), "Line\n" * 99, "a:1", ("yes " * 99, "no"))
    store = Pairs(tokenize([pair], tokenizer, tmp_path, 9999, stage="dpo"))
    shown = PreparedData(tokenizer, store, (), SimpleNamespace(notes={})).first_example()  # type: ignore[arg-type]
    head, *parts = shown.replace("Line\n", "").split("\n")
    assert head == "the first pair, trained parts in [[ ]]:"
    assert [part.partition(":")[0] for part in parts if part] == ["prompt", "chosen", "rejected"]
    assert len(shown) < 700
    assert parts[-1].endswith("[[no<｜end▁of▁sentence｜>]]")


def test_prepared_pairs_have_an_identity_and_no_overlap(store: Pairs) -> None:
    note = SimpleNamespace(notes={})
    data = PreparedData(None, Subset(store, np.arange(5)), Subset(store, np.arange(5, 7)), note)  # type: ignore[arg-type]
    assert data.identity["examples"] == data.example_stats.count == 5
    longest = max(store[at].chosen.length for at in range(5))
    assert data.example_stats.longest == 2 * longest, "a padded pair has two rows of it"
    assert overlap(data).count == overlap(data).texts == 0
    again = PreparedData(None, Subset(store, np.arange(5)), Subset(store, np.arange(4, 7)), note)  # type: ignore[arg-type]
    assert overlap(again).count == overlap(again).texts == 1


@pytest.mark.parametrize(("key", "setting"), [("loss_on", "everything"), ("too_long", "split")])
def test_settings_without_a_meaning_for_pairs_are_refused(key: str, setting: str) -> None:
    values = {"model": "m", "dataset": "d", "max_steps": 1, "stage": "dpo", key: setting}
    with pytest.raises(InputError, match=f"{key}: {setting}"):
        recipe_from(values, "a.yaml")


def test_a_recipe_prepares_pairs_once(tmp_path: Path) -> None:
    lines = (
        json.dumps({"chosen": f"Question {n}: yes", "rejected": f"Question {n}: no"})
        for n in range(12)
    )
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(lines))
    values = {"model": "deepseek-llm-tiny", "vocabulary": 300, "dataset": str(path), "eval_data": 4}
    recipe = recipe_from({**values, "max_steps": 1, "stage": "dpo"}, "a.yaml")
    told: list[str] = []
    data = prepare_data(recipe, tmp_path / "data", told.append)
    assert f"{path} (jsonl): chosen, rejected examples" in told
    assert (len(data.train), len(data.eval_data)) == (8, 4)
    assert isinstance(data.train[0], PreferencePair)
    assert data.note.end_text is None, "texts have no chat template"
    again = prepare_data(recipe, tmp_path / "data", told.append)
    assert again.identity == data.identity
    assert sum(line.startswith("tokenising") for line in told) == 1
    other = prepare_data(
        recipe_from({**values, "max_steps": 1, "stage": "kto"}, "b.yaml"), tmp_path
    )
    assert other.example_stats.count + len(other.eval_data) == 24


TRL_SHAPES = ("TRL, texts", "TRL, implicit texts", "TRL, turns", "TRL, implicit turns")


@pytest.mark.parametrize("name", TRL_SHAPES)
def test_tokens_are_those_of_trl(tmp_path: Path, tokenizer: Any, name: str) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    examples = []
    for text in ("A test. ", "naïve  café", "12345", "a\n"):
        words = json.dumps(PAIRS[name][0]).replace("A test.", text).replace("What", f"Wh{text}")
        examples.append(json.loads(words.replace("\n", "\\n")))
    args = SimpleNamespace(dataset_num_proc=None, max_length=99, truncation_mode="keep_start")
    rows = trl.DPOTrainer._prepare_dataset(
        SimpleNamespace(_tokenizer=tokenizer),
        datasets.Dataset.from_list(examples),
        tokenizer,
        args,
        "train",
    )
    ours = encode_pairs(tokenizer, read(tmp_path, examples), 99)
    for row, encoded in zip(rows, ours, strict=True):
        chosen, rejected = encoded.examples
        assert chosen.input_ids.tolist() == row["prompt_ids"] + row["chosen_ids"]
        assert rejected.input_ids.tolist() == row["prompt_ids"] + row["rejected_ids"]
        assert int(chosen.trained.sum()) == len(row["chosen_ids"])


@pytest.mark.parametrize("name", ["TRL, texts", "TRL, turns"])
def test_tokens_of_rated_answers_are_those_of_trl(
    tmp_path: Path, tokenizer: Any, name: str
) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    example = RATED[name][0]
    examples = [example | {"label": label} for label in (True, False)]
    rows = trl.KTOTrainer._prepare_dataset(
        SimpleNamespace(
            _tokenizer=tokenizer, calculate_KL=False, desirable_weight=1, undesirable_weight=1
        ),
        datasets.Dataset.from_list(examples),
        tokenizer,
        SimpleNamespace(dataset_num_proc=None, max_length=99),
        "train",
    )
    ours = encode_pairs(tokenizer, read(tmp_path, examples, "kto"), 99, separate=True)
    for row, encoded in zip(rows, ours, strict=True):
        answer = encoded.examples[0 if row["label"] else 1]
        assert answer.input_ids.tolist() == row["prompt_ids"] + row["completion_ids"]
        assert int(answer.trained.sum()) == len(row["completion_ids"])
        assert not encoded.examples[1 if row["label"] else 0].length
