"""What a layout saves, measures and writes is what one process does, and no rank holds it whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from hasten.core.job import Job
from hasten.core.loop import evaluate
from hasten.core.setup import Session
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.machine.environment import World
from hasten.models import weight_files
from hasten.models.adapters import add_lora
from hasten.models.save import save_adapter, save_model
from hasten.models.weights import NumberFormats
from hasten.parts.nn.late_weights import LateWeight, read_later
from hasten.parts.nn.losses import TokenAccuracy
from hasten.recipe import sample
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.layout.experts import ExpertParallel
from hasten.techniques.layout.fsdp import FSDP2
from hasten.techniques.layout.hybrid import Hybrid
from hasten.techniques.layout.pipeline import Pipeline
from hasten.techniques.layout.tensor import TensorParallel
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.objective import MultiTokenPrediction
from hasten.techniques.precision import BF16MasterWeights
from ranks import once_on_ranks
from tiny import examples, language_job, session_of, tiny_model

ENDS = frozenset({-1})  # no token ends an answer
LABELS, AHEAD = LabelledTokenLoss(chunk=16), MultiTokenPrediction(depth=2)


@dataclass(frozen=True)
class Case:
    layout: Technique
    architecture: str = "llama"
    tied: bool = False
    lora: bool = False
    others: tuple[Technique, ...] = ()
    most: torch.dtype | None = None  # format of most saved weights; None: as in memory
    rounds: bool = True  # weights are rounded when they are saved; False: they have that format
    late: bool = False  # ranks read their parts of the weights after the split

    def model(self) -> Any:
        return tiny_model(self.architecture, tied=self.tied)

    def job(self) -> Job:
        more: dict[str, Any] = {"adapter": adapted} if self.lora else {}
        accuracy = {"accuracy": TokenAccuracy()}
        build = Late(self.model) if self.late else self.model
        return language_job(build, metrics=accuracy, **more)

    def session(self, world: World) -> Session:
        plan = self.others if world.size == 1 else (*self.others, self.layout)
        return session_of(self.job(), *plan, architecture=self.architecture, world=world)


@dataclass(frozen=True)
class Late:
    build: Callable[[], Any]

    def __call__(self) -> Any:
        return self.build()

    def late(self) -> Any:
        """The model without memory for weights, which are read from another one."""
        model = self.build()
        weights = dict(model.named_parameters())
        empty = {id(p): nn.Parameter(torch.empty_like(p, device="meta")) for p in weights.values()}
        for module in model.modules():
            tables = module._parameters
            tables.update({key: empty[id(p)] for key, p in tables.items() if p is not None})
        read_later(
            model,
            {
                name: LateWeight(name, tuple(p.shape), p.dtype, full=p.detach().clone)
                for name, p in weights.items()
            },
        )
        return model


def adapted(model: Any) -> Any:
    """With a B that adds something, as after some training."""
    model = add_lora(model, rank=2, alpha=4, targets="auto")
    generator = torch.Generator().manual_seed(9)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data.normal_(0, 0.1, generator=generator)
    return model


TWO = {
    "fsdp2": Case(FSDP2(), tied=True, others=(LABELS,), late=True),
    "fsdp2, lora": Case(FSDP2(), "qwen2", lora=True),
    "fsdp2, experts in bf16": Case(FSDP2(), "deepseek_v3", others=(AHEAD,), most=torch.bfloat16),
    "tp": Case(TensorParallel(), others=(AHEAD,), late=True),
    "tp, lora": Case(TensorParallel(), lora=True),
    "pp": Case(Pipeline(), "qwen2", tied=True, late=True),
    "pp, tokens ahead": Case(Pipeline(), "qwen2", others=(LABELS, AHEAD), late=True),
    "pp, tied, tokens ahead": Case(Pipeline(), tied=True, others=(AHEAD,)),
    "pp, half a format": Case(
        Pipeline(), others=(BF16MasterWeights(),), most=torch.bfloat16, rounds=False
    ),
    "pp, lora": Case(Pipeline(), lora=True, others=(LABELS,)),
    "pp, experts": Case(Pipeline(), "deepseek_v3", most=torch.bfloat16),
    "ep": Case(ExpertParallel(), "deepseek_v3", most=torch.bfloat16, late=True),
    "ddp": Case(DDP(), most=torch.bfloat16),
}
FOUR = {
    "shard x tp": Case(Hybrid(shard=2, tp=2), tied=True, late=True),
    "pp x shard": Case(Hybrid(pp=2, shard=2), "qwen2", tied=True, others=(AHEAD,)),
    "pp x tp": Case(Hybrid(pp=2, tp=2), lora=True),
    "pp x dp": Case(Hybrid(pp=2, dp=2), "deepseek_v3"),
    "shard x ep": Case(Hybrid(shard=4, ep=2), "deepseek_v3", others=(AHEAD,)),
}


def results(world: World, case: Case, folder: Path) -> dict[str, Any]:
    """Evaluates, writes an answer and saves, in this order: an evaluation leaves some gathered."""
    session, sample.ANSWER_TOKENS = case.session(world), 3
    found = evaluate(session)
    prompts = [example.input_ids[: 3 + n].tolist() for n, example in enumerate(examples(3))]
    answers = sample.continuations(session, prompts, ENDS)
    layout, model = session.setup.layout, session.model
    source = weight_files.weight_source(layout)
    held = sum(p.numel() for p in model.parameters())
    if world.is_main or not layout.replicated:
        saved = folder if world.is_main else folder / "not written"
        if case.lora:
            save_adapter(model, None, saved, source, world.is_main)  # type: ignore[arg-type]
        else:
            formats = NumberFormats(case.most if case.rounds else None)
            save_model(model, None, saved, formats, source, world.is_main)  # type: ignore[arg-type]
    return {
        "loss": found.eval_loss,
        "accuracy": found.metrics["accuracy"],
        "answers": answers,
        "held": held == sum(p.numel() for p in model.parameters()),
        "again": evaluate(session).eval_loss,
    }


def all_of(world: World, cases: dict[str, Case]) -> dict[str, Any]:
    folder = Path(os.environ["HASTEN_RENDEZVOUS"]).parent
    weight_files.SHARD_BYTES = 40_000  # several files, which a tiny model would not need
    found = {name: results(world, case, folder / name) for name, case in cases.items()}
    return {**found, "folder": str(folder)}


def on_two(world: World) -> dict[str, Any]:
    return all_of(world, TWO) | {"faults": faults(world)}


def on_four(world: World) -> dict[str, Any]:
    return all_of(world, FOUR)


def faults(world: World) -> list[str]:
    """What each rank reports if the first can't write, after which all go on together."""
    session = TWO["fsdp2"].session(world)
    folder = Path(os.environ["HASTEN_RENDEZVOUS"]).parent / "occupied"
    folder.mkdir(exist_ok=True)
    (folder / "thesis.tex").write_text("years of work")
    source: Any = session.setup.layout
    try:
        save_model(session.model, None, folder, source=source, is_first=world.is_main)  # type: ignore[arg-type]
        said = ""
    except InputError as error:
        said = str(error)
    return [said, f"{evaluate(session).eval_loss is not None}"]


