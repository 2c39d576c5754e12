"""What all tests share: seeds, threads, how child processes start, and which tests are left out."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

import interpreted_triton  # noqa: F401  # before all that may import Triton
import narrow_presets
import sample_data
import side_by_side
import suite_report
import warm
from hasten.machine import environment, host
from hasten.parts.kernels import registry
from hasten.parts.nn import kernel_variants

try:
    from typer import testing

    from hasten.data import selection, tokenize
    from hasten.recipe import sample

    HAS_RECIPES = True
except ImportError:  # a machine with a GPU may lack pydantic
    HAS_RECIPES = False

SECONDS = {
    kernel_variants.PASS_PLAIN: 0.24,
    kernel_variants.PASS_FUSED: 0.20,
    kernel_variants.PASS_HALF: 0.14,
    kernel_variants.PASS_FUSED_HALF: 0.10,
    kernel_variants.PLAIN_UPDATE: 0.02,
    kernel_variants.FUSED_UPDATE: 0.01,
}
FIGURES = registry.DeviceFigures(
    "a processor",
    "2026-11-24T12:00:00+00:00",
    4.2,
    {each.key: registry.Verdict(1e-6, each.bound) for each in SECONDS},
    {
        each.key: registry.VariantTimes((seconds,) * 6, 1e9 / seconds)
        for each, seconds in SECONDS.items()
    },
)

# Scripts and workers that a test starts import what tests share.
_HERE = Path(__file__).parent
_OURS = [str(_HERE / "common"), str(_HERE), str(_HERE.parent / "tools")]
_PATHS = [*_OURS, *filter(None, [os.environ.get("PYTHONPATH")])]
os.environ["PYTHONPATH"] = os.pathsep.join(_PATHS)

# The same draws in every run, and no example has a time limit. Long runs draw more (`thorough`).
settings.register_profile(
    "steady",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=20,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("thorough", settings.get_profile("steady"), max_examples=300)
settings.load_profile("steady")
# A shell lets what it starts in the background ignore Ctrl-C, and that is handed on to children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    side_by_side.pytest_addoption(parser)


def pytest_configure(config: pytest.Config) -> None:
    suite_report.pytest_configure(config)
    side_by_side.pytest_configure(config)
    # Toy tensors, here and in children: a second thread waits longer than it works.
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # As in processes that hasten starts: one server for all of them.
    environment.use_defaults()
    # Two passes of every short training here; the tests of the proof switch it on.
    os.environ.setdefault("HASTEN_PROOF", "off")
    # One measurement at a time on a machine: processes that test side by side don't wait.
    os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="hasten-tests-")
    narrow_presets.narrow()
    warm.install()


def pytest_unconfigure() -> None:
    warm.end_servers()
    shutil.rmtree(os.environ["XDG_RUNTIME_DIR"], ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Ten thousand tests are made and stay: looking for garbage takes half of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that wait come first, then slow ones: no worker is idle at the end. Tests of data and
    of the articles may skip."""
    files = {
        mark: {item.path for item in items if item.get_closest_marker(mark)}
        for mark in ("waits", "slow")
    }
    items.sort(key=lambda item: [item.path not in marked for marked in files.values()])
    for mark, variable, what in (
        ("data", "HASTEN_TEST_DATA", "the real examples"),
        ("articles", "HASTEN_TEST_ARTICLES", "the articles' code"),
    ):
        if not os.environ.get(variable):
            absent = pytest.mark.skip(reason=f"{variable} names no folder with {what}")
            for item in items:
                if item.get_closest_marker(mark):
                    item.add_marker(absent)


def pytest_collection_finish() -> None:
    # Tests leave little garbage: Python's own 700 new objects are a look every millisecond.
    gc.set_threshold(20_000)
    shorten_runs()
    # For each part of a test, pytest adds its handlers to the root logger and to all that don't
    # propagate to it: torch has forty of them.
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True


@pytest.fixture(autouse=True, scope="module")
def _nothing_old_is_searched() -> None:
    """Looking for garbage among all that is loaded takes half a second each time."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _alike(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test depends on one before it; in one fixture, since each costs every test its share.

    What a test draws without a seed is the same, and torch has one thread. Every process that a
    test with the mark ``cold`` starts is a fresh interpreter. A run that left ignores the signals
    that asked it to, for a process that ends with it.
    """
    random.seed(1)
    np.random.seed(1)
    torch.default_generator.manual_seed(1)
    torch.set_num_threads(1)
    is_cold = request.node.get_closest_marker("cold")
    with warm.cold() if is_cold else contextlib.nullcontext():
        yield
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def shorten_runs() -> None:
    """What each training would repeat for seconds."""
    if HAS_RECIPES:
        # All of Python's own modules take 5 s.
        selection.stdlib_corpus = sample_data.some_modules
        # Half of a short training is the sample of 60 tokens at its end.
        sample.ANSWER_TOKENS = warm.ANSWER_TOKENS
        # The process that renders chat templates stays for the next training.
        tokenize.stop_renderer = lambda: None
        # For each call, typer would read the parameters of all commands: 80 ms.
        testing._get_command = functools.cache(testing._get_command)
    # What kernels gain here is no test's business: a measurement takes four seconds.
    registry.figures_here = lambda device="cpu", fresh=False: FIGURES


@pytest.fixture
def much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has, and the tests before have taken of it."""
    monkeypatch.setattr("hasten.techniques.batch.memory_meter", lambda device: lambda: (0.0, 1e12))


@pytest.fixture
def published_presets() -> Iterator[None]:
    with narrow_presets.as_published():
        yield


@pytest.fixture
def bf16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process takes the processor for one with bf16 products; where it has none it is slow."""
    sets = {*host.hardware().instruction_sets, "avx512f"}
    monkeypatch.setattr(host, "_instruction_sets", lambda: tuple(sorted(sets)))
