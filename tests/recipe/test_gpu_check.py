"""First contact: every kernel agrees with float64, and planted faults are found and said.

Kernels run in Triton's interpreter, on a processor; those that only CUDA has, by what runs in their
place, so that their references are known to be right.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_rank_jobs import first_contact
from hasten.cli import check
from hasten.core.context import JobContext, ModelFacts
from hasten.machine import host
from hasten.parts.kernels import registry
from hasten.parts.kernels.registry import Sizes, Verdict, checked, difference, figures_of
from hasten.parts.nn import attention, gpu_kernels, kernel_variants, quantised  # noqa: F401
from hasten.recipe import build, gpu_check
from hasten.recipe.gpu_check import apply, check_kernels, sizes_of
from hasten.recipe.schema import Recipe
from hasten.techniques import layers
from interpreted_triton import round_as_a_gpu
from ranks import on_ranks
from sample_data import small
from tiny import job_context, language_job
from triton_marks import needs_triton

KERNELS = {kernel.key: kernel for kernel in registry.gpu_kernels()}
SMALL = Sizes(hidden=40, between=56, heads=4, groups=2, head=16, lengths=(2, 3))
FAULTS = {
    "wrong": r"float32: off by 0\.1 of the largest number, at most 6e-06",
    "nan": "float32: 1 of 280 numbers are infinite or NaN where they shouldn't be",
    "does not compile": "float32: RuntimeError: PTXAS error: Internal Triton PTX codegen error",
    "hangs": "it hadn't ended after 2 s",
    "takes its process along": r"its process ended \(exit code -6: an illegal memory access",
}


@pytest.fixture(autouse=True)
def _nothing_refused() -> Any:
    yield
    registry.allow_all()


# The interpreter takes seconds for these; tests/parts compare them with float64, too.
DEAR = ("rotate", "float8_rounding", "codec", "adamw_compact_moments")


@needs_triton
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in DEAR)) for name in KERNELS]
)
def test_a_kernel_agrees_with_float64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    round_as_a_gpu(monkeypatch)
    found = checked(KERNELS[name], SMALL, "cpu")
    assert found.fault == found.failed == ""
    assert found.repeats


@pytest.mark.parametrize("wrong", [1.02, float("nan")])
def test_a_bound_is_met_by_little(wrong: float) -> None:
    """A result that is off by a fiftieth in one number is found in every format."""
    for kernel in KERNELS.values():
        for bound in kernel.bounds.values():
            truth = torch.full((9,), 3.0, dtype=torch.float64)
            found = truth.clone()
            found[4] *= wrong
            assert difference(truth * (1 + bound / 2), truth, of_largest=True)[0] <= bound
            if bound < 0.02 or wrong != wrong:
                assert difference(found, truth, of_largest=True)[0] > bound
    assert "shape" in difference(torch.ones(2), torch.ones(3))[1]


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
    assert "off by" in checked(KERNELS[name], SMALL, "cpu").failed


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
    """The registry's child process with planted faults, and how often it was started."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.starts, self._plan = folder / "starts", folder / "plan.json"
        script = Path(__file__).with_name("planted_kernels.py")
        monkeypatch.setattr(registry, "COMMAND", (sys.executable, str(script), str(self._plan)))
        monkeypatch.setattr(registry, "_FAILED_STARTS", set())
        monkeypatch.setattr(registry, "FOLDER", folder / "kept")
        self.plan()

    def plan(self, faults: dict[str, str] | None = None, **more: Any) -> None:
        self._plan.write_text(
            json.dumps({"faults": faults or {}, "starts": str(self.starts), **more})
        )

    def verdicts(self, *names: str, **more: Any) -> dict[str, Verdict]:
        """As in a process of its own, of which the child computes on the processor."""
        registry._MEMORY.clear()
        kernels = [replace(KERNELS[name], why_not=lambda device: "") for name in names]
        found = figures_of(kernels, "cpu:0", SMALL, **more).proofs
        return {name: verdict for name, verdict in found.items() if name in names}

    @property
    def asked(self) -> list[list[str]]:
        lines = self.starts.read_text().splitlines() if self.starts.exists() else []
        return [json.loads(line)["kernels"] for line in lines]


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Child:
    return Child(tmp_path, monkeypatch)


BOTH = ("swiglu", "plain_norm")


