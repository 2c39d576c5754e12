"""The corpus out of the standard library, and the tokenizer trained on the spot."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from hasten.data import corpus as module
from hasten.data.corpus import Corpus, stdlib_corpus
from hasten.data.prompt_formats import PROMPT_FORMATS
from hasten.data.tokenize import SMALLEST, SPECIAL, train_bpe
from hasten.errors import InputError

MODULE = '''
class Shape:
    """A closed figure."""

    @property
    def area(self, unit="m"):
        r"""Return the area.

        In square metres.
        """
        note = """text
out of line"""
        return note

    def nothing(self):
        """Do nothing."""

    def short(self): """One line."""; return 1

\x0c
async def later(x,
                y):
    """Wait."""
    return x + y  # é
'''


@pytest.fixture(scope="module", params=["an eighth", pytest.param("all", marks=pytest.mark.long)])
def corpus(request: pytest.FixtureRequest) -> Corpus:
    """Of the real library, or of an eighth of its modules, with textwrap."""
    if request.param == "all":
        return stdlib_corpus()

    def some(root: Path) -> Iterator[Path]:
        for number, file in enumerate(files(root)):
            if number % 8 == 0 or file.name == "textwrap.py":
                yield file

    files = module._files
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_files", some)
        return stdlib_corpus()


@pytest.fixture
def library(tmp_path: Path) -> Path:
    for number in range(60):
        (tmp_path / f"m{number:02}.py").write_text(f"x = {number}\n")
    (tmp_path / "shapes.py").write_text(MODULE, "utf-8")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_shapes.py").write_text(MODULE, "utf-8")
    return tmp_path


def test_signature_and_docstring_ask_for_the_source_without_it(library: Path) -> None:
    corpus = stdlib_corpus(library)
    pairs = {
        pair.location: pair for side in (corpus.train, corpus.eval_data) for pair in side.pairs
    }
    assert list(pairs) == ["shapes.py:2", "shapes.py:6", "shapes.py:21"]
    question, answer = (message.content for message in pairs["shapes.py:6"].messages)
    assert question == (
        'Write this in Python.\n\ndef area(self, unit="m"):\n\n'
        "Return the area.\n\nIn square metres."
    )
    assert answer == (
        'def area(self, unit="m"):\n    note = """text\nout of line"""\n    return note'
    )
    last = pairs["shapes.py:21"].messages[-1].content
    assert last == "async def later(x,\n                y):\n    return x + y  # é"


def test_modules_are_sorted_hashed_and_without_tests(library: Path) -> None:
    corpus = stdlib_corpus(library)
    assert corpus.modules == (*(f"m{number:02}.py" for number in range(60)), "shapes.py")
    digest = hashlib.sha256()
    for name in corpus.modules:
        digest.update(name.encode() + b"\0" + (library / name).read_bytes() + b"\0")
    assert corpus.sha256 == digest.hexdigest()
    (library / "m07.py").write_text("x = 8\n")
    assert stdlib_corpus(library).sha256 != corpus.sha256


def test_a_module_that_cannot_be_read_is_left_out(library: Path) -> None:
    (library / "bad.py").write_bytes(b"# coding: utf-8\nx = '\xff'\n")
    (library / "worse.py").write_bytes(b"# coding: no-such-encoding\n")
    (library / "odd.py").write_text('def (:\n    """Not Python."""\n')
    corpus = stdlib_corpus(library)
    assert not {"bad.py", "worse.py"} & {*corpus.modules}
    assert "odd.py" in corpus.modules  # as text


def test_stripped_sources_are_explained(tmp_path: Path) -> None:
    (tmp_path / "os.py").write_text("x = 1\n")
    with pytest.raises(InputError, match="the source of only 1 modules"):
        stdlib_corpus(tmp_path)


def test_the_real_library_gives_thousands_of_pairs_of_uneven_lengths(
    corpus: Corpus, request: pytest.FixtureRequest
) -> None:
    share = 1 if request.node.get_closest_marker("long") else 8
    assert len(corpus.modules) > 300 / share
    assert len(corpus.train.pairs) > 4000 / share
    lengths = sorted(sum(len(m.content) for m in pair.messages) for pair in corpus.train.pairs)
    assert lengths[len(lengths) * 99 // 100] > 10 * lengths[len(lengths) // 2]
    total = len(corpus.train.texts) + len(corpus.eval_data.texts)
    assert total == len(corpus.modules)
    assert 0.02 < len(corpus.eval_data.texts) / total < 0.1


def test_no_module_and_no_answer_is_on_both_sides(corpus: Corpus) -> None:
    def modules(side: str) -> set[str]:
        portion = getattr(corpus, side)
        return {item.location.rpartition(":")[0] for item in (*portion.pairs, *portion.texts)}

    assert not modules("train") & modules("eval_data")
    train = {pair.messages[-1].content for pair in corpus.train.pairs}
    assert not any(pair.messages[-1].content in train for pair in corpus.eval_data.pairs)


def test_every_eval_data_answer_parses(corpus: Corpus) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for pair in corpus.eval_data.pairs:
            ast.parse(pair.messages[-1].content)


def test_a_known_function_is_there_as_inspect_sees_it(corpus: Corpus) -> None:
    sides = (*corpus.train.pairs, *corpus.eval_data.pairs)
    pair = next(
        p
        for p in sides
        if p.messages[0].content.startswith("Write this in Python.\n\ndef dedent(text):")
    )
    reference = ast.parse(inspect.getsource(textwrap.dedent))
    function = reference.body[0]
    assert isinstance(function, ast.FunctionDef)
    function.body = function.body[1:]
    assert ast.unparse(ast.parse(pair.messages[1].content)) == ast.unparse(reference)


TEXTS = ["the cat sat on the mat", "def f(x):\n\treturn  x ** 2\n", "你好，世界"] * 5


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back_unchanged(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) == text


def test_merges_are_used_and_special_tokens_come_first(tokenizer: Any) -> None:
    assert len(tokenizer.encode("apples")) < len("apples")
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL)) == [0, 1, 2]
    assert (tokenizer.pad_token, tokenizer.bos_token, tokenizer.eos_token) == SPECIAL
    assert len(train_bpe(TEXTS, 280)) == 280


def test_the_same_texts_give_the_same_tokenizer() -> None:
    first, second = (train_bpe(iter(TEXTS), 300) for _ in range(2))
    assert first.backend_tokenizer.to_str() == second.backend_tokenizer.to_str()


def test_a_saved_tokenizer_is_the_same_when_loaded(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "She had  twelve\n\napples, 你好 \U0001f34e"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.decode(loaded.encode(text)[1:]) == text
    assert loaded.chat_template == PROMPT_FORMATS["deepseek-llm"]
    assert loaded.special_tokens_map == tokenizer.special_tokens_map
    assert loaded.model_max_length == tokenizer.model_max_length > 10**6


def test_a_vocabulary_without_room_for_all_bytes_is_refused() -> None:
    with pytest.raises(InputError, match=f"at least {SMALLEST}"):
        train_bpe(TEXTS, SMALLEST - 1)
    assert len(train_bpe([], SMALLEST)) == SMALLEST
