"""Token examples: tokenised once, stored in an Arrow file, then memory-mapped.

(1) the key is a hash of everything that decides the tokens. These are conversations,
    tokenizer with its chat template, cutoff_len and format. The file `<key>.arrow` is
    the result for exactly this key.
(2) a complete file of that name is mapped and used. A missing or damaged one is written
    again, by one process at a time (`hasten.machine.locks`). Finished chunks survive if
    that process ends (`tokenize`).
(3) lengths and counts of trained tokens are computed once. An example is a view of the
    mapping.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from hasten.data import arrow_file
from hasten.data.chat_template import CUTOFF_REASONS, NOTES, SHARED, LossOn, TooLong
from hasten.data.readers import Rejected, check_rejected
from hasten.data.spool import IndexedConversations, packed
from hasten.data.tokenize import prepare
from hasten.data.worker import TokenizeWork
from hasten.errors import InputError
from hasten.formatting import shown
from hasten.machine.locks import one_writer
from hasten.parts.data.collate import TokenizedExample
from hasten.parts.data.pairs import PreferencePair

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FORMAT = 8  # change it with anything that changes the tokens of a given input


class StoredExamples(Protocol):
    """Token examples, or pairs of them, by position; lengths can be read alone."""

    @property
    def lengths(self) -> NDArray[np.int32]: ...
    @property
    def trained_counts(self) -> NDArray[np.int32]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...  # TokenizedExample or PreferencePair


class TokenStore:
    """All examples of one Arrow file; opening it checks its digest.

    `input_ids` of an example are a read-only view of the mapping. Pickling stores only the path.
    """

    def __init__(self, path: Path) -> None:
        """Maps a file; raises arrow_file.DamagedError or OSError."""
        self.path = path
        self._batches, summary = arrow_file.read(path)
        self.digest = arrow_file.digest_of(path)  # depends on all tokens and marks
        self.rejected = [Rejected(*row) for row in summary["rejected"]]
        self.long: int = summary.get("long", 0)  # conversations longer than cutoff_len
        # Effects of the chat template.
        self.notes: dict[str, int] = {name: summary.get(name, 0) for name in NOTES}
        sizes = (len(batch.starts) - 1 for batch in self._batches)
        self._firsts = np.asarray([0, *accumulate(sizes)], np.int64)  # (batches + 1,)
        lengths = [np.diff(batch.starts) for batch in self._batches]
        counts = [_trained_counts(batch) for batch in self._batches]
        self.lengths: NDArray[np.int32] = _joined(lengths)  # (examples,) tokens
        self.trained_counts: NDArray[np.int32] = _joined(counts)  # (examples,) as trained_tokens
        begins = np.ones(len(self.lengths), np.bool_)
        for first, count in summary.get("pieces", ()):
            begins[first + 1 : first + count] = False
        self.conversations: NDArray[np.int64] = np.cumsum(begins) - 1  # (examples,) its number

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> TokenizedExample:
        row = range(len(self))[index]  # counts from the end, raises IndexError
        number = int(np.searchsorted(self._firsts, row, side="right")) - 1
        return self._batches[number].record(row - int(self._firsts[number]))

    def __reduce__(self) -> tuple[type[TokenStore], tuple[Path]]:
        return TokenStore, (self.path,)


class Pairs:
    """A store's rows as preference pairs: two consecutive rows are chosen and rejected answer.

    ``lengths`` and ``trained_counts`` are sums of both rows.
    """

    def __init__(self, rows: TokenStore) -> None:
        self.rows = rows
        self.row_lengths: NDArray[np.int32] = rows.lengths.reshape(-1, 2)  # (pairs, 2)
        self.lengths: NDArray[np.int32] = self.row_lengths.sum(1, dtype=np.int32)
        counts = rows.trained_counts.reshape(-1, 2)
        self.trained_counts: NDArray[np.int32] = counts.sum(1, dtype=np.int32)
        self.conversations: NDArray[np.int64] = rows.conversations[::2]  # (pairs,) its number

    @property
    def shared_share(self) -> float:
        """Returns the share of all tokens that is saved if a pair's common beginning is once."""
        return self.rows.notes[SHARED] / max(int(self.lengths.sum(dtype=np.int64)), 1)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> PreferencePair:
        row = range(len(self))[index]
        return PreferencePair(self.rows[2 * row], self.rows[2 * row + 1])

    def __reduce__(self) -> tuple[type[Pairs], tuple[TokenStore]]:
        return Pairs, (self.rows,)


