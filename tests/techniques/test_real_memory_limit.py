"""Under a real limit of the operating system a step in one piece dies and the adaptive one ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

linux = pytest.mark.skipif(sys.platform != "linux", reason="the limit of data is Linux's")

PROGRAM = """
import json, resource, sys
import torch
import tiny
tiny.COMMON["vocab_size"] = 16_000
torch.set_num_threads(1)
from hasten.machine.memory import _kilobytes, is_out_of_memory
from hasten.techniques.batch import GradientAccumulation, AdaptiveBatch
from tiny import language_job, examples, run, session_of

def losses(*techniques):
    session = session_of(job, *techniques)
    return [m.loss for m in run(session)], session

job = language_job(data=examples(48), steps=4, batch=24)
small, _ = losses(GradientAccumulation(micro_batch_size=1))  # the libraries' memory, too
limit = _kilobytes("self/status", "VmData") + 100 * 2**20
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
found = {"fits": losses(GradientAccumulation(micro_batch_size=1))[0], "before": small}
try:
    found["one piece"] = losses()[0]
except (RuntimeError, MemoryError) as error:
    found["error"] = [is_out_of_memory(error), str(error)]
    del error
found["adaptive"], session = losses(AdaptiveBatch())
found["redone"], found["passes"] = session.setup.run_passes.redone, session.setup.run_passes.passes
found["ceiling"] = session.setup.run_passes.room.ceiling
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> Any:
    # One arena: each further one reserves what the limit would count at times and at times not.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.slow
@linux
def test_a_step_in_one_piece_dies_of_memory(found: Any) -> None:
    if "one piece" in found:
        pytest.skip("this system doesn't enforce RLIMIT_DATA")
    recognised, text = found["error"]
    assert recognised, text


@linux
def test_the_adaptive_step_ends_with_the_losses_of_a_cut_that_fits(found: Any) -> None:
    if "one piece" in found:
        pytest.skip("this system doesn't enforce RLIMIT_DATA")
    assert found["redone"] > 0
    assert found["passes"] > 4
    assert found["ceiling"] > 0
    assert found["adaptive"] == pytest.approx(found["fits"], rel=1e-5)
    assert found["fits"] == found["before"]
