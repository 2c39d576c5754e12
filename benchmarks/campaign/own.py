"""Faults that hasten alone is given: what other trainers have no counterpart of.

Ranks, signals and links run as the scripts of ``tests/faults``; strangers' files are those tests.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import sys
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from campaign.ledger import NotHereError, Outcome
from campaign.lives import outcome
from fault_kit import PlantedLoss
from hasten.core.health import StepChecks
from hasten.core.step import training
from hasten.errors import InputError
from hasten.recipe.schema import Recipe, load_recipe
from labs import missing
from tiny import examples, language_job, session_of

TESTS = Path(__file__).parents[2] / "tests"
STRANGERS = ("faults/test_strangers.py", "models/test_convert.py")
SCRIPT_SECONDS = 900.0
LONGEST_WAIT = 10.0  # seconds that a rank may take to notice that another one has died
CODES = {"SIGTERM": 75, "SIGUSR1": 75, "SIGINT": 130}
CUTS = {"a cut of 5 s is waited for": ("5", "30", "2"), "a cut of 20 s restarts": ("20", "8", "5")}
CUTS |= {"a cut for good": ("inf", "8", "1")}


def nans(draw: random.Random, folder: Path, size: int) -> list[Outcome]:
    """Losses that aren't finite at random steps: no weight is touched by them."""
    torch.set_num_threads(1)
    data = examples(24)
    found = []
    for _ in range(size):
        steps = sorted(draw.sample(range(1, 13), draw.randint(1, 3)))
        planted = {step: draw.choice([math.nan, math.inf, -math.inf]) for step in steps}
        job = language_job(steps=12, data=data, loss=lambda m, p=planted: PlantedLoss(m, p))
        session = session_of(job)
        session.setup.step_checks = StepChecks(quarantine=folder / "quarantined.jsonl")
        skipped = [m.step for m in training(session) if m.skipped]
        whole = all(bool(p.isfinite().all()) for p in session.model.parameters())
        good = whole and skipped == steps
        kind = "skipped, weights finite" if good else "weights ruined" if not whole else "not seen"
        found.append(outcome(good, kind, f"planted {steps}, skipped {skipped}"))
    return found


def storms(draw: random.Random, folder: Path, size: int) -> list[Outcome]:
    """Lives that are asked to leave by signals that repeat."""
    told = _script("signal_storm.py", folder, size, draw.randrange(10**6))
    same = _same_lines(folder)
    found = []
    for life in told["lives"]:
        good = life["code"] == CODES[life["signal"]] and life["saved"] == life["steps"] and same
        lost = life["steps"] - life["saved"]
        kind = "left with its code, no step lost" if good else f"{lost} steps lost"
        seconds = {"seconds to leave": life["seconds"]}
        found.append(outcome(good, kind, str(life)) | {"numbers": seconds})
    return found


def ranks(draw: random.Random, folder: Path, size: int) -> list[Outcome]:
    """One of two ranks killed or stopped."""
    kills = size // 2
    return _soaked(folder, kills, size - kills, draw.randrange(10**6), 0)


def kills_of_ranks(draw: random.Random, folder: Path, size: int) -> list[Outcome]:
    """One rank of a layout that splits the model killed in a start, load, step, save or rename."""
    told = _script("rank_kills.py", folder / "run", size, draw.randrange(10**6))
    found = []
    for kill in told["kills"]:
        lost, late = kill["resumed"] < kill["saved"], kill["waited"] > LONGEST_WAIT
        good = told["same"] and not (lost or late or told["damaged"])
        kind = "a checkpoint lost" if lost else "others waited too long" if late else "other losses"
        kind = f"{kill['moment']}: resumed, same losses" if good else f"{kill['moment']}: {kind}"
        numbers = {"seconds that other ranks waited": kill["waited"]}
        found.append(outcome(good, kind, f"{told['layout']}: {kill}") | {"numbers": numbers})
    return found


def soak(draw: random.Random, folder: Path, size: int) -> list[Outcome]:
    """A longer run of two ranks under kills, stops and flipped bits in turn."""
    third = size // 3
    return _soaked(folder, size - 2 * third, third, draw.randrange(10**6), third)


def cut_links(draw: random.Random, folder: Path, size: int) -> list[Outcome]:
    """A link between two ranks' hosts that is cut, of each kind as often.

    Raises:
        NotHereError: this machine has no namespaces.
    """
    if reason := missing():
        raise NotHereError(reason)
    found = []
    for number in range(size):
        (kind, words), place = list(CUTS.items())[number % len(CUTS)], folder / str(number)
        place.mkdir()
        told = _script("link_soak.py", place, *words)
        log = place / "restarts.jsonl"
        restarts = len(log.read_text().splitlines()) if log.exists() else 0
        if kind == "a cut for good":
            cause = json.loads(log.read_text().splitlines()[0])["cause"] if restarts else ""
            good = told["code"] == 7 and bool(re.search(r"rank \d", cause)) and restarts == 2
        else:
            good = told["code"] == 0 and _same_lines(place)
            good &= restarts == 0 if kind.endswith("waited for") else restarts > 0
        seconds = {f"seconds, {kind}": told["seconds"]}
        found.append(outcome(good, kind, f"{told}, {restarts} restarts") | {"numbers": seconds})
    return found


