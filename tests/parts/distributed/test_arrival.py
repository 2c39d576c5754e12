"""Ranks that read only their parts of a model train as ranks that loaded all of it first."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from hasten.core.setup import Session
from hasten.core.step import training
from hasten.core.technique import Technique
from hasten.machine.environment import World
from hasten.machine.lazy_torch import is_dtensor
from hasten.models.load import load_model, take_own_attention
from hasten.parts.distributed import arrival
from hasten.parts.distributed.arrival import broadcast_model
from hasten.parts.nn.late_weights import is_late, late_weight
from hasten.techniques.activation_checkpointing import ActivationCheckpointing
from hasten.techniques.adapter import LoRA
from hasten.techniques.checkpoint import Checkpoints
from hasten.techniques.layers import FusedLayers
from hasten.techniques.layout.experts import ExpertParallel
from hasten.techniques.layout.fsdp import FSDP2
from hasten.techniques.layout.hybrid import Hybrid
from hasten.techniques.layout.pipeline import Pipeline
from hasten.techniques.layout.tensor import TensorParallel
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.precision import BF16MasterWeights
from hasten.techniques.routing import BalancedRouting
from ranks import once_on_ranks
from techniques.expert_checkpoint_jobs import shared_folder
from techniques.sharded_rank_jobs import even_examples
from tiny import COMMON, language_job, session_of, tiny_config
from told import refusal

BLOCK = 12  # of float8 scales: no rank's part begins or ends with one


class Case(NamedTuple):
    model: str
    techniques: tuple[Technique, ...]


TWO = {
    "fsdp2": Case("llama", (FSDP2(),)),
    "fsdp2, tied": Case("tied", (LabelledTokenLoss(chunk=16), FSDP2())),
    "fsdp2, float8": Case("float8", (BalancedRouting(), ActivationCheckpointing(), FSDP2())),
    "fsdp2, older latents": Case("deepseek_v2", (FSDP2(),)),
    "fsdp2, adapters": Case("llama", (LoRA(rank=4), FusedLayers(), Checkpoints(), FSDP2())),
    "fsdp2, lengths": Case("llama", (LoRA(rank=4, dora=True), Checkpoints(), FSDP2())),
    "fsdp2, lengths sent": Case("sent", (LoRA(rank=4, dora=True), FSDP2())),
    "fsdp2, few bits": Case("qwen2", (LoRA(rank=4, base="int8"), FSDP2())),
    "fsdp2, half a format": Case("qwen2", (BF16MasterWeights(), FSDP2())),
    "fsdp2, drawn": Case("drawn", (FSDP2(),)),
    "fsdp2, sent": Case("sent", (LoRA(rank=4), FSDP2())),
    "tp": Case("tied", (LabelledTokenLoss(chunk=16), TensorParallel())),
    "tp, older latents": Case("deepseek_v2", (TensorParallel(),)),
    "tp, adapters": Case("qwen2", (LoRA(rank=4), TensorParallel())),
    "pp, lengths": Case("qwen2", (LoRA(rank=4, dora=True), Pipeline())),
    "pp": Case("llama", (Pipeline(), BF16MasterWeights())),
    "pp, tied": Case("tied", (Pipeline(),)),
    "pp, experts": Case("qwen3_moe", (Pipeline(),)),
    "pp, sent": Case("sent", (Pipeline(),)),
    "ep": Case("float8", (ExpertParallel(),)),
    "ep, fused files": Case("qwen3_moe", (ExpertParallel(),)),
    "ep, drawn": Case("drawn", (ExpertParallel(),)),
}
FOUR = {
    "shard x tp": Case("tied", (Hybrid(shard=2, tp=2),)),
    "shard x tp, experts": Case("float8", (Hybrid(shard=2, tp=2),)),
    "shard x ep": Case("float8", (Hybrid(shard=4, ep=2),)),
    "pp x shard": Case("tied", (Hybrid(pp=2, shard=2),)),
    "pp x tp": Case("deepseek_v2", (Hybrid(pp=2, tp=2),)),
    "dp x shard, sent": Case("sent", (Hybrid(dp=2, shard=2),)),
    "dp x ep": Case("qwen3_moe", (Hybrid(dp=4, ep=2),)),
}


def saved(name: str, folder: Path) -> Path:
    """A model as published ones are: bfloat16, one tensor per expert, or float8 with scales."""
    import transformers as hf

    torch.manual_seed(0)
    if name == "qwen3_moe":
        own = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        config = hf.Qwen3MoeConfig(**COMMON, **own, num_key_value_heads=2, head_dim=8)
    else:
        config = tiny_config({"tied": "llama", "float8": "deepseek_v3"}.get(name, name))
    config.tie_word_embeddings = name == "tied"
    hf.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    if name == "float8":
        found = {}
        for key, weight in load_file(folder / "model.safetensors").items():
            found[key] = weight
            if key.endswith("_proj.weight"):
                blocks = tuple(-(-n // BLOCK) for n in weight.shape)
                found[key] = (100 * weight.float()).to(torch.float8_e4m3fn)
                found[f"{key}_scale_inv"] = torch.rand(blocks) / 100
        save_file(found, folder / "model.safetensors")
        written = json.loads((folder / "config.json").read_text())
        block = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
        written["quantization_config"] = block
        (folder / "config.json").write_text(json.dumps(written))
    return folder


@dataclass(frozen=True)
class Whole:
    """Each rank loads the whole model, as transformers does."""

    source: str
    name: str

    def __call__(self, **how: bool) -> nn.Module:
        config = self.source if self.name != "drawn" else "v3-tiny"
        model: Any = load_model(config, seed=5, **how)
        take_own_attention(model)
        built: nn.Module = model
        return built


class Late(Whole):
    def late(self) -> nn.Module:
        return self(late=True)


class Sent(Whole):
    def skeleton(self) -> nn.Module:
        return self(skeleton=True)


def session(world: World, case: Case, kind: Callable[..., Any], folder: Path) -> Session:
    name = "llama" if case.model == "sent" else case.model
    known = {"tied": "llama", "float8": "deepseek_v3", "drawn": "deepseek_v3"}.get(name, name)
    data = even_examples(8)
    job = language_job(kind(str(folder / name), case.model), data=data, batch=4, steps=2)
    own = folder / "run" / kind.__name__
    return session_of(job, *case.techniques, architecture=known, world=world, folder=own)


def train(world: World, cases: dict[str, Case]) -> dict[str, Any]:
    folder = shared_folder()
    if world.is_main:
        for name in {"llama" if case.model == "sent" else case.model for case in cases.values()}:
            if name != "drawn":
                saved(name, folder / name)
    dist.barrier()
    found: dict[str, Any] = {}
    for name, case in cases.items():
        kinds = (Whole, Sent if case.model == "sent" else Late)
        sessions = [session(world, case, kind, folder) for kind in kinds]
        wanted, tensors = map(_tensors, sessions)
        hashes = [s.frozen.hash if s.frozen else "" for s in sessions]
        found[name] = {
            "differ": [
                n
                for n in wanted.keys() | tensors.keys()
                if n not in wanted or n not in tensors or not _equal(wanted[n], tensors[n])
            ],
            "late": is_late(sessions[1].module),
            "hashes": hashes[0] == hashes[1] or not world.is_main,
            "losses": [[m.loss for m in training(s)] for s in sessions],
        }
    return found


def _tensors(found: Session) -> dict[str, torch.Tensor]:
    own = found.module
    named = {**dict(own.named_parameters(remove_duplicate=False)), **dict(own.named_buffers())}
    return {n: t.to_local() if is_dtensor(t) else t.detach() for n, t in named.items()}


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)


def on_two(world: World) -> dict[str, Any]:
    found = train(world, TWO)
    with torch.device("meta"):
        skeleton = nn.Linear(3, 3 if world.is_main else 4)
    found["wrong"] = refusal(broadcast_model, lambda: nn.Linear(3, 3), skeleton)
    return found


def on_four(world: World) -> dict[str, Any]:
    return {**train(world, FOUR), **on_hosts(world)}


def on_hosts(world: World) -> dict[str, Any]:
    """Two faked hosts; the first rank of each builds the model."""
    arrival.host_name = lambda: f"host-{world.rank // 2}"
    torch.manual_seed(world.rank)
    with torch.device("meta"):
        skeleton = nn.Linear(5, 3)
    built: list[nn.Module] = []

    def build() -> nn.Module:
        built.append(nn.Linear(5, 3))
        return built[0]

    weight = late_weight(broadcast_model(build, skeleton).get_parameter("weight"))
    assert weight is not None
    rows: list[Any] = [None] * world.size
    dist.all_gather_object(rows, weight.read().flatten().tolist())
    return {"builds": len(built), "same": [rows[world.rank] == row for row in rows]}


two = once_on_ranks(on_two)
four = once_on_ranks(on_four, 4)


def check(seen: dict[str, Any]) -> None:
    assert not seen["differ"]
    assert not seen["late"]
    assert seen["hashes"]
    assert seen["losses"][0] == seen["losses"][1]


@pytest.mark.parametrize("name", TWO)
def test_parts_that_are_read_are_those_of_the_whole_model(two: list[Any], name: str) -> None:
    for rank in two:
        check(rank[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_parts_of_parts_are_those_of_the_whole_model(four: list[Any], name: str) -> None:
    for rank in four:
        check(rank[name])


def test_the_skeleton_of_another_model_is_refused(two: list[Any]) -> None:
    for rank in two:
        assert "('weight', (4, 3), 'torch.float32') for ('weight', (3, 3)" in rank["wrong"]


@pytest.mark.slow
def test_one_rank_of_each_host_builds_the_model_for_the_others(four: list[Any]) -> None:
    assert [r["builds"] for r in four] == [1, 0, 1, 0]
    assert [r["same"] for r in four] == [
        [True, True, False, False],
        [True, True, False, False],
        [False, False, True, True],
        [False, False, True, True],
    ]
