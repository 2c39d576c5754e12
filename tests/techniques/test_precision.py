"""fp16 with a loss scale: found, agreed on by all ranks, saved; float8 where it can't work."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from hasten.core.context import JobContext
from hasten.core.plan import Plan
from hasten.core.setup import Session, prepare, run_once
from hasten.core.state import state_of
from hasten.core.step import NotFiniteError, assemble, training
from hasten.errors import InputError
from hasten.machine.environment import World
from hasten.machine.gain import Gain
from hasten.machine.host import Accelerator
from hasten.parts.nn.quantised import Float8Layers, Rounding
from hasten.techniques import precision
from hasten.techniques.adapter import LoRA
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.layout.ranks import LocalShards
from hasten.techniques.precision import Autocast, BF16MasterWeights, Float8
from ranks import on_ranks
from tiny import examples, job_context, language_job, restore, run, session_of, tiny_model

OVERFLOWS = (0, 1, 4)  # steps


def overflowing(world: World) -> dict[str, Any]:
    """Both ways of one rank's overflow: before gradients travel, and after they have."""
    return {
        where: _run(world, where)
        for where in ("before the communication", "after the communication")
    }


def _run(world: World, where: str) -> dict[str, Any]:
    job = language_job(data=examples(24), batch=4, steps=6)
    plan = Plan([Autocast(dtype="fp16", growth_interval=2), DDP()])
    setup = prepare(job, plan, job_context(job, world=world))
    held: list[Session] = []
    mine = world.rank == world.size - 1

    def now() -> bool:
        return mine and held[0].progress.step in OVERFLOWS

    def attempt(engine: Any, batch: Any) -> Any:
        found = run_once(engine, batch)
        if where == "after the communication" and now():
            setup.precision.parameters()[0].grad.view(-1)[0] = torch.inf  # type: ignore[union-attr]
        return found

    setup.run_passes = attempt
    session = assemble(setup)
    held.append(session)
    if where == "before the communication":
        model: Any = session.model
        model.lm_head.weight.register_hook(lambda g: g * torch.inf if now() else g)
    scale: Any = setup.loss_scale
    steps = [(m.skipped, scale.value) for m in training(session)]
    weights = torch.cat([p.detach().flatten() for p in session.finish().parameters()])
    return {"steps": steps, "weights": float(weights.double().sum())}


FP16 = Autocast(dtype="fp16")


def facts(**hardware: Any) -> JobContext:
    context = job_context(language_job())
    return dataclasses.replace(context, hardware=dataclasses.replace(context.hardware, **hardware))


def poisoned(session: Any, steps: range, loss: bool = False) -> Any:
    """The session with infinite gradients, or an infinite loss too, at these steps."""

    def attempt(engine: Any, batch: Any) -> Any:
        loss_sum, ran = run_once(engine, batch)
        if session.progress.step in steps:
            session.setup.precision.parameters()[0].grad.fill_(torch.inf)
            loss_sum = loss_sum * torch.inf if loss else loss_sum
        return loss_sum, ran

    session.setup.run_passes = attempt
    return session


@pytest.mark.parametrize("architecture", ["llama", "deepseek_v3"])
def test_fp16_with_its_scale_learns_as_float32_does(architecture: str) -> None:
    job = language_job(lambda: tiny_model(architecture), steps=8)
    plain = [m.loss for m in run(session_of(job, architecture=architecture))]
    session = session_of(job, FP16, architecture=architecture)
    found = run(session)
    assert not any(m.skipped for m in found)
    assert [m.loss for m in found] == pytest.approx(plain, rel=5e-3)
    proof = FP16.check_effect(session)
    assert proof.effective
    assert "float16; loss scale 65536, 0 steps given up" in proof.evidence


def test_the_norm_that_clips_is_that_of_unscaled_gradients() -> None:
    job = language_job(steps=1)
    (plain,), (scaled,) = run(session_of(job)), run(session_of(job, FP16))
    assert scaled.grad_norm == pytest.approx(plain.grad_norm, rel=1e-2)


def test_the_search_for_a_scale_is_no_failure() -> None:
    job = language_job(steps=20)
    session = poisoned(session_of(job, FP16), range(14))
    steps = run(session)
    assert [m.skipped for m in steps] == [True] * 14 + [False] * 6
    assert session.setup.loss_scale.value == 4.0