def configs(draw: random.Random, folder: Path, size: int) -> list[Outcome]:
    """Recipes with something wrong in them: refused before any work, in a sentence."""
    good = {"model": "deepseek-llm-tiny", "dataset": "stdlib", "max_steps": 3}
    path, found = folder / "recipe.yaml", []
    for _ in range(size):
        kind = draw.choice(list(WRONGS))
        text, wanted = WRONGS[kind](draw, dict(good))
        path.write_text(text)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                load_recipe(path)
            said = "it was accepted"
        except InputError as error:
            said = str(error)
        except Exception as error:  # a traceback is what the case is about
            said = f"traceback of {type(error).__name__}\n"
        fine = "\n" not in said and said != "it was accepted"
        fine = fine and all(words in said for words in wanted)
        found.append(outcome(fine, f"{kind}: {'refused' if fine else 'not refused'}", said[:200]))
    return found


def strangers(draw: random.Random, folder: Path, size: int) -> list[Outcome]:
    """Manifests, pickles, links and pipes from a stranger: each test is a case."""
    report = folder / "report.xml"
    words = ["-q", "-p", "no:cacheprovider", f"--junit-xml={report}"]
    places = [str(TESTS / name) for name in STRANGERS]
    command = [sys.executable, "-m", "pytest", *words, *places]
    subprocess.run(command, cwd=TESTS.parent, capture_output=True, timeout=SCRIPT_SECONDS)
    cases = ElementTree.parse(report).getroot().iter("testcase")
    found = []
    for case in cases:
        if case.find("skipped") is None:
            good = len([child for child in case if child.tag in ("failure", "error")]) == 0
            found.append(outcome(good, "refused" if good else "failed", str(case.get("name"))))
    return found


def _mistyped(draw: random.Random, good: dict[str, Any]) -> tuple[str, list[str]]:
    key = draw.choice([key for key in Recipe.model_fields if len(key) > 4])
    place = draw.randrange(1, len(key) - 1)
    wrong = key[:place] + draw.choice("QZ") + key[place + 1 :]
    return json.dumps({**good, wrong: 1}), [f"unknown key '{wrong}'", "did you mean"]


def _strange(draw: random.Random, good: dict[str, Any]) -> tuple[str, list[str]]:
    keys = ("max_steps", "learning_rate", "seed", "cutoff_len", "hang_seconds", "max_restarts")
    key = draw.choice(keys)
    value = draw.choice(["soon", [1], {"a": 1}, -7, None, "", -0.5])
    return json.dumps({**good, key: value}), [key]


def _half(draw: random.Random, good: dict[str, Any]) -> tuple[str, list[str]]:
    text = json.dumps(good)
    return text[: draw.randrange(1, len(text) - 1)], []


def _gone(draw: random.Random, good: dict[str, Any]) -> tuple[str, list[str]]:
    key = draw.choice(["model", "max_steps"])
    del good[key]
    return json.dumps(good), [key]


def _twice(draw: random.Random, good: dict[str, Any]) -> tuple[str, list[str]]:
    key = draw.choice(list(good))
    return "\n".join(f"{k}: {v}" for k, v in [*good.items(), (key, good[key])]), [key]


WRONGS: dict[str, Callable[[random.Random, dict[str, Any]], tuple[str, list[str]]]] = {
    "a mistyped key": _mistyped,
    "a value of another kind": _strange,
    "half a file": _half,
    "a key left out": _gone,
    "a key twice": _twice,
}


def _soaked(folder: Path, kills: int, stops: int, seed: int, flips: int) -> list[Outcome]:
    told = _script("rank_soak.py", folder, kills, stops, seed, flips)
    same, asked = _same_lines(folder), kills + stops + flips
    good = told["code"] == 0 and same and len(told["recoveries"]) == asked
    kind = "gone on with, same losses" if good else "other losses" if not same else "not gone on"
    words = f"code {told['code']}, {len(told['recoveries'])} of {asked} recovered"
    return [
        outcome(good, kind, words) | {"numbers": {f"seconds to the next step, {fault}": seconds}}
        for fault, seconds in told["recoveries"]
    ] + [outcome(False, kind, words)] * (asked - len(told["recoveries"]))


def _same_lines(folder: Path) -> bool:
    ours, reference = (p / "metrics.jsonl" for p in (folder, folder / "reference"))
    return ours.read_bytes() == reference.read_bytes()


def _script(name: str, *words: object) -> dict[str, Any]:
    """What a script of ``tests/faults`` prints."""
    command = [sys.executable, "-W", "ignore", str(TESTS / "faults" / name), *map(str, words)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=SCRIPT_SECONDS, env=dict(os.environ)
    )
    if done.returncode:
        raise RuntimeError(f"{name} ended with code {done.returncode}: {done.stderr[-400:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found
