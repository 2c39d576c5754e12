"""What is measured of one run, in the same way in every variant: when each step ended, its tokens.

    began          the process started
    opened()       examples are read, libraries imported; the model comes next
    started()      the first step comes next; the peak of memory is counted from here
    step(tokens)   a step is over; time since the last one is its own, waiting for data included

Tokens are those of examples: neither padding nor anything else counts. With ``cpu_time`` all
seconds but those to the first step are CPU seconds of the process, to which other work adds little.
With ``abreast`` the process stops itself before the first step and after each one, until the
benchmark continues it. The seconds while it is stopped count for no step.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from typing import Any

import psutil
import torch

from hasten.machine import host, processes


class Clock:
    """Times of one run."""

    def __init__(self, warmup: int, cpu_time: bool = False, abreast: bool = False) -> None:
        self.warmup, self.abreast = warmup, abreast
        self._now = time.process_time if cpu_time else time.perf_counter
        self.marks: dict[str, float] = {}
        self.begins: list[float] = []
        self.ends: list[float] = []
        self.tokens: list[int] = []
        self.losses: list[float] = []
        self.peak_bytes = 0
        self.device_peak_bytes = 0
        self.compile_seconds: float | None = None

    def opened(self) -> None:
        self.marks["opened"] = self._now()

    def started(self) -> None:
        host.reset_memory_peak(host.default_device())
        self.marks["started"] = self._now()
        self._begin()

    def step(self, tokens: int) -> None:
        if host.default_device() != "cpu":
            torch.accelerator.synchronize()  # or the step would still run when it is clocked
        if not self.ends:
            self.marks["first_step_after_process"] = time.time() - psutil.Process().create_time()
        self.ends.append(self._now())
        self.tokens.append(int(tokens))
        self.peak_bytes = processes.host_memory_peak()
        self.device_peak_bytes = host.memory_peak(host.default_device())
        self._begin()

    def _begin(self) -> None:
        if self.abreast:
            os.kill(os.getpid(), signal.SIGSTOP)
        self.begins.append(self._now())

    def result(self) -> dict[str, Any]:
        """Raw times of every step and the figures that the table is made of."""
        steps = zip(self.begins[:-1], self.ends, strict=True)
        seconds = [end - begin for begin, end in steps]
        warm = min(self.warmup, len(seconds) - 1)
        steady = list(zip(self.tokens, seconds, strict=True))[warm:]
        return {
            "steps": len(seconds),
            "warmup": warm,
            "tokens": sum(self.tokens),
            "step_tokens": self.tokens,
            "step_seconds": seconds,
            "losses": self.losses,
            # sums and not the median of steps: grouped and packed steps differ in length
            "steady_tokens_per_second": sum(t for t, _ in steady) / sum(s for _, s in steady),
            "median_tokens_per_second": statistics.median(t / s for t, s in steady),
            "whole_tokens_per_second": sum(self.tokens)
            / (self.marks["started"] - self.marks["opened"] + sum(seconds)),
            "first_step_seconds": self.marks["first_step_after_process"],
            "compile_seconds": self.compile_seconds,
            "peak_bytes": self.peak_bytes,
            "device_peak_bytes": self.device_peak_bytes,
        }
