"""A corpus that is on every machine: Python's standard library, as tasks and texts.

Nothing is downloaded, and a model's answers can be checked by parsing them. The flow:

  (1) every module except tests and generated tables, in sorted order.
  (2) every function and class with a docstring becomes a pair. Signature and docstring
      are the question; the source without the docstring is the answer.
  (3) whole modules, chosen by a hash of their name, are eval data, because two
      functions of one module resemble each other. Answers that also occur in training
      are left out of the eval pairs.

The source differs between Python versions; `sha256` identifies the corpus.
"""

from __future__ import annotations

import ast
import hashlib
import io
import sysconfig
import tokenize
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hasten.data.conversation import Conversation
from hasten.data.turns import Message
from hasten.errors import InputError

_NOT_LIBRARY = (
    *("test", "tests", "idle_test", "idlelib", "lib2to3", "site-packages", "dist-packages"),
)
# Near-identical modules would stand on both sides of the split.
_GENERATED = ("encodings", "pydoc_data", "_bundled", "__pycache__")
_SKIPPED = frozenset((*_NOT_LIBRARY, *_GENERATED))
_EVAL_EVERY = 20  # about 5 % of the modules
_FEWEST = 50  # modules; a Python with fewer has its sources stripped
_Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class SplitSide(NamedTuple):
    """One side of the split."""

    pairs: tuple[Conversation, ...]  # question and answer
    texts: tuple[Conversation, ...]  # whole modules as plain text


@dataclass(frozen=True)
class Corpus:
    """The standard library, split by module."""

    train: SplitSide
    eval_data: SplitSide
    sha256: str  # over names and sources of all modules, in order
    modules: tuple[str, ...]  # paths below the library's root, sorted


def stdlib_corpus(root: Path | None = None) -> Corpus:
    """Returns the corpus of this Python, or of the library below `root`; takes about 4 seconds.

    Raises InputError where the sources are missing, as in some small images.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    digest = hashlib.sha256()
    modules: list[str] = []
    sides: dict[bool, tuple[list[Conversation], list[Conversation]]] = {
        False: ([], []),
        True: ([], []),
    }
    for path in _files(root):
        try:
            data = path.read_bytes()
            encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
            text = data.decode(encoding)
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
        name = path.relative_to(root).as_posix()
        source = text.replace("\r\n", "\n").replace("\r", "\n").replace("\x00", "")
        if not source.strip():
            continue
        modules.append(name)
        digest.update(f"{name}\0{source}\0".encode())
        first = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
        pairs, texts = sides[first % _EVAL_EVERY == 0]
        pairs.extend(_pairs(source, name))
        texts.append(Conversation((), source, f"{name}:1"))
    if len(modules) < _FEWEST:
        raise InputError(
            f"{root} holds the source of only {len(modules)} modules: install Python's standard "
            "library with its sources, or name a dataset"
        )
    train, eval_data = (SplitSide(tuple(pairs), tuple(texts)) for pairs, texts in sides.values())
    answers = {pair.messages[-1].content for pair in train.pairs}
    unseen = tuple(pair for pair in eval_data.pairs if pair.messages[-1].content not in answers)
    return Corpus(train, eval_data._replace(pairs=unseen), digest.hexdigest(), tuple(modules))


def _files(root: Path) -> Iterator[Path]:
    relative_paths = (path.relative_to(root) for path in root.rglob("*.py"))
    source_paths = (path for path in relative_paths if not _SKIPPED & {*path.parts})
    yield from (root / path for path in sorted(source_paths, key=lambda path: path.as_posix()))


def _pairs(source: str, name: str) -> Iterator[Conversation]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old modules have escapes that Python warns about
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = source.split("\n")  # as Python counts them; splitlines also splits at form feeds
    for node in sorted(_definitions(tree), key=lambda node: node.lineno):
        doc = ast.get_docstring(node)
        if doc and (parts := _parts(node, lines)):
            question = f"Write this in Python.\n\n{parts[0]}\n\n{doc}"
            turns = (Message("user", question), Message("assistant", "\n".join(parts)))
            yield Conversation(turns, None, f"{name}:{node.lineno}")


def _definitions(tree: ast.Module) -> Iterator[_Documented]:
    """Functions and classes in the order of `ast.walk`, which would visit all expressions too."""
    waiting: deque[ast.AST] = deque([tree])
    while waiting:
        node = waiting.popleft()
        if isinstance(node, _Documented):
            yield node
        waiting.extend(n for n in ast.iter_child_nodes(node) if not isinstance(n, ast.expr))


def _parts(node: _Documented, lines: list[str]) -> tuple[str, str] | None:
    """Returns signature and body without the docstring; None if there is nothing else.

    Slices of lines: `ast.get_source_segment` splits the module again for every node and takes
    minutes for the whole library.
    """
    if len(node.body) < 2:
        return None
    doc, body = node.body[0], node.body[1]
    shared = body.lineno == doc.end_lineno or doc.lineno == node.lineno
    if shared or doc.end_lineno is None:
        return None  # docstring and code on one line
    head = _dedent(lines[node.lineno - 1 : doc.lineno - 1], node.col_offset)
    return head, _dedent(lines[doc.end_lineno : node.end_lineno], node.col_offset)


def _dedent(lines: list[str], columns: int) -> str:
    """Lines moved left; lines inside strings may have less to give."""
    dedented = (line[columns:] if not line[:columns].strip() else line for line in lines)
    return "\n".join(dedented).strip("\n")
