"""FusedLayers in a run: its proof, its unsupported_reasons, with recomputation, on several
ranks.
"""

from __future__ import annotations

import pytest
import torch

from fused_models import model_of
from hasten.parts.kernels import rowwise
from hasten.parts.nn.fused_layers import ARCHITECTURES
from hasten.techniques.activation_checkpointing import ActivationCheckpointing
from hasten.techniques.layers import FusedLayers
from tiny import examples, job_context, language_job, run, session_of

pytestmark = [
    pytest.mark.skipif(not rowwise.library().library, reason=rowwise.library().reason),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]
architectures = pytest.mark.parametrize("architecture", ARCHITECTURES)


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
