"""A run with dropout on ranks, read ahead and not, over two epochs and a resume."""

from __future__ import annotations

from typing import Any

from torch import nn

from hasten.core.job import Stop
from hasten.core.setup import Session
from hasten.core.state import state_of
from hasten.core.step import training
from hasten.core.technique import Technique
from hasten.machine.environment import World
from hasten.techniques.feed import Prefetched
from hasten.techniques.layout.ddp import DDP
from tiny import examples, language_job, restore, session_of, tiny_model


def both_ways(world: World) -> dict[str, Any]:
    plain, ahead = _run(_session(world)), _run(_session(world, Prefetched()))
    first = _session(world, Prefetched())
    steps = training(first)
    for _ in range(5):
        next(steps)
    saved = state_of(first)
    steps.close()
    second = _session(world, Prefetched())
    restore(second, *saved)
    return {"plain": plain, "ahead": ahead, "resumed": [m.tokens for m in training(second)]}


def with_dropout() -> nn.Module:
    """A model of one block whose attention drops out."""
    model: Any = tiny_model()
    model.config.num_hidden_layers = 1
    model.model.layers = model.model.layers[:1]
    model.model.layers[0].self_attn.attention_dropout = 0.2
    return model


def _session(world: World, *techniques: Technique) -> Session:
    job = language_job(with_dropout, data=examples(21), batch=4, stop=Stop(epochs=2))
    return session_of(job, *techniques, DDP(), world=world)


def _run(session: Session) -> list[Any]:
    found = [[m.loss, m.grad_norm, m.tokens] for m in training(session)]
    model: Any = session.finish()
    return [*found, model.lm_head.weight[:3].flatten().tolist()]
