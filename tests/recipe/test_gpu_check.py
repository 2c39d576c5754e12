"""First contact: every kernel agrees with float64, and planted faults are found and said.

Kernels run in Triton's interpreter, on a processor; those that only CUDA has, by what runs in their
place, so that their references are known to be right.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hasten.cli import doctor
from hasten.core.facts import ModelFacts
from hasten.machine import host
from hasten.parts.kernels import adamw, refused
from hasten.parts.nn import attention, gpu_kernels, quantised
from hasten.parts.nn.gpu_kernels import KERNELS, Sizes, Verdict, checked_kernel, kernel_named
from hasten.recipe import build, gpu_check
from hasten.recipe.gpu_check import Limits, apply, check_kernels, kept_or_tried, sizes_of
from hasten.recipe.schema import Recipe
from interpreted_triton import round_as_a_gpu
from ranks import on_ranks
from sample_data import small
from tiny import job_facts, language_job

TRITON = ("rms_norm", "swiglu", "rotate", "codec", "float8_rounding", "widening")
TRITON += (adamw.PLAIN, adamw.COMPACT)
HERE = [kernel.name for kernel in KERNELS if not kernel.name.startswith("liger")]
SMALL = Sizes(hidden=40, between=56, heads=4, groups=2, head=16, rows=5)
FAULTS = {
    "wrong": r"float32: off by 0\.1 of the largest number, at most 6e-06",
    "nan": "float32: 1 of 280 numbers are infinite or NaN where they shouldn't be",
    "does not compile": "float32: RuntimeError: PTXAS error: Internal Triton PTX codegen error",
    "hangs": "it hadn't ended after 6 s",
    "takes its process along": r"its process ended \(exit code -6: an illegal memory access",
}
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton isn't installed"
)


@pytest.fixture(autouse=True)
def _nothing_refused() -> Any:
    yield
    refused.allow_all()


@needs_triton
@pytest.mark.parametrize("name", HERE)
def test_a_kernel_agrees_with_float64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    round_as_a_gpu(monkeypatch)
    assert checked_kernel(kernel_named(name), SMALL, "cpu") == Verdict(name)


@pytest.mark.parametrize("wrong", [1.02, float("nan")])
def test_a_bound_is_met_by_little(wrong: float) -> None:
    """A result that is off by a fiftieth in one number is found in every format."""
    for kernel in KERNELS:
        for bound in kernel.bounds.values():
            truth = torch.full((9,), 3.0, dtype=torch.float64)
            found = truth.clone()
            found[4] *= wrong
            small = gpu_kernels._difference(truth * (1 + bound / 2), truth, bound)
            assert small == ""
            if bound < 0.02 or wrong != wrong:
                assert gpu_kernels._difference(found, truth, bound)
    assert "shape" in gpu_kernels._difference(torch.ones(2), torch.ones(3), 0.1)


@pytest.mark.parametrize("name", ["varlen_attention", "grouped_mm"])
def test_a_kernel_that_mixes_up_its_inputs_is_found(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_attention, true_product = attention._causal, torch.nn.functional.grouped_mm

    def swapped(query: Any, key: Any, value: Any, *more: Any) -> Any:
        if key.shape == value.shape:
            key, value = value, key
        return true_attention(query, key, value, *more)

    monkeypatch.setattr(attention, "_causal", swapped)
    monkeypatch.setattr(
        torch.nn.functional, "grouped_mm", lambda x, w, offs: true_product(x, w.flip(0), offs=offs)
    )
    assert "off by" in checked_kernel(kernel_named(name), SMALL, "cpu").why


class TriedError(Exception):
    """The kernels are tried here."""


class JobError(Exception):
    """The job is made here."""


@pytest.mark.parametrize(("ranks", "first"), [(1, TriedError), (2, JobError)])
def test_kernels_are_tried_before_a_job_is_made(
    ranks: int, first: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not for ranks that are about to be started: they do so themselves."""

    def raises(error: type[Exception]) -> Any:
        def stop(*given: Any, **more: Any) -> None:
            raise error

        return stop

    monkeypatch.setattr(build, "prepare_data", lambda *given: None)
    monkeypatch.setattr(build, "check_kernels", raises(TriedError))
    monkeypatch.setattr(build, "job_of", raises(JobError))
    with pytest.raises(first):
        build.prepare_run(Recipe.model_validate(small(tmp_path)), lambda text: None, ranks=ranks)


