"""The data of a recipe: read, split, tokenised once into the run's folder, mapped ever after.

Reading spools the records to disk, so memory doesn't grow with their number; one process prepares
at a time, and others wait for it. What was prepared is noted in ``data/index.json`` under a key of
everything that decides it, so that other processes of the run (ranks, arms of an experiment) and
later runs open it at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from hasten.core.facts import RecordFacts
from hasten.data.chat_template import choose_chat_template
from hasten.data.conversation import Conversation
from hasten.data.file_lock import one_writer
from hasten.data.sources import entry_of
from hasten.data.spool import spools
from hasten.data.token_store import Records, Subset, TokenStore, split, tokenize
from hasten.data.tokenize import sweep
from hasten.data.tokenizer import train_bpe
from hasten.errors import InputError
from hasten.machine import host
from hasten.models.load import load_tokenizer
from hasten.models.presets import PRESETS
from hasten.recipe.reading import Conversations, Tell, read_source
from hasten.recipe.schema import Recipe
from hasten.recipe.stamps import stamps

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OnProgress = Callable[[int, int], None]
_FATE = {
    "truncate": "dialogues are cut, plain texts go on in further pieces",
    "split": "they go on in further pieces, as far as those have a part of an answer",
    "drop": "left out",
}


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

    def identity(self) -> dict[str, Any]:
        """Which tokens are trained on, whatever files they came from; for checkpoints."""
        whole = self.train.records if isinstance(self.train, Subset) else self.train
        digest = xxhash.xxh3_128(whole.digest if isinstance(whole, TokenStore) else b"")
        if isinstance(self.train, Subset):
            digest.update(self.train.indices.tobytes())
        known = self.record_facts()
        return {"records": known.count, "tokens": known.tokens, "hash": digest.hexdigest()[:16]}


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
    containers: dict[str, str] = field(default_factory=dict)
    long: int = 0  # training records that are longer than cutoff_len


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
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with one_writer(folder / "writing.lock", tell):
            ready = _opened(recipe, folder, key)  # another process may have prepared it meanwhile
            if ready is not None:
                return ready
            with spools(folder) as spooled:
                source = read_source(recipe, tell, spooled.new)
                return _prepared(recipe, source, folder, key, tell, on_progress)
    except OSError as error:
        raise InputError(
            f"the data can't be prepared in {folder}: {error.strerror or error}"
        ) from error


def _prepared(
    recipe: Recipe,
    source: Conversations,
    folder: Path,
    key: str,
    tell: Tell,
    on_progress: OnProgress | None,
) -> Material:
    """Tokenise what was read, and note it."""
    tokenizer = _tokenizer(recipe, source, tell)
    tell(f"tokenising {len(source.train):,} records")

    def store(conversations: Sequence[Conversation]) -> TokenStore:
        return tokenize(
            conversations,
            tokenizer,
            folder,
            recipe.cutoff_len,
            recipe.max_rejected,
            on_progress,
            recipe.too_long,
            host.usable_cores() if recipe.data_workers == "auto" else recipe.data_workers,
            tell,
        )

    train = store(source.train)
    if train.long:
        tell(
            f"{train.long:,} of {len(source.train):,} records are longer than "
            f"cutoff_len={recipe.cutoff_len}: {_FATE[recipe.too_long]} "
            f"(too_long: {recipe.too_long})"
        )
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
        containers=source.containers,
        long=train.long,
    )
    _write(folder / "index.json", json.dumps(asdict(note), indent=1))
    sweep(folder)
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


def _tokenizer(recipe: Recipe, source: Conversations, tell: Tell) -> PreTrainedTokenizerBase:
    where = recipe.tokenizer or recipe.model
    if where in PRESETS:
        tell(f"training a tokenizer of {recipe.vocabulary:,} on the data (the preset has none)")
        tokenizer = train_bpe(_texts(source.train), recipe.vocabulary)
        choose_chat_template(tokenizer, recipe.chat_template)
        return tokenizer
    tokenizer = load_tokenizer(where)
    template = choose_chat_template(tokenizer, recipe.chat_template)
    tell(f"chat template: {template}")
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
    paths = [path for name in _named(recipe) for path in (name, *_behind(name))]
    fields = recipe.model_dump(
        include={
            *("model", "tokenizer", "dataset", "held_out", "max_records", "max_rejected"),
            *("cutoff_len", "vocabulary", "seed", "columns", "too_long", "chat_template"),
        }
    )
    parts = [fields, stamps(paths, Path(recipe.output)), host.versions()]
    return str(xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True).encode()))


def _named(recipe: Recipe) -> list[str]:
    """Whatever of the recipe's words may be a file."""
    names = [*(data.path for data in recipe.datasets), recipe.tokenizer or recipe.model]
    return [*names, recipe.chat_template, *([h] if isinstance(h := recipe.held_out, str) else [])]


def _behind(name: str) -> list[str]:
    """The list and the file behind the name of a listed data set."""
    entry = entry_of(name)
    return [name.rpartition(":")[0], str(entry[0])] if entry else []


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)