@needs_triton
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_the_others_are_tried_all_the_same(
    fault: str, child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "hangs":
        monkeypatch.setattr(registry, "KERNEL_SECONDS", 2.0)
    child.plan({"swiglu": fault})
    found = child.verdicts(*BOTH)
    assert list(found) == list(BOTH)
    assert not found["plain_norm"].fault
    assert re.match(FAULTS[fault], found["swiglu"].failed), found["swiglu"].failed
    lost = fault in ("hangs", "takes its process along")
    assert child.asked == [list(BOTH), *([["plain_norm"]] if lost else [])]


@needs_triton
def test_a_verdict_is_kept_and_a_fault_is_tried_again_when_asked(child: Child) -> None:
    child.plan({"swiglu": "wrong"})
    first = child.verdicts(*BOTH)
    assert child.verdicts(*BOTH) == first
    assert len(child.asked) == 1
    assert child.verdicts(*BOTH, retry=True) == first  # what failed is tried again, nothing else
    assert child.asked[1:] == [["swiglu"]]


@needs_triton
def test_a_kernel_that_gives_other_bits_may_be_used_and_is_noted(child: Child) -> None:
    child.plan({"swiglu": "differs each time"})
    found = child.verdicts("swiglu")["swiglu"]
    assert not found.fault
    assert not found.repeats


def test_a_child_that_cannot_start_says_nothing_about_kernels(child: Child) -> None:
    """Nothing is refused, and in this process no child is started again."""
    child.plan(**{"does not start": True})
    assert child.verdicts(*BOTH) == {}
    assert registry.faults("cpu:0", *layers.KERNELS) == ()
    assert len(child.asked) == 1


def test_a_refusal_is_one_sentence_and_something_else_runs() -> None:
    bad = Verdict(failed="bfloat16: off by 0.3 of the largest number, at most 0.0078")
    assert apply({"scaled_mm": bad, "swiglu": Verdict()}, "NVIDIA H100 (9.0)") == [
        "scaled_mm isn't used on NVIDIA H100 (9.0): bfloat16: off by 0.3 of the largest number, at "
        "most 0.0078; products run in bf16, at half the speed that float8 can have"
    ]
    assert registry.is_refused("scaled_mm")
    assert not registry.is_refused("swiglu")
    layers = quantised.Float8Layers()
    model = torch.nn.Sequential(torch.nn.Linear(32, 16))
    layers.attach(model)
    x = torch.randn(3, 32)
    plain = torch.nn.functional.linear(x, model[0].weight, model[0].bias)
    assert torch.equal(model(x), plain)
    assert not layers.ran, "the probe must not say that float8 ran"


def test_sizes_are_the_models_own() -> None:
    model = ModelFacts(hidden_size=4096, heads=32, key_value_heads=8)
    assert sizes_of(model) == Sizes(4096, 16_384, 32, 8, 128)
    assert sizes_of(ModelFacts()) == Sizes(512, 2048, 8, 8, 64)


@pytest.fixture
def on_a_gpu(child: Child, monkeypatch: pytest.MonkeyPatch) -> JobContext:
    """As ``check_kernels`` sees a GPU: the child computes on the processor all the same."""
    child.plan({"swiglu": "wrong"})
    mine = [replace(KERNELS[n], why_not=lambda device: "") for n in ("swiglu", "fused_adamw")]
    monkeypatch.setattr(registry, "gpu_kernels", lambda: mine)
    monkeypatch.setattr(registry, "_name", lambda device: "NVIDIA H100")
    monkeypatch.setattr(host, "accelerator_words", lambda device: "NVIDIA H100 (9.0)")
    usual = registry._in_children

    def on_the_processor(names: list[str], sizes: Sizes, device: str) -> Any:
        assert device == "cuda:1"
        return usual(names, SMALL, "cpu")

    monkeypatch.setattr(registry, "_in_children", on_the_processor)
    return replace(job_context(language_job()), device="cuda:1")


@needs_triton
def test_a_run_hears_of_what_is_refused_and_a_processor_of_nothing(on_a_gpu: JobContext) -> None:
    told: list[str] = []
    assert check_kernels(replace(on_a_gpu, device="cpu"), told.append) == {}
    found = check_kernels(on_a_gpu, told.append)
    assert [name for name, verdict in found.items() if not verdict.fault] == ["fused_adamw"]
    begins, sentence = told
    assert begins == "trying 2 kernels on NVIDIA H100 (9.0), once for it and these versions"
    assert sentence.startswith("swiglu isn't used on NVIDIA H100 (9.0): float32: off by 0.1 of")
    assert sentence.endswith("torch's silu and product run, which move 5 numbers for 3")
    assert registry.is_refused("swiglu")
    told.clear()
    check_kernels(on_a_gpu, told.append)
    assert told == [sentence], "the verdict was kept"


@needs_triton
def test_check_reports_each_kernel(
    on_a_gpu: JobContext, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = check._Checks()
    check._gpu(on_a_gpu, checks)
    _, refusal, good = capsys.readouterr().out.splitlines()
    assert refusal.startswith("warn gpu kernels  swiglu isn't used on NVIDIA H100 (9.0): ")
    assert good == "ok   gpu kernels  agree with float64 on NVIDIA H100 (9.0): fused_adamw"
    assert not checks.failed, "a run goes on without the kernel"


@needs_triton
def test_a_variant_on_a_gpu_is_tried_without_what_is_refused_there(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "variants", lambda: (kernel_variants.PASS_FUSED,))
    registry.refuse("swiglu", "wrong")
    assert registry.faults("cpu:0", kernel_variants.PASS) == ()
    assert json.loads(child.starts.read_text())["refused"] == {"swiglu": "wrong"}


def test_experts_are_taken_one_by_one_where_groups_are_refused() -> None:
    from tiny import tiny_model

    model: Any = tiny_model("deepseek_v3")
    before = model.config._experts_implementation
    gpu_check.without_refused(model)
    assert model.config._experts_implementation == before == "grouped_mm"
    registry.refuse("grouped_mm", "wrong")
    gpu_check.without_refused(model)
    assert model.config._experts_implementation == "eager"


def test_ranks_look_for_their_devices_and_for_each_other(tmp_path: Path) -> None:
    for found in on_ranks(first_contact, tmp_path):
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
