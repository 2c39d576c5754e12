"""Slots: one decision of a training job each, filled by at most one technique.

Two techniques that make the same decision can't be in one plan. No further table of
conflicting pairs is needed. The order below is the order of a step: from the example on
disk to the checkpoint on disk.
"""

from __future__ import annotations

import functools
from enum import Enum


class Slot(Enum):
    """The decisions of a training job; the value describes each for people and messages."""

    SAMPLER = "which examples share a step and a micro-batch"
    COLLATE = "how examples become one tensor"
    FEED = "how a batch reaches the device"
    BATCH = "how a step's examples are cut into micro-batches"
    ADAPTER = "which parameters learn"
    ROUTING = "how tokens are balanced over experts"
    EXPERTS = "which code multiplies tokens with their experts"
    ATTENTION = "how attention is computed and documents are kept apart"
    LAYERS = "which code computes norm, rotary embedding, activation, linear layers"
    LOSS = "how head and loss are computed"
    OBJECTIVE = "what is minimised in addition to the loss"
    INDEXER = "what the indexers of sparse attention learn"
    ACTIVATION_CHECKPOINTING = "which activations are kept for the backward pass"
    COMPILE = "which graph runs"
    PRECISION = "in which number format the step runs"
    LAYOUT = "which rank holds which part"
    COMMUNICATION = "what travels between ranks, and by which path"
    OPTIMIZER = "the update rule and the format of its state"
    AVERAGE = "which running average of the weights is kept"
    CHECKPOINT = "when and how state reaches the disk"
    ALLOCATOR = "memory allocator, huge pages"

    @functools.cached_property
    def position(self) -> int:
        """Place in the order of the step; plans list their techniques by it."""
        return list(Slot).index(self)


# Slots whose techniques change the computation of a training pass.
CHANGES_A_PASS = (
    Slot.EXPERTS,
    Slot.ATTENTION,
    Slot.LAYERS,
    Slot.LOSS,
    Slot.ACTIVATION_CHECKPOINTING,
    Slot.COLLATE,
)
