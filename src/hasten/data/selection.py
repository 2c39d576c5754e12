"""Reads and selects the conversations of a training, before they are tokenised.

  (1) Sources are read, each with its columns, or the embedded corpus is used.
  (2) Of a source with its own `max_examples`, the first ones are kept.
  (3) With weights, the eval examples are removed first, each once: no copy of them is trained.
  (4) The others are repeated or thinned by the weight of their source.
  (5) `max_examples` of them are drawn.

Examples may be on disk (`data/spool.py`), because the steps after (1) only select row numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hasten.data.conversation import Conversation, columns_of
from hasten.data.corpus import stdlib_corpus
from hasten.data.readers import (
    ReadExamples,
    joined,
    other_splits,
    placeholder_words,
    read_sources,
    unread_words,
)
from hasten.data.sources import source_of, weighted
from hasten.data.spool import ConversationSink, IndexedConversations, Selection
from hasten.data.token_store import split
from hasten.errors import InputError

EMBEDDED = ("stdlib", "stdlib-text")
Tell = Callable[[str], None]


class SourceSettings(NamedTuple):
    """A recipe's source of examples, maybe with its own columns."""

    path: str
    weight: float = 1.0
    columns: Mapping[str, str] | None = None
    max_examples: int | None = None


@dataclass(frozen=True)
class DataSelection:
    """Settings for reading and selecting examples; see the recipe's keys."""

    sources: Sequence[SourceSettings]
    columns: Mapping[str, str]
    eval_data: float | str
    max_examples: int | None
    max_rejected: float
    seed: int
    stage: str = field(default="sft", kw_only=True)

    def names(self) -> list[str]:
        """Returns the names of all sources, including the eval file."""
        names = [source.path for source in self.sources]
        return [*names, self.eval_data] if isinstance(self.eval_data, str) else names


@dataclass(frozen=True)
class Conversations:
    """Conversations before tokenising."""

    train: Sequence[Conversation]
    eval_data: Sequence[Conversation] | None  # None: to be split off the training examples
    files: ReadExamples  # notes on the files of the sources
    corpus_sha256: str | None = None


def read_conversations(
    settings: DataSelection, tell: Tell, gathered: Callable[[], ConversationSink] = list
) -> Conversations:
    """Reads all data that the settings name; reports its files and formats.

    ``gathered`` returns a container for the examples of a source: a list, or a spool on disk.

    Raises:
        InputError: a missing or unusable file, too many rejected examples.
    """
    embedded = [each.path for each in settings.sources if each.path in EMBEDDED]
    if embedded and len(settings.sources) > 1:
        raise InputError(f"dataset: {embedded[0]} can't be mixed with files; give one or the other")
    if embedded and settings.stage != "sft":
        raise InputError(
            f"dataset: {embedded[0]} has no preferences, which stage: {settings.stage} needs: "
            "give a file of them"
        )
    source = _embedded(settings, gathered) if embedded else _files(settings, tell, gathered)
    if source.corpus_sha256:
        tell(f"embedded corpus, sha256 {source.corpus_sha256[:16]}")
    for file, shape in source.files.shapes.items():
        unread = unread_words(source.files.unread.get(file, set()))
        tell(f"{file} ({source.files.containers[file]}): {shape} examples{unread}")
        if sentence := placeholder_words(source.files.placeholders.get(file, {})):
            tell(f"warning: {file}: {sentence}")
    for entry in settings.sources:
        if names := other_splits(Path(entry.path), source.files.shapes):
            tell(
                f"warning: all files in {entry.path} are read, so {' and '.join(names)} will be "
                "trained too: list the files to train in dataset, and give one as eval_data"
            )
    return replace(source, train=_draw(source.train, settings.max_examples, settings.seed))


def _embedded(settings: DataSelection, gathered: Callable[[], ConversationSink]) -> Conversations:
    (source,) = settings.sources
    corpus = stdlib_corpus()
    kind = "texts" if source.path == "stdlib-text" else "pairs"
    first = _first(getattr(corpus.train, kind), source.max_examples)
    train = weighted([first], [source.weight], settings.seed)
    eval_data = _eval_file(settings, gathered)
    if eval_data is None and not isinstance(settings.eval_data, str):
        theirs = getattr(corpus.eval_data, kind)
        share = settings.eval_data
        eval_data = (
            _draw(theirs, int(share) if share >= 1 else None, settings.seed) if share else ()
        )
    return Conversations(train, eval_data, joined([]), corpus.sha256)


def _files(
    settings: DataSelection, tell: Tell, gathered: Callable[[], ConversationSink]
) -> Conversations:
    readings = read_sources(
        [
            source_of(
                d.path,
                columns_of(settings.columns if d.columns is None else d.columns, settings.stage),
            )
            for d in settings.sources
        ],
        settings.max_rejected,
        gathered,
    )
    groups = [
        _first(reading.conversations, source.max_examples)
        for reading, source in zip(readings, settings.sources, strict=True)
    ]
    weights = [source.weight for source in settings.sources]
    eval_data = _eval_file(settings, gathered)
    if any(weight != 1 for weight in weights):
        if eval_data is None and not isinstance(settings.eval_data, str):
            selection = Selection(groups)
            numbers = np.arange(len(selection))
            ours, theirs = split(numbers, settings.eval_data, settings.seed)
            borders = np.searchsorted(ours, np.cumsum([0, *map(len, groups)]))
            groups = [selection.take(ours[a:b]) for a, b in itertools.pairwise(borders)]
            eval_data = selection.take(theirs)
        train = weighted(groups, weights, settings.seed)
        for source, group in zip(settings.sources, groups, strict=True):
            tell(f"{source.path}: {len(group):,} examples to train on, weight {source.weight:g}")
    else:
        train = Selection(groups)
    return Conversations(train, eval_data, joined(readings))


def _eval_file(
    settings: DataSelection, gathered: Callable[[], ConversationSink]
) -> Sequence[Conversation] | None:
    """Reads the examples of the eval file, with the common columns; None without one."""
    if not isinstance(settings.eval_data, str):
        return None
    source = source_of(settings.eval_data, columns_of(settings.columns, settings.stage))
    return Selection([read_sources([source], settings.max_rejected, gathered)[0].conversations])


def _first(conversations: IndexedConversations, count: int | None) -> Selection:
    """Returns the first ``count`` conversations; all without a count."""
    return Selection([conversations], np.arange(len(conversations))[:count])


def _draw(
    conversations: Sequence[Conversation], count: int | None, seed: int
) -> Sequence[Conversation]:
    """Returns ``count`` random conversations in their order; all without a count."""
    if count is None or count >= len(conversations):
        return conversations
    chosen = np.random.default_rng(seed).choice(len(conversations), count, replace=False)
    return Selection([conversations], np.sort(chosen))
