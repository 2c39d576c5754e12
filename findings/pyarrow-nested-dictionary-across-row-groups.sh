#!/usr/bin/env bash
# pyarrow 26.0.1: a nested Parquet column read with read_dictionary can't cross a row group.
#
# Guess: iter_batches reads a list of texts over all row groups, as it does a plain text column.
# Seen: ArrowNotImplementedError at the first batch with rows of two groups; each group alone works.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check pyarrow==26.0.1
venv/bin/python - <<'END'
import sys

import pyarrow as pa
import pyarrow.parquet as pq

print("pyarrow", pa.__version__)
texts = [f"text {n % 3}" for n in range(200)]
pq.write_table(
    pa.table({"plain": texts, "nested": [[text] for text in texts]}), "a.parquet", row_group_size=100
)


def rows(name, leaf, groups):
    file = pq.ParquetFile("a.parquet", read_dictionary=[leaf])
    batches = file.iter_batches(64, groups, [name])
    return [row[name] for batch in batches for row in batch.to_pylist()]


leaf = "nested.list.element"
assert rows("plain", "plain", [0, 1]) == texts
print("plain column, both row groups: read")
assert rows("nested", leaf, [0]) + rows("nested", leaf, [1]) == [[text] for text in texts]
print("nested column, one row group at a time: read")
try:
    rows("nested", leaf, [0, 1])
except pa.ArrowNotImplementedError as error:
    print("nested column, both row groups:", error)
else:
    print("nested column, both row groups: read, so the behaviour has changed")
    sys.exit(1)
END
