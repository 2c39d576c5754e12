"""The catalogue: every technique there is, one explicit line each."""

from __future__ import annotations

from hasten.core.technique import Technique
from hasten.techniques.adapter import LoRA
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.batch import Accumulate, AdaptiveBatch
from hasten.techniques.checkpoint import Checkpoints
from hasten.techniques.collate import Packed
from hasten.techniques.feed import Prefetched
from hasten.techniques.layout import DDP
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.precision import Autocast, BF16MasterWeights
from hasten.techniques.sampler import LengthGrouped, PackedEpoch

CATALOGUE: tuple[type[Technique], ...] = (
    PackedEpoch,
    LengthGrouped,
    Packed,
    Prefetched,
    Accumulate,
    AdaptiveBatch,
    LoRA,
    DocumentAttention,
    LabelledTokenLoss,
    Autocast,
    BF16MasterWeights,
    DDP,
    Checkpoints,
)