class Subset:
    """Some examples of a store, in the given order, with the store's interface."""

    def __init__(self, examples: StoredExamples, indices: NDArray[np.int64]) -> None:
        self.examples = examples
        self.indices = np.asarray(indices, np.int64)
        self.lengths: NDArray[np.int32] = examples.lengths[self.indices]
        self.trained_counts: NDArray[np.int32] = examples.trained_counts[self.indices]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.examples[int(self.indices[index])]


def complete_store(examples: StoredExamples) -> StoredExamples:
    """Returns the store that has these examples, and maybe more."""
    return examples.examples if isinstance(examples, Subset) else examples


def tokenize(
    conversations: IndexedConversations,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    cutoff_len: int,
    max_rejected: float = 0.001,
    on_progress: Callable[[int, int], None] | None = None,
    too_long: TooLong = "truncate",
    workers: int = 1,
    tell: Callable[[str], None] = lambda text: None,
    loss_on: LossOn = "answers",
    stage: str = "sft",
) -> TokenStore:
    """Returns the token examples of conversations, stored in `folder/<key>.arrow`.

    With another `stage` than sft, conversations have answers, and two rows are a pair.

    If that file exists, it is used. `workers` is the number of processes that tokenise; 1
    is this process. The file is the same for any number, byte by byte.

    `on_progress(done, total)` counts conversations and is called only while tokenising.
    Conversations that an earlier, killed call finished are counted at once. If this call
    waits for another process that prepares the same, it calls `tell` with a message.

    `max_rejected` is as in `read_examples`. Two kinds of examples are noted as rejected and
    don't count towards it. These are examples dropped by `too_long`, and examples that only
    `cutoff_len` leaves without an answer.

    Raises InputError if more are rejected, if no example is left, or if the folder can't be
    written.
    """
    key = cache_key(conversations, tokenizer, cutoff_len, too_long, loss_on, stage)
    path = folder / f"{key}.arrow"
    try:
        store = _opened(path)
        if store is None:
            folder.mkdir(parents=True, exist_ok=True)
            with one_writer(path.with_suffix(".lock"), tell):
                store = _opened(path)  # another process may have written it meanwhile
                if store is None:
                    work = TokenizeWork(tokenizer, cutoff_len, too_long, loss_on, stage)
                    prepare(conversations, work, path, workers, on_progress)
                    store = TokenStore(path)
    except OSError as error:
        raise InputError(f"the token cache {path} can't be written or read: {error}") from error
    unusable = [r for r in store.rejected if not r.reason.startswith(CUTOFF_REASONS)]
    check_rejected(unusable, len(conversations), max_rejected)
    if not len(store):
        reasons = "; ".join(dict.fromkeys(each.reason for each in store.rejected[:3]))
        raise InputError(
            f"none of {len(conversations)} examples is left after tokenising ({reasons}): raise "
            "cutoff_len, or give other examples"
        )
    return store


def cache_key(
    conversations: IndexedConversations,
    tokenizer: PreTrainedTokenizerBase,
    cutoff_len: int,
    too_long: TooLong = "truncate",
    loss_on: LossOn = "answers",
    stage: str = "sft",
) -> str:
    """Returns a hash of everything that decides the examples, including their locations."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    for changing in ("truncation", "padding"):  # these depend on the tokenizer's last call
        backend.pop(changing, None)
    borders = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.special_tokens_map)
    kind = stage if stage in ("sft", "kto") else "pairs"
    settings = [cutoff_len, too_long, loss_on, kind]
    parts = [_FORMAT, *settings, backend, tokenizer.chat_template, borders]
    digest = xxhash.xxh3_128(json.dumps(parts, sort_keys=True, default=str).encode())
    for index in range(len(conversations)):
        digest.update(packed(conversations, index))
    return str(digest.hexdigest())


def split(
    conversations: NDArray[np.int64], eval_data: float | int, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns sorted indices (train, eval) of a random split; it depends only on `seed`.

    `conversations` (examples,) has the number of each example's conversation, from 0. Complete
    conversations become eval data, up to the requested number of examples. If this gives less than
    half of the number, single pieces are used.

    `eval_data` below 1 is a share of the examples, and means at least one. From 1 on it is a
    number of examples; 0 means none.
    """
    total = len(conversations)
    if not eval_data >= 0:
        raise InputError(f"eval_data is {eval_data}: give a share below 1 or a count")
    count = max(1, round(eval_data * total)) if 0 < eval_data < 1 else int(eval_data)
    if count >= total:
        raise InputError(f"eval_data={eval_data} of {total} examples leaves none to train on")
    sizes, remaining = np.bincount(conversations), count
    held_conversations = []
    for conversation in np.random.default_rng(seed).permutation(len(sizes)):
        if not remaining:
            break
        if sizes[conversation] <= remaining:
            held_conversations.append(conversation)
            remaining -= sizes[conversation]
    if 2 * remaining <= count:
        held_out = np.isin(conversations, held_conversations)
    else:
        pieces = np.random.default_rng(seed).permutation(total)[:count]
        held_out = np.isin(np.arange(total), pieces)
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def row_lengths(examples: StoredExamples) -> NDArray[np.int32]:
    """Returns the tokens of each example's rows, (examples, 1), or of pairs (examples, 2)."""
    if isinstance(examples, Subset):
        return row_lengths(examples.examples)[examples.indices]
    return examples.row_lengths if isinstance(examples, Pairs) else examples.lengths[:, None]


