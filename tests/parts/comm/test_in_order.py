"""The thread that finishes buckets works on the device of each, whatever the current one is."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest
import torch

from hasten.parts.comm.groups import _work


def test_a_job_runs_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda d: calls.append(str(d)))
    jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def job() -> torch.Tensor:
        calls.append(threading.current_thread().name)
        return torch.ones(1)

    for device in ("cuda:1", "cpu"):
        jobs.put((job, torch.futures.Future(), torch.device(device)))
    jobs.put(None)
    thread = threading.Thread(target=_work, args=(jobs,), name="buckets")
    thread.start()
    thread.join()
    assert calls == ["cuda:1", "buckets", "buckets"]
