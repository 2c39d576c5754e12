"""The runs below the folders that somebody named: a run is a folder with a run's files in it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from hasten.errors import InputError

MARKS = ("metrics.jsonl", "run.json", "summary.json")
INSIDE = frozenset(  # folders of a run, which are no runs
    {*("previous", "data", "checkpoints", "model", "adapter", "best", "merged", "ranks")}
    | {*("model_average", "adapter_average", "tensorboard", "wandb", "mlflow")}
)
DEEPEST = 4
MOST_FOLDERS = 5_000  # looked into: a home directory has millions
MOST_RUNS = 32


def is_run(folder: Path) -> bool:
    """Whether one of a run's files is there."""
    return any((folder / name).is_file() for name in MARKS)


def find_runs(places: Sequence[Path]) -> dict[str, Path]:
    """Name -> folder of the runs at or below the places, at most ``MOST_RUNS``, the newest.

    A name is the way from the place, or the place's own where it is a run itself.
    """
    found: dict[str, Path] = {}
    for place in places:
        for folder in _below(place):
            name = place.resolve().name if folder == place else str(folder.relative_to(place))
            if name in found and found[name] != folder:
                name = str(folder)
            found.setdefault(name, folder)
    newest = sorted(found, key=lambda name: _changed(found[name]), reverse=True)[:MOST_RUNS]
    return {name: found[name] for name in sorted(newest)}


def check_places(places: Sequence[Path]) -> None:
    """Raise InputError for a place that isn't a run and has none below it."""
    for place in places:
        try:
            os.scandir(place).close()
        except FileNotFoundError as error:
            raise InputError(
                f"{place}: there is no such folder; give a run's folder, the `output` of its recipe"
            ) from error
        except OSError as error:
            raise InputError(
                f"{place}: can't be looked into ({error.strerror}); give a run's folder, the "
                "`output` of its recipe"
            ) from error
        if next(_below(place), None) is None:
            raise InputError(
                f"{place}: no run is in it, {DEEPEST} folders deep ({', '.join(MARKS)}); "
                "give the `output` of a recipe that has begun to train"
            )


def _below(place: Path) -> Iterator[Path]:
    """Runs, the nearest first; links aren't followed, so there are no circles."""
    level, looked = [place], 0
    for _ in range(DEEPEST + 1):
        following: list[Path] = []
        for folder in level:
            looked += 1
            if looked > MOST_FOLDERS:
                return
            if is_run(folder):
                yield folder
            else:
                following += _folders(folder)
        level = following


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = [
                e.name
                for e in entries
                if not e.name.startswith(".")
                and e.name not in INSIDE
                and e.is_dir(follow_symlinks=False)
            ]
    except OSError:  # not ours to see
        return []
    return [folder / name for name in sorted(names)]


def _changed(folder: Path) -> float:
    times = [0.0]
    for name in MARKS:
        try:
            times.append((folder / name).stat().st_mtime)
        except OSError:
            continue
    return max(times)
