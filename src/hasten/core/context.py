"""Facts about the machine, the ranks and the job, collected before anything runs.

Techniques use them to decide if they can work. The planner and ``hasten check`` read
the same facts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hasten.machine.environment import World, world
from hasten.machine.host import Hardware, default_device, hardware, versions


@dataclass(frozen=True)
class ModelFacts:
    """Shape of the model that will train, known without building it."""

    architecture: str = "module"
    parameters: int = 0
    hidden_size: int = 0
    layers: int = 0
    vocabulary: int = 0
    tied_head: bool = False
    experts: int = 0
    sliding_window: bool = False
    heads: int = 0
    key_value_heads: int = 0
    # Reason why a loss may not call trunk and head separately; empty: it may.
    head_reason: str = "the model's forward hasn't been looked at"
    router_loss: bool = False  # the model's own loss includes a term that balances its routers
    adapter_weights: int = 0  # trained weights of the job's own LoRA
    merged_weights: int = 0  # weights of tensors that LoRA is merged into in each pass
    weight_bytes: float = 4.0  # bytes of a number of the model itself; 4 in an adapter
    index_topk: int = 0  # keys that an indexer chooses for a query; 0: no indexer, or unknown
    attention: str = ""  # class name in transformers, if the model was built by other code

    def why_not_float32(self) -> tuple[str, ...]:
        """Returns why a technique that needs trained weights in float32 can't be used."""
        if self.weight_bytes >= 4 or self.adapter_weights:
            return ()
        return (
            "it needs trained weights in float32, and weights_dtype is bfloat16; leave one of "
            "the two out",
        )

    def why_not_of(self, proven: Sequence[str], needs_experts: bool = False) -> tuple[str, ...]:
        """Returns why a technique proven for some architectures can't be used on this model."""
        if self.architecture in proven and (self.experts or not needs_experts):
            return ()
        models = f"{'models with experts of ' if needs_experts else ''}{', '.join(proven)}"
        return (f"not proven for the architecture {self.architecture}; it is for {models}",)


@dataclass(frozen=True)
class ExampleStats:
    """Lengths of the training examples in tokens; only their number if lengths are unknown.

    A padded preference pair has two rows of its longest answer, so ``longest`` counts both. The
    share of tokens that a layout with shared prompts saves is ``shared_share``.
    """

    count: int = 0
    tokens: int = 0
    longest: int = 0
    trained_share: float = 1.0
    shared_share: float = 0.0


@dataclass(frozen=True)
class JobContext:
    """The facts from which a technique decides."""

    hardware: Hardware
    device: str = "cpu"
    world: World = field(default_factory=World)
    model: ModelFacts = ModelFacts()
    examples: ExampleStats = ExampleStats()
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        return not self.device.startswith("cpu")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def seen_at_start() -> JobContext:
    """Returns the facts that are available before the job is read."""
    return JobContext(hardware(), default_device(), world(), versions=versions())
