"""Copies of a model with everything bound to it: each runs its own code on its own weights."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from covering import covering
from hasten.parts.data.collate import packed
from hasten.parts.kernels import rowwise
from hasten.parts.nn import rebind
from hasten.parts.nn.attention import use_document_attention
from hasten.parts.nn.compile import CompiledBlocks
from hasten.parts.nn.fused_experts import fuse_experts
from hasten.parts.nn.fused_layers import fuse_layers
from hasten.parts.nn.losses import WholeLogitsLoss
from hasten.parts.nn.recompute import BlockRecompute
from tiny import examples, tiny_model

BATCH = packed(examples(4, seed=2, longest=12))
IDS = torch.randint(3, 97, (2, 7), generator=torch.Generator().manual_seed(0))
needs_kernels = pytest.mark.skipif(not rowwise.library().library, reason="needs the kernels")


def recomputed(segments: int | None) -> Callable[[nn.Module], Any]:
    return lambda model: BlockRecompute(segments)(model)


BINDINGS = {
    "documents": [use_document_attention],
    "fused": [use_document_attention, fuse_layers],
    "experts": [fuse_experts],
    "recomputed": [use_document_attention, fuse_layers, recomputed(None)],
    "segments": [recomputed(2)],
    "compiled": [use_document_attention, lambda model: CompiledBlocks(backend="eager")(model)],
}


def gradient(model: Any) -> Tensor:
    model.zero_grad()
    WholeLogitsLoss(model.train())(**BATCH)[0].backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def reweighted(model: nn.Module) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)


@needs_kernels
@pytest.mark.parametrize(
    ("architecture", "binding", "how"),
    covering(["llama", "deepseek_v3", "deepseek_v32"], BINDINGS, ["deepcopy", "pickle"], rounds=2),
)
def test_a_copy_learns_with_its_own_weights(architecture: str, binding: str, how: str) -> None:
    if binding == "experts" and architecture == "llama":
        pytest.skip("has no experts")
    plain, model = tiny_model(architecture), tiny_model(architecture)
    before = gradient(plain)
    for bind in BINDINGS[binding]:
        bind(model)
    gradient(model)  # a pass leaves something behind
    made = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert [type(m) for m in made.modules()] == [type(m) for m in model.modules()]
    reweighted(made), reweighted(plain)
    torch.testing.assert_close(gradient(made), gradient(plain), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(gradient(model), before, rtol=1e-3, atol=1e-5)


def test_a_copy_recomputes_by_itself() -> None:
    model, recompute = tiny_model("llama"), BlockRecompute()
    recompute(model)
    made = copy.deepcopy(model)
    gradient(made)
    assert recompute.passes == 0
    gradient(model)
    assert recompute.passes == len(recompute.blocks)
    recompute.remove()
    assert not any(map(rebind.has_own_forward, model.modules()))
    assert any(map(rebind.has_own_forward, made.modules()))


GENERATES = """
import sys
import torch

model = torch.load(sys.argv[1], weights_only=False)
given = torch.load(sys.argv[2])
torch.save(model.generate(**given, do_sample=False), sys.argv[3])
"""


@pytest.mark.slow
@needs_kernels
def test_a_model_that_another_process_loads_generates_the_same(tmp_path: Path) -> None:
    """Left padding and a static cache: it needs the masks before its first pass."""
    model = tiny_model("llama")
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    given = {"input_ids": IDS, "attention_mask": mask, "max_new_tokens": 5, "eos_token_id": None}
    given |= {"cache_implementation": "static", "disable_compile": True, "pad_token_id": 0}
    expected = model.eval().generate(**given, do_sample=False)
    for bind in BINDINGS["recomputed"]:
        bind(model)
    torch.save(model, tmp_path / "model.pt")
    torch.save(given, tmp_path / "given.pt")
    (tmp_path / "generate.py").write_text(GENERATES)
    names = [str(tmp_path / name) for name in ("model.pt", "given.pt", "found.pt")]
    subprocess.run([sys.executable, str(tmp_path / "generate.py"), *names], check=True, timeout=300)
    assert torch.equal(torch.load(names[-1]), expected)
