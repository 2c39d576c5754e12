"""DeepSeek-V3.2 and V4 on several ranks: what each of them trains, as plain JSON values."""

from __future__ import annotations

from functools import partial

from torch import nn

from hasten.core.plan import Plan
from hasten.core.session import assemble
from hasten.core.setup import prepare
from hasten.core.step import training
from hasten.core.technique import Technique
from hasten.machine.environment import World
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.collate import Packed
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.objective import MultiTokenPrediction
from hasten.techniques.routing import BalancedRouting
from tiny import examples, job_context, language_job, tiny_model


def _given(architecture: str, thawed: bool) -> nn.Module:
    model = tiny_model(architecture)
    return model.requires_grad_(True) if thawed else model


CASES: dict[str, tuple[str, tuple[Technique, ...]]] = {
    "v3.2": ("deepseek_v32", ()),
    "v3.2, packed": ("deepseek_v32", (Packed(), DocumentAttention(), MultiTokenPrediction())),
    "v4": ("deepseek_v4", ()),
    "v4, accumulated": (
        "deepseek_v4",
        (GradientAccumulation(micro_batch_size=1), BalancedRouting()),
    ),
}


def train_newest(world: World) -> dict[str, list[float]]:
    """The losses of every case; some examples are shorter than what V4 compresses to a key."""
    found = {}
    for case, (architecture, plan) in CASES.items():
        data = [*examples(6, seed=4, longest=3), *examples(6, seed=5, longest=12)]
        # Some come with indexers that nobody has frozen, as models of the user's own do.
        given = partial(_given, architecture, thawed="packed" not in case)
        job = language_job(given, data=data, batch=4)
        more = (DDP(),) if world.size > 1 else ()
        context = job_context(job, architecture, world=world)
        session = assemble(prepare(job, Plan((*plan, *more)), context))
        found[case] = [metrics.loss for metrics in training(session)]
        session.finish()
    return found
