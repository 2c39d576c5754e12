"""A file of packed rows for any trainer: Arrow or Parquet, several examples in a row.

  - input_ids: list<int32>; the row's tokens, at most row_tokens, without padding
  - labels: list<int32>; the token itself if it is trained, otherwise -100. A model that
    shifts labels, as those of Transformers do, predicts each from those before it. The
    first token of an example is always -100
  - position_ids: list<int32>; counted from 0 in each example, which separates examples
  - seq_lengths: list<int32>; tokens of each example of the row, as in TRL's packed data
    sets

Both files are read by ``datasets.load_dataset`` (an Arrow file is a stream). Two
collators fit: TRL's, which joins rows end to end (``padding_free``), and Transformers'
default collator with one row per batch. Then positions show models with flash or SDPA
attention where an example begins. Transformers' ``DataCollatorWithFlattening`` doesn't
fit: it takes each row for one example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from hasten.data.token_store import StoredExamples
from hasten.errors import InputError
from hasten.machine.files import replacing
from hasten.parts.data.collate import IGNORED
from hasten.parts.data.epoch_order import PackedOrder
from hasten.parts.data.packing import Efficiency

COLUMNS = ("input_ids", "labels", "position_ids", "seq_lengths")
SCHEMA = pa.schema([(name, pa.list_(pa.int32())) for name in COLUMNS])
SUFFIXES = (".arrow", ".parquet")
BATCH_TOKENS = 1 << 20  # tokens of rows that are held in memory


def write_packed(
    examples: StoredExamples,
    output: Path,
    row_tokens: int,
    seed: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Efficiency:
    """Packs all examples into rows in a random order, and writes them to ``output``.

    ``output`` has either its old content or all of the new. ``on_progress(done, total)`` counts
    rows. Raises InputError where an example is longer than a row, the name ends in neither
    ``.arrow`` nor ``.parquet``, or the file can't be written.
    """
    check_name(output)
    longest = int(np.asarray(examples.lengths).max(initial=0))
    if longest > row_tokens:
        raise InputError(
            f"rows of {row_tokens} tokens can't hold the longest example of {longest}; raise "
            "--row-tokens or lower cutoff_len"
        )
    order = PackedOrder(examples.lengths, row_tokens, 1, seed)
    rows = order.rows(0)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with replacing(output) as file:
            writer: Any
            if output.suffix == ".parquet":
                writer = pq.ParquetWriter(file, SCHEMA, compression="zstd")
            else:
                writer = pa.ipc.new_stream(pa.PythonFile(file, "w"), SCHEMA)
            with writer:
                for batch in _batches(examples, rows, on_progress):
                    writer.write_batch(batch)
    except OSError as error:
        raise InputError(f"{output} can't be written: {error.strerror or error}") from error
    return order.efficiency


def check_name(output: Path) -> None:
    """Raises InputError if the name has neither of the two formats' endings."""
    if output.suffix not in SUFFIXES:
        raise InputError(f"{output}: give a name that ends in {' or '.join(SUFFIXES)}")


def _batches(
    examples: StoredExamples, rows: list[list[int]], on_progress: Callable[[int, int], None]
) -> Iterator[Any]:
    """Yields record batches of rows, about ``BATCH_TOKENS`` tokens in each."""
    pending: list[dict[str, NDArray[np.int32]]] = []
    tokens = 0
    for done, row in enumerate(rows, start=1):
        pending.append(_row(examples, row))
        tokens += len(pending[-1]["input_ids"])
        if tokens >= BATCH_TOKENS or done == len(rows):
            yield pa.RecordBatch.from_pylist(pending, schema=SCHEMA)
            on_progress(done, len(rows))
            pending, tokens = [], 0


def _row(examples: StoredExamples, row: list[int]) -> dict[str, NDArray[np.int32]]:
    row_examples = [examples[index] for index in row]
    labels = []
    for example in row_examples:
        trained = example.trained.copy()
        trained[0] = False  # nothing of the example stands before it
        labels.append(np.where(trained, example.input_ids, IGNORED))
    columns = (
        np.concatenate([example.input_ids for example in row_examples]),
        np.concatenate(labels),
        np.concatenate([np.arange(example.length) for example in row_examples]),
        np.array([example.length for example in row_examples]),
    )
    return {n: c.astype(np.int32) for n, c in zip(COLUMNS, columns, strict=True)}
