"""The state of a communication method beside a host's checkpoint: made by one version, read by
another.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hasten.core.plan import Plan
from hasten.core.session import Session, assemble
from hasten.core.setup import prepare
from hasten.core.step import training
from hasten.integrations.checkpoints import keep_communication, take_communication
from hasten.machine.environment import World
from hasten.techniques.communication.compress import TopK
from hasten.techniques.layout.ddp import DDP
from tiny import VOCABULARY, examples, job_context, language_job

GOLDEN = Path(__file__).with_name("golden") / "host"
STEPS = 3


def small_model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=4,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def session(world: World) -> Session:
    job = language_job(small_model, data=examples(16), steps=8)
    plan = Plan((DDP(), TopK(0.1, dense_share=0.0, minimum=1)))
    return assemble(prepare(job, plan, job_context(job, "llama", world)))


def made(world: World) -> Any:
    """Train some steps and keep what the communication method has left out."""
    found = session(world)
    list(itertools.islice(training(found), STEPS))
    GOLDEN.mkdir(parents=True, exist_ok=True)
    keep_communication(found.setup, GOLDEN)


def taken(world: World) -> Any:
    """What a communication method has that goes on from the stored state, and how it was when it
    was stored.
    """
    found = session(world)
    take_communication(found.setup, GOLDEN)
    communication: Any = found.setup.communication
    state = plain(communication.state_dict())
    losses = [metrics.loss for metrics in itertools.islice(training(found), 1)]
    stored = plain(torch.load(GOLDEN / "hasten_communication.pt", weights_only=True))
    return {"same": state == stored, "left": total(stored), "losses": losses}


def plain(value: Any) -> Any:
    """Tensors as lists."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value


def total(value: Any) -> float:
    """The sum of the sizes of all its fractions."""
    if isinstance(value, dict):
        return sum(map(total, value.values()))
    if isinstance(value, list):
        return sum(map(total, value))
    return abs(value) if isinstance(value, float) else 0.0
