"""JSON lists through a window: no size of it changes what is found, and none has the whole file."""

from __future__ import annotations

import io
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.data import json_reader
from hasten.data.json_reader import FaultError, JsonValue, scan_json

TEXTS = st.text(st.sampled_from('aé你\U0001f600"\\{}[],: \n'), max_size=12)
WHOLE = st.integers(-(2**63), 2**64 - 1)
EXAMPLES = st.fixed_dictionaries(
    {"q": TEXTS, "a": TEXTS | WHOLE | st.floats(allow_nan=False, allow_infinity=False) | st.none()}
)
PIECES = (b"", b'"', b"{", b"}", b"]", b"[", b",", b"\n", b" ", b"\xff", b'{"q', b"\\", b"1", b"-")


def found(data: bytes) -> list[JsonValue]:
    return list(scan_json(io.BytesIO(data)))


@given(
    examples=st.lists(EXAMPLES | WHOLE | st.booleans(), max_size=8),
    indent=st.sampled_from([None, 1]),
    faults=st.lists(
        st.tuples(st.integers(0, 10**6), st.integers(0, 3), st.sampled_from(PIECES)), max_size=3
    ),
    least=st.integers(1, 40),
    read=st.integers(1, 9),
)
def test_a_small_window_finds_what_a_large_one_finds(
    examples: list[object],
    indent: int | None,
    faults: list[tuple[int, int, bytes]],
    least: int,
    read: int,
) -> None:
    data = json.dumps(examples, indent=indent, ensure_ascii=False).encode()
    for place, cut, piece in faults:
        at = place % (len(data) + 1)
        data = data[:at] + piece + data[at + cut :]
    whole = found(data)
    if not faults:
        assert [one.value for one in whole] == examples
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_reader, "_LEAST", least)
        patch.setattr(json_reader, "_READ", read)
        assert found(data) == whole


def test_more_space_than_a_window_holds_may_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_reader, "_LEAST", 8)
    monkeypatch.setattr(json_reader, "_READ", 4)
    assert [one.value for one in found(b"\n" * 100 + b"[1, 2]")] == [1, 2]


def test_a_record_without_an_end_costs_a_window_and_not_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(json_reader, "_LEAST", 64)
    monkeypatch.setattr(json_reader, "_READ", 16)
    monkeypatch.setattr(json_reader, "LONGEST_LINE", 256)
    sound = b'{"q": "a", "a": "b"}'
    data = b'[\n{"q": 1, "a": [' + b"[1], " * 200 + b"\n" + b",\n".join([sound] * 9) + b"]"
    reasons = [one.reason for one in found(data)]
    assert reasons[0] is not None
    assert reasons.count(None) == 9


@pytest.mark.parametrize(
    "opened", ['{"q":', '{"a":[', '{"q": 1, "a": [{"q": 1}, '], ids=["deep", "lists", "examples"]
)
def test_what_is_read_again_after_a_fault_grows_with_the_file_and_not_its_square(
    opened: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_reader, "_VAIN", 1 << 12, raising=False)
    read = 0
    plain = json_reader.Decoder.decode

    def counting(self: Any, text: str, at: int, before: int = 0) -> Any:
        nonlocal read
        try:
            return plain(self, text, at, before)
        except FaultError as fault:
            read += max(fault.at - at, 1000)
            raise

    monkeypatch.setattr(json_reader.Decoder, "decode", counting)
    sound = '{"q": "a", "a": "b"}'
    inner = opened * 100 + "1," * 2000
    data = f"[{sound}, " + f"{inner} damaged " * 40 + f", {sound}]"
    values = [one.value for one in found(data.encode())]
    assert values[0] == values[-1] == json.loads(sound)
    assert read < 30 * len(data)


def test_a_list_is_never_in_memory_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"q": "q" * 2000, "a": "a" * 2000}] * 5000))
    tracemalloc.start()
    try:
        assert sum(one.reason is None for one in scan_json(path.open("rb"))) == 5000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < path.stat().st_size / 2


@pytest.mark.parametrize("text", ['{"q": 1, "a": 2, "q": 3}', '{"q": [{"a": 1, "b": 2, "a": 1}]}'])
def test_an_example_with_a_key_twice_is_a_fault_and_costs_nothing_else(text: str) -> None:
    for data in (f'{{"q": 0}}\n{text}\n{{"q": 2}}\n', f'[{{"q": 0}},\n{text},\n{{"q": 2}}]'):
        one, two, three = found(data.encode())
        assert (one.value, three.value) == ({"q": 0}, {"q": 2})
        assert two.reason is not None
        assert two.reason.endswith("occurs twice in an object")
        assert two.line == 2
