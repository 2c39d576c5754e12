"""Jobs on sharded models; each case is run by one process too, and must come to the same."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hasten.core.job import Job, Stop
from hasten.core.loop import EvaluationSchedule, evaluate, fit
from hasten.core.setup import Session
from hasten.core.step import training
from hasten.core.technique import Technique
from hasten.machine.environment import World
from hasten.models.save import save_model
from hasten.models.weight_files import weight_source
from hasten.parts.data.collate import TokenizedExample, tokenized_example
from hasten.techniques.activation_checkpointing import ActivationCheckpointing
from hasten.techniques.adapter import LoRA
from hasten.techniques.average import WeightAverage
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.layout.fsdp import FSDP2
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.optimizer import FusedAdamW, Muon
from hasten.techniques.precision import BF16MasterWeights
from tiny import VOCABULARY, examples, language_job, session_of, tiny_config, tiny_model
from told import refusal
from whole import whole_weights


def even_examples(count: int = 7) -> list[TokenizedExample]:
    """One even length, which is not padded: each dropout mask has one process's shape.

    Trained tokens are uneven. Each further shape of a batch is worked out by DTensor, for a
    fifth of a second.
    """
    draw = np.random.default_rng(0)
    return [
        tokenized_example(draw.integers(3, VOCABULARY, 12), np.arange(12) > draw.integers(11))
        for _ in range(count)
    ]


@dataclass(frozen=True)
class Case:
    """What trains, and how; ``layout`` is for several ranks only."""

    layout: Technique
    others: tuple[Technique, ...] = ()
    architecture: str = "llama"
    dtype: torch.dtype = torch.float64
    tied: bool = False
    model: Callable[[], nn.Module] | None = None
    data: Callable[[], list[TokenizedExample]] | None = None

    def build(self) -> nn.Module:
        if self.model is not None:
            return self.model()
        model: Any = tiny_model(self.architecture, dtype=self.dtype)
        if self.tied:
            model.config.tie_word_embeddings = True
            model.lm_head.weight = model.model.embed_tokens.weight
        return model

    def job(self, **changes: Any) -> Job:
        """A step of five examples, one of two; the gradient's norm is above the limit."""
        given = {"stop": Stop(steps=2), "max_grad_norm": 0.05, **changes}
        data = examples(7)
        if self.data is not None:
            data = self.data()
            given["eval_data"] = data[:5]
        return language_job(self.build, data=data, batch=5, **given)

    def session(self, world: World, **changes: Any) -> Session:
        techniques = self.others + ((self.layout,) if world.size > 1 else ())
        job = self.job(**changes)
        return session_of(
            job, *techniques, architecture=self.architecture, folder=Path("unused"), world=world
        )


def outcome(session: Session, folder: Path | None = None) -> dict[str, Any]:
    """Losses, norms, eval loss, proofs and, of the first rank, some of the trained weights.

    ``folder``: the model is saved there, and the weights are read back from it.
    """
    steps = list(training(session))
    eval_data = evaluate(session).eval_loss
    probes = {t.name(): t.check_effect(session) for t in session.setup.plan}
    session.finish()
    found = whole_weights(session)
    if folder is not None:
        is_main, model = session.setup.context.world.is_main, session.model
        source = weight_source(session.setup.layout)
        save_model(model, None, folder, source=source, is_first=is_main)  # type: ignore[arg-type]
        found = load_file(folder / "model.safetensors") if is_main else {}
    weights = {name: _some(tensor) for name, tensor in found.items()}
    return {
        "losses": [m.loss for m in steps],
        "norms": [m.grad_norm for m in steps],
        "tokens": [m.tokens for m in steps],
        "eval_data": eval_data,
        "weights": weights,
        "proofs": {name: proof.effective for name, proof in probes.items()},
        "average": probes["weight_average"].evidence if "weight_average" in probes else "",
        "pieces": sum(p.numel() for p in session.setup.precision.parameters()),
    }


def check_same(found: dict[str, Any], alone: dict[str, Any], close: float) -> None:
    """A run on ranks has the losses, norms, counts and weights of one process."""
    for key in ("losses", "norms", "eval_data"):
        assert found[key] == pytest.approx(alone[key], rel=close), key
    assert found["tokens"] == alone["tokens"]
    assert set(found["weights"]) == set(alone["weights"])
    for weight, numbers in found["weights"].items():
        assert numbers == pytest.approx(alone["weights"][weight], rel=close, abs=close), weight


