"""Faults that any trainer can be given: each case is one fault, judged by what the next start does.

A life is a run in a fork of this process, which has all libraries loaded. What it tells of its
steps is held against a run of the same trainer that nothing disturbs, loss by loss, bit by bit.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from campaign.ledger import NotHereError, Outcome
from campaign.small_disk import fill, make_room, mount_small_disk
from fault_kit import EVERY, Account, Tell, damage, forked, losses_in

Told = list[list[str]]
Life = tuple[Callable[[Tell], None], float | None]  # work, and seconds until it is killed
RUN = "run"
SMALL = 32 << 20  # bytes of a disk that gets full
FULL_AFTER = 8  # steps
EPOCH = 40  # records of a peer's data set, each a step
PATIENCE = 120.0  # seconds for a case
GONE_ON, STUCK, OTHER = "went on", "could not go on", "went on with other losses"


class Trainer(Protocol):
    """A way to train the kit's model; ``steps`` of a run that is killed again and again."""

    steps: int

    def train(self, folder: Path, steps: int, tell: Tell, poison: int | None = None) -> None:
        """Go on from the newest checkpoint in the folder, if there is one."""

    def train_and_die(self, folder: Path, steps: int, tell: Tell, draw: random.Random) -> None: ...

    def train_until_dark(
        self, root: Path, run: str, left: Path, tell: Tell, draw: random.Random
    ) -> None: ...

    def newest(self, folder: Path) -> list[Path]: ...


def outcome(good: bool, kind: str, words: str = "") -> Outcome:
    return {"good": good, "kind": kind, "words": words}


def kills(trainer: Trainer, draw: random.Random, folder: Path, size: int) -> list[Outcome]:
    """SIGKILL at random instants of a run that is started again until it is done.

    The earlier the more often, and at the end of an undisturbed run's time at the latest.
    """
    truth, seconds = undisturbed(trainer, folder, trainer.steps)

    def life(run: Path) -> Life:
        return partial(trainer.train, run, trainer.steps), seconds * draw.random() ** 2 + 1e-3

    return list(_chains(folder, truth, life, size))


def kills_saving(trainer: Trainer, draw: random.Random, folder: Path, size: int) -> list[Outcome]:
    """SIGKILL inside a save, in every life but the last."""
    truth, _ = undisturbed(trainer, folder, trainer.steps)

    def life(run: Path) -> Life:
        own = random.Random(draw.random())  # a fork draws for itself
        return partial(trainer.train_and_die, run, trainer.steps, draw=own), None

    return list(_chains(folder, truth, life, size))


def flips(trainer: Trainer, draw: random.Random, folder: Path, size: int) -> list[Outcome]:
    """One bit of the newest of two checkpoints."""
    return _damaged(trainer, draw, folder, size, ("flip",))


def damages(trainer: Trainer, draw: random.Random, folder: Path, size: int) -> list[Outcome]:
    """A page of zeros, or a file cut, grown or gone, in the newest of two checkpoints."""
    return _damaged(trainer, draw, folder, size, ("page", "cut", "grow", "delete"))


def power_cuts(trainer: Trainer, draw: random.Random, folder: Path, size: int) -> list[Outcome]:
    """The power goes; the next start finds what had reached the disk."""
    truth, _ = undisturbed(trainer, folder, trainer.steps)
    found = []
    for _ in range(size):
        root, left = _fresh(folder / "disk"), folder / "left"
        shutil.rmtree(left, ignore_errors=True)
        account, own = Account(truth), random.Random(draw.random())
        work = partial(trainer.train_until_dark, root, RUN, left, draw=own)
        told, code = forked(work, PATIENCE)
        if code:
            raise RuntimeError(f"no power cut came: code {code}, {told[-1:]}")
        first = judged(account, told, code)
        steps = min(account.reached + EVERY, trainer.steps)
        told, code = forked(partial(trainer.train, left / RUN, steps), PATIENCE)
        found.append(judged(account, told, code) if first["good"] else first)
    return found


def full_disks(trainer: Trainer, draw: random.Random, folder: Path, size: int) -> list[Outcome]:
    """No room for a checkpoint from some step on; the next start has room again.

    Raises:
        NotHereError: this machine doesn't give a process a disk of its own.
    """
    truth, _ = undisturbed(trainer, folder, FULL_AFTER + 5 * EVERY)
    found = []
    for _ in range(size):
        share, place = draw.random(), _fresh(folder / "disk")
        told, code = forked(partial(_on_full_disk, trainer, place, share, truth), PATIENCE)
        if not told or told[-1][0] != "O":
            said = error_in(told)
            refused = "unshare:" in said or "mount:" in said
            raise (NotHereError if refused else RuntimeError)(f"no small disk: {code}, {said}")
        _, good, *kind = told[-1]
        found.append(outcome(good == "1", " ".join(kind)))
    return found


def poisoned(trainer: Trainer, draw: random.Random, folder: Path, size: int) -> list[Outcome]:
    """A record with a number that isn't one, met once in an epoch."""
    found = []
    for _ in range(size):
        record = draw.randrange(EPOCH)
        work = partial(trainer.train, _fresh(folder / RUN), EPOCH, poison=record)
        told, code = forked(work, PATIENCE)
        whole = any(line == ["W", "1"] for line in told)
        ruined = "weights ruined, the run ended as if all were well"
        kind = STUCK if code else "weights finite" if whole else ruined
        found.append(outcome(not code and whole, kind, error_in(told) if code else ""))
    return found


