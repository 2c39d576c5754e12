"""Examples of other trainings are refused by name; flags of turns are followed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hasten.data.chat_template import encode
from hasten.data.conversation import columns_of
from hasten.data.readers import read_examples, read_sources
from hasten.data.sources import Source
from hasten.data.tokenize import train_bpe
from hasten.errors import InputError

QUESTION, ANSWER = "What is it?", "It is a test."
TURNS = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
SYSTEM = {"role": "system", "content": "Be brief."}
PAIR = {"prompt": QUESTION, "completion": ANSWER}


def put(folder: Path, *examples: dict[str, Any]) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(example) + "\n" for example in examples))
    return path


def turn(**keys: Any) -> dict[str, Any]:
    return {"messages": [TURNS[0], TURNS[1] | keys]}


def part(**keys: Any) -> dict[str, Any]:
    parts = [{"type": "text", "text": QUESTION}, keys]
    return {"messages": [{"role": "user", "content": parts}, TURNS[1]]}


# One of each place in which it is found; the catalogue of foreign shapes has the others.
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "column": ({"prompt": "q", "chosen": "a", "rejected": "b"}, "preference pairs"),
    "value of a column": ({**PAIR, "label": False}, "write stage: kto"),
    "key of a turn": (turn(weight=0.5), "'weight' is 0.5"),
    "part of a turn": (part(type="input_audio", input_audio={}), "'input_audio'"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_record_of_another_training_is_refused_by_name_whatever_may_be_rejected(
    tmp_path: Path, name: str
) -> None:
    example, said = OTHERS[name]
    for examples in (
        [example] * 3,
        [PAIR, example] if "messages" not in example else [turn(), example],
    ):
        path = put(tmp_path, *examples)
        with pytest.raises(InputError, match=f"data.jsonl:[12]: .*{said}") as refused:
            read_examples([path], max_rejected=10**6)
        assert "rename" not in str(refused.value)


PREFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "a pair": ({"prompt": "q", "chosen": "a", "rejected": "b"}, "write stage: dpo"),
    "the worse answer": ({"messages": TURNS, "rejected_response": "b"}, "write stage: dpo"),
    "ranked answers": ({"instruction": "q", "output": ["a", "b"]}, "stage: dpo or rm"),
    "a label": ({**PAIR, "label": False}, "write stage: kto"),
    "a turn's label": (turn(is_chosen=True), "stage: kto"),
    "several answers": ({"prompt": "q", "completions": ["a", "b"]}, "stage: dpo or rm"),
    "prompts alone": ({"prompt": "q"}, "use TRL's GRPOTrainer with hasten.speed_up"),
}


@pytest.mark.parametrize("name", PREFERENCES)
def test_a_refusal_of_preferences_names_what_trains_on_them(tmp_path: Path, name: str) -> None:
    example, advice = PREFERENCES[name]
    with pytest.raises(InputError, match=advice):
        read_examples([put(tmp_path, example)])


EMPTY = {"images": [], "chosen": None, "rejected": None, "label": None, "video": ""}


@pytest.mark.parametrize(
    "example",
    [
        *({**PAIR, **EMPTY}, {"text": "A film.", "label": True}, {**PAIR, "label": "sports"}),
        *(turn(weight=1), turn(train=True), turn(loss_weight=1.0), turn(reasoning_content="")),
        part(type="text", text=" Yes?"),
        {
            "messages": [
                TURNS[0],
                {"role": "assistant", "content": [{"type": "text", "value": "A"}]},
            ]
        },
    ],
)
def test_ordinary_records_pass_whose_columns_only_look_like_it(
    tmp_path: Path, example: dict[str, Any]
) -> None:
    assert len(read_examples([put(tmp_path, example)], 0).conversations) == 1


def test_parts_of_text_are_joined(tmp_path: Path) -> None:
    (found,) = read_examples([put(tmp_path, part(type="text", text=" Yes?"))], 0).conversations
    assert found.messages[0].content == QUESTION + " Yes?"


def test_a_column_that_the_user_names_is_read_and_not_refused(tmp_path: Path) -> None:
    path = put(tmp_path, {"prompt": "q", "chosen": "a", "rejected": "b"})
    columns = columns_of({"prompt": "prompt", "completion": "chosen"})
    (reading,) = read_sources([Source(path, columns=columns)], 0)
    assert reading.conversations[0].messages[1].content == "a"


@pytest.mark.parametrize(
    ("prompt", "before"),
    [
        (QUESTION, []),
        (f" {QUESTION}\n", []),
        (QUESTION, [SYSTEM]),
        ([TURNS[0]], []),
        ([SYSTEM, TURNS[0]], []),
        ([SYSTEM, TURNS[0]], [SYSTEM]),
        ([*TURNS, {"role": "user", "content": "And?"}], []),
    ],
    ids=["text", "blanks", "system", "turns", "its system", "both systems", "earlier answer"],
)
def test_an_answer_that_repeats_its_question_has_it_once(
    tmp_path: Path, prompt: Any, before: list[dict[str, str]]
) -> None:
    asked = [t for t in prompt if t != SYSTEM] if isinstance(prompt, list) else [TURNS[0]]
    chosen = [*before, *asked, TURNS[1]]
    path = put(tmp_path, {"prompt": prompt, "chosen": chosen, "rejected": chosen})
    columns = columns_of({"prompt": "prompt", "completion": "chosen"})
    (reading,) = read_sources([Source(path, columns=columns)], 0)
    turns = reading.conversations[0].messages
    roles = [turn["role"] for turn in (*asked, TURNS[1])]
    assert [t.role for t in turns] == ["system"] * (SYSTEM in [*before, *prompt]) + roles
    assert [t.trained for t in turns if t.role == "assistant"][:-1] == [False] * (len(asked) // 2)
    with pytest.raises(InputError, match="begins with another question than its prompt"):
        read_sources([Source(put(tmp_path, {"prompt": "Why?", "chosen": chosen}), columns)], 0)


@pytest.mark.parametrize("flag", [{"weight": 0}, {"train": False}, {"loss_weight": 0}])
def test_a_turn_whose_flag_is_off_is_not_trained(tmp_path: Path, flag: dict[str, Any]) -> None:
    tokenizer = train_bpe([QUESTION, ANSWER], 300)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    more = [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "Yes."}]
    for off in (1, 3):
        turns = [dict(one) for one in (*TURNS, *more)]
        turns[off] |= flag
        (found,) = read_examples([put(tmp_path, {"messages": turns})], 0).conversations
        (example,) = encode(tokenizer, found, 400).examples
        trained = tokenizer.decode(example.input_ids[example.trained])
        assert (ANSWER in trained, "Yes." in trained) == (off != 1, off != 3)


def test_a_dialogue_without_a_trained_turn_is_one_reject(tmp_path: Path) -> None:
    reading = read_examples([put(tmp_path, turn(), turn(weight=0))], 1)
    assert (len(reading.conversations), len(reading.rejected)) == (1, 1)
    assert "no answer to train" in reading.rejected[0].reason
    with pytest.raises(InputError, match=r"2 of 3 examples.*allows 1"):  # 1 is a count, not a share
        read_examples([put(tmp_path, turn(), turn(weight=0), turn(weight=0))], 1)