def test_without_a_scale_ten_are_still_a_failure() -> None:
    with pytest.raises(NotFiniteError, match="10 steps in a row"):
        run(poisoned(session_of(language_job(steps=20), Autocast()), range(20)))


def test_when_the_scale_can_fall_no_further_ten_more_are_a_failure() -> None:
    session = poisoned(session_of(language_job(steps=40), FP16), range(40))
    with pytest.raises(NotFiniteError, match="10 steps in a row, up to step 26"):
        run(session)


def test_a_loss_that_is_not_finite_is_a_failure_at_any_scale() -> None:
    session = poisoned(session_of(language_job(steps=20), FP16), range(20), loss=True)
    with pytest.raises(NotFiniteError, match="up to step 10"):
        run(session)


def test_the_scale_is_part_of_a_checkpoint() -> None:
    job = language_job(steps=5)
    fp16 = Autocast(dtype="fp16", growth_interval=3)
    session = poisoned(session_of(job, fp16), range(1))
    run(session)
    tensors, meta = state_of(session)
    fresh: Any = session_of(job, fp16)
    restore(fresh, tensors, meta)
    assert fresh.setup.loss_scale.state_dict() == {"value": 65536.0, "good": 1, "skipped": 1}


def test_ranks_agree_when_one_of_them_overflows(tmp_path: Path) -> None:
    one, two = on_ranks(overflowing, tmp_path)
    assert one == two
    skipped = [True, True, False, False, True, False]
    values = [32768.0, 16384.0, 16384.0, 32768.0, 16384.0, 16384.0]
    for found in one.values():
        assert found["steps"] == [list(pair) for pair in zip(skipped, values, strict=True)]


def test_float8_with_no_layer_left_to_it_is_refused_in_a_sentence() -> None:
    with pytest.raises(InputError, match="float8: no linear layer has sides"):
        session_of(language_job(), Float8(emulate=True), LoRA(base="nf4"))


def test_a_layer_that_bypasses_float8_is_seen_by_the_probe() -> None:
    session: Any = session_of(language_job(steps=1), Float8(emulate=True))
    layer = session.model.model.layers[0].mlp.down_proj
    del layer.forward
    run(session)
    proof = Float8().check_effect(session)
    assert not proof.effective
    assert "13 of 14 linear layers ran" in proof.evidence


class Roundings(Counter[str]):
    """Counts how often weights are rounded to float8."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        for name in ("by_rows", "by_columns"):
            patch.setattr(Rounding, name, self._counted(name, getattr(Rounding, name)))

    def _counted(self, name: str, true: Any) -> Any:
        def run(rounding: Any, x: Any, weight: bool = False) -> Any:
            self[name] += weight
            return true(rounding, x, weight)

        return run


def test_weights_are_rounded_once_a_step_and_train_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a step of three passes; between steps weights are written to through ``.data``."""
    counted, losses = Roundings(monkeypatch), []
    job = language_job(steps=3, batch=6)
    for keep in (False, True):
        float8 = Float8(emulate=True, keep_weights=keep)
        session: Any = session_of(job, float8, GradientAccumulation(micro_batch_size=2))
        layers = session.setup.precision.layers
        found = []
        for metrics in training(session):
            assert all(weight._both is None for weight in layers._weights), "nothing stays"
            session.model.model.layers[0].mlp.down_proj.weight.data.mul_(1.01)
            with torch.no_grad():
                logits = session.model(input_ids=torch.arange(3, 12)[None]).logits
            found.append((metrics.loss, logits.square().sum().item()))
        assert counted.pop("by_rows") == 14 * 3 * (1 + 1 if keep else 3 + 1), "and an evaluation"
        assert counted.pop("by_columns") == 14 * 3 * (1 if keep else 3)
        losses.append(found)
        said = float8.check_effect(session).evidence
        assert ("their weights rounded once a step" in said) == keep
    assert losses[0] == losses[1]


def test_weights_that_are_dealt_out_are_rounded_in_each_pass() -> None:
    """They are brought together in the same memory again and again, and no version tells of it."""
    net = torch.nn.Sequential(torch.nn.Linear(16, 16))
    inner = precision.AutocastRegion("cpu", torch.bfloat16, Float8Layers(emulate=True), True)
    dealt = LocalShards(inner)
    dealt.prepare(net)
    assert inner.layers is not None
    for format, kept in ((dealt, False), (inner, True)):
        format.before_backward(reduces=True)
        assert inner.layers._weights[0].kept is kept
    inner.parameters()  # whoever has them may write to them
    assert not inner.layers._weights[0].kept
    assert not inner.layers.have_kept, "no pass has run"


