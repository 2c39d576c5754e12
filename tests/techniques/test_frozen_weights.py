"""A checkpoint holds what learns. Resumes have the same bits, and another base is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hasten.core.setup import Session
from hasten.core.step import training
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.machine.environment import World
from hasten.parts.checkpoint import checkpoints, load
from hasten.parts.nn.losses import WholeLogitsLoss
from hasten.techniques.activation_checkpointing import ActivationCheckpointing
from hasten.techniques.adapter import LoRA
from hasten.techniques.average import WeightAverage
from hasten.techniques.checkpoint import Checkpoints
from hasten.techniques.experts import ExpertsImplementation
from hasten.techniques.layers import FusedLayers
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.layout.experts import ExpertParallel
from hasten.techniques.layout.fsdp import FSDP2
from hasten.techniques.layout.pipeline import Pipeline
from hasten.techniques.layout.tensor import TensorParallel
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.precision import BF16MasterWeights
from ranks import once_on_ranks
from techniques.expert_checkpoint_jobs import shared_folder
from techniques.sharded_rank_jobs import even_examples
from tiny import COMMON, language_job, session_of, tiny_model
from told import refusal

SAVED, STEPS = 2, 4


def frozen_embedding() -> nn.Module:
    model: Any = tiny_model(tied=True)
    model.get_input_embeddings().requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    return model


def sparse() -> nn.Module:
    return tiny_model("deepseek_v32")


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Technique, ...]]] = {
    "adapters": (tiny_model, (LoRA(rank=4, dropout=0.1),)),
    "adapters, masters, average": (
        *(tiny_model, (LoRA(rank=4), BF16MasterWeights(emulate=True), WeightAverage())),
    ),
    "adapters on nf4": (tiny_model, (LoRA(rank=4, base="nf4"),)),
    "frozen layer and tied embedding": (frozen_embedding, ()),
    "indexers": (sparse, ()),
}


def built(case: str, folder: Path, steps: int = STEPS, **changes: Any) -> Session:
    model, plan = CASES[case]
    kind = "deepseek_v32" if case == "indexers" else "llama"
    job = language_job(**{"model": model, "steps": steps, "lr": 1e-3, **changes})
    kept = Checkpoints(SAVED, compression=False)
    return session_of(job, *plan, kept, architecture=kind, folder=folder)


def bits(session: Session) -> dict[str, Any]:
    return {name: t.clone() for name, t in session.loss_module.state_dict().items()}


@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_on_with_the_same_bits_and_no_frozen_weight_on_disk(
    case: str, tmp_path: Path
) -> None:
    whole = built(case, tmp_path / "whole")
    losses = [m.loss for m in training(whole)]
    list(training(built(case, tmp_path / "run", SAVED)))
    stored = load(checkpoints(tmp_path / "run")[-1])[0]
    weights = {name for name, _ in whole.loss_module.named_parameters()}
    learns = {n for n, p in whole.loss_module.named_parameters() if p.requires_grad}
    names = {name.removeprefix("model/") for name in stored if name.startswith("model/")}
    assert learns <= names
    assert not names & (weights - learns)
    assert not any(name.endswith(".codes") for name in names)
    second = built(case, tmp_path / "run")
    assert second.setup.checkpoint.resume(second) is not None
    assert [m.loss for m in training(second)] == losses[SAVED:]
    expected = bits(whole)
    assert all(torch.equal(t, expected[name]) for name, t in bits(second).items())


def wide_model() -> nn.Module:
    import transformers as hf

    torch.manual_seed(0)
    sizes = {**COMMON, "hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 4}
    model: nn.Module = hf.AutoModelForCausalLM.from_config(hf.LlamaConfig(**sizes))
    return model


def test_a_checkpoint_of_an_adapter_has_the_bytes_of_adapter_and_moments(tmp_path: Path) -> None:
    job = language_job(wide_model, steps=1)
    plan = (LoRA(rank=32), Checkpoints(1, compression=False))
    session = session_of(job, *plan, folder=tmp_path)
    list(training(session))
    adapter = sum(p.nbytes for p in session.model.parameters() if p.requires_grad)
    files = [*checkpoints(tmp_path)[-1].iterdir()]
    assert sum(file.stat().st_size for file in files) <= 1.05 * 3 * adapter
    # which the whole model isn't: the test can fail
    assert sum(p.nbytes for p in session.model.parameters()) > 2 * adapter


def other_seed() -> nn.Module:
    return tiny_model(seed=1)


def one_bit() -> nn.Module:
    model: Any = tiny_model()
    model.lm_head.weight.data.view(torch.int32)[3, 3] ^= 1
    return model


@pytest.mark.parametrize("other", [other_seed, one_bit])
@pytest.mark.parametrize("case", ["adapters", "adapters on nf4"])
def test_a_resume_on_another_base_is_refused_before_training(
    case: str, other: Any, tmp_path: Path
) -> None:
    terms = {"model": "models/seven"}
    list(training(built(case, tmp_path, SAVED, terms=terms)))
    second = built(case, tmp_path, model=other, terms=terms)
    before = bits(second)
    with pytest.raises(
        InputError,
        match=r"^the checkpoint is of another base model: \d+ frozen weights, .* differ from those "
        r"of model models/seven now; give the model that the run began with, or .* output$",
    ):
        second.setup.checkpoint.resume(second)
    assert second.progress.step == 0
    assert all(torch.equal(t, before[name]) for name, t in bits(second).items())


def test_techniques_that_change_how_is_computed_keep_the_base(tmp_path: Path) -> None:
    job = language_job(lambda: tiny_model("deepseek_v3"), steps=SAVED)
    own = (LoRA(rank=4), Checkpoints(SAVED))
    list(training(session_of(job, *own, architecture="deepseek_v3", folder=tmp_path)))
    edits = (FusedLayers(), ExpertsImplementation(), LabelledTokenLoss(), ActivationCheckpointing())
    session = session_of(job, *own, *edits, architecture="deepseek_v3", folder=tmp_path)
    assert session.setup.checkpoint.resume(session) is not None
    assert session.changes


class Moves(nn.Module):
    """The usual loss, in which a frozen layer changes in each pass."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner = WholeLogitsLoss(model)

    def forward(self, **inputs: Any) -> Any:
        for weight in self.inner.model.model.layers[0].parameters():
            weight.data.mul_(1.001)
        return self.inner(**inputs)