def _some(tensor: torch.Tensor) -> list[float]:
    flat = tensor.detach().double().flatten()
    return [*flat[:: max(flat.numel() // 20, 1)].tolist(), float(flat.sum()), float(flat.numel())]


EACH = GradientAccumulation(micro_batch_size=1)
CASES: dict[str, Case] = {
    "plain": Case(FSDP2()),
    "accumulated, labels, tied": Case(FSDP2(), (EACH, LabelledTokenLoss(chunk=16)), tied=True),
    "whole gradients": Case(FSDP2(whole_gradients=True, reshard=False), (EACH,), "deepseek_v3"),
    "recomputed, averaged": Case(
        FSDP2(), (ActivationCheckpointing(), WeightAverage()), dtype=torch.float32
    ),
    "adapters, own kernels": Case(FSDP2(), (LoRA(rank=4), FusedAdamW()), dtype=torch.float32),
    "adapters of experts": Case(
        FSDP2(),
        (LoRA(rank=2, targets="all-linear", resolver="peft"),),
        "deepseek_v3",
    ),
    "half a format": Case(FSDP2(), (BF16MasterWeights(), EACH), dtype=torch.float32),
}
REFUSED: dict[str, tuple[Technique, ...]] = {
    "matrices": (Muon(),),
}


def sharded(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            saves = "adapters" not in name
            found[name] = outcome(case.session(world), Path(folder) if saves else None)
    for name, others in REFUSED.items():
        found[name] = refusal(Case(FSDP2(), others).session, world)
    found["dropped"] = dropping(world)
    found["chosen"] = chosen(world, DDP())
    return found


def chosen(world: World, layout: Technique) -> dict[str, Any]:
    """Each rank measures other values, where it measures any; the first rank's fall at step 3."""
    values = iter([[1.0, 2.0, 0.0], [5.0, 4.0, 3.0]][world.rank])
    session = Case(layout).session(
        world, stop=Stop(steps=3), metrics={"quality": lambda model: next(values)}
    )
    best: list[int] = []
    watch = EvaluationSchedule(
        every_steps=1,
        best_by="quality",
        lower_is_better=False,
        on_best=lambda evaluation: best.append(evaluation.step),
    )
    evaluations = fit(session, watch).evaluations
    return {"best": best, "metrics": [evaluation.metrics for evaluation in evaluations]}


def held_bytes(world: World) -> dict[str, Any]:
    """Bytes of weights, gradients and moments that this rank holds, of four layouts."""
    plain = partial(Case, dtype=torch.float32)
    layouts = {
        "ddp": DDP(),
        "fsdp2": FSDP2(),
        "copies": FSDP2(replicas=2),
    }
    found: dict[str, Any] = {}
    for name, layout in layouts.items():
        session = plain(layout).session(world, stop=Stop(steps=2))
        gradients: list[torch.Tensor] = []
        before = session.engine.update

        def update(
            factor: float,
            session: Any = session,
            before: Any = before,
            gradients: list[torch.Tensor] = gradients,
        ) -> None:
            gradients[:] = [p.grad for p in session.setup.precision.parameters()]
            before(factor)

        session.engine.update = update  # type: ignore[method-assign]
        losses = [m.loss for m in training(session)]
        pieces = session.setup.precision.parameters()
        moments = [v for s in session.optimizer.state.values() for v in s.values()]
        moments = [v for v in moments if isinstance(v, torch.Tensor)]
        found[name] = {
            "bytes": _held([*pieces, *gradients, *moments]),
            "losses": losses,
            "proof": layout.check_effect(session).evidence,
        }
    return found


def _held(tensors: list[torch.Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def dropping_model() -> nn.Module:
    """Its attention drops out."""
    import transformers as hf

    torch.manual_seed(0)
    config = tiny_config("llama")
    config.attention_dropout = 0.3
    model = hf.AutoModelForCausalLM.from_config(config)
    model.set_attn_implementation("sdpa")
    built: nn.Module = model.double()
    return built


DROPPING: dict[str, Case] = {
    "ddp": Case(DDP(), (LoRA(rank=4, dropout=0.3),), model=dropping_model),
    "fsdp2": Case(FSDP2(), (LoRA(rank=4, dropout=0.3),), model=dropping_model),
    "recomputed": Case(FSDP2(), (ActivationCheckpointing(),), model=dropping_model),
}


def dropping(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, case in DROPPING.items():
        first = next(training(case.session(world)))
        other = next(training(case.session(world)))
        found[name] = {"loss": first.loss, "norm": first.grad_norm, "again": other.loss}
    return found


def by_hand(case: Case, ranks: int) -> tuple[float, float]:
    """Loss and norm of the first step, each rank's examples with the masks that its seed draws."""
    session = case.session(World())
    job, setup = session.setup.job, session.setup
    collate, sampler = setup.collate or job.collate, setup.sampler
    assert sampler is not None
    batches = []
    for rank in range(ranks):
        pieces = next(iter(sampler.local_steps(0, rank, ranks)))
        batches.append([collate([job.examples[i] for i in piece]) for piece in pieces if piece])
    tokens = sum(batch.counts.trained_tokens for mine in batches for batch in mine)
    total = 0.0
    for rank, mine in enumerate(batches):
        torch.manual_seed(job.seed + 1 + rank)
        for batch in mine:
            loss, _ = session.loss_module(**batch.inputs)
            (loss / tokens).backward()
            total += loss.item() / tokens
    learns = [p.grad for p in session.loss_module.parameters() if p.grad is not None]
    return total, torch.nn.utils.get_total_norm(learns).item()