def test_a_processor_without_fp16_units_is_an_obstacle() -> None:
    (reason,) = FP16.unsupported_reasons(facts(instruction_sets=("avx2", "avx512f")))
    assert "in software only" in reason
    assert FP16.unsupported_reasons(facts(instruction_sets=("avx512_fp16",))) == ()
    assert (
        Autocast(dtype="fp16", emulate=True).unsupported_reasons(facts(instruction_sets=())) == ()
    )


@pytest.mark.parametrize("kind", [Autocast, BF16MasterWeights])
def test_a_processor_that_torch_has_no_bf16_products_for_is_an_obstacle(
    kind: type[Autocast | BF16MasterWeights],
) -> None:
    """Products backward were 100 to 150 times slower than float32's on an AMD EPYC with AVX2."""
    old = facts(instruction_sets=("avx2",), cpu="An Old One", system="Linux 6.1")
    (reason,) = kind().unsupported_reasons(old)
    assert "An Old One multiplies bf16 in software only" in reason
    assert kind(emulate=True).unsupported_reasons(old) == ()
    for sets in (("avx2", "avx512f"), ("avx512f", "amx_bf16"), ("sve", "bf16")):
        assert kind().unsupported_reasons(facts(instruction_sets=sets, system="Linux 6.1")) == ()
    # Where the system doesn't tell, nothing is known against it.
    assert kind().unsupported_reasons(facts(instruction_sets=(), system="Darwin 24.1")) == ()
    gpus = (Accelerator("a GPU", 10**9, "9.0"),)
    assert (
        kind().unsupported_reasons(dataclasses.replace(facts(accelerators=gpus), device="cuda:0"))
        == ()
    )


def test_bf16_that_is_asked_for_only_if_faster_follows_the_measurement_and_no_flag(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = ("avx512f", "avx512_bf16")
    wish, known = BF16MasterWeights(only_if_faster=True), facts(instruction_sets=flags)
    assert wish.unsupported_reasons(known) == ()  # measured as faster, see conftest.py
    for low, high in ((0.5, 0.7), (0.9, 1.3)):
        slow = Gain(0.99 * high, low, high, 6)
        monkeypatch.setattr(precision, "bf16_gain", lambda device, slow=slow: slow)
        (reason,) = wish.unsupported_reasons(known)
        assert f"[{low:.2f}, {high:.2f}] the speed of float32" in reason
        assert BF16MasterWeights().unsupported_reasons(known) == ()  # asked for without a condition


def test_where_bf16_is_not_measured_it_is_used_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks might not agree, and a GPU has units of its own."""
    monkeypatch.setattr(precision, "bf16_gain", lambda device: pytest.fail("it was measured"))
    wish, known = BF16MasterWeights(only_if_faster=True), facts(instruction_sets=("avx512f",))
    assert wish.unsupported_reasons(dataclasses.replace(known, world=World(size=2))) == ()
    gpus = facts(accelerators=(Accelerator("a GPU", 10**9, "9.0"),))
    assert wish.unsupported_reasons(dataclasses.replace(gpus, device="cuda:0")) == ()


@pytest.mark.parametrize(
    ("technique", "capability", "reason"),
    [
        (Float8(), None, "a processor has no float8 products"),
        (Float8(), "8.9", "below 9.0"),
        (Float8(), "9.0", None),
        (Float8(), "10.0", None),
        (Float8(recipe="blockwise"), "9.0", "emulated only"),
        (Float8(recipe="blockwise", emulate=True), None, None),
    ],
)
def test_float8_says_where_it_cannot_work(
    technique: Float8, capability: str | None, reason: str | None
) -> None:
    gpus = (Accelerator("a GPU", 10**9, capability),) if capability else ()
    known = dataclasses.replace(facts(accelerators=gpus), device="cuda:0" if gpus else "cpu")
    found = technique.unsupported_reasons(known)
    assert (reason in found[0] and len(found) == 1) if reason else found == ()
    narrow = dataclasses.replace(known, model=dataclasses.replace(known.model, hidden_size=40))
    assert any("this llama is 40 wide" in text for text in technique.unsupported_reasons(narrow))
