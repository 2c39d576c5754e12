"""The catalogue: one explicit line for every technique."""

from __future__ import annotations

from hasten.core.technique import Technique
from hasten.techniques.activation_checkpointing import ActivationCheckpointing
from hasten.techniques.adapter import LoRA
from hasten.techniques.allocator import Allocator
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.average import WeightAverage
from hasten.techniques.batch import AdaptiveBatch, GradientAccumulation
from hasten.techniques.checkpoint import Checkpoints
from hasten.techniques.collate import Packed
from hasten.techniques.communication.compress import Half, PowerSGD, Quantised, TopK
from hasten.techniques.communication.local import LocalSteps, Stream
from hasten.techniques.communication.topology import Hierarchical
from hasten.techniques.compile import Compiled
from hasten.techniques.experts import ExpertsImplementation
from hasten.techniques.feed import Prefetched
from hasten.techniques.indexer import IndexerLoss
from hasten.techniques.layers import FusedLayers
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.layout.deepspeed import DeepSpeed
from hasten.techniques.layout.experts import ExpertParallel
from hasten.techniques.layout.fsdp import FSDP2
from hasten.techniques.layout.hybrid import Hybrid
from hasten.techniques.layout.pipeline import Pipeline
from hasten.techniques.layout.tensor import TensorParallel
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.objective import MultiTokenPrediction
from hasten.techniques.optimizer import CompactAdamW, FusedAdamW, Muon
from hasten.techniques.precision import Autocast, BF16MasterWeights, Float8
from hasten.techniques.routing import BalancedRouting
from hasten.techniques.sampler import LengthGrouped, PackedEpoch

CATALOGUE: tuple[type[Technique], ...] = (
    PackedEpoch,
    LengthGrouped,
    Packed,
    Prefetched,
    GradientAccumulation,
    AdaptiveBatch,
    LoRA,
    BalancedRouting,
    ExpertsImplementation,
    DocumentAttention,
    FusedLayers,
    LabelledTokenLoss,
    MultiTokenPrediction,
    IndexerLoss,
    ActivationCheckpointing,
    Compiled,
    Autocast,
    BF16MasterWeights,
    Float8,
    DDP,
    FSDP2,
    TensorParallel,
    Hybrid,
    Pipeline,
    ExpertParallel,
    DeepSpeed,
    Half,
    Quantised,
    TopK,
    PowerSGD,
    LocalSteps,
    Stream,
    Hierarchical,
    FusedAdamW,
    CompactAdamW,
    Muon,
    WeightAverage,
    Checkpoints,
    Allocator,
)
