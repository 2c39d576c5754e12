"""The same gradients through two optimizers: the proof that another form of one update rule owes.

A gradient says nothing of an optimizer. So the plan without it makes some steps, its gradients are
kept, and the plan with it is given the same ones, tensor by tensor. What the weights have moved by
is compared. A weight of size w in float32 can't show a move finer than w / 2^23, so that a small
learning rate is known less exactly; the floor that follows is part of the answer.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hasten.core.plan import Plan
from hasten.core.session import Session, assemble, batches
from hasten.core.setup import prepare
from hasten.measure.quality.bench import Bench, still, trainable

STEPS = 3
Named = dict[str, Tensor]


def update(bench: Bench, without: Plan, plan: Plan) -> dict[str, Any]:
    """Relative difference of what the weights moved by, and the floor that float32 sets."""
    usual = _session(bench, without)
    start = _weights(usual)
    given = [_step(usual, None, number) for number in range(STEPS)]
    ended = _weights(usual)
    del usual
    ours = _session(bench, plan)
    for number, gradients in enumerate(given):
        _step(ours, gradients, number)
    found = _weights(ours)
    moved = _norm({n: ended[n] - w for n, w in start.items()})
    apart = _norm({n: found[n] - w for n, w in ended.items()})
    floor = torch.finfo(torch.float32).eps * _norm(ended) / max(moved, 1e-300)
    return {"error": apart / max(moved, 1e-300), "floor": floor, "steps": STEPS}


def _session(bench: Bench, plan: Plan) -> Session:
    session = assemble(prepare(bench.small(plan), plan, bench.known, bench.folder))
    still(session.loss_module)
    return session


def _step(session: Session, gradients: Named | None, number: int) -> Named:
    """One update, with its own gradients or with those given; the gradients."""
    setup, parameters = session.setup, dict(trainable(session.module))
    if gradients is None:
        setup.attempt(session.engine, next(batches(session)))
        gradients = {n: p.grad.clone() for n, p in parameters.items() if p.grad is not None}
    for name, parameter in parameters.items():
        parameter.grad = gradients[name].clone() if name in gradients else None
    session.engine.norm()
    session.engine.update(setup.job.schedule(number))
    session.progress.step += 1
    return gradients


def _weights(session: Session) -> Named:
    return {n: p.detach().double().cpu().clone() for n, p in trainable(session.module)}


def _norm(tensors: Named) -> float:
    return math.sqrt(sum(float(t.square().sum()) for t in tensors.values()))
