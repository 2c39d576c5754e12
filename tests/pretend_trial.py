"""Speaks like ``hasten.measure.trial_process``, without torch: what it shows, and how it fails, the
recipe says.

    {"arms": {PLAN: {"rate": 100, "fails": {"steps": "diverge"}, "after": 2}}, "log": FILE}

PLAN is the names of the plan's techniques with + between them. ``fails`` names the order and how it
fails after ``after`` times: diverge (an error is reported), killed, hang, end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def main(recipe: str, plan: str, orders: int, answers: int) -> None:
    told = json.loads(Path(recipe).read_text())
    name = "+".join(entry["technique"] for entry in json.loads(plan)) or "baseline"
    arm = {"rate": 100.0, "fails": {}, "after": 0, "tokens": 10, **told["arms"].get(name, {})}
    step = 0
    seen: dict[str, int] = {}
    with os.fdopen(orders) as inbox, os.fdopen(answers, "w", buffering=1) as outbox:

        def say(answer: dict[str, Any]) -> None:
            outbox.write(json.dumps(answer) + "\n")

        def fail(what: str) -> None:
            seen[what] = seen.get(what, 0) + 1
            how = arm["fails"].get(what)
            if how is None or seen[what] <= arm["after"]:
                return
            if how == "diverge":
                say({"failed": "NotFiniteError: the gradients were not finite"})
                sys.exit(1)
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "hang":
                time.sleep(600)
            print("an error of its own")
            sys.exit(7)

        with Path(told["log"]).open("a") as log:
            log.write(f"start {name}\n")
        fail("start")
        say({"ready": True, "startup_seconds": {"imports": 0.1}})
        for line in inbox:
            order = json.loads(line)
            fail(order["do"])
            if order["do"] == "steps":
                found = []
                for _ in range(order["count"]):
                    step += 1
                    found.append(a_step(arm, step))
                time.sleep(arm.get("sleep", 0.0) * order["count"])
                with Path(told["log"]).open("a") as log:
                    log.write(f"steps {name} {step}\n")
                graphs = min(step, arm.get("compiles_until", 0))
                say({"steps": found, "compiled": {"graphs": graphs, "seconds": 0.5}})
            elif order["do"] == "evaluate":
                say({"held_out_loss": 2.0, "tokens": step * arm["tokens"]})
            else:
                say({"acted": [], "samples": [], "ledger": {"step": None}})
                return


def a_step(arm: dict[str, Any], step: int) -> dict[str, Any]:
    seconds = arm["tokens"] / arm["rate"]
    return {
        "step": step,
        "tokens": arm["tokens"],
        "slots": arm["tokens"],
        "loss": 2.0,
        "step_seconds": seconds * (1 + arm.get("settles", 0.0) / step),
        "tokens_per_second": arm["rate"],
        "peak_memory_bytes": arm.get("peak", 100),
    }


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