two, four = once_on_ranks(on_two), once_on_ranks(on_four, 4)


def reference(case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """One process: transformers' or PEFT's own saving of the same weights; losses and answers."""
    session = case.session(World())
    monkeypatch.setattr(sample, "ANSWER_TOKENS", 3)
    found = evaluate(session)
    prompts = [example.input_ids[: 3 + n].tolist() for n, example in enumerate(examples(3))]
    answers = sample.continuations(session, prompts, ENDS)
    plain = adapted(case.model()) if case.lora else case.model()
    for weight in plain.parameters():  # not the buffers, which keep their format
        weight.data = weight.data.to(case.most or torch.float32)
    plain.save_pretrained(folder)
    return {"loss": found.eval_loss, "accuracy": found.metrics["accuracy"], "answers": answers}


def tensors_of(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "name"), [*(("two", name) for name in TWO), *(("four", name) for name in FOUR)]
)
def test_files_losses_and_answers_are_those_of_one_process(
    request: pytest.FixtureRequest,
    world: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks, case = request.getfixturevalue(world), (TWO | FOUR)[name]
    alone = reference(case, tmp_path, monkeypatch)
    folder = Path(ranks[0]["folder"]) / name
    expected, written = tensors_of(tmp_path), tensors_of(folder)
    assert written.keys() == expected.keys()
    for key, tensor in expected.items():
        assert written[key].dtype == tensor.dtype
        assert torch.equal(written[key], tensor), key
    for rank in ranks:
        assert rank[name]["loss"] == pytest.approx(alone["loss"], rel=1e-6)
        assert rank[name]["again"] == rank[name]["loss"]
        assert rank[name]["accuracy"] == pytest.approx(alone["accuracy"])
        assert rank[name]["answers"] == alone["answers"]
        assert rank[name]["held"]
    assert not (folder / "not written").exists()
    if not case.lora:
        _, report = hf.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1


@pytest.mark.slow
def test_ranks_go_on_together_if_the_first_cannot_write(two: list[Any]) -> None:
    assert "holds thesis.tex" in two[0]["faults"][0]
    assert two[1]["faults"][0] == ""
    assert all(rank["faults"][1] == "True" for rank in two)


@pytest.mark.parametrize("layout", [FSDP2(), Pipeline()])
def test_a_metric_of_the_full_model_is_refused_where_no_rank_has_one(layout: Technique) -> None:
    job = language_job(metrics={"norm": lambda model: 0.0})
    with pytest.raises(InputError, match="norm needs the full model"):
        session_of(job, layout, world=World(rank=0, size=2))
