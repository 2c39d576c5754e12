"""THREADS: threads, affinity, waiting."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hasten.core.context import JobContext
from hasten.core.session import Session
from hasten.core.setup import Setup
from hasten.core.slot import Slot
from hasten.core.technique import EffectCheck, Fidelity, Technique, knob, setting
from hasten.machine import environment, threads


@dataclass(frozen=True)
class Threads(Technique):
    """A rank's own cores, as many threads as it has cores, garbage looked for seldom."""

    slot = Slot.THREADS
    fidelity = Fidelity.ROUNDING  # sums are cut into as many pieces as there are threads
    auto = "try"
    count: int | None = setting(
        None, "threads of an operator; none: the rank's share of the machine's cores", least=1
    )
    affinity: bool = setting(True, "ranks of one machine keep to cores of their own")
    numa: bool = setting(False, "insist that a rank's cores lie in one memory node")
    waiting: str = knob(
        "auto",
        "how idle threads wait: asleep, spinning, or as OpenMP's library does (auto)",
        only=tuple(threads.WAITING),
    )
    interop: int = setting(1, "operators that may run at the same time", least=1)
    collect_every: int = knob(
        50,
        "updates between two looks for garbage; 0: as Python does",
        choices=(0, 20, 50, 200),
        least=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.numa and not self.affinity:
            raise ValueError("numa chooses the cores that affinity keeps to; leave affinity on")

    def apply(self, setup: Setup) -> None:
        host = HostThreads(self, setup.context)
        setup.threads = host
        build = setup.optimizer
        if build is None or host.collector is None:
            return
        collector = host.collector

        def watched(named: object) -> torch.optim.Optimizer:
            optimizer = build(named)  # type: ignore[arg-type]  # handed on as it came
            collector.attach(optimizer)
            return optimizer

        setup.optimizer = watched

    def environment(self, context: JobContext) -> Mapping[str, str]:
        return {"OMP_NUM_THREADS": str(self.threads(context)), **threads.waiting(self.waiting)}

    def unsupported_reasons(self, context: JobContext) -> tuple[str, ...]:
        reasons, name = [], context.model.architecture
        if self.affinity and not threads.usable_cores():
            reasons.append(
                f"{context.hardware.system} has no core masks, so {name} can't keep to its cores; "
                "set affinity: false"
            )
        nodes = len(threads.memory_nodes())
        if self.numa and nodes < 2:
            reasons.append(
                f"this machine shows {nodes} memory node, so there is none to keep {name} in; "
                "leave numa out"
            )
        elif self.numa and environment.ranks_here(context.world) % nodes:
            reasons.append(
                f"{environment.ranks_here(context.world)} ranks of {name} can't be dealt evenly to "
                f"{nodes} memory nodes; start a multiple of {nodes}, or leave numa out"
            )
        cores = context.hardware.usable_cores
        if self.count is not None and self.count > cores:
            reasons.append(
                f"count is {self.count}, but {name} may use {cores} cores here; give at most that"
            )
        return tuple(reasons)

    def cores(self, context: JobContext) -> tuple[int, ...]:
        """The cores of this rank; empty where the system has no masks."""
        usable = threads.usable_cores()
        if not usable:
            return ()
        ranks = environment.ranks_here(context.world)
        return threads.own_cores(
            usable, context.world.local_rank % ranks, ranks, threads.memory_nodes()
        )

    def threads(self, context: JobContext) -> int:
        """Threads of an operator on this rank."""
        if self.count is not None:
            return self.count
        ranks = environment.ranks_here(context.world)
        hardware = context.hardware
        logical = len(self.cores(context)) or hardware.usable_cores // ranks
        return max(1, min(logical, hardware.physical_cores // ranks or 1))

    def check_effect(self, session: Session) -> EffectCheck:
        host = session.setup.threads
        if not isinstance(host, HostThreads):
            return EffectCheck(False, f"{torch.get_num_threads()} threads, as torch chose")
        return host.proof()


class HostThreads:
    """The settings, put into force when a run is assembled."""

    def __init__(self, technique: Threads, context: JobContext) -> None:
        self._technique, self._facts = technique, context
        every = technique.collect_every
        self.collector = threads.QuietCollector(every) if every else None
        self._cores: tuple[int, ...] = ()
        self._count = 0

    def __call__(self) -> None:
        technique = self._technique
        self._count = technique.threads(self._facts)
        if technique.affinity:
            self._cores = technique.cores(self._facts)
            threads.keep_to(self._cores)
        threads.use_threads(self._count, technique.interop)

    def proof(self) -> EffectCheck:
        """How the process runs now, asked of torch, the kernel and the collector."""
        count, mask = torch.get_num_threads(), threads.usable_cores()
        start = threads.started_with()
        evidence = [f"{count} threads, {torch.get_num_interop_threads()} between operators"]
        effective = count == self._count
        if self._technique.affinity:
            effective = effective and mask == self._cores
            evidence.append(f"cores {', '.join(map(str, mask))}")
        wanted = threads.waiting(self._technique.waiting)
        stands = all(start.get(name) == value for name, value in wanted.items())
        how = threads.WAITING[self._technique.waiting]
        evidence.append(
            f"idle threads wait {how}"
            if stands
            else "the waiting mode of idle threads was set before this process read its plan"
        )
        if self.collector is not None and self.collector.updates:
            effective = effective and not gc.isenabled()
            evidence.append(
                f"garbage looked for {self.collector.collections} times in "
                f"{self.collector.updates} updates"
            )
        return EffectCheck(effective, ", ".join(evidence))
