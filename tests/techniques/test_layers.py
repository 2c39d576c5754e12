"""FusedLayers in a run: its proof, its unsupported_reasons, with recomputation, on several
ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fused_models import model_of
from hasten.core.job import Stop
from hasten.core.plan import Plan
from hasten.core.session import assemble
from hasten.core.setup import prepare
from hasten.core.step import training
from hasten.machine.environment import World
from hasten.parts.kernels import rowwise
from hasten.parts.nn.fused_layers import ARCHITECTURES
from hasten.techniques.activation_checkpointing import ActivationCheckpointing
from hasten.techniques.collate import Packed
from hasten.techniques.layers import FusedLayers
from hasten.techniques.layout.ddp import DDP
from ranks import on_ranks
from tiny import examples, job_context, language_job, run, session_of, tiny_model

CASES = {"llama": torch.float32, "deepseek_v3": torch.float32, "qwen2": torch.bfloat16}


def train_fused(world: World) -> dict[str, Any]:
    """Losses of every case, and whether the layers say that they are fused."""
    found = {}
    for architecture, dtype in CASES.items():
        job = language_job(
            lambda a=architecture, d=dtype: tiny_model(a, dtype=d),
            data=examples(9),
            batch=4,
            stop=Stop(epochs=2),
            lr=1e-3,
        )
        techniques = (Packed(), FusedLayers(), *((DDP(),) if world.size > 1 else ()))
        context = job_context(job, architecture, world)
        session = assemble(prepare(job, Plan(techniques), context))
        losses = [m.loss for m in training(session)]
        found[architecture] = {
            "losses": losses,
            "effective": FusedLayers().check_effect(session).effective,
        }
    return found


pytestmark = [
    pytest.mark.skipif(not rowwise.library().library, reason=rowwise.library().reason),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]
architectures = pytest.mark.parametrize("architecture", ARCHITECTURES)


def test_the_probe_is_false_when_nothing_is_bound() -> None:
    with_it, without = session_of(language_job(), FusedLayers()), session_of(language_job())
    assert FusedLayers().check_effect(with_it).effective
    assert "2 x mlp" in FusedLayers().check_effect(with_it).evidence
    proof = FusedLayers().check_effect(without)
    assert not proof.effective
    assert proof.evidence == "fused code runs nothing"


@architectures
def test_recomputed_blocks_give_the_same_losses(architecture: str) -> None:
    job = language_job(lambda: model_of(architecture, torch.bfloat16), data=examples(8))
    found = [
        [m.loss for m in run(session_of(job, *more, architecture=architecture))]
        for more in ((FusedLayers(),), (FusedLayers(), ActivationCheckpointing()))
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("architecture", ["gpt2", "mixtral"])
def test_an_architecture_that_is_not_proven_is_an_obstacle(architecture: str) -> None:
    (reason,) = FusedLayers().unsupported_reasons(job_context(language_job(), architecture))
    assert f"not proven for the architecture {architecture}" in reason


@pytest.mark.long  # fused layers of ranks: test_layout_tensor; ranks that pack: launch/test_ranks
def test_two_ranks_train_like_one_process(tmp_path: Path) -> None:
    alone = train_fused(World())
    for found in on_ranks(train_fused, tmp_path):
        for architecture, dtype in CASES.items():
            assert found[architecture]["effective"]
            close = 1e-5 if dtype == torch.float32 else 2e-2
            expected = alone[architecture]["losses"]
            assert found[architecture]["losses"] == pytest.approx(expected, rel=close)
