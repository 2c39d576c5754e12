"""ALLOCATOR: what a process starts with, what hinders, what the probes see."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from hasten.cli.train import train
from hasten.core.context import JobContext, ModelFacts
from hasten.launch.supervisor import SupervisedRanks
from hasten.machine import environment as environment_
from hasten.machine import host, memory
from hasten.techniques.allocator import Allocator
from sample_data import small_recipe

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux's variables")


def here(**changes: Any) -> JobContext:
    known = JobContext(host.hardware(), model=ModelFacts("llama", layers=2))
    return dataclasses.replace(known, **changes)


def test_what_cannot_be_had_here_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hasten.machine.memory.library", lambda kind: None)
    assert "libjemalloc2" in Allocator(kind="jemalloc").unsupported_reasons(here())[0]
    assert "GPU" in Allocator(kind="expandable").unsupported_reasons(here())[0]
    monkeypatch.setattr("hasten.machine.memory.huge_page_mode", lambda: "never")
    assert (
        "transparent_hugepage is never" in Allocator(huge_pages=True).unsupported_reasons(here())[0]
    )


def test_variables_join_what_the_user_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=2")
    wanted = Allocator(huge_pages=True).environment(here())
    assert wanted["GLIBC_TUNABLES"] == "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"
    monkeypatch.setenv("GLIBC_TUNABLES", wanted["GLIBC_TUNABLES"])
    assert Allocator(huge_pages=True).environment(here()) == wanted
    monkeypatch.setenv("LD_PRELOAD", "/a.so")
    monkeypatch.setattr("hasten.machine.memory.library", lambda kind: "/b.so")
    assert Allocator(kind="tcmalloc").environment(here()) == {"LD_PRELOAD": "/a.so:/b.so"}


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_join_what_torchs_allocator_is_told(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    technique = Allocator(kind="expandable")
    assert technique.environment(here()) == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    monkeypatch.setenv(variable, "roundup_power2_divisions:[256:1,512:2],max_split_size_mb:128")
    (found,) = technique.environment(here()).items()
    assert found == (
        variable,
        "roundup_power2_divisions:[256:1,512:2],max_split_size_mb:128,expandable_segments:True",
    )
    monkeypatch.setenv(*found)
    assert dict([found]) == technique.environment(here())


def test_a_process_begins_again_only_for_what_is_missing_and_only_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(environment_.STARTED_FOR_PLAN, raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.delenv("MALLOC_TOP_PAD_", raising=False)
    wanted = {"OMP_WAIT_POLICY": "PASSIVE", "MALLOC_TOP_PAD_": "1"}
    assert environment_.not_yet_so(wanted) == {"MALLOC_TOP_PAD_": "1"}
    monkeypatch.setenv(environment_.STARTED_FOR_PLAN, "1")
    assert environment_.not_yet_so(wanted) == {}


class BegunError(Exception):
    """Another program, or ranks, would begin here."""


@linux
def test_hasten_train_begins_its_processes_with_the_plans_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process becomes another, and each of several ranks is started with them."""
    for name in ("GLIBC_TUNABLES", environment_.STARTED_FOR_PLAN):
        monkeypatch.delenv(name, raising=False)

    def execve(program: str, words: list[str], variables: dict[str, str]) -> None:
        raise BegunError(words, variables)

    def supervise(ranks: SupervisedRanks, *given: object) -> None:
        raise BegunError(*(ranks.environ(rank, 2) for rank in range(2)))

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr("hasten.launch.supervisor.supervise", supervise)
    monkeypatch.setattr(memory, "huge_page_mode", lambda: "madvise")
    plan = [{"allocator": {"huge_pages": True}}]
    path = small_recipe(tmp_path, plan=plan, max_steps=1)
    with pytest.raises(BegunError) as begun:
        train(path, ["seed=7"])
    words, variables = begun.value.args
    assert words == [sys.executable, "-m", "hasten", "train", str(path), "seed=7"]
    assert variables[environment_.STARTED_FOR_PLAN] == "1"
    with pytest.raises(BegunError) as begun:
        train(path, ["nproc=2"])
    for found in (variables, *begun.value.args):
        assert found["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
