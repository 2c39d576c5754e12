"""Whether one document's loss depends on another: change all others and look.

The documents are laid out together, as the plan does it. Loss is asked of one alone; then every
token of the others becomes another token, lengths kept, and the loss of that one has to stay. Bits
may differ where experts multiply the tokens of several documents in one product, so a difference
within rounding is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hasten.core.plan import Plan
from hasten.core.session import Session, assemble
from hasten.core.setup import prepare
from hasten.measure.quality.bench import Bench, still
from hasten.parts.data.collate import TokenRecord

DOCUMENTS = 4  # of the proof's records, laid out together


def leak(bench: Bench, plan: Plan) -> dict[str, Any]:
    """The largest relative change of a document's loss by changes of the others."""
    job = bench.small(plan)
    session = assemble(prepare(job, plan, bench.known, bench.folder))
    still(session.loss_module)
    records: list[TokenRecord] = [job.records[i] for i in range(min(DOCUMENTS, len(job.records)))]
    changed = others(records)
    worst, where = 0.0, 0
    for index, record in enumerate(records):
        before = _loss(session, records, index)
        after = _loss(session, [record if i == index else c for i, c in enumerate(changed)], index)
        change = abs(after - before) / max(abs(before), 1e-30)
        if not change <= worst:
            worst, where = change, index
    return {"change": worst, "document": where, "documents": len(records)}


def others(records: Sequence[TokenRecord]) -> list[TokenRecord]:
    """The same lengths with another token at every position, of those that occur."""
    low = min(int(r.input_ids.min()) for r in records)
    span = max(int(r.input_ids.max()) for r in records) - low + 1
    step = max(span // 3, 1)
    return [
        TokenRecord((low + (r.input_ids - low + step) % span).astype(np.int32), r.trained)
        for r in records
    ]


def _loss(session: Session, records: Sequence[TokenRecord], asked: int) -> float:
    """The loss of one document among its neighbours, whose tokens carry none."""
    setup = session.setup
    silent = [
        r if i == asked else TokenRecord(r.input_ids, np.zeros_like(r.trained))
        for i, r in enumerate(records)
    ]
    batch = (setup.collate or setup.job.collate)(silent).to(setup.job.device)
    with setup.precision.region():
        loss, _ = session.module(**batch.inputs)
    return float(loss.detach())
