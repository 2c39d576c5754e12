"""The conversations of a recipe, read and drawn, before anything is tokenised.

(1) sources are read, each with its columns, or the embedded corpus is taken
(2) with weights, the held-out records leave first, each once: no copy of one is trained on
(3) what is left is repeated or thinned by its source's weight
(4) `max_records` of it are drawn

Records may lie on disk meanwhile (`data/spool.py`): everything after (1) moves rows, not records.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hasten.data.conversation import Conversation, columns_of
from hasten.data.corpus import stdlib_corpus
from hasten.data.readers import Reading, read_sources
from hasten.data.sources import Source, source_of, weighted
from hasten.data.spool import Choice, Gathered
from hasten.data.token_store import split
from hasten.errors import InputError
from hasten.recipe.schema import DataSource, Recipe

EMBEDDED = ("stdlib", "stdlib-text")
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Conversations:
    """Conversations before tokenising."""

    train: Sequence[Conversation]
    held_out: Sequence[Conversation] | None  # None: to be split off the training records
    shapes: dict[str, str]
    corpus_sha256: str | None = None
    rejected: list[list[Any]] = field(default_factory=list)
    containers: dict[str, str] = field(default_factory=dict)


def read_source(
    recipe: Recipe, tell: Tell, gathered: Callable[[], Gathered] = list
) -> Conversations:
    """Everything that the recipe's words on data mean; tells what was found.

    ``gathered`` makes what the records of a file are put into: lists, or spools on disk.

    Raises:
        InputError: a missing or unusable file, too many rejected records.
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
        tell(f"{file} ({source.containers[file]}): {shape} records")
    return replace(source, train=_draw(source.train, recipe.max_records, recipe.seed))


def _embedded(recipe: Recipe, name: str, gathered: Callable[[], Gathered]) -> Conversations:
    corpus = stdlib_corpus()
    kind = "texts" if name == "stdlib-text" else "pairs"
    train = weighted([getattr(corpus.train, kind)], [recipe.datasets[0].weight], recipe.seed)
    held_out = _held_out_file(recipe, gathered)
    if held_out is None and not isinstance(recipe.held_out, str):
        theirs = getattr(corpus.held_out, kind)
        share = recipe.held_out
        held_out = _draw(theirs, int(share) if share >= 1 else None, recipe.seed) if share else ()
    return Conversations(train, held_out, {}, corpus.sha256)


def _files(recipe: Recipe, tell: Tell, gathered: Callable[[], Gathered]) -> Conversations:
    readings = read_sources(
        [_source(recipe, data) for data in recipe.datasets], recipe.max_rejected, gathered
    )
    groups: list[Choice] = [Choice([reading.conversations]) for reading in readings]
    weights = [data.weight for data in recipe.datasets]
    held_out = _held_out_file(recipe, gathered)
    if any(weight != 1 for weight in weights):
        if held_out is None and not isinstance(recipe.held_out, str):
            groups, held_out = _apart(groups, recipe.held_out, recipe.seed)
        train = weighted(groups, weights, recipe.seed)
        for data, group in zip(recipe.datasets, groups, strict=True):
            tell(f"{data.path}: {len(group):,} records to train on, weight {data.weight:g}")
    else:
        train = Choice(groups)
    return Conversations(
        train,
        held_out,
        _merged(readings, "shapes"),
        rejected=[[*row] for reading in readings for row in reading.rejected],
        containers=_merged(readings, "containers"),
    )


def _source(recipe: Recipe, data: DataSource) -> Source:
    given = recipe.columns if data.columns is None else data.columns
    return source_of(data.path, columns_of(given))


def _held_out_file(
    recipe: Recipe, gathered: Callable[[], Gathered]
) -> Sequence[Conversation] | None:
    """The records of the held-out file, with the recipe's columns; None where it names none."""
    if not isinstance(recipe.held_out, str):
        return None
    source = source_of(recipe.held_out, columns_of(recipe.columns))
    return Choice([read_sources([source], recipe.max_rejected, gathered)[0].conversations])


def _apart(
    groups: Sequence[Choice], held_out: float, seed: int
) -> tuple[list[Choice], Sequence[Conversation]]:
    """The groups without the held-out records, and these."""
    whole = Choice(groups)
    ours, theirs = split(whole, held_out, seed)
    firsts = np.cumsum([0, *map(len, groups)])
    borders = np.searchsorted(ours, firsts)
    kept = [whole.take(ours[a:b]) for a, b in itertools.pairwise(borders)]
    return kept, whole.take(theirs)


def _merged(readings: Sequence[Reading], name: str) -> dict[str, str]:
    return {file: what for reading in readings for file, what in getattr(reading, name).items()}


def _draw(
    conversations: Sequence[Conversation], count: int | None, seed: int
) -> Sequence[Conversation]:
    """``count`` of them, chosen by the seed and kept in order; all of them without a count."""
    if count is None or count >= len(conversations):
        return conversations
    chosen = np.random.default_rng(seed).choice(len(conversations), count, replace=False)
    return Choice([conversations], np.sort(chosen))
