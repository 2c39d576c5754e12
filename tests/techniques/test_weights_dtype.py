"""Weights held in bfloat16: the file's bits on every rank, and one training in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from hasten.core.resume_check import check_same_job
from hasten.core.setup import Session
from hasten.core.step import training
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.machine.environment import World
from hasten.machine.lazy_torch import is_dtensor
from hasten.models.load import load_model, take_own_attention
from hasten.recipe.build import context_of, plan_of, recipe_terms
from hasten.recipe.schema import Recipe
from hasten.techniques.adapter import LoRA
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.layout.experts import ExpertParallel
from hasten.techniques.layout.fsdp import FSDP2
from hasten.techniques.layout.pipeline import Pipeline
from hasten.techniques.layout.tensor import TensorParallel
from hasten.techniques.precision import BF16MasterWeights
from ranks import once_on_ranks
from techniques.expert_checkpoint_jobs import shared_folder
from techniques.sharded_rank_jobs import even_examples
from tiny import able, language_job, session_of, tiny_config

LAYOUTS: dict[str, tuple[str, tuple[Technique, ...]]] = {
    "ddp": ("qwen2", (DDP(),)),
    "fsdp2": ("qwen2", (FSDP2(),)),
    "fsdp2, adapters": ("qwen2", (LoRA(rank=4), FSDP2())),
    "fsdp2, adapters with masters": ("qwen2", (LoRA(rank=4), BF16MasterWeights(), FSDP2())),
    "tp": ("qwen2", (TensorParallel(),)),
    "pp": ("qwen2", (Pipeline(),)),
    "ep": ("deepseek_v3", (ExpertParallel(),)),
}
HALF = torch.bfloat16
ROUNDING = 2.0**-8  # of a bfloat16 number


def saved(architecture: str, folder: Path) -> str:
    """A model as published ones are: bfloat16."""
    import transformers as hf

    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(tiny_config(architecture))
    model.to(HALF).save_pretrained(folder)
    return str(folder)


class Loaded:
    """Builds a saved model with weights in a format."""

    def __init__(self, source: str, dtype: torch.dtype = HALF) -> None:
        self.source, self.dtype = source, dtype

    def __call__(self, **how: bool) -> nn.Module:
        model: Any = load_model(self.source, dtype=self.dtype, **how)
        take_own_attention(model)
        built: nn.Module = model
        return built

    def late(self) -> nn.Module:
        return self(late=True)


def session(model: Loaded, architecture: str, world: World | None, *plan: Technique) -> Session:
    job = language_job(model, data=even_examples(8), batch=4, steps=3, lr=1e-3)
    return session_of(job, *plan, architecture=architecture, world=world)


def differing(weights: dict[str, torch.Tensor], folder: str) -> list[str]:
    """Names of weights of a file that are there with other bits or in another format."""
    stored = load_file(Path(folder) / "model.safetensors")
    assert len(weights.keys() & stored) >= 8
    return [
        name
        for name in weights.keys() & stored
        if weights[name].dtype != HALF or not torch.equal(weights[name], stored[name])
    ]


def own_weights(session: Session) -> dict[str, torch.Tensor]:
    """Weights by their names in the file; those of other ranks are left out."""
    found = {}
    for name, weight in session.module.named_parameters():
        own = name.removeprefix("module.").removeprefix("model.")
        own = own.removeprefix("base_model.model.").replace(".base_layer", "")
        tensor = weight.detach()
        found[own] = tensor.full_tensor() if is_dtensor(tensor) else tensor
    return found


def on_two(world: World) -> dict[str, Any]:
    folder, found = shared_folder(), {}
    names = {architecture for architecture, _ in LAYOUTS.values()}
    if world.is_main:
        for name in names:
            saved(name, folder / name)
    dist.barrier()
    for case, (name, plan) in LAYOUTS.items():
        model = Loaded(str(folder / name))
        split = session(model, name, world, *plan)
        differ = differing(own_weights(split), model.source)
        formats = {str(p.dtype) for p in split.module.parameters() if p.requires_grad}
        alone = session(model, name, None, *plan[:-1])
        losses = [[m.loss for m in training(s)] for s in (split, alone)]
        frozen = {n: w for n, w in own_weights(split).items() if "lora" not in n}
        changed = differing(frozen, model.source)
        found[case] = {
            "differ": differ,
            "formats": sorted(formats),
            "losses": losses,
            "changed": len(changed),
        }
    return found


two = once_on_ranks(on_two)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_hold_the_bits_of_the_file_and_train_like_one_process(
    two: list[Any], name: str
) -> None:
    adapts = "adapters" in name
    for rank in two:
        found = rank[name]
        assert not found["differ"]
        assert (found["changed"] == 0) == adapts
        assert found["formats"] == ["torch.float32" if adapts else "torch.bfloat16"]
        split, alone = map(torch.tensor, found["losses"])
        assert (split - alone).abs().max() < ROUNDING * alone[0]
        assert alone[-1] < alone[0] - 2 * ROUNDING


def recipe(**changes: Any) -> Recipe:
    settings = {"model": "deepseek-llm-tiny", "dataset": "stdlib", "max_steps": 1}
    return Recipe.model_validate({**settings, "weights_dtype": "bfloat16", **changes})


@pytest.mark.parametrize("name", ["bf16_master_weights", "fused_adamw"])
def test_techniques_that_need_float32_weights_are_refused(name: str) -> None:
    plain = recipe(plan=[name])
    with pytest.raises(InputError, match=f"{name}: it needs trained weights in float32, and we"):
        plan_of(plain, able(context_of(plain)))
    adapts = recipe(plan=[name], finetuning_type="lora")  # what is trained is float32
    assert len(plan_of(adapts, able(context_of(adapts)))) == 1


def test_another_format_than_the_checkpoints_is_refused() -> None:
    saved = recipe_terms(recipe(weights_dtype="float32"))
    with pytest.raises(InputError, match=r"weights_dtype .*float32.*bfloat16"):
        check_same_job(saved, recipe_terms(recipe()), step=2)
