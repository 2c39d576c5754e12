"""What a study of hyper-parameters leaves: its JSON and its result in a sentence.

The JSON has the shape of a study of speed (docs/tune.md), so that the same page draws both: a
trial's ``log_rate`` is the logarithm of the start's held-out loss over its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hasten.tune.belief import Belief, importance
from hasten.tune.learning import Learnt
from hasten.tune.report import SCHEMA
from hasten.tune.space import Space

SEED_NOISE = 0.003  # of a loss between seeds, as a logarithm, for the importance alone


def document(learnt: Learnt, space: Space, about: Mapping[str, Any]) -> dict[str, Any]:
    """The study as plain values."""
    own = float(learnt.rows[0]["loss"])
    trials = [
        {**row, "log_rate": None if row["loss"] is None else round(math.log(own / row["loss"]), 6)}
        for row in learnt.rows
    ]
    return {
        "schema": SCHEMA,
        "study": "learning",
        **about,
        "ended": learnt.ended,
        "space": [{"name": d.name, "values": list(d.values)} for d in space.dimensions],
        "start": {"settings": space.settings(space.start), "loss": own},
        "trials": trials,
        "duel": _duel(learnt),
        "pairs": learnt.pairs,
        "unproven": learnt.unproven,
        "winner": _winner(learnt, space),
        "importance": _importance(trials, space),
    }


def said(found: Mapping[str, Any]) -> str:
    """The result in a sentence or two."""
    states = [t["state"] for t in found["trials"]]
    pruned, failed = (states.count(s) for s in ("pruned", "failed"))
    count = f"{len(states)} trainings"
    count += f", {pruned} given up early" if pruned else ""
    count += f", {failed} failed" if failed else ""
    count += f"; {found['ended']}."
    winner = found["winner"]
    if winner is not None:
        ratio, pairs = winner["ratio"], found["pairs"]
        low, high = (f"{100 * (1 - 1 / ratio[k]):.2f}" for k in ("low", "high"))
        changed = ", ".join(f"{k}={v}" for k, v in winner["changes"].items())
        mean = {k: math.fsum(p[k] for p in pairs) / len(pairs) for k in ("start", "best")}
        return (
            f"Held-out loss {mean['start']:.4f} -> {mean['best']:.4f}, lower by {low} to {high} % "
            f"(95 %, {len(pairs)} fresh seeds, equal tokens) with {changed}. {count}"
        )
    if found["unproven"]:
        return f"Not proven ({found['unproven']}): the best so far is in best.yaml. {count}"
    if found["duel"] is None:
        return f"No training had a lower loss: keep the values as they are. {count}"
    return f"No significant difference: keep the values as they are. {count}"


def _duel(learnt: Learnt) -> dict[str, Any] | None:
    if learnt.best is None:
        return None
    ratio = learnt.ratio
    if learnt.unproven is not None:
        verdict = f"inconclusive: {learnt.unproven}"
    elif learnt.better:
        verdict = "held: a lower loss from fresh seeds"
    else:
        worse = ratio is not None and ratio.high < 1
        verdict = "harmed: a higher loss" if worse else "inconclusive: no lower loss beyond doubt"
        verdict += " from fresh seeds"
    row = {
        "name": "the best again",
        "ratio": None if ratio is None else ratio.summary(),
        "verdict": verdict,
        "rounds": [p["start"] / p["best"] for p in learnt.pairs],
    }
    return {"arms": [row]}


def _winner(learnt: Learnt, space: Space) -> dict[str, Any] | None:
    ratio = learnt.ratio
    if learnt.best is None or ratio is None or not learnt.better or learnt.unproven is not None:
        return None
    return {
        "settings": space.settings(learnt.best),
        "changes": space.changes(learnt.best),
        "ratio": ratio.summary(),
    }


def _importance(trials: list[dict[str, Any]], space: Space) -> dict[str, float]:
    fine = [t for t in trials if t["log_rate"] is not None]
    points, values = [space.point(t["settings"]) for t in fine], [t["log_rate"] for t in fine]
    believed = Belief(space, noise=SEED_NOISE).after(points, values)
    return importance(space, lambda wanted: believed(wanted).mean.tolist())
