"""Records a run for observers: its start, machine, and numbers for other tools."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from hasten.core.setup import Session
from hasten.machine import environment, host
from hasten.machine.files import write_atomic
from hasten.machine.gpu import GpuReading, Gpus
from hasten.machine.processes import LoadMeter
from hasten.recipe.schema import Recipe
from hasten.training.metric_writers import Writers

# Files that a run writes for observers, besides its lines of steps and evaluations.
#
# - run.json: start time, number of steps, plan, price and process
# - machine.jsonl: load, temperature and free space of devices, host and disk, every ten seconds
# - ranks/R.json: duration of a rank's own work, every ten seconds, if there are several ranks
#
# A thread reads the machine of the first rank, so steps don't wait. A rank's own work ends where it
# must wait for others: data, copy, forward. In backward all ranks wait for the slowest one, so full
# steps take equally long and don't show which rank is slow.

EVERY_SECONDS = 10.0
OWN = ("data", "copy", "forward")
Steps = Sequence[Mapping[str, float]]


class Recording:
    """Records a run's steps, on every rank; ``step`` and ``evaluation`` receive each.

    Args:
        folder: the run's.
        start: content of ``run.json`` besides time and process.
        rank: this one's number, of ``ranks``.
        parts: seconds of each part of each step so far, as the step's clock keeps them.
        log_to: names of writers for other tools.
        gpus: UUIDs of the GPUs that train on this machine.
        every: seconds between two looks.
    """

    def __init__(
        self,
        folder: Path,
        start: Mapping[str, Any],
        rank: int = 0,
        ranks: int = 1,
        parts: Steps = (),
        log_to: Sequence[str] = (),
        gpus: Sequence[str] = (),
        every: float = EVERY_SECONDS,
    ) -> None:
        self._folder, self._start, self._rank, self._ranks = folder, start, rank, ranks
        self._parts, self._names, self._uuids, self._every = parts, log_to, gpus, every
        self._step = 0
        self._told = time.monotonic()
        self._own: list[float] = []
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._writers: Writers | None = None

    def __enter__(self) -> Recording:
        if self._rank:
            return self
        process = {"host": platform.node(), "pid": os.getpid(), "began": time.time()}
        with contextlib.suppress(OSError):  # an error of the observation must not end a training
            write_atomic(
                self._folder / "run.json", json.dumps({**process, **self._start}, default=str)
            )
        self._writers = Writers(self._names, self._folder, self._start)
        self._thread = threading.Thread(target=self._sample, daemon=True, name="recording")
        self._thread.start()
        return self

    def __exit__(self, *reason: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=2.0)  # a hanging disk must not block the run
        if self._writers is not None:
            self._writers.close()

    def step(self, metrics: Any) -> None:
        """Records a step that has ended; its metrics have ``step`` and ``to_dict()``."""
        self._step = metrics.step
        if self._ranks > 1:
            self._note_rank()
        if self._writers is not None and self._names:
            self._writers.put("train", metrics.to_dict())

    def evaluation(self, evaluation: Any) -> None:
        """Records an evaluation that has ended."""
        if self._writers is not None and self._names:
            self._writers.put("eval", evaluation.to_dict())

    def _note_rank(self) -> None:
        if self._parts:
            last = self._parts[-1]
            self._own.append(sum(last.get(part, 0.0) for part in OWN))
        now = time.monotonic()
        if not self._own or now - self._told < self._every:
            return
        mean, self._own, self._told = sum(self._own) / len(self._own), [], now
        line = {"step": self._step, "time": time.time(), "own_seconds": mean}
        with contextlib.suppress(OSError):
            folder = self._folder / "ranks"
            folder.mkdir(exist_ok=True)
            text = json.dumps({**line, "host": platform.node()})
            write_atomic(folder / f"{self._rank}.json", text, durable=False)

    def _sample(self) -> None:
        gpus = Gpus(self._uuids) if self._uuids else None
        psutil.cpu_percent()  # start of this measurement
        psutil.cpu_times_percent()
        # With several ranks, this run's other ranks would count as foreign.
        load = LoadMeter(host.usable_cores()) if self._ranks == 1 else None
        while not self._over.wait(self._every):
            with contextlib.suppress(OSError):  # a full disk may have room later
                state = sample(self._folder, gpus, load)
                line = {"step": self._step, "time": time.time(), **state}
                with (self._folder / "machine.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")


def sample(
    folder: Path, gpus: Gpus | None = None, load: LoadMeter | None = None
) -> dict[str, float | None]:
    """Returns the state of devices, host and the folder's disk since the last call; None: unknown.

    Without GPUs the device is the processor, and its power is unknown.
    """
    memory = psutil.virtual_memory()
    busy = psutil.cpu_percent() / 100
    waiting = getattr(psutil.cpu_times_percent(), "iowait", None)  # exists on Linux
    foreign: float | None = None
    if load is not None:
        load.lap("run")
        foreign = load.share("run")
        load.begin()
    readings = gpus.readings() if gpus is not None else []
    device_sample = (
        of_gpus(readings)
        if readings
        else {
            "device_utilisation": busy,
            "device_temperature": _processor_temperature(),
            "device_power_watts": None,
            "device_memory_bytes": memory.total - memory.available,
        }
    )
    return {
        **device_sample,
        "host_utilisation": busy,
        "foreign_load": foreign,
        "disk_wait_share": None if waiting is None else waiting / 100,
        "host_memory_bytes": memory.total - memory.available,
        "disk_free_bytes": psutil.disk_usage(str(folder)).free,
    }


def of_gpus(readings: Sequence[GpuReading]) -> dict[str, float | None]:
    """Combines all GPUs: mean utilisation, highest temperature, total power and memory."""
    use = [r.utilisation for r in readings if r.utilisation is not None]
    heat = [r.temperature for r in readings if r.temperature is not None]
    power = [r.power_watts for r in readings if r.power_watts is not None]
    memory = [r.memory_used_bytes for r in readings if r.memory_used_bytes is not None]
    return {
        "device_utilisation": sum(use) / len(use) if use else None,
        "device_temperature": max(heat, default=None),
        "device_power_watts": sum(power) if power else None,
        "device_memory_bytes": sum(memory) if memory else None,
    }


def _processor_temperature() -> float | None:
    read = getattr(psutil, "sensors_temperatures", None)  # not available on every system
    if read is None:
        return None
    sensors = read()
    for name in ("coretemp", "k10temp", "zenpower", "cpu_thermal"):
        values = [each.current for each in sensors.get(name, ()) if each.current]
        if values:
            return float(max(values))
    return None


def recording_of(session: Session, recipe: Recipe, output: Path) -> Recording:
    """Returns the recording of a recipe's run, on every rank."""
    setup, price = session.setup, recipe.price
    context, size = setup.context, setup.context.world.size
    start = {
        "model": recipe.model,
        "dataset": recipe.model_dump(mode="json")["dataset"],
        "data": setup.job.terms.get("data"),
        "total_steps": setup.job.schedule.total_steps,
        "world_size": size,
        "plan": setup.plan.to_list(),
        "hardware": context.hardware.short,
        "currency": price.currency if price else None,
        "price_per_hour": price.hour * price.paid(size) if price else None,
    }
    return Recording(
        output,
        start,
        rank=context.world.rank,
        ranks=size,
        parts=setup.clock.steps,
        log_to=recipe.log_to,
        gpus=host.accelerator_uuids(context.device, environment.ranks_here(context.world)),
    )


def machine_facts() -> dict[str, Any]:
    """Returns facts about the machine for the summary, beyond those of ``hardware``."""
    gpus = Gpus()
    return {
        "numa": [asdict(node) for node in host.numa_nodes()],
        "disks": [asdict(mount) for mount in host.mounts()],
        "network": [asdict(card) for card in (*host.interfaces(), *host.rdma_devices())],
        "limits": asdict(host.limits()),
        "driver": gpus.driver,
        "gpus": [asdict(gpu) for gpu in gpus.descriptions()],
        "gpu_paths": gpus.paths(),
    }


def call_all(*functions: Callable[[Any], None]) -> Callable[[Any], None]:
    """Returns one function that calls these in turn."""

    def call(value: Any) -> None:
        for function in functions:
            function(value)

    return call
