"""Under DeepSpeed's ZeRO two ranks train as one process does, and save what it would."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hasten.core.plan import Plan
from hasten.core.setup import prepare
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.machine.environment import World
from hasten.parts.distributed import deepspeed_engine
from hasten.parts.distributed.deepspeed_config import TrainerSettings
from hasten.techniques.checkpoint import Checkpoints
from hasten.techniques.communication.compress import TopK
from hasten.techniques.layout.deepspeed import DeepSpeed
from hasten.techniques.objective import MultiTokenPrediction
from hasten.techniques.optimizer import Muon
from hasten.techniques.precision import Autocast
from ranks import on_ranks
from techniques.zero_rank_jobs import CASES, train_all
from tiny import examples, job_context, language_job

installed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is an extra: hasten[deepspeed]"
)
TWO = World(0, 0, 2)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks("techniques.zero_rank_jobs:train_all", tmp_path_factory.mktemp("zero"))


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return train_all(World())


@installed
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_one_process_does(
    found: list[Any], alone: dict[str, Any], case: str
) -> None:
    ours, theirs = found[0][case], alone[case]
    for key in ("losses", "norms", "eval_data", "after", "answer"):
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
    for found in on_ranks("techniques.zero_rank_jobs:held", tmp_path, 4):
        whole = found["ddp"]["bytes"]
        assert found["zero 3"]["bytes"] <= 0.35 * whole
        assert found["fsdp2"]["bytes"] <= 0.35 * whole
        assert found["zero 3"]["losses"] == pytest.approx(found["ddp"]["losses"], rel=2e-5)


@pytest.mark.parametrize(
    ("technique", "words"),
    [
        (TopK(), "can't go with topk.*its own way .* zero_quantized_gradients"),
        (Autocast(), "can't go with autocast.*number format is its config's"),
        (Muon(), "can't go with muon.*flat pieces"),
        (Checkpoints(), "can't go with checkpoints.*isn't written by hasten"),
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
