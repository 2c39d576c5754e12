"""Under DeepSpeed's ZeRO two ranks train as one process does, and save what it would."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hasten.core.job import Stop
from hasten.core.loop import evaluate
from hasten.core.plan import Plan
from hasten.core.setup import Session, prepare
from hasten.core.step import training
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.machine.environment import World
from hasten.parts.distributed import deepspeed_engine
from hasten.parts.distributed.deepspeed_config import TrainerSettings
from hasten.parts.distributed.deepspeed_engine import ZeroTrainer
from hasten.recipe import sample
from hasten.techniques.adapter import LoRA
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.checkpoint import Checkpoints, bytes_of_stage
from hasten.techniques.communication.compress import TopK
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.layout.deepspeed import DeepSpeed
from hasten.techniques.layout.fsdp import FSDP2
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.objective import MultiTokenPrediction
from hasten.techniques.optimizer import Muon
from hasten.techniques.precision import Autocast
from memory_rank_jobs import model as larger
from ranks import on_ranks, once_on_ranks
from techniques.expert_checkpoint_jobs import shared_folder
from tiny import (
    examples,
    job_context,
    language_job,
    restore,
    session_of,
    state_of_all_ranks,
    tiny_model,
)
from whole import whole_weights

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
    return tiny_model(tied=True) if architecture == "tied" else tiny_model(architecture)


def session_on(world: World, case: str, **changes: Any) -> Session:
    zero, architecture, techniques = CASES[case]
    if world.size > 1:
        file = Path(os.environ.get("HASTEN_RENDEZVOUS", ".")).with_name(f"ds-{world.rank}.json")
        file.write_text(json.dumps({"zero_optimization": zero, "gradient_clipping": "auto"}))
        techniques = (*techniques, DeepSpeed(config=str(file)))
    settings = {"batch": 4, "stop": Stop(steps=5), "max_grad_norm": 0.3, "lr": 1e-3, **changes}
    job = language_job(lambda: model_of(architecture), data=examples(9), **settings)
    return session_of(job, *techniques, architecture=architecture, world=world)


def train_all(world: World) -> dict[str, Any]:
    """Losses, norms, eval loss and whole weights of every case."""
    found = {}
    for case in CASES:
        session = session_on(world, case)
        steps = list(training(session))
        eval_data = evaluate(session).eval_loss
        weights = _sums(whole_weights(session))
        answer = sample.continuations(session, [[3, 4, 5]], frozenset())
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


def _sums(weights: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    """Two numbers of each weight, by name."""
    return {n: [w.double().sum().item(), w.double().norm().item()] for n, w in weights.items()}


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
        session = session_of(job, layout, world=world)
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


SAVED, STEPS = 2, 5
# name -> config, architecture, techniques beside it; of what a checkpoint can hold
SAVES: dict[str, tuple[dict[str, Any], str, tuple[Technique, ...]]] = {
    **{name: (({"zero_optimization": CASES[name][0]}), *CASES[name][1:]) for name in CASES},
    "zero 1, bf16": ({"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}, "llama", ()),
    "zero 3, bf16": ({"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}, "llama", ()),
    "zero 2, LoRA": ({"zero_optimization": {"stage": 2}}, "llama", (LoRA(rank=4),)),
    "zero 3, LoRA": ({"zero_optimization": {"stage": 3}}, "llama", (LoRA(rank=4),)),
}


def go_on(world: World) -> dict[str, Any]:
    """Losses of all steps, and of those after checkpoints of this and of another layout."""
    torch.manual_seed(0)
    found = {}
    for case, (config, architecture, techniques) in SAVES.items():
        file = shared_folder() / f"{world.rank}.json"
        file.write_text(json.dumps({**config, "gradient_clipping": "auto"}))
        zero, every = DeepSpeed(config=str(file)), {"batch": 4, "stop": Stop(steps=STEPS)}

        def session(
            layout: Technique,
            folder: Path,
            of: tuple[str, tuple[Technique, ...], dict[str, Any]] = (
                architecture,
                techniques,
                every,
            ),
        ) -> Session:
            architecture, techniques, settings = of
            job = language_job(lambda: model_of(architecture), data=examples(9), **settings)
            plan = (*techniques, layout, Checkpoints(SAVED))
            return session_of(job, *plan, architecture=architecture, world=world, folder=folder)

        def rest(layout: Technique, saved: Path, session: Any = session) -> list[float]:
            again = session(layout, shared_folder())
            again.setup.checkpoint.resume(again, saved / f"step-{SAVED:08d}")
            return [m.loss for m in training(again)]

        folders = {"zero": shared_folder(), "fsdp2": shared_folder()}
        straight = {
            name: [m.loss for m in training(session(layout, folders[name]))]
            for name, layout in (("zero", zero), ("fsdp2", FSDP2()))
        }
        found[case] = {
            "all": straight,
            "same": rest(zero, folders["zero"]),
            "to fsdp2": rest(FSDP2(), folders["zero"]),
            "from fsdp2": rest(zero, folders["fsdp2"]),
            "to a stage": rest(
                DeepSpeed(stage=1 if config["zero_optimization"]["stage"] == 3 else 3),
                folders["zero"],
            ),
            "estimated": bytes_of_stage(session(zero, shared_folder())),
            "bytes": sum(f.stat().st_size for f in folders["zero"].glob("step*2/*.safetensors")),
            "saved": saved_weights(folders["zero"] / f"step-{SAVED:08d}"),
        }
    return found


def saved_weights(checkpoint: Path) -> list[str]:
    """Names of the model's weights in a checkpoint's files."""
    names: set[str] = set()
    for file in checkpoint.glob("*.safetensors"):
        names |= {n.removeprefix("model/") for n in load_file(file) if n.startswith("model/")}
    return sorted(names)


resumes = once_on_ranks(go_on)

installed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is an extra: hasten[deepspeed]"
)
TWO = World(0, 0, 2)


found = once_on_ranks(train_all)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return train_all(World())


@installed
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_one_process_does(
    found: list[Any], alone: dict[str, Any], case: str
) -> None:
    ours, theirs = found[0][case], alone[case]
    assert ours["answer"] == theirs["answer"]
    for key in ("losses", "norms", "eval_data", "after"):
        assert ours[key] == pytest.approx(theirs[key], rel=2e-5), key
    assert min(theirs["norms"]) > 0.3, "clipping has to act"
    assert ours["weights"].keys() == theirs["weights"].keys()
    for name, (total, norm) in theirs["weights"].items():
        assert ours["weights"][name] == pytest.approx([total, norm], rel=1e-4, abs=2e-4), name
    assert ours["effective"].startswith(f"ZeRO-{CASES[case][0]['stage']} on 2 ranks")


@installed
@pytest.mark.parametrize("case", CASES)
def test_ranks_report_the_same_and_only_the_first_has_the_weights(
    found: list[Any], case: str
) -> None:
    first, second = found[0][case], found[1][case]
    assert second["weights"] == {}
    for key in ("losses", "norms", "eval_data"):
        assert first[key] == second[key]


@installed
@pytest.mark.parametrize("case", ["zero 2", "zero 3"])
def test_a_step_given_up_moves_nothing(found: list[Any], case: str) -> None:
    assert found[0]["given up"][case] == found[0][case]["losses"]


@installed
def test_four_ranks_hold_a_third_of_what_replicas_do(tmp_path: Path) -> None:
    """Everything that lies in tensors when the weights are about to move."""
    for found in on_ranks(held, tmp_path, 4):
        whole = found["ddp"]["bytes"]
        assert found["zero 3"]["bytes"] <= 0.35 * whole
        assert found["fsdp2"]["bytes"] <= 0.35 * whole
        assert found["zero 3"]["losses"] == pytest.approx(found["ddp"]["losses"], rel=2e-5)


@installed
@pytest.mark.parametrize("case", SAVES)
def test_a_run_goes_on_from_its_checkpoint_under_this_layout_and_another(
    resumes: list[Any], case: str
) -> None:
    here, other = resumes[0][case], resumes[1][case]
    assert here == other, "each rank has the same numbers"
    straight = {name: losses[SAVED:] for name, losses in here["all"].items()}
    assert here["same"] == straight["zero"], "to the bit"
    within = 1e-2 if "bf16" in case else 2e-5
    assert here["to fsdp2"] == pytest.approx(straight["fsdp2"], rel=within)
    assert here["from fsdp2"] == pytest.approx(straight["zero"], rel=within)
    assert here["to a stage"] == pytest.approx(straight["zero"], rel=within)
    assert len({*straight["zero"]}) == STEPS - SAVED
    assert all(("lora" in name) == ("LoRA" in case) for name in here["saved"]), "no frozen weight"
    assert here["saved"]
    assert here["estimated"] == pytest.approx(here["bytes"], rel=0.25, abs=20_000)


def with_other_counts(world: World) -> str:
    """What a run says to a checkpoint in which one weight was updated more often than others."""
    job = language_job(data=examples(9), batch=4, stop=Stop(steps=3))
    saved, folder = session_of(job, FSDP2(), world=world), shared_folder()
    plain_run = training(saved)
    next(plain_run)
    next(iter(saved.optimizer.state.values()))["step"] += 1
    tensors, meta = state_of_all_ranks(saved)
    zero = session_of(job, DeepSpeed(stage=2), world=world, folder=folder)
    before = _sums(whole_weights(zero))
    with pytest.raises(InputError) as told:
        restore(zero, tensors, meta)
    assert _sums(whole_weights(zero)) == before, "nothing was changed"
    return str(told.value)


@installed
def test_weights_that_were_updated_unequally_often_are_refused(tmp_path: Path) -> None:
    for told in on_ranks(with_other_counts, tmp_path):
        assert "different numbers of updates, and DeepSpeed counts those of many weights" in told


@installed
@pytest.mark.parametrize("rest", [[True], [False, False, True, True]], ids=["overflow", "growth"])
def test_a_loss_scale_goes_on_as_deepspeed_moves_it(
    rest: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    scalers: Any = importlib.import_module("deepspeed.runtime.fp16.loss_scaler")
    monkeypatch.setattr(scalers, "dist", SimpleNamespace(get_rank=lambda: 1))  # says nothing

    def trainer() -> ZeroTrainer:
        made = object.__new__(ZeroTrainer)
        scaler = scalers.DynamicLossScaler(2.0**16, 3, 1.0, 2, False)
        made.engine = SimpleNamespace(optimizer=SimpleNamespace(loss_scaler=scaler))
        return made

    def scales(of: ZeroTrainer, overflows: list[bool]) -> list[float]:
        scaler, found = of.engine.optimizer.loss_scaler, []
        for overflow in overflows:
            scaler.update_scale(overflow)
            found.append(scaler.cur_scale)
        return found

    saved, resumed = trainer(), trainer()
    scales(saved, [True, True, False, False])
    resumed.loss_scale = json.loads(json.dumps(saved.loss_scale))
    assert scales(saved, rest) == scales(resumed, rest) != scales(trainer(), rest)


@pytest.mark.parametrize("what", ["optimizer", "param"])
def test_checkpoints_of_a_state_on_nvme_are_refused(what: str, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    offload = {"device": "nvme", "nvme_path": str(tmp_path)}
    file.write_text(json.dumps({"zero_optimization": {"stage": 3, f"offload_{what}": offload}}))
    job, plan = language_job(data=examples(4)), Plan([Checkpoints(), DeepSpeed(config=str(file))])
    with pytest.raises(InputError, match="nvme; offload it to the device cpu"):
        prepare(job, plan, job_context(job, world=TWO), tmp_path)


@pytest.mark.parametrize(
    ("technique", "words"),
    [
        (TopK(), "can't go with topk.*its own way .* zero_quantized_gradients"),
        (Autocast(), "can't go with autocast.*number format is its config's"),
        (Muon(), "can't go with muon.*flat pieces"),
        (MultiTokenPrediction(), "0.18.3 to 0.19.3 have wrong gradients .* Take ddp as the layout"),
    ],
    ids=lambda value: value.name() if isinstance(value, Technique) else "",
)
def test_what_deep_speed_decides_itself_is_refused_with_a_reason(
    technique: Technique, words: str, tmp_path: Path
) -> None:
    job = language_job(data=examples(4))
    with pytest.raises(InputError, match=words):
        prepare(job, Plan([technique, DeepSpeed()]), job_context(job, world=TWO), tmp_path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"zero_optimization": {"stage": 3}, "gradient_clipping": 5.0}, "max_grad_norm 1.0"),
        ({"zero_optimization": {"stage": 3, "overlap_com": True}}, "did you mean 'overlap_comm'"),
        ({"bf16": {"enabled": True}}, "no zero_optimization stage above 0"),
        (
            {"zero_optimization": {"stage": 2}, "train_batch_size": 64},
            "train_batch_size is 64 and global_batch_size is 8",
        ),
    ],
)
def test_a_config_that_contradicts_is_refused(
    config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config))
    job = language_job(data=examples(4))
    with pytest.raises(InputError, match=words):
        prepare(job, Plan([DeepSpeed(config=str(file))]), job_context(job, world=TWO))


@pytest.mark.parametrize(
    ("beside", "dtype", "runs_in"),
    [
        ({}, "bf16", "bf16"),
        ({"fp16": {"enabled": "auto"}}, "bf16", "bf16"),
        ({}, "fp16", "fp16"),
        ({"bf16": {"enabled": False}}, "bf16", None),
        ({"bfloat16": {"enabled": True}}, "fp16", "bfloat16"),
        ({}, "float32", None),
    ],
)
def test_the_format_is_the_config_s_or_else_the_technique_s(
    beside: dict[str, Any], dtype: str, runs_in: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3}, **beside}))
    known = TrainerSettings(fp16=dtype == "fp16", bf16=dtype == "bf16")
    found = DeepSpeed(config=str(file), dtype=dtype).settings_of(known)
    on = [name for name, section in found.items() if section.get("enabled") is True]
    assert on == ([] if runs_in is None else [runs_in])


def test_what_is_dealt_out_is_foretold_by_the_config_s_stage(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    context = job_context(language_job(data=examples(4)), world=TWO)
    by_config = DeepSpeed(config=str(file)).forecast(context)
    assert by_config == DeepSpeed(stage=3).forecast(context)
    assert by_config != DeepSpeed().forecast(context)
    assert DeepSpeed(config=str(tmp_path / "none")).forecast(context) == DeepSpeed().forecast(
        context
    )


def test_it_stands_aside_on_one_rank() -> None:
    job = language_job(data=examples(4))
    assert prepare(job, Plan([DeepSpeed()]), job_context(job)).layout.size == 1


def test_a_missing_package_or_compiler_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    known = replace(job_context(language_job(data=examples(4))))
    monkeypatch.setattr(deepspeed_engine.util, "find_spec", lambda name: None)
    assert "pip install 'deepspeed>=0.19,<0.20' ninja" in DeepSpeed().unsupported_reasons(known)[0]
    monkeypatch.setattr(deepspeed_engine.util, "find_spec", lambda name: object())
    monkeypatch.setattr(deepspeed_engine.shutil, "which", lambda name: None)
    assert "install a C++ compiler" in DeepSpeed().unsupported_reasons(known)[0]
    monkeypatch.setattr(deepspeed_engine.shutil, "which", lambda name: name)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert DeepSpeed().unsupported_reasons(known) == ()


def test_the_lock_of_a_killed_build_is_found(tmp_path: Path) -> None:
    (tmp_path / "op").mkdir()
    lock = tmp_path / "op" / "lock"
    lock.touch()
    assert deepspeed_engine.stale_locks(tmp_path) == []
    os.utime(lock, (0, 0))
    assert deepspeed_engine.stale_locks(tmp_path) == [lock]
    link = tmp_path / "op" / "main.cpp"
    link.symlink_to(tmp_path / "gone")
    os.utime(link, (0, 0), follow_symlinks=False)
    assert deepspeed_engine.stale_locks(tmp_path) == [lock]
    (tmp_path / "op" / "main.o").touch()  # somebody is at work
    assert deepspeed_engine.stale_locks(tmp_path) == []
