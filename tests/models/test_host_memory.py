"""Memory of a host's ranks by phase: in plain numbers, refused with them, and in an estimate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hasten.core.context import JobContext
from hasten.core.plan import Plan
from hasten.core.setup import prepare
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.machine.environment import World
from hasten.models.host_memory import HostBytes, lacking
from hasten.planner.cluster import Cluster
from hasten.planner.inputs import cluster_of
from hasten.planner.layout import PlannedJob
from hasten.planner.planning import plan
from hasten.recipe import memory_check
from hasten.recipe.memory_check import host_needs, needs_of, settle_memory, size_of
from hasten.recipe.schema import Recipe
from hasten.techniques.checkpoint import Checkpoints
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.layout.fsdp import FSDP2
from tiny import examples, job_context, language_job

BILLION = 10**9
RECIPE = Recipe(model="deepseek-llm-tiny", dataset="stdlib", max_steps=1, from_scratch=True)
WIDE = 97 * 32 * 4  # bytes of the largest weight of the job's facts


def known(ranks: int, device: str = "cpu") -> JobContext:
    context = job_context(language_job(data=examples(8)), world=World(0, 0, ranks))
    model = replace(context.model, parameters=BILLION)
    return replace(context, model=model, device=device)


def of(plan: tuple[Technique, ...], ranks: int, device: str = "cpu") -> HostBytes:
    """Without activations: state, and what a phase adds to it."""
    context, techniques = known(ranks, device), Plan(plan)
    size = replace(size_of(RECIPE, context), hidden=32, vocabulary=97, layers=2)
    needs = needs_of(size, context, techniques, 0)
    certain = replace(needs, activations=0.0, logits=0.0, gathered=0.0)
    return host_needs(size, context, techniques, certain)


@pytest.mark.parametrize(
    ("plan", "ranks", "loading", "step", "save"),
    [
        # bytes of a weight: 4 to load, 16 to train, 12 in a checkpoint
        ((), 1, 4, 16, 16),
        ((Checkpoints(1),), 1, 4, 16, 16 + 1.1 * 12),
        ((FSDP2(), Checkpoints(1)), 4, 4, 16, 16 + 1.1 * 12),
        ((DDP(), Checkpoints(1)), 4, 4 * 4, 4 * 16, 4 * 16 + 1.1 * 12),  # each stages a quarter
    ],
    ids=["one rank", "with checkpoints", "fsdp2", "ddp"],
)
def test_ranks_of_a_processor_hold_all_and_stage_once(
    plan: tuple[Technique, ...], ranks: int, loading: float, step: float, save: float
) -> None:
    found, process = of(plan, ranks), ranks * 0.65e9
    parts = 1 if FSDP2() in plan else ranks
    assert found.loading == pytest.approx(loading * BILLION + process + parts * WIDE)
    assert found.step == pytest.approx(step * BILLION + process)
    assert found.save == pytest.approx(save * BILLION + process)
    gradients = parts * 4 * BILLION
    assert found.export == pytest.approx(found.save - gradients + 2 * WIDE)


def test_on_a_gpu_the_host_loads_and_stages_and_holds_nothing_else() -> None:
    found = of((FSDP2(), Checkpoints(1)), 4, "cuda:0")
    process = 4 * 2.5e9
    assert found.step == process
    assert found.loading == pytest.approx(process + 4 * BILLION + WIDE)
    assert found.save == pytest.approx(process + 1.1 * 12 * BILLION)
    offloaded = of((FSDP2(offload=True),), 4, "cuda:0")
    assert offloaded.step == pytest.approx(process + 16 * BILLION)


@pytest.mark.parametrize(
    ("room", "phase", "needed"),
    [(4.5e9, "loading", "4.7 GB"), (16e9, "step", "16.6 GB"), (29e9, "save", "29.9 GB")],
)
def test_a_job_that_its_host_can_not_hold_is_refused_with_phase_and_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, room: float, phase: str, needed: str
) -> None:
    context, job = known(1), language_job(data=examples(8))
    monkeypatch.setattr(memory_check, "room_of", lambda known: 64e9)
    monkeypatch.setattr(memory_check, "host_room", lambda known, resident: room)
    monkeypatch.setattr(memory_check, "resident_bytes", lambda: 0)
    setup = prepare(job, Plan([Checkpoints(1)]), context, tmp_path)
    with pytest.raises(InputError, match=f"the phase {phase} needs {needed} of this host") as error:
        settle_memory(RECIPE, setup, lambda text: None)
    assert f"{room / 1e9:.1f} GB are available; " in str(error.value)


def test_weights_that_a_step_brings_together_count_before_it_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    context, plan = known(4), Plan([FSDP2()])
    job = language_job(data=examples(8))
    room = of((FSDP2(),), 4).step + 0.1e9  # enough for the state alone
    assert FSDP2().forecast(context).passing_bytes > 0.1e9
    monkeypatch.setattr(memory_check, "room_of", lambda known: 64e9)
    monkeypatch.setattr(memory_check, "host_room", lambda known, resident: room)
    monkeypatch.setattr(memory_check, "resident_bytes", lambda: 0)
    setup = prepare(job, plan, context, tmp_path)
    with pytest.raises(InputError, match="the phase step needs"):
        settle_memory(RECIPE, setup, lambda text: None)


def test_ranks_share_what_is_free_and_what_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "available_bytes", lambda limit: 8 * 10**9)
    context = known(4)
    hardware = replace(context.hardware, memory_limit_bytes=10 * 10**9)
    context = replace(context, hardware=hardware)
    assert memory_check.host_room(context) == 8e9
    assert memory_check.host_room(context, resident=10**8) == 8.4e9
    assert memory_check.host_room(context, resident=10**9) == 10e9  # no more than the limit


def test_an_estimate_leaves_out_layouts_that_a_node_can_not_hold() -> None:
    job = PlannedJob(sequence=4096, global_batch=64)
    cluster = Cluster.preset("single_node", 1, 8, "h100")
    best = plan("deepseek-v2-lite", cluster, job).best[0]
    # 15.7 B weights: a copy is 13.2 bytes of each, whichever rank writes it
    assert best.host_bytes["save"] == pytest.approx(8 * 2.5e9 + 13.2 * 15.7e9, rel=0.01)
    assert lacking(HostBytes(**best.host_bytes), 300e9) == ""
    with pytest.raises(InputError, match=r"needs 23\d\.\d GB of 200\.0 .*in the phase export"):
        plan("deepseek-v2-lite", replace(cluster, host_memory=200e9), job)


def test_a_cluster_without_devices_names_what_to_give() -> None:
    with pytest.raises(InputError, match=r"--gpu is missing.* --gpu h100, or --cluster dgx_a100"):
        cluster_of("single_node", "", 1, 8)
    with pytest.raises(InputError, match="give the argument device_name"):
        Cluster.preset("single_node", 1)
    assert cluster_of("dgx_h100", "", 1, 8).host_memory == 2e12
    assert cluster_of("dgx_h100", "", 1, 8, host_gb=512).host_memory == 512e9
