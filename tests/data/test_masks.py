"""The mark of a token, found by two searches, is what a loop over all tokens says."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hasten.data.chat_template import _dialogue_example

# Tokens in the order of their text: each begins where the last did (a character of several tokens)
# or at or after its end; some have no width.
WIDTHS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(1, 3)), min_size=1, max_size=20
)


@given(widths=WIDTHS, spans=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=3))
def test_a_token_is_trained_where_it_has_a_part_of_an_answer(
    widths: list[tuple[int, int, int]], spans: list[tuple[int, int]]
) -> None:
    offsets: list[tuple[int, int]] = []
    for gap, width, times in widths:
        begin = (offsets[-1][1] if offsets else 0) + gap
        # Only a character of one width is shared by several tokens.
        offsets += [(begin, begin + width)] * (times if width == 1 else 1)
    answers = [(first, first + size) for first, size in spans]
    example = _dialogue_example(list(range(len(offsets))), offsets, answers)
    assert example.trained.tolist() == [
        any(begin < last and max(end, begin + 1) > first for first, last in answers)
        for begin, end in offsets
    ]