def token_bytes(example: TokenizedExample | PreferencePair) -> bytes:
    """Returns the tokens as bytes, which are equal for equal examples."""
    if isinstance(example, TokenizedExample):
        return np.ascontiguousarray(example.input_ids).tobytes()
    border = b"%d/" % example.chosen.length
    return border + token_bytes(example.chosen) + token_bytes(example.rejected)


def inspect(
    tokenizer: PreTrainedTokenizerBase,
    example: TokenizedExample | PreferencePair,
    colour: bool = False,
) -> str:
    """Returns an example as text, with trained parts between [[ and ]], or in green."""
    parts = text_parts(tokenizer, example, colour)
    return "\n".join(f"{name}: {text}" if name else text for name, text in parts.items())


def text_parts(
    tokenizer: PreTrainedTokenizerBase,
    example: TokenizedExample | PreferencePair,
    colour: bool = False,
) -> dict[str, str]:
    """Returns the text of `inspect` by name: prompt and answers of a pair, or one without name."""
    if isinstance(example, TokenizedExample):
        return {"": "".join(_marked_parts(tokenizer, example, colour))}
    parts: dict[str, str] = {}
    for name, row in (("chosen", example.chosen), ("rejected", example.rejected)):
        if row.length:
            start = row.length - int(row.trained.sum())
            answer = TokenizedExample(row.input_ids[start:], row.trained[start:])
            prompt = TokenizedExample(row.input_ids[:start], row.trained[:start])
            parts["prompt"] = inspect(tokenizer, prompt)
            parts[name] = inspect(tokenizer, answer, colour)
    return parts


def _marked_parts(
    tokenizer: PreTrainedTokenizerBase, example: TokenizedExample, colour: bool
) -> Iterator[str]:
    opening, closing = ("\033[32m", "\033[0m") if colour else ("[[", "]]")
    borders = np.flatnonzero(np.diff(example.trained)) + 1
    for ids, marks in zip(
        np.split(example.input_ids, borders), np.split(example.trained, borders), strict=True
    ):
        text = shown(tokenizer.decode(ids.tolist(), skip_special_tokens=False))
        yield f"{opening}{text}{closing}" if marks.any() else text


def _opened(path: Path) -> TokenStore | None:
    try:
        return TokenStore(path)
    except (FileNotFoundError, arrow_file.DamagedError):
        return None


def _trained_counts(batch: arrow_file.Batch) -> NDArray[np.int32]:
    """Returns the trained tokens of each example without the first, which isn't predicted."""
    firsts, lasts = batch.starts[:-1], batch.starts[1:]
    marks = batch.marks(0, len(batch.ids))
    marks[firsts[firsts < lasts]] = False
    before = np.concatenate(([0], np.cumsum(marks, dtype=np.int32)))  # (tokens + 1,)
    counts: NDArray[np.int32] = (before[lasts] - before[firsts]).astype(np.int32)
    return counts


def _joined(parts: list[NDArray[np.int32]]) -> NDArray[np.int32]:
    return np.concatenate([np.zeros(0, np.int32), *parts])
