"""What layouts can't do on these ranks or with this model is one sentence, said before a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hasten.core.technique import Technique
from hasten.machine.environment import World
from hasten.techniques.layout.experts import ExpertParallel
from hasten.techniques.layout.fsdp import FSDP2
from hasten.techniques.layout.hybrid import Hybrid
from hasten.techniques.layout.pipeline import Pipeline
from hasten.techniques.layout.tensor import TensorParallel
from tiny import job_context, language_job

V3, OTHER = "deepseek_v3", "gemma2"
EVEN = "4 experts of a layer can't be shared evenly by"


@pytest.mark.parametrize(
    ("technique", "size", "architecture", "said"),
    [
        (Pipeline(stages=4), 4, "llama", "needs 4 stages and llama has 2 layers"),
        (Pipeline(schedule="zbv"), 2, "llama", "zbv on 2 ranks needs 4 stages"),
        (Pipeline(stages=2), 3, "llama", "3 ranks can't be dealt into pipelines of 2"),
        (Pipeline(), 2, OTHER, "not proven for the architecture gemma2"),
        (Pipeline(stages=2), 4, "llama", None),
        (TensorParallel(), 3, "llama", "the 4 attention heads of this llama can't be dealt out"),
        (TensorParallel(), 4, "llama", "the 2 key and value heads"),
        (TensorParallel(size=2), 4, "llama", "use hybrid with tp: 2"),
        (TensorParallel(), 2, OTHER, "for the architecture gemma2"),
        (Hybrid(dp=2, tp=2), 2, "llama", "dp 2 x shard 1 x tp 2 x pp 1 is 4 ranks and 2 are"),
        (Hybrid(pp=2, shard=2), 2, "llama", "dp 1 x shard 2 x tp 1 x pp 2 is 4 ranks"),
        (Hybrid(dp=2, pp=3), 6, "llama", "3 stages and llama has 2 layers"),
        (Hybrid(dp=2, ep=2), 2, "llama", "llama; it is for models with experts"),
        (Hybrid(shard=8, ep=8), 8, V3, "4 experts of a layer can't be shared evenly"),
        (Hybrid(pp=2, tp=2), 4, OTHER, "not proven for the architecture gemma2"),
        (ExpertParallel(), 2, "llama", "not proven for the architecture llama; it is"),
        (ExpertParallel(size=3), 4, V3, "4 ranks can't form groups of 3"),
        (ExpertParallel(size=8), 8, V3, f"{EVEN} 8"),
        (ExpertParallel(), 3, V3, f"{EVEN} 3"),
        (ExpertParallel(size=3), 1, V3, f"{EVEN} 3"),
        (ExpertParallel(size=2), 4, V3, None),
        (ExpertParallel(), 4, V3, None),
        (FSDP2(replicas=2), 3, "llama", "3 ranks can't be dealt into 2 copies"),
        (FSDP2(offload=True), 3, "llama", "leave offload out"),
    ],
)
def test_what_a_layout_cannot_do_is_said_in_one_sentence(
    technique: Technique, size: int, architecture: str, said: str | None
) -> None:
    context = job_context(language_job(), architecture, World(size=size))
    model = replace(context.model, heads=4, key_value_heads=2)
    reasons = technique.unsupported_reasons(replace(context, model=model))
    assert any(said in reason for reason in reasons) if said else reasons == ()
    assert not any(". " in reason for reason in reasons)
