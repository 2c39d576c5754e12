"""ALLOCATOR: memory allocator, huge pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hasten.core.context import JobContext
from hasten.core.setup import Session, Setup
from hasten.core.slot import Slot
from hasten.core.technique import EffectCheck, Fidelity, Technique, knob
from hasten.machine import environment, memory, processes
from hasten.machine.processes import started_with

KINDS = ("glibc", "tcmalloc", "jemalloc", "expandable")
EXPANDABLE = "expandable_segments:True"
OLDER, UNIFIED = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"  # the first that is set counts
TUNABLE = "glibc.malloc.hugetlb=1"  # madvise for huge pages; requires glibc 2.35
REFAULT_SHARE = 0.1  # share of a test block's pages that may fault again if memory is kept


@dataclass(frozen=True)
class Allocator(Technique):
    """Keeps freed memory in the process, so steps cause no page faults for the same tensors."""

    slot = Slot.ALLOCATOR
    fidelity = Fidelity.EXACT
    auto = "try"
    kind: str = knob(
        "glibc",
        "glibc: tuned; tcmalloc, jemalloc: loaded instead; expandable: torch's on a GPU",
        only=KINDS,
    )
    huge_pages: bool = knob(
        False, "pages of 2 MiB where the kernel gives them on request", choices=(False, True)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.huge_pages and self.kind == "expandable":
            raise ValueError("huge_pages are the host's; leave them out with kind: expandable")

    def apply(self, setup: Setup) -> None:
        setup.allocator = HostAllocator(self)

    def environment(self, context: JobContext) -> Mapping[str, str]:
        if self.kind == "expandable":
            name = (
                UNIFIED
                if environment.variable(UNIFIED) and not environment.variable(OLDER)
                else OLDER
            )
            return {name: _joined(name, EXPANDABLE, ",")}
        if self.kind == "glibc":
            tunables = {"GLIBC_TUNABLES": _joined("GLIBC_TUNABLES", TUNABLE)}
            return memory.keeping() | (tunables if self.huge_pages else {})
        library = memory.library(self.kind)
        if library is None:
            return {}  # unsupported_reasons() reports it
        pages = {"THP_MEM_ALLOC_ENABLE": "1"} if self.huge_pages else {}  # the kernel's setting
        return {"LD_PRELOAD": _joined("LD_PRELOAD", library), **pages}

    def unsupported_reasons(self, context: JobContext) -> tuple[str, ...]:
        name = context.model.architecture
        reasons = []
        if self.kind == "expandable" and not context.on_gpu:
            reasons.append(f"expandable segments are a GPU's, and {name} trains on the processor")
        if self.kind == "glibc" and not memory.is_glibc():
            reasons.append(
                f"the C library of {context.hardware.system} isn't glibc, so there is nothing to "
                f"tune for {name}"
            )
        if self.kind in memory.PACKAGES and memory.library(self.kind) is None:
            package = memory.PACKAGES[self.kind]
            reasons.append(
                f"{self.kind} isn't on this machine, so {name} can't run on it; install it "
                f"(Debian, Ubuntu: {package})"
            )
        mode = memory.huge_page_mode()
        if self.huge_pages and mode not in ("madvise", "always"):
            reasons.append(
                f"this kernel gives no huge pages to {name} (transparent_hugepage is {mode}); "
                "leave huge_pages out"
            )
        return tuple(reasons)

    def check_effect(self, session: Session) -> EffectCheck:
        host = session.setup.allocator
        if not isinstance(host, HostAllocator):
            return EffectCheck(False, "the process's allocator is as it was")
        return host.proof(session.progress.step)


class HostAllocator:
    """Sets the allocator options that a running process can change."""

    def __init__(self, technique: Allocator) -> None:
        self._technique = technique
        self._faults = 0
        self._keeps_memory = False

    def __call__(self) -> None:
        if self._technique.kind == "glibc":
            self._keeps_memory = memory.keep()
        self._faults = memory.minor_faults()

    def proof(self, steps: int) -> EffectCheck:
        """Returns the loaded library, and the number of page faults."""
        technique, start = self._technique, started_with()
        if technique.kind == "expandable":
            stands = EXPANDABLE in (start.get(OLDER) or start.get(UNIFIED, ""))
            return EffectCheck(stands, f"expandable segments are {'on' if stands else 'off'}")
        per_step = (memory.minor_faults() - self._faults) / max(steps, 1)
        again = memory.faults_per_block()
        pages = memory.BLOCK // 4096
        evidence = [
            f"{per_step:,.0f} page faults per step since the start of the run",
            f"{again:,} of {pages:,} pages of a freed block were filled in again at best",
        ]
        effective = again < REFAULT_SHARE * pages
        if technique.kind == "glibc":
            effective = effective and self._keeps_memory
            evidence.insert(
                0, "glibc keeps freed memory" if self._keeps_memory else "glibc refused"
            )
        else:
            loaded = bool(processes.loaded_library(technique.kind))
            effective = loaded
            evidence.insert(0, f"{technique.kind} is {'loaded' if loaded else 'not loaded'}")
        if technique.huge_pages:
            variable = "GLIBC_TUNABLES" if technique.kind == "glibc" else "THP_MEM_ALLOC_ENABLE"
            stands = variable in start
            effective = effective and stands
            evidence.append(
                "huge pages are requested"
                if stands
                else f"no huge pages: set {variable} before the process starts"
            )
        return EffectCheck(effective, "; ".join(evidence))


def _joined(variable: str, value: str, separator: str = ":") -> str:
    """Appends a value to those that the variable has, each once."""
    before = [entry for entry in (environment.variable(variable) or "").split(separator) if entry]
    return separator.join([*(entry for entry in before if entry != value), value])