def undisturbed(trainer: Trainer, folder: Path, steps: int) -> tuple[dict[int, str], float]:
    """Every step's loss of a run that nothing disturbs, and its seconds."""
    began = time.monotonic()
    told, code = forked(partial(trainer.train, folder / "undisturbed", steps), PATIENCE)
    seconds = time.monotonic() - began
    if code or set(losses_in(told)) != set(range(1, steps + 1)):
        raise RuntimeError(f"the undisturbed run ended with code {code}: {told[-1:]}")
    return losses_in(told), seconds


def judged(account: Account, told: Told, code: int) -> Outcome:
    """What a life says of the one before it."""
    try:
        account.life(told)
    except AssertionError as error:
        said = str(error).splitlines()[0]
        lost = "lost" in said or "interval" in said
        return outcome(False, "lost more than it may" if lost else OTHER, said)
    if code > 0:
        return outcome(False, STUCK, error_in(told))
    return outcome(True, GONE_ON)


def error_in(told: Told) -> str:
    return " ".join(told[-1][1:]) if told and told[-1][0] == "E" else "it said nothing"


def _chains(
    folder: Path, truth: Mapping[int, str], life: Callable[[Path], Life], size: int
) -> Iterator[Outcome]:
    """Runs until there are so many cases; one that is stuck is given up for the next."""
    count = 0
    while count < size:
        run = _fresh(folder / RUN)
        for found in _chain(run, truth, life):
            yield found
            count += 1
            if count == size:
                return


def _chain(run: Path, truth: Mapping[int, str], life: Callable[[Path], Life]) -> Iterator[Outcome]:
    """The lives of one run. A kill counts if a step was done before it, and is judged by the next
    life that does one; what is killed before its first step changes nothing."""
    account, pending, code = Account(truth), False, -1
    while code < 0:
        told, code = forked(*life(run))
        found = judged(account, told, code)
        stepped = any(line[0] == "L" for line in told)
        if not found["good"] or (pending and (stepped or code == 0)):
            yield found
            pending = False
        if not found["good"]:
            return
        pending = pending or (stepped and code < 0)


def _damaged(
    trainer: Trainer, draw: random.Random, folder: Path, size: int, kinds: Sequence[str]
) -> list[Outcome]:
    truth, _ = undisturbed(trainer, folder, 3 * EVERY)
    whole = folder / "whole"
    told, code = forked(partial(trainer.train, whole, 2 * EVERY), PATIENCE)
    if code:
        raise RuntimeError(f"the run to be damaged ended with code {code}: {told[-1:]}")
    found: list[Outcome] = []
    while len(found) < size:
        run, kind = folder / RUN, draw.choice(kinds)
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(whole, run, symlinks=True)
        files = trainer.newest(run)
        (file,) = draw.choices(files, [p.stat().st_size for p in files])
        before = file.read_bytes()
        damage(file, kind, draw)
        if file.exists() and file.read_bytes() == before:
            continue  # a page of zeros that was one
        told, code = forked(partial(trainer.train, run, 3 * EVERY), PATIENCE)
        found.append(seen(told, code, truth, f"{kind} in {file.name}"))
    return found


def seen(told: Told, code: int, truth: Mapping[int, str], words: str) -> Outcome:
    """Whether damage to the newest of two checkpoints was noticed, and what was done about it."""
    if code:
        return outcome(False, STUCK, f"{words}: {error_in(told)}")
    began = next(int(line[1]) for line in told if line[0] == "R")
    losses = losses_in(told)
    same = all(truth.get(step) == loss for step, loss in losses.items())
    if began == 2 * EVERY:
        how = "the same losses all the same" if same else "other losses"
        return outcome(False, f"not noticed, {how}", words)
    if not same:
        return outcome(False, OTHER, words)
    if began == 0:
        return outcome(False, "began anew", words)
    if began > 2 * EVERY or 3 * EVERY not in losses:
        return outcome(False, "ended before its time", words)
    return outcome(True, "noticed, the one before was used")


def _on_full_disk(
    trainer: Trainer, place: Path, share: float, truth: Mapping[int, str], tell: Tell
) -> None:
    """Two lives on a disk of this process: one in which it gets full, one with room again."""
    mount_small_disk(place, SMALL)
    run = place / RUN

    def life(tell: Tell) -> None:
        def telling(line: str) -> None:
            tell(line)
            if line.startswith(f"L {FULL_AFTER} "):
                fill(place, int(share * sum(p.stat().st_size for p in trainer.newest(run))))

        trainer.train(run, FULL_AFTER + 3 * EVERY, telling)

    told, code = forked(life, PATIENCE)
    make_room(place)
    after, end = forked(partial(trainer.train, run, FULL_AFTER + 5 * EVERY), PATIENCE)
    losses = {**losses_in(told), **losses_in(after)}
    began = next((int(line[1]) for line in after if line[0] == "R"), -1)
    first = "training ended" if code else "training went on"
    then = "the next start went on"
    if end:
        then = "the next start could not go on"
    elif began == 0:
        then = "the next start began anew"
    elif any(truth[step] != loss for step, loss in losses.items()):
        then = "the next start had other losses"
    good = not code and then.endswith("went on")
    tell(f"O {int(good)} {first}, {then}")


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder
