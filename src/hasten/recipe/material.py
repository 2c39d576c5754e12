"""The data of a recipe: read, split, tokenised once into the run's folder, mapped ever after.

What was prepared is noted in ``data/index.json`` under a key of everything that decides it, so that
other processes of the run (ranks, arms of an experiment) and later runs open it at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from hasten.core import facts
from hasten.core.facts import RecordFacts
from hasten.data.corpus import stdlib_corpus
from hasten.data.formats import read_records
from hasten.data.shapes import Conversation
from hasten.data.store import Records, Subset, TokenStore, split, tokenize
from hasten.data.templates import ensure_chat_template
from hasten.data.tokenizer import train_bpe
from hasten.errors import InputError
from hasten.models.load import load_tokenizer
from hasten.models.presets import PRESETS
from hasten.recipe.schema import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EMBEDDED = ("stdlib", "stdlib-text")
Tell = Callable[[str], None]
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Material:
    """What a recipe trains and is judged on."""

    tokenizer: PreTrainedTokenizerBase
    train: Records
    held_out: Records | tuple[()]
    note: Note

    def record_facts(self) -> RecordFacts:
        tokens = int(self.train.lengths.sum())
        return RecordFacts(
            count=len(self.train),
            tokens=tokens,
            longest=int(self.train.lengths.max()),
            trained_share=float(self.train.trained_counts.sum()) / max(tokens, 1),
        )


@dataclass(frozen=True)
class Note:
    """What ``data/index.json`` says: where the prepared data lies and where it came from."""

    key: str
    tokenizer: str
    train: str
    held_out: str | None
    split: float | None  # share or number held out of ``train`` itself
    shapes: dict[str, str] = field(default_factory=dict)
    corpus_sha256: str | None = None
    rejected: list[list[Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Source:
    """Conversations before tokenising."""

    train: Sequence[Conversation]
    held_out: Sequence[Conversation] | None  # None: to be split off the training records
    shapes: dict[str, str]
    corpus_sha256: str | None = None
    rejected: list[list[Any]] = field(default_factory=list)


def gather(
    recipe: Recipe,
    folder: Path,
    tell: Tell = lambda text: None,
    on_progress: OnProgress | None = None,
) -> Material:
    """Open the recipe's prepared data in ``folder``, or prepare it there first.

    Raises:
        InputError: a missing or unusable file, too many rejected records, nothing to train on.
    """
    key = _key(recipe)
    ready = _opened(recipe, folder, key)
    if ready is not None:
        return ready
    source = _read(recipe, tell)
    tokenizer = _tokenizer(recipe, source, tell)
    tell(f"tokenising {len(source.train):,} records")
    folder.mkdir(parents=True, exist_ok=True)

    def store(conversations: Sequence[Conversation]) -> TokenStore:
        return tokenize(
            conversations, tokenizer, folder, recipe.cutoff_len, recipe.max_rejected, on_progress
        )

    train = store(source.train)
    held_out = store(source.held_out) if source.held_out else None
    tokenizer.save_pretrained(folder / "tokenizer")
    rejected = [*source.rejected, *([*r] for r in train.rejected)]
    own = source.held_out is not None
    note = Note(
        key=key,
        tokenizer="tokenizer",
        train=train.path.name,
        held_out=held_out.path.name if held_out is not None else None,
        split=None if own or isinstance(recipe.held_out, str) else recipe.held_out,
        shapes=source.shapes,
        corpus_sha256=source.corpus_sha256,
        rejected=rejected,
    )
    _write(folder / "index.json", json.dumps(asdict(note), indent=1))
    return _material(recipe, note, tokenizer, train, held_out)


def write_rejected(note: Note, path: Path) -> None:
    """One line of JSON for each record that was left out: file, line, reason."""
    lines = [json.dumps({"file": f, "line": n, "reason": r}) for f, n, r in note.rejected]
    _write(path, "\n".join(lines) + "\n")


def _material(
    recipe: Recipe,
    note: Note,
    tokenizer: PreTrainedTokenizerBase,
    train: TokenStore,
    held_out: TokenStore | None,
) -> Material:
    if note.split is None:
        return Material(tokenizer, train, held_out if held_out is not None else (), note)
    if not note.split:
        return Material(tokenizer, train, (), note)
    ours, theirs = split(train, note.split, recipe.seed)
    return Material(tokenizer, Subset(train, ours), Subset(train, theirs), note)


def _opened(recipe: Recipe, folder: Path, key: str) -> Material | None:
    try:
        note = Note(**json.loads((folder / "index.json").read_text()))
        if note.key != key:
            return None
        train = TokenStore(folder / note.train)
        held_out = TokenStore(folder / note.held_out) if note.held_out else None
        tokenizer = load_tokenizer(str(folder / note.tokenizer))
    except (OSError, ValueError, TypeError):
        return None  # absent, damaged or of another version: prepared anew
    return _material(recipe, note, tokenizer, train, held_out)


def _read(recipe: Recipe, tell: Tell) -> Source:
    embedded = [name for name in recipe.datasets if name in EMBEDDED]
    if embedded and len(recipe.datasets) > 1:
        raise InputError(f"dataset: {embedded[0]} can't be mixed with files; give one or the other")
    source = _embedded(recipe, embedded[0]) if embedded else _files(recipe)
    if source.corpus_sha256:
        tell(f"embedded corpus, sha256 {source.corpus_sha256[:16]}")
    for file, shape in source.shapes.items():
        tell(f"{file}: {shape} records")
    return replace(source, train=_draw(source.train, recipe.max_records, recipe.seed))


def _embedded(recipe: Recipe, name: str) -> Source:
    corpus = stdlib_corpus()
    kind = "texts" if name == "stdlib-text" else "pairs"
    train = getattr(corpus.train, kind)
    held_out: Sequence[Conversation]
    if isinstance(recipe.held_out, str):
        held_out = read_records([Path(recipe.held_out)], recipe.max_rejected).conversations
    else:
        theirs = getattr(corpus.held_out, kind)
        share = recipe.held_out
        held_out = _draw(theirs, int(share) if share >= 1 else None, recipe.seed) if share else ()
    return Source(train, held_out, {}, corpus.sha256)


def _files(recipe: Recipe) -> Source:
    reading = read_records([Path(name) for name in recipe.datasets], recipe.max_rejected)
    rejected = [[*r] for r in reading.rejected]
    held_out: Sequence[Conversation] | None = None
    if isinstance(recipe.held_out, str):
        held_out = read_records([Path(recipe.held_out)], recipe.max_rejected).conversations
    return Source(reading.conversations, held_out, reading.shapes, rejected=rejected)


def _draw(
    conversations: Sequence[Conversation], count: int | None, seed: int
) -> Sequence[Conversation]:
    """``count`` of them, chosen by the seed and kept in order; all of them without a count."""
    if count is None or count >= len(conversations):
        return conversations
    chosen = np.random.default_rng(seed).choice(len(conversations), count, replace=False)
    return [conversations[i] for i in sorted(chosen)]


def _tokenizer(recipe: Recipe, source: Source, tell: Tell) -> PreTrainedTokenizerBase:
    where = recipe.tokenizer or recipe.model
    if where in PRESETS:
        tell(f"training a tokenizer of {recipe.vocabulary:,} on the data (the preset has none)")
        return train_bpe(_texts(source.train), recipe.vocabulary)
    tokenizer = load_tokenizer(where)
    if ensure_chat_template(tokenizer):
        tell(f"{where} has no chat template: using deepseek-llm's")
    return tokenizer


def _texts(conversations: Sequence[Conversation]) -> Iterable[str]:
    for conversation in conversations:
        if conversation.text is not None:
            yield conversation.text
        yield from (message.content for message in conversation.messages)


def _key(recipe: Recipe) -> str:
    """Of the recipe's words on data, the files' sizes and times, and the versions that read them.

    Contents are not read: a file that changed has another size or time, as for make.
    """
    names = [*recipe.datasets, recipe.tokenizer or recipe.model]
    if isinstance(recipe.held_out, str):
        names.append(recipe.held_out)
    fields = recipe.model_dump(
        include={
            *("model", "tokenizer", "dataset", "held_out", "max_records", "max_rejected"),
            *("cutoff_len", "vocabulary", "seed"),
        }
    )
    parts = [fields, [_stamp(Path(name)) for name in names], facts.versions()]
    return str(xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True).encode()))


def _stamp(path: Path) -> list[Any]:
    if path.is_dir():
        return [_stamp(p) for p in sorted(path.iterdir()) if p.is_file()]
    if not path.exists():
        return [str(path)]
    stat = path.stat()
    return [str(path.resolve()), stat.st_size, stat.st_mtime_ns]


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)
