"""What test_layout_deepspeed runs on two ranks and alone; plain JSON values."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import torch

from hasten.core.job import Stop
from hasten.core.loop import evaluate
from hasten.core.plan import Plan
from hasten.core.session import Session, assemble
from hasten.core.setup import prepare
from hasten.core.step import training
from hasten.core.technique import Technique
from hasten.machine.environment import World
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.layout.deepspeed import DeepSpeed
from hasten.techniques.layout.fsdp import FSDP2
from hasten.techniques.loss import LabelledTokenLoss
from memory_rank_jobs import model as larger
from tiny import examples, job_context, language_job, tiny_config, tiny_model

NO_BUCKET = 10_000  # elements: smaller than the model, so that several leave
# name -> zero_optimization, architecture, techniques beside it
CASES: dict[str, tuple[dict[str, Any], str, tuple[Technique, ...]]] = {
    "zero 1": ({"stage": 1}, "llama", ()),
    "zero 2": ({"stage": 2, "reduce_bucket_size": NO_BUCKET}, "llama", (GradientAccumulation(2),)),
    "zero 2, offload": (
        {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "llama",
        (GradientAccumulation(2),),
    ),
    "zero 3": (
        {"stage": 3, "stage3_param_persistence_threshold": 0},
        "llama",
        (GradientAccumulation(2), LabelledTokenLoss(chunk=16)),
    ),
    "zero 3, offload, auto": (
        {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
        },
        "deepseek_v3",
        (GradientAccumulation(2),),
    ),
    "zero 3, tied": ({"stage": 3, "stage3_param_persistence_threshold": 0}, "tied", ()),
}


def model_of(architecture: str) -> Any:
    if architecture != "tied":
        return tiny_model(architecture)
    import transformers as hf

    torch.manual_seed(0)
    config = tiny_config("llama")
    config.tie_word_embeddings = True
    model = hf.AutoModelForCausalLM.from_config(config)
    model.set_attn_implementation("sdpa")
    return model


def session_on(world: World, case: str, **changes: Any) -> Session:
    zero, architecture, techniques = CASES[case]
    if world.size > 1:
        file = Path(os.environ.get("HASTEN_RENDEZVOUS", ".")).with_name(f"ds-{world.rank}.json")
        file.write_text(json.dumps({"zero_optimization": zero, "gradient_clipping": "auto"}))
        techniques = (*techniques, DeepSpeed(config=str(file)))
    settings = {"batch": 4, "stop": Stop(steps=5), "max_grad_norm": 0.3, "lr": 1e-3, **changes}
    job = language_job(lambda: model_of(architecture), data=examples(9), **settings)
    context = job_context(job, architecture, world)
    return assemble(prepare(job, Plan(techniques), context))


def train_all(world: World) -> dict[str, Any]:
    """Losses, norms, eval loss and whole weights of every case."""
    found = {}
    for case in CASES:
        session = session_on(world, case)
        steps = list(training(session))
        eval_data = evaluate(session).eval_loss
        with session.setup.layout.gather(session.model) as mine:
            weights = _sums(session.model) if mine else {}
            answer = _answer(session.model) if mine else 0.0
        found[case] = {
            "losses": [m.loss for m in steps],
            "norms": [m.grad_norm for m in steps],
            "eval_data": eval_data,
            "weights": weights,
            "answer": answer,
            "after": evaluate(session).eval_loss,
            "effective": DeepSpeed().check_effect(session).evidence,
        }
    if world.size > 1:
        found["given up"] = _given_up(world)
    return found


def _sums(model: Any) -> dict[str, list[float]]:
    """Two numbers of each weight, by name."""
    weights = model.state_dict()
    return {n: [w.double().sum().item(), w.double().norm().item()] for n, w in weights.items()}


def _answer(model: Any) -> float:
    """The model runs here alone."""
    with torch.no_grad():
        return float(model(input_ids=torch.arange(3, 12)[None]).logits.double().norm())


def _given_up(world: World) -> dict[str, Any]:
    """A step that is given up moves nothing, and the next is as if it hadn't been."""
    found = {}
    for case in ("zero 2", "zero 3"):
        session = session_on(world, case)
        steps = training(session)
        losses = [next(steps).loss]
        batch = torch.randint(3, 90, (1, 8))
        loss, _ = session.engine.zero.engine(input_ids=batch, labels=batch)
        session.engine.zero.backward(loss, True)
        session.engine.zero_grad()
        losses += [m.loss for m in steps]
        found[case] = losses
    return found


def held(world: World) -> dict[str, Any]:
    """Bytes of all tensors that a run has brought into this process, before its third update."""
    small = {
        "stage": 3,
        "reduce_bucket_size": NO_BUCKET,
        "stage3_prefetch_bucket_size": NO_BUCKET,
        "stage3_param_persistence_threshold": 0,
    }
    file = Path(os.environ["HASTEN_RENDEZVOUS"]).with_name(f"held-{world.rank}.json")
    file.write_text(json.dumps({"zero_optimization": small}))
    layouts: dict[str, Technique] = {
        "ddp": DDP(),
        "fsdp2": FSDP2(),
        "zero 3": DeepSpeed(config=str(file)),
    }
    found = {}
    for name, layout in layouts.items():
        before, seen = _alive(), []
        job = language_job(lambda: larger("llama"), data=examples(9), batch=4, steps=3)
        session = assemble(prepare(job, Plan([layout]), job_context(job, world=world)))
        update = session.engine.update

        def watched(factor: float, update: Any = update, seen: list[int] = seen) -> None:
            seen.append(_alive())
            update(factor)

        session.engine.update = watched  # type: ignore[method-assign]
        losses = [m.loss for m in training(session)]
        found[name] = {"bytes": seen[-1] - before, "losses": losses}
        del session, update, watched
    return found


def _alive() -> int:
    """Bytes of the storages of all tensors that Python knows of."""
    gc.collect()
    sizes: dict[int, int] = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and not thing.is_meta:
            local = getattr(thing, "_local_tensor", thing)  # of a DTensor
            storage = local.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())
