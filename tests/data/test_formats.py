"""Reading conversations: every shape, every damage with its place, nothing good lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.data.readers import ReadExamples, Rejected, check_rejected, read_examples
from hasten.data.turns import Message, message
from hasten.errors import InputError

GOOD = {"question": "How many?", "answer": "Four."}


def one(tmp_path: Path, example: object, name: str = "data.jsonl") -> ReadExamples:
    (tmp_path / name).write_text(json.dumps(example) + "\n")
    return read_examples([tmp_path / name])


def dialogue(*turns: tuple[str, str]) -> tuple[Message, ...]:
    return tuple(Message(*turn) for turn in turns)


SHAPES = {
    "alpaca": (
        {"instruction": "Add", "input": "1 2", "output": "3", "system": "Be brief", "text": "x"},
        (
            Message("system", "Be brief"),
            Message("user", "Add\n1 2", instruction="Add", input="1 2"),
            Message("assistant", "3"),
        ),
    ),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        dialogue(("user", "Hi"), ("assistant", "Hello")),
    ),
    "messages": (
        {"messages": [{"role": r, "content": r} for r in ("system", "user", "assistant")]},
        dialogue(("system", "system"), ("user", "user"), ("assistant", "assistant")),
    ),
    "prompt": (
        {"prompt": "Once", "completion": "upon"},
        dialogue(("user", "Once"), ("assistant", "upon")),
    ),
    "question": (GOOD, dialogue(("user", "How many?"), ("assistant", "Four."))),
    "text": ({"text": "A tale."}, ()),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_has_the_same_normal_form(tmp_path: Path, shape: str) -> None:
    example, messages = SHAPES[shape]
    reading = one(tmp_path, example)
    (conversation,) = reading.conversations
    assert reading.shapes == {str(tmp_path / "data.jsonl"): shape}
    assert conversation.messages == messages
    assert conversation.text == ("A tale." if shape == "text" else None)
    assert conversation.location == f"{tmp_path / 'data.jsonl'}:1"


def test_alpaca_history_comes_before_the_question(tmp_path: Path) -> None:
    example = {"instruction": "c", "input": None, "output": "d", "history": [["a", "b"]]}
    (conversation,) = one(tmp_path, example).conversations
    assert [message.content for message in conversation.messages] == ["a", "b", "c", "d"]


def damaged(text: bytes) -> bytes:
    """A good example with its answer replaced by raw bytes."""
    return b'{"question": "How many?", "answer": ' + text + b"}"


BAD = {
    "truncated": (b'{"question": "How many?", "ans', "truncated"),
    "not UTF-8": (damaged(b'"Fo\xffur"'), "isn't UTF-8 (0xff)"),
    "NUL byte": (damaged(b'"Fo\x00ur"'), "NUL"),
    "NUL escape": (damaged(b'"Fo\\u0000ur"'), "NUL"),
    "lone surrogate": (damaged(b'"Fo\\ud83dur"'), "lone surrogate"),
    "text is an object": (damaged(b'{"value": "Four"}'), "an object, not a text"),
    "text is a list": (damaged(b'["Four"]'), "an array, not a text"),
    "text is missing": (b'{"question": "How many?"}', "lacks 'answer'"),
    "text is null": (damaged(b"null"), "null, not a text"),
    "text is empty": (damaged(b'" \\n"'), "lacks an answer"),
    "other keys": (b'{"instruction": "a", "output": "b"}', "lacks 'question' and 'answer'"),
    "NaN": (damaged(b'"Four", "score": NaN'), "NaN"),
    "infinity": (damaged(b'"Four", "score": -Infinity'), "-Infinity"),
    "integer beyond 64 bits": (damaged(b'"Four", "id": 18446744073709551616'), "64 bits"),
    "integer of 5000 digits": (damaged(b'"Four", "id": ' + b"9" * 5000), "64 bits"),
    "float beyond 64 bits": (damaged(b'"Four", "score": 1e999'), "64 bits"),
    "an array": (b"[1, 2]", "an array, not an object"),
    "a string": (b'"Four"', "a string, not an object"),
    "a number": (b"4", "a number, not an object"),
    "deep": (b'{"a":' * 9_000 + b"1" + b"}" * 9_000, "nested too deeply"),
}
ONLY_IN_LINES = {
    "BOM before": (b"\xef\xbb\xbf" + damaged(b'"Four"'), "byte order mark"),
    "two objects": (damaged(b'"Four"') + b" " + damaged(b'"Five"'), "more than one value"),
}


@pytest.mark.parametrize("kind", [*BAD, *ONLY_IN_LINES])
def test_a_bad_line_is_rejected_with_its_place_and_no_good_one_is_lost(
    tmp_path: Path, kind: str
) -> None:
    bad, reason = {**BAD, **ONLY_IN_LINES}[kind]
    good = [json.dumps(GOOD | {"answer": str(number)}).encode() for number in range(4)]
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\r\n".join([*good[:2], bad, *good[2:]]) + b"\r\n\n")
    reading = read_examples([path], max_rejected=1)
    assert [c.messages[1].content for c in reading.conversations] == ["0", "1", "2", "3"]
    assert [c.location for c in reading.conversations] == [f"{path}:{n}" for n in (1, 2, 4, 5)]
    ((file, line, why),) = reading.rejected
    assert (file, line) == (str(path), 3)
    assert reason in why


def test_empty_lines_are_no_examples_and_keep_the_numbers_of_the_others(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    good = json.dumps(GOOD).encode()
    path.write_bytes(b"\n" + good + b"\n\n \t\r\n" + good + b"\n\n\n")
    reading = read_examples([path], max_rejected=0)
    assert [c.location for c in reading.conversations] == [f"{path}:{n}" for n in (2, 5)]
    assert not reading.rejected


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("kind", BAD)
def test_a_bad_record_of_a_list_costs_itself_alone(
    tmp_path: Path, kind: str, indent: int | None
) -> None:
    bad, reason = BAD[kind]
    good = [json.dumps(GOOD | {"answer": str(n)}, indent=indent).encode() for n in range(4)]
    path = tmp_path / "data.json"
    path.write_bytes(b"[\n" + b",\n".join([*good[:2], bad, *good[2:]]) + b"\n]\n")
    reading = read_examples([path], max_rejected=1)
    height = good[0].count(b"\n") + 1
    assert [c.messages[1].content for c in reading.conversations] == ["0", "1", "2", "3"]
    ((_, line, why),) = reading.rejected
    assert line == 2 + 2 * height
    assert reason in why or (kind == "truncated" and "JSON" in why)


def test_a_bad_record_with_turns_in_a_list_costs_itself_alone(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    example = json.dumps({"messages": turns})
    path = tmp_path / "data.json"
    path.write_text(f"[{example}, {example.replace('[', '[,')}, {example}]")
    reading = read_examples([path], max_rejected=1)
    assert (len(reading.conversations), len(reading.rejected)) == (2, 1)


@pytest.mark.parametrize("cut", [1, 3, 30])
def test_a_list_that_is_cut_off_is_refused_whatever_may_be_rejected(
    tmp_path: Path, cut: int
) -> None:
    path = tmp_path / "data.json"
    path.write_text(json.dumps([GOOD] * 3)[:-cut])
    with pytest.raises(InputError, match=r"data.json:1: .*all that follow are lost"):
        read_examples([path], max_rejected=1000)


def test_a_byte_order_mark_at_the_start_and_unknown_columns_are_fine(tmp_path: Path) -> None:
    example = json.dumps(GOOD | {"tags": [{"deep": 1}], "id": 2**64 - 1, "note": None}).encode()
    for name, data in (("a.jsonl", example), ("a.json", b"\r\n[" + example + b"]")):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + data)
    assert len(read_examples([tmp_path]).conversations) == 2


def test_a_line_separator_inside_a_text_is_no_line_break(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(GOOD | {"answer": "a\u2028b\x85c"}, ensure_ascii=False), "utf-8")
    assert read_examples([path]).conversations[0].messages[1].content == "a\u2028b\x85c"


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ("au", "lacks an answer"),
        ("uau", "lacks an answer"),
        ("us", "lacks an answer: its last turn is the system's"),
        ("sa", "turns of assistant alone"),
        ("s", "is empty"),
        ("", "is empty"),
        ("ut", "turn 2 is tool's, expected user's or assistant's or system's"),
        ("ux", "role 'robot'"),
    ],
)
def test_turns_out_of_order_are_rejected(tmp_path: Path, turns: str, reason: str) -> None:
    roles = {"u": "user", "a": "assistant", "s": "system", "t": "tool", "x": "robot"}
    example = {"messages": [{"role": roles[turn], "content": "x"} for turn in turns]}
    with pytest.raises(InputError, match=reason):
        one(tmp_path, example)


@pytest.mark.parametrize(
    ("name", "role"), [("developer", "system"), ("model", "assistant"), ("ipython", "tool")]
)
def test_roles_of_other_formats_are_read(name: str, role: str) -> None:
    assert message({"role": name, "content": "x"}) == Message(role, "x")


def test_a_share_of_rejects_is_not_rounded_by_its_binary_form() -> None:
    rejected = [Rejected("a", 1, "bad")] * 29
    check_rejected(rejected, 100, 0.29)  # 0.29 * 100 is 28.999999999999996
    with pytest.raises(InputError, match="allows 28"):
        check_rejected(rejected, 100, 0.289)


def test_too_many_rejects_name_count_budget_places_and_way_out(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join([json.dumps(GOOD)] * 6 + ["{"] * 4))
    with pytest.raises(InputError) as caught:
        read_examples([path], max_rejected=0.3)
    message = str(caught.value)
    assert "4 of 10" in message
    assert "max_rejected=0.3 allows 3" in message
    assert [f"data.jsonl:{line}: " in message for line in (7, 8)] == [True, False]
    assert "(4 of them)" in message
    assert "write max_rejected: 4 to train without them" in message
    assert len(read_examples([path], max_rejected=0.4).rejected) == 4
    assert len(read_examples([path], max_rejected=4).rejected) == 4
    with pytest.raises(InputError, match="max_rejected=1 allows 1: "):  # a count, not all of them
        read_examples([path], max_rejected=1)


def test_a_missing_file_is_answered_with_near_names(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}")
    with pytest.raises(InputError, match=r"did you mean train\.jsonl"):
        read_examples([tmp_path / "trian.jsonl"])
    with pytest.raises(InputError, match="nor a folder"):
        read_examples([tmp_path / "nowhere" / "train.jsonl"])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b" \n\n", "empty"),
        (b"[]", "empty"),
        (b"\xff\xfe{\x00}\x00\n\x00", "UTF-8"),
        (b'{"a": 1}', "none of the known shapes: its first example has the keys 'a'"),
        (b'{"a": "x", "b c": "y"}', r"columns: .instruction: a, output: \"b c\"."),
        (b'{"a": "x", "b": 1}', r"columns: .text: a."),
        (b"{}", r"the keys \(none\)"),
        (b'{"columns": [{"a": 1}], "data": [[1]]}', "none of the known shapes"),
        (
            b"{\"messages\": \"[{'role': 'user', 'content': 'q', 1: {2}}]\"}",
            "'messages' is no JSON",
        ),
    ],
)
def test_a_file_without_records_is_refused(tmp_path: Path, data: bytes, reason: str) -> None:
    (tmp_path / "data.json").write_bytes(data)
    with pytest.raises(InputError, match=reason):
        read_examples([tmp_path / "data.json"])


def test_nothing_to_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("x")
    for paths in ([], [tmp_path], [tmp_path / "notes.md"]):
        with pytest.raises(InputError):
            read_examples(paths)
    (tmp_path / "data.jsonl").write_text("{")
    with pytest.raises(InputError, match="no usable example"):
        read_examples([tmp_path / "data.jsonl"], max_rejected=5)
    with pytest.raises(InputError, match="max_rejected is -1"):
        read_examples([tmp_path / "data.jsonl"], max_rejected=-1)


def test_a_shape_first_seen_after_two_hundred_bad_lines_is_not_guessed(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text("{\n" * 200 + json.dumps(GOOD))
    with pytest.raises(InputError, match="201 of 201"):
        read_examples([tmp_path / "data.jsonl"])


@pytest.mark.data
def test_the_real_files_are_read_whole(real_data: Path) -> None:
    gsm8k, alpaca = real_data / "gsm8k_train.jsonl", real_data / "alpaca_en_demo.json"
    reading = read_examples([gsm8k, alpaca])
    assert len(reading.conversations) == 7473 + 999
    assert reading.rejected == []
    assert reading.shapes == {str(gsm8k): "question", str(alpaca): "alpaca"}
    rows = json.loads(alpaca.read_text("utf-8"))  # the standard reader as the reference
    answers = [c.messages[-1].content for c in reading.conversations[7473:]]
    assert answers == [row["output"] for row in rows]
    line = alpaca.read_text("utf-8").split("\n")[
        int(reading.conversations[7473 + 500].location.rpartition(":")[2])
    ]
    assert json.dumps(rows[500]["instruction"], ensure_ascii=False) in line


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
KEYS = st.sampled_from(
    [
        *("question", "answer", "text", "messages", "conversations", "instruction", "output"),
        *("history", "prompt", "completion", "data", "columns", "train", "label", "weight"),
    ]
)
LINES = st.one_of(
    st.binary(max_size=30),
    st.dictionaries(KEYS, VALUES).map(lambda value: json.dumps(value).encode()),
    st.just(json.dumps(GOOD).encode()),
)


@given(lines=st.lists(LINES, max_size=6), as_list=st.booleans(), cut=st.integers(0, 8))
def test_any_bytes_are_read_or_refused_in_words(
    tmp_path: Path, lines: list[bytes], as_list: bool, cut: int
) -> None:
    path = tmp_path / ("data.json" if as_list else "data.jsonl")
    data = b"[" + b",".join(lines) + b"]" if as_list else b"\n".join(lines)
    path.write_bytes(data[: len(data) - cut])
    try:
        reading = read_examples([path], max_rejected=100)
    except InputError:
        return
    for conversation in reading.conversations:
        assert (conversation.text is None) == bool(conversation.messages)
        "".join([message.content for message in conversation.messages]).encode("utf-8")
    assert all(row.reason and row.line >= 1 for row in reading.rejected)