class Child:
    """The command of a child process with planted faults, and how often it was started."""

    def __init__(self, folder: Path, faults: dict[str, str], **more: Any) -> None:
        self.starts = folder / "starts"
        plan = folder / "plan.json"
        plan.write_text(json.dumps({"faults": faults, "starts": str(self.starts), **more}))
        script = Path(__file__).parents[1] / "planted_kernels.py"
        self.command = (sys.executable, str(script), str(plan))
        self.folder = folder / "kept"
        self.kernel_seconds = 6.0 if "hangs" in faults.values() else 100.0

    def verdicts(self, names: tuple[str, ...] = ("swiglu", "plain_norm"), **more: Any) -> Any:
        limits = Limits(120.0, self.kernel_seconds)
        return kept_or_tried(
            names,
            SMALL,
            "cpu",
            "a GPU",
            folder=self.folder,
            command=self.command,
            limits=limits,
            **more,
        )

    @property
    def asked(self) -> list[list[str]]:
        lines = self.starts.read_text().splitlines() if self.starts.exists() else []
        return [json.loads(line)["kernels"] for line in lines]


@needs_triton
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_the_others_are_tried_all_the_same(
    fault: str, tmp_path: Path
) -> None:
    child = Child(tmp_path, {"swiglu": fault})
    bad, good = child.verdicts()
    assert good == Verdict("plain_norm")
    assert bad.kernel == "swiglu"
    assert re.match(FAULTS[fault], bad.why), bad.why
    lost = fault in ("hangs", "takes its process along")
    assert child.asked == [["swiglu", "plain_norm"], *([["plain_norm"]] if lost else [])]


@needs_triton
def test_a_verdict_is_kept_until_something_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = Child(tmp_path, {"swiglu": "wrong"})
    first = child.verdicts()
    assert child.verdicts() == first
    assert len(child.asked) == 1
    assert child.verdicts(again=True) == first  # what was refused is tried again, and nothing else
    assert child.asked[1:] == [["swiglu"]]
    monkeypatch.setattr(gpu_check, "_version", lambda package: "another")
    child.verdicts()
    assert len(child.asked) == 3
    (newest, *_) = sorted(child.folder.glob("*.json"), key=lambda f: -f.stat().st_mtime_ns)
    newest.write_text("{")  # cut off
    child.verdicts()
    assert len(child.asked) == 4


@needs_triton
def test_a_kernel_that_gives_other_bits_may_be_used_and_is_noted(tmp_path: Path) -> None:
    (found, _) = Child(tmp_path, {"swiglu": "differs each time"}).verdicts()
    assert found == Verdict("swiglu", repeats=False)


def test_a_child_that_cannot_start_says_nothing_about_kernels(tmp_path: Path) -> None:
    child = Child(tmp_path, {}, **{"does not start": True})
    assert child.verdicts() == []
    assert len(child.asked) == 1


def test_nothing_is_kept_where_nothing_can_be_written(tmp_path: Path) -> None:
    child = Child(tmp_path, {})
    child.folder.write_text("a file")
    assert child.verdicts(("fused_adamw",)) == [Verdict("fused_adamw")]


def test_a_refusal_is_one_sentence_and_something_else_runs() -> None:
    bad = Verdict("scaled_mm", "bfloat16: off by 0.3 of the largest number, at most 0.0078")
    assert apply([bad, Verdict("swiglu")], "NVIDIA H100 (9.0)") == [
        "scaled_mm isn't used on NVIDIA H100 (9.0): bfloat16: off by 0.3 of the largest number, at "
        "most 0.0078; products run in bf16, at half the speed that float8 can have"
    ]
    assert dict(refused.reasons()) == {"scaled_mm": bad.why}
    layers = quantised.Float8Layers()
    model = torch.nn.Sequential(torch.nn.Linear(32, 16))
    layers.attach(model)
    x = torch.randn(3, 32)
    plain = torch.nn.functional.linear(x, model[0].weight, model[0].bias)
    assert torch.equal(model(x), plain)
    assert not layers.ran, "the probe must not say that float8 ran"


