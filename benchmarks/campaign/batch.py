"""One batch in a process of its own, started by ``run``: cases of one fault on one trainer.

    python benchmarks/campaign/batch.py TRAINER FAULT BATCH SIZE OUT

Libraries are loaded once; each life of a run is a fork. What happened is written to ``OUT``.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / place) for place in ("benchmarks", "tests", "tests/common", "src")]

from campaign.faults import fault_named  # noqa: E402
from campaign.ledger import NotHereError  # noqa: E402


def done(trainer: str, name: str, number: int, size: int, folder: Path) -> dict[str, Any]:
    """The outcomes of a batch; or why there is nothing to be had on this machine."""
    import torch

    torch.set_num_threads(1)  # a fork has no threads but the one that forked
    fault = fault_named(name)
    room, _, function = fault.does[trainer].partition(".")
    does = getattr(importlib.import_module(f"campaign.{room}"), function)
    draw = random.Random(f"{trainer}/{name}/{number}")
    try:
        if room == "own":
            return {"outcomes": does(draw, folder, size)}
        life = importlib.import_module(f"campaign.{trainer}_life")
        return {"outcomes": does(life.TRAINER, draw, folder, size)}
    except NotHereError as error:
        return {"outcomes": [], "skipped": str(error)[:300]}


def main() -> None:
    trainer, name, number, size, out = sys.argv[1:]
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="campaign-", dir=Path(out).parent) as folder:
        found = done(trainer, name, int(number), int(size), Path(folder))
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
