"""What there is to do to a trainer, and how often. Nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TRAINERS: Mapping[str, str] = {
    "hasten": "hasten",
    "transformers": "HF Trainer",
    "lightning": "Lightning",
}


@dataclass(frozen=True)
class Fault:
    """A row of the table.

    Args:
        row: what is done, as the table says it.
        does: function of ``lives``, or of ``own`` for hasten alone.
        wanted: cases, by trainer; of files from strangers all in one batch.
        batch: cases that are done in one process, by trainer.
    """

    name: str
    row: str
    does: Mapping[str, str]
    wanted: Mapping[str, int]
    batch: Mapping[str, int]


def _all(name: str, row: str, does: str, hasten: int, peers: int, batch: int) -> Fault:
    """A fault that every trainer is given."""
    wanted = dict.fromkeys(TRAINERS, peers) | {"hasten": hasten}
    sizes = dict.fromkeys(TRAINERS, 10) | {"hasten": batch}
    return Fault(name, row, dict.fromkeys(TRAINERS, f"lives.{does}"), wanted, sizes)


def _own(name: str, row: str, does: str, wanted: int, batch: int) -> Fault:
    return Fault(name, row, {"hasten": f"own.{does}"}, {"hasten": wanted}, {"hasten": batch})


FAULTS: tuple[Fault, ...] = (
    _all("kills", "SIGKILL at a random instant", "kills", 1000, 200, 25),
    _all("kills-saving", "SIGKILL inside a save", "kills_saving", 1000, 200, 25),
    _all("flips", "one flipped bit in the newest checkpoint", "flips", 5000, 300, 100),
    _all("damage", "a zeroed page, a file cut, grown or gone", "damages", 1000, 100, 50),
    _all("power", "the power goes while a checkpoint is written", "power_cuts", 1000, 100, 25),
    _all("full-disk", "no room on the disk from some step on", "full_disks", 200, 60, 20),
    Fault(
        "nan",
        "a loss that isn't finite",
        {"hasten": "own.nans", "transformers": "lives.poisoned", "lightning": "lives.poisoned"},
        {"hasten": 200, "transformers": 20, "lightning": 20},
        {"hasten": 50, "transformers": 10, "lightning": 10},
    ),
    _own("storms", "asked to leave by repeated signals", "storms", 200, 10),
    _own("configs", "a recipe with something wrong in it", "configs", 500, 250),
    _own("strangers", "files from a stranger", "strangers", 1, 1),
    _own("ranks", "one of two ranks killed or stopped", "ranks", 100, 4),
    _own("kills-ranks", "one of 2 or 4 ranks of a split model killed", "kills_of_ranks", 300, 10),
    _own("cut-link", "the link between two ranks cut", "cut_links", 12, 3),
    _own("soak", "kills, stops and flips on two ranks, for hours", "soak", 2025, 45),
)


def fault_named(name: str) -> Fault:
    """Raises KeyError where there is none."""
    return {fault.name: fault for fault in FAULTS}[name]
