"""What the pipeline's tests run on ranks: every schedule against one process, and stages asleep."""

from __future__ import annotations

import gc
import itertools
import time
import weakref
from dataclasses import astuple
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hasten.machine.environment import World
from hasten.parts.distributed.pipeline.model import AsyncPipeline, PipelineModel
from hasten.parts.distributed.pipeline.schedules import SCHEDULES, stages_per_rank
from hasten.parts.nn.losses import WholeLogitsLoss
from tiny import VOCABULARY, tiny_config

LAYERS = 5  # uneven stages wherever there is more than one


def language_model(architecture: str, tied: bool = False, layers: int = LAYERS) -> Any:
    """A tiny model in float64 with more layers than the other tests' have."""
    import transformers as hf

    config = tiny_config(architecture)
    config.num_hidden_layers, config.tie_word_embeddings = layers, tied
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"] * layers
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config)
    model.set_attn_implementation("sdpa")
    if "deepseek" in architecture:
        model.set_experts_implementation("eager")
    return model.double()


def language_batch(rows: int = 8, width: int = 11) -> dict[str, Tensor]:
    """Trained tokens differ from row to row, so that a mean of means would be wrong."""
    draw = torch.Generator().manual_seed(4)
    ids = torch.randint(3, VOCABULARY, (rows, width), generator=draw)
    labels = ids.clone()
    labels[:, :4] = -100
    labels[3:, 5:] = -100
    return {"input_ids": ids, "labels": labels}


def plain_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The mean over all trained tokens of the batch, in one pass."""
    labels = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    total, count = WholeLogitsLoss(model)(labels=labels, input_ids=batch["input_ids"])
    return total / count


def largest_error(stages: PipelineModel, there: nn.Module, here: nn.Module) -> float:
    """Of the gradients of this process's stages, against those of the reference."""
    own = {id(p) for p in stages.parameters()}
    pairs = zip(there.parameters(), here.parameters(), strict=True)
    return max(
        float(((torch.zeros_like(b) if a.grad is None else a.grad) - b.grad).abs().max())
        for a, b in pairs
        if id(a) in own and b.grad is not None
    )


def schedules(world: World) -> dict[str, Any]:
    """Loss and gradients of every schedule, for a model and for a plain sequence of layers."""
    found: dict[str, Any] = {}
    cases = [(schedule, "llama", True, "never", True) for schedule in SCHEDULES]
    cases += [("zbv", "deepseek_v3", False, "never", True)]
    cases += [(schedule, "qwen2", False, "always", False) for schedule in ("gpipe", "1f1b")]
    for case in cases:
        found[", ".join(map(str, case))] = _language(world, *case)
    for schedule in SCHEDULES:
        found[f"{schedule}, layers"] = _layers(world, schedule)
    return found


def _language(
    world: World, schedule: str, architecture: str, tied: bool, checkpoint: str, overlap: bool
) -> dict[str, float]:
    model, reference = (language_model(architecture, tied) for _ in range(2))
    pipeline = AsyncPipeline(
        world.size, 1, overlap, schedule=schedule, checkpoint=checkpoint, optimizer=False
    )
    stages = pipeline.partition_model(model)
    batch = language_batch()
    loss = float(pipeline.step(stages, batch))
    expected = plain_loss(reference, batch)
    expected.backward()
    found = {
        "loss": abs(loss - float(expected.detach())),
        "gradient": largest_error(stages, model, reference),
        "parameters": sum(p.numel() for p in stages.parameters()),
        "all": sum(p.numel() for p in model.parameters()),
    }
    layers = [weakref.ref(layer) for layer in model.model.layers]
    del model
    gc.collect()
    return {**found, "layers": sum(layer() is not None for layer in layers)}


def _layers(world: World, schedule: str) -> dict[str, float]:
    def build() -> nn.Sequential:
        torch.manual_seed(1)
        wide = (6, 9, 5, 8, 7, 6, 4, 5, 3)
        layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(wide)]
        return nn.Sequential(*layers).double()

    model, reference = build(), build()
    draw = torch.Generator().manual_seed(2)
    pipeline = AsyncPipeline(world.size, 1, schedule=schedule, optimizer=False)
    stages = pipeline.partition_model(model)
    error = 0.0
    for inside in ((), (5,)):  # the shape that stages send changes
        x = torch.randn(8, *inside, 6, generator=draw).double()
        y = torch.randn(8, *inside, 3, generator=draw).double()
        loss = pipeline.step(stages, (x, y), F.mse_loss)
        expected = F.mse_loss(reference(x), y)
        expected.backward()
        error = max(error, abs(float(loss) - float(expected.detach())))
    return {"loss": error, "gradient": largest_error(stages, model, reference)}


def updates(world: World) -> dict[str, Any]:
    """The pipeline's own optimizer against one over the whole model; then one rank looks on."""
    model, reference = (language_model("llama", tied=True) for _ in range(2))
    pipeline = AsyncPipeline(world.size, 2, learning_rate=0.01)
    stages = pipeline.partition_model(model)
    for _ in range(3):
        pipeline.step(stages, language_batch())
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        plain_loss(reference, language_batch()).backward()
        optimizer.step()
    own = {id(p) for p in stages.stages.parameters()}
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    tied = [layer for layer in stages.modules() if isinstance(layer, nn.Embedding | nn.Linear)]
    edge = tied[0] if world.rank == 0 else tied[-1]  # embedding, or head
    looked = AsyncPipeline(world.size, 2)
    stages = looked.partition_model(language_model("llama"))
    if world.rank == 0:
        print(sum(p.numel() for p in stages.parameters()))
    looked.step(stages, language_batch())
    return {
        "error": max(float((a - b).abs().max().detach()) for a, b in pairs if id(a) in own),
        "tied": edge.weight.detach().flatten()[:50].tolist(),
        "left": looked.state_dict()["optimizer"] is None,
    }


class _Sleep(torch.autograd.Function):
    """Takes its time in the forward pass, and again when a gradient passes through it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, before: float, after: float) -> Tensor:
        ctx.after = after
        time.sleep(before)
        return value * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(ctx.after)
        return gradients[0], None, None


class Asleep(nn.Module):
    """A layer whose three passes take fixed times and no processor: F, I and W seconds."""

    def __init__(self, forward: float, inputs: float, weights: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.times = forward, inputs, weights

    def forward(self, x: Tensor) -> Tensor:
        ahead, inputs, weights = self.times
        scale: Any = _Sleep.apply(self.scale, 0.0, weights)  # type: ignore[no-untyped-call]
        out: Any = _Sleep.apply(x * scale, ahead, inputs)  # type: ignore[no-untyped-call]
        found: Tensor = out
        return found


def bubbles(world: World, seconds: float = 0.002, micro_batches: int = 4) -> dict[str, Any]:
    """A recorded step of each schedule, whose stages sleep ``seconds`` in F, in I and in W."""
    found: dict[str, Any] = {}
    for schedule in SCHEDULES:
        each = stages_per_rank(schedule)
        layers = [Asleep(*[seconds / each] * 3) for _ in range(world.size * each)]
        pipeline = AsyncPipeline(world.size, 1, schedule=schedule, optimizer=False)
        stages = pipeline.partition_model(nn.Sequential(*layers), [1.0] * len(layers))
        batch = torch.ones(micro_batches, 2), torch.ones(micro_batches, 2)
        pipeline.step(stages, batch, F.mse_loss)
        with pipeline.recording(stages):
            pipeline.step(stages, batch, F.mse_loss)
        found[schedule] = {
            "share": pipeline.bubble,
            "events": [astuple(e) for e in pipeline.events],
        }
    return found