def test_every_kernel_has_something_in_its_place() -> None:
    for kernel in KERNELS:
        assert " run" in kernel.instead or "make" in kernel.instead
        assert kernel.missing("mps"), "there is nothing to try on other devices"


def test_sizes_are_the_models_own() -> None:
    model = ModelFacts(hidden_size=4096, heads=32, key_value_heads=8)
    assert sizes_of(model) == Sizes(4096, 16_384, 32, 8, 128)
    assert sizes_of(ModelFacts()) == Sizes(512, 2048, 8, 8, 64)


@pytest.fixture
def on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Child:
    """As ``check_kernels`` sees a GPU: the child computes on the processor all the same."""
    child = Child(tmp_path, {"swiglu": "wrong"})
    monkeypatch.setattr(gpu_check, "COMMAND", child.command)
    monkeypatch.setattr(gpu_check, "names_on", lambda device: ["swiglu", "fused_adamw"])
    monkeypatch.setattr(host, "accelerator_words", lambda device: "NVIDIA H100 (9.0)")
    usual = gpu_check.kept_or_tried

    def here(names: Any, sizes: Any, device: str, gpu: str, tell: Any, *, again: bool) -> Any:
        assert device == "cuda:1"
        more = {"folder": child.folder, "command": child.command}
        return usual(names, SMALL, "cpu", gpu, tell, again=again, **more)

    monkeypatch.setattr(gpu_check, "kept_or_tried", here)
    return child


@needs_triton
def test_a_run_hears_of_what_is_refused_and_a_processor_of_nothing(on_a_gpu: Child) -> None:
    known, told = job_facts(language_job()), []
    assert check_kernels(known, told.append) == []
    found = check_kernels(replace(known, device="cuda:1"), told.append)
    assert [v.kernel for v in found if v.good] == ["fused_adamw"]
    begins, sentence = told
    assert begins == "trying 2 kernels on NVIDIA H100 (9.0), once for it and these versions"
    assert sentence.startswith("swiglu isn't used on NVIDIA H100 (9.0): float32: off by 0.1 of")
    assert sentence.endswith("torch's silu and product run, which move 5 numbers for 3")
    assert refused.is_refused("swiglu")
    told.clear()
    check_kernels(replace(known, device="cuda:1"), told.append)
    assert told == [sentence], "the verdict was kept"


@needs_triton
def test_doctor_tells_of_each_kernel(on_a_gpu: Child, capsys: pytest.CaptureFixture[str]) -> None:
    checks = doctor._Checks()
    doctor._gpu(replace(job_facts(language_job()), device="cuda:1"), checks)
    _, refusal, good = capsys.readouterr().out.splitlines()
    assert refusal.startswith("warn gpu kernels  swiglu isn't used on NVIDIA H100 (9.0): ")
    assert good == "ok   gpu kernels  agree with float64 on NVIDIA H100 (9.0): fused_adamw"
    assert not checks.failed, "a run goes on without the kernel"


def test_experts_are_taken_one_by_one_where_groups_are_refused() -> None:
    from tiny import tiny_model

    model: Any = tiny_model("deepseek_v3")
    before = model.config._experts_implementation
    gpu_check.without_refused(model)
    assert model.config._experts_implementation == before == "grouped_mm"
    refused.refuse("grouped_mm", "wrong")
    gpu_check.without_refused(model)
    assert model.config._experts_implementation == "eager"


def test_ranks_look_for_their_devices_and_for_each_other(tmp_path: Path) -> None:
    for found in on_ranks("gpu_rank_jobs:first_contact", tmp_path):
        assert found == {
            "as they are": "",
            "a product that is wrong": "rank 1 (cpu of HOST): a product of ones came out as 7, not "
            "262144",
            "one GPU for two": "ranks 0 and 1 have the same GPU, cuda:0 of HOST: start no more "
            "ranks than GPUs there, and let the launcher set LOCAL_RANK",
            "not the current one": "rank 1 (cuda:1 of HOST): its current device is number 0; call "
            "torch.accelerator.set_device_index before the ranks meet",
            "a wrong sum": "a sum of 1 over 2 ranks came out as 3 on rank RANK: the GPUs' link "
            "carries wrong numbers; see NCCL_DEBUG=INFO, or try NCCL_P2P_DISABLE=1",
        }
