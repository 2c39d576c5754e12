"""LAYOUT: each rank computes a part of every layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hasten.core.context import JobContext
from hasten.core.setup import Session, Setup
from hasten.core.slot import Slot
from hasten.core.technique import EffectCheck, Fidelity, Forecast, Technique, knob, setting
from hasten.errors import InputError
from hasten.models.memory import ADAMW_FLOAT32
from hasten.parts.comm.groups import MeshSizes
from hasten.parts.distributed.fsdp import Sharding
from hasten.parts.distributed.tensor_plans import TENSOR_PLANS
from hasten.parts.nn.causal_lm import causal_lm
from hasten.parts.nn.losses import LabelOnlyLoss, WholeLogitsLoss
from hasten.parts.nn.multi_token import decoders
from hasten.techniques.compile import Bucketed
from hasten.techniques.layout.experts import routed
from hasten.techniques.layout.mesh import LayoutOptions, MeshLayout, gathered, lay_out
from hasten.techniques.layout.ranks import no_torch_distributed
from hasten.techniques.precision import AutocastRegion


@dataclass(frozen=True)
class TensorParallel(Technique):
    """Divides heads, MLP widths and vocabulary over ranks, which process the same examples."""

    slot = Slot.LAYOUT
    fidelity = Fidelity.ROUNDING
    size: int | None = setting(None, "ranks that share each layer; none: all of them", least=1)
    sequence: bool = knob(
        True, "cut the sequence between attention and MLP too", choices=(True, False)
    )
    parallel_loss: bool = knob(
        True, "deal embedding, head and loss out by vocabulary", choices=(True, False)
    )

    def apply(self, setup: Setup) -> None:
        size = self.size or setup.context.world.size
        cut(setup, MeshSizes(tp=size), self.name(), (self.sequence, self.parallel_loss))

    def unsupported_reasons(self, context: JobContext) -> tuple[str, ...]:
        size = self.size or context.world.size
        reasons = [*no_torch_distributed(context), *no_plan(context, size)]
        if self.size is not None and self.size != context.world.size:
            reasons.append(
                f"{size} ranks share each layer and {context.world.size} are running; use "
                f"hybrid with tp: {size}, or change nproc"
            )
        return tuple(reasons)

    def forecast(self, context: JobContext) -> Forecast:
        return forecast(context, MeshSizes(tp=self.size or context.world.size))

    def check_effect(self, session: Session) -> EffectCheck:
        return proof(session)


def no_plan(context: JobContext, size: int) -> tuple[str, ...]:
    """Returns why this model's layers can't be split over so many ranks."""
    if size == 1:
        return ()
    name, model = context.model.architecture, context.model
    if reasons := model.why_not_of(tuple(TENSOR_PLANS)):
        return reasons
    for heads, what in ((model.heads, "attention"), (model.key_value_heads, "key and value")):
        if heads % size:
            return (
                f"the {heads} {what} heads of this {name} can't be dealt out evenly over {size} "
                "ranks; take a number that divides them",
            )
    return ()


def cut(
    setup: Setup,
    sizes: MeshSizes,
    name: str,
    pieces: tuple[bool, bool],
    sharding: Sharding | None = None,
    whole_gradients: bool = False,
) -> None:
    """Sets LAYOUT for the technique ``name``; ``pieces``: sequence and vocabulary are split too."""
    sequence, parallel_loss = pieces
    if sizes.tp > 1:
        refuse_other_code(setup, name)
    split = partial(_split, sequence=sequence, parallel_loss=parallel_loss)
    lay_out(setup, sizes, LayoutOptions(name, sharding or Sharding(), whole_gradients, split))
    if isinstance(setup.layout, MeshLayout) and sizes.tp > 1 and sequence:
        setup.collate = Bucketed(setup.collate or setup.job.collate, sizes.tp)


def refuse_other_code(setup: Setup, name: str) -> None:
    """Refuses code that reads a layer's weight by itself: it would get only a shard."""
    precision = setup.precision
    if isinstance(precision, AutocastRegion) and precision.layers is not None:
        raise InputError(
            f"plan: {name} cuts torch's own layers, and float8 replaces them with its own code; "
            "leave one of them out"
        )


def _split(module: nn.Module, mesh: DeviceMesh, sequence: bool, parallel_loss: bool) -> nn.Module:
    """Splits the layers of a loss module's model over ``mesh``."""
    if not isinstance(module, WholeLogitsLoss | LabelOnlyLoss):
        raise ValueError(
            f"only language models can be cut, and the loss is {type(module).__name__}; take ddp "
            "or fsdp2 as the layout"
        )
    from hasten.parts.distributed.tensor_parallel import split_layers, split_vocabulary

    model = module.model
    plan = TENSOR_PLANS.get(causal_lm(model).config.model_type)
    if plan is None:
        raise ValueError(f"how to cut the layers of {type(model).__name__} isn't known")
    for decoder in decoders(module):
        split_layers(decoder, mesh, plan, sequence)
    if not parallel_loss:
        return module
    if isinstance(module, WholeLogitsLoss):  # no rank has full rows of logits
        ahead, module = module.ahead, LabelOnlyLoss(model, terms=module.terms)
        module.ahead = ahead
    split_vocabulary(model, mesh, plan)
    return module


def forecast(context: JobContext, sizes: MeshSizes) -> Forecast:
    """Forecasts split layers as shards, except routed experts and small norms, routers, latents."""
    pieces = sizes.shard * sizes.tp
    if context.world.size == 1 or pieces == 1:
        return Forecast()
    experts = routed(context)
    other_weights = context.model.parameters - experts
    gone = ADAMW_FLOAT32 * (other_weights * (1 - 1 / pieces) + experts * (1 - 1 / sizes.shard))
    passing = gathered(context) / sizes.tp if sizes.shard > 1 else 0.0
    return Forecast(flops=1 / sizes.tp, resident_bytes=-gone, passing_bytes=passing)


def proof(session: Session) -> EffectCheck:
    layout, steps = session.setup.layout, session.progress.step
    if not isinstance(layout, MeshLayout):
        return EffectCheck(False, "one rank holds everything")
    local_count = sum(p.numel() for p in layout.weights.parameters())
    total = sum(p.numel() for p in session.module.parameters() if p.requires_grad)
    return EffectCheck(
        steps > 0 and (local_count < total or layout.sizes.dp > 1),
        f"{layout.sizes}: this rank holds {local_count:,} of {total:,} trained weights; {steps} "
        "steps",
    )
