"""The conversations of a recipe, read and drawn, before anything is tokenised.

  (1) Sources are read, each with its columns, or the embedded corpus is used.
  (2) Of a source with its own `max_examples`, the first ones are kept.
  (3) With weights, the eval examples are removed first, each once: no copy of them is trained.
  (4) The others are repeated or thinned by the weight of their source.
  (5) `max_examples` of them are drawn.

Examples may be on disk meanwhile (`data/spool.py`): everything after (1) moves rows, not examples.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hasten.data.conversation import Conversation, columns_of
from hasten.data.corpus import stdlib_corpus
from hasten.data.readers import (
    ReadExamples,
    other_splits,
    placeholder_words,
    read_sources,
    unread_words,
)
from hasten.data.sources import source_of, weighted
from hasten.data.spool import ConversationSink, IndexedConversations, Selection
from hasten.data.token_store import split
from hasten.errors import InputError
from hasten.recipe.schema import Recipe

EMBEDDED = ("stdlib", "stdlib-text")
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Conversations:
    """Conversations before tokenising."""

    train: Sequence[Conversation]
    eval_data: Sequence[Conversation] | None  # None: to be split off the training examples
    shapes: dict[str, str]
    corpus_sha256: str | None = None
    rejected: list[list[Any]] = field(default_factory=list)
    containers: dict[str, str] = field(default_factory=dict)
    unread: dict[str, set[str]] = field(default_factory=dict)
    placeholders: dict[str, dict[str, int]] = field(default_factory=dict)


def read_source(
    recipe: Recipe, tell: Tell, gathered: Callable[[], ConversationSink] = list
) -> Conversations:
    """Reads all data that the recipe names; reports its files and formats.

    ``gathered`` makes the container for the examples of a file: lists, or spools on disk.

    Raises:
        InputError: a missing or unusable file, too many rejected examples.
    """
    embedded = [data.path for data in recipe.datasets if data.path in EMBEDDED]
    if embedded and len(recipe.datasets) > 1:
        raise InputError(f"dataset: {embedded[0]} can't be mixed with files; give one or the other")
    source = (
        _embedded(recipe, embedded[0], gathered) if embedded else _files(recipe, tell, gathered)
    )
    if source.corpus_sha256:
        tell(f"embedded corpus, sha256 {source.corpus_sha256[:16]}")
    for file, shape in source.shapes.items():
        unread = unread_words(source.unread.get(file, set()))
        tell(f"{file} ({source.containers[file]}): {shape} examples{unread}")
        if sentence := placeholder_words(source.placeholders.get(file, {})):
            tell(f"warning: {file}: {sentence}")
    for entry in recipe.datasets:
        if names := other_splits(Path(entry.path), source.shapes):
            tell(
                f"warning: {entry.path} is read whole, so {' and '.join(names)} will be trained "
                "too: list the files to train in dataset, and give one of these as eval_data"
            )
    return replace(source, train=_draw(source.train, recipe.max_examples, recipe.seed))


def _embedded(recipe: Recipe, name: str, gathered: Callable[[], ConversationSink]) -> Conversations:
    corpus = stdlib_corpus()
    kind = "texts" if name == "stdlib-text" else "pairs"
    data = recipe.datasets[0]
    first = _first(getattr(corpus.train, kind), data.max_examples)
    train = weighted([first], [data.weight], recipe.seed)
    eval_data = _eval_file(recipe, gathered)
    if eval_data is None and not isinstance(recipe.eval_data, str):
        theirs = getattr(corpus.eval_data, kind)
        share = recipe.eval_data
        eval_data = _draw(theirs, int(share) if share >= 1 else None, recipe.seed) if share else ()
    return Conversations(train, eval_data, {}, corpus.sha256)


def _files(recipe: Recipe, tell: Tell, gathered: Callable[[], ConversationSink]) -> Conversations:
    readings = read_sources(
        [
            source_of(d.path, columns_of(recipe.columns if d.columns is None else d.columns))
            for d in recipe.datasets
        ],
        recipe.max_rejected,
        gathered,
    )
    groups = [
        _first(reading.conversations, data.max_examples)
        for reading, data in zip(readings, recipe.datasets, strict=True)
    ]
    weights = [data.weight for data in recipe.datasets]
    eval_data = _eval_file(recipe, gathered)
    if any(weight != 1 for weight in weights):
        if eval_data is None and not isinstance(recipe.eval_data, str):
            groups, eval_data = _split_eval(groups, recipe.eval_data, recipe.seed)
        train = weighted(groups, weights, recipe.seed)
        for data, group in zip(recipe.datasets, groups, strict=True):
            tell(f"{data.path}: {len(group):,} examples to train on, weight {data.weight:g}")
    else:
        train = Selection(groups)
    return Conversations(
        train,
        eval_data,
        _merged(readings, "shapes"),
        rejected=[[*row] for reading in readings for row in reading.rejected],
        containers=_merged(readings, "containers"),
        unread=_merged(readings, "unread"),
        placeholders=_merged(readings, "placeholders"),
    )


def _eval_file(
    recipe: Recipe, gathered: Callable[[], ConversationSink]
) -> Sequence[Conversation] | None:
    """The examples of the eval file, with the recipe's columns; None where it names none."""
    if not isinstance(recipe.eval_data, str):
        return None
    source = source_of(recipe.eval_data, columns_of(recipe.columns))
    return Selection([read_sources([source], recipe.max_rejected, gathered)[0].conversations])


def _split_eval(
    groups: Sequence[Selection], eval_data: float, seed: int
) -> tuple[list[Selection], Sequence[Conversation]]:
    """The groups without the eval examples, and these."""
    selection = Selection(groups)
    ours, theirs = split(np.arange(len(selection)), eval_data, seed)
    firsts = np.cumsum([0, *map(len, groups)])
    borders = np.searchsorted(ours, firsts)
    train_groups = [selection.take(ours[a:b]) for a, b in itertools.pairwise(borders)]
    return train_groups, selection.take(theirs)


def _merged(readings: Sequence[ReadExamples], name: str) -> dict[str, Any]:
    return {file: what for reading in readings for file, what in getattr(reading, name).items()}


def _first(conversations: IndexedConversations, count: int | None) -> Selection:
    """The first ``count`` of them; all of them without a count."""
    return Selection([conversations], np.arange(len(conversations))[:count])


def _draw(
    conversations: Sequence[Conversation], count: int | None, seed: int
) -> Sequence[Conversation]:
    """``count`` of them, chosen by the seed and kept in order; all of them without a count."""
    if count is None or count >= len(conversations):
        return conversations
    chosen = np.random.default_rng(seed).choice(len(conversations), count, replace=False)
    return Selection([conversations], np.sort(chosen))