def test_weights_without_gradient_that_a_model_moves_itself_are_saved(tmp_path: Path) -> None:
    case = "frozen layer and tied embedding"
    losses = [m.loss for m in training(built(case, tmp_path / "whole", loss=Moves))]
    list(training(built(case, tmp_path / "run", SAVED, loss=Moves)))
    second = built(case, tmp_path / "run", loss=Moves)
    second.setup.checkpoint.resume(second)
    assert [m.loss for m in training(second)] == losses[SAVED:]


# On two ranks: saved under a layout, resumed under it, under another, and by one process.

LAYOUTS: dict[str, tuple[str, Technique]] = {
    "ddp": ("llama", DDP()),
    "fsdp2": ("llama", FSDP2()),
    "tensor": ("llama", TensorParallel()),
    "pipeline": ("llama", Pipeline()),
    "experts": ("deepseek_v3", ExpertParallel()),
}


def on_layout(
    world: World, name: str, layout: Technique, folder: Path, steps: int = STEPS, seed: int = 0
) -> Session:
    """A session that goes on from the newest checkpoint in the folder."""
    architecture = LAYOUTS[name][0]
    data = even_examples(24)
    job = language_job(
        lambda: tiny_model(architecture, seed), data=data, batch=4, steps=steps, lr=1e-3
    )
    own = (layout,) if world.size > 1 else ()
    plan = (LoRA(rank=4), Checkpoints(SAVED, compression=False), *own)
    session = session_of(job, *plan, architecture=architecture, folder=folder, world=world)
    session.setup.checkpoint.resume(session)
    return session


def losses(session: Session) -> list[float]:
    found = [m.loss for m in training(session)]
    dist.barrier()
    return found


def on_two(world: World) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, (_, layout) in LAYOUTS.items():
        folder = shared_folder()
        straight = losses(on_layout(world, name, layout, shared_folder()))
        losses(on_layout(world, name, layout, folder, SAVED))
        refused = refusal(on_layout, world, name, layout, folder, seed=1)
        dist.barrier()
        # no step is done here, so the others find the same checkpoint
        elsewhere = losses(on_layout(world, name, DDP(), folder, SAVED))
        stored = sorted(load(checkpoints(folder)[-1])[0])
        dist.barrier()
        alone = None
        if world.is_main:
            session = on_layout(World(), name, layout, folder, SAVED + 1)
            alone = [m.loss for m in training(session)]
        dist.barrier()
        results[name] = {
            "stored": stored,
            "straight": straight[SAVED:],
            "resumed": losses(on_layout(world, name, layout, folder)),
            "elsewhere": elsewhere,
            "alone": alone,
            "refused": refused,
        }
    return results


found = once_on_ranks(on_two)


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_layout_saves_a_base_and_any_goes_on(name: str, found: list[Any]) -> None:
    first, second = (rank[name] for rank in found)
    assert first["stored"]
    moving = ("lora_", "optimizer/", "e_score_correction_bias")  # the last balances experts
    assert all(any(part in name for part in moving) for name in first["stored"])
    assert first["resumed"] == second["resumed"] == first["straight"]
    assert first["elsewhere"] == []
    assert first["alone"] == pytest.approx(first["straight"][:1], rel=1e-5)
    for rank in (first, second):
        assert rank["refused"].startswith("the checkpoint is of another base model")
