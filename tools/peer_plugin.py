"""A pytest plugin for `peer_tests.py`: another project's tests, with or without techniques.

It is loaded with `-p peer_plugin` and reads `Settings` from the file that the environment variable
`PEER_SETTINGS` names.

    (1) The package under test is imported before pytest puts the checkout on the path, so that the
        tests of one commit run against the installed version.
    (2) Names that a test file imports and the installed version no longer has become placeholders:
        as a decorator they skip the test, in any other use they raise an error.
    (3) Models and data of the hub have stand-ins, see `peer_stand_ins.py`.
    (4) In a mode with techniques, `hasten.speed_up` is applied once to each trainer when it begins
        to train. accelerate has no trainer: there the model is edited when it is prepared.
    (5) One line for each test says which trainers it had, what was logged and what effective.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import logging
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import peer_stand_ins
from technique_counts import TechniqueCounts, counted

PLAIN, USUAL = "plain", "usual"  # modes; any other is a plan, names with commas between them
LONGEST_MESSAGE = 900
LOSSES = ("loss", "train_loss")  # keys of the Trainer's log


@dataclasses.dataclass(frozen=True)
class Settings:
    """What `peer_tests.py` asks of one run of pytest.

    Args:
        package: the package under test, imported first.
        mode: plain, usual, or a plan.
        entries: the file for a line per test.
        hub: the folder of a hub cache with stand-ins.
        trl: a checkout of TRL, for the tables of its data sets; empty without one.
    """

    package: str
    mode: str
    entries: str
    hub: str
    trl: str

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: str) -> Settings:
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))


class TestRecord:
    """What one test did, as the line that is written when it ends."""

    __test__ = False  # pytest collects classes of this name

    def __init__(self) -> None:
        self.counts = TechniqueCounts()
        self.clear("")

    def clear(self, test: str) -> None:
        self.counts.clear()
        self.test = test
        self.trainers: list[str] = []
        self.messages: list[str] = []
        self.losses: list[list[float]] = []

    def to_dict(self) -> dict[str, Any]:
        return {
            "test": self.test,
            "trainers": self.trainers,
            "messages": self.messages,
            "losses": self.losses,
            "effective": self.counts.effective(),
        }


class _Messages(logging.Handler):
    """Keeps what hasten logs during a test."""

    def __init__(self, example: TestRecord) -> None:
        super().__init__()
        self._record = example

    def emit(self, example: logging.LogRecord) -> None:
        self._record.messages.append(example.getMessage()[:LONGEST_MESSAGE])


class PeerPlugin:
    """The hooks of pytest."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._record = TestRecord()
        self._stack = ExitStack()
        if settings.mode != PLAIN:
            self._stack.enter_context(counted(self._record.counts))
            logging.getLogger("hasten").addHandler(_Messages(self._record))
        apply = _application(settings.package, settings.mode)
        module, name, method, wrap = _LOOPS[settings.package]
        owner = getattr(importlib.import_module(module), name)
        setattr(owner, method, wrap(getattr(owner, method), apply, self._record))

    def pytest_collect_file(self, file_path: Path) -> None:
        if file_path.suffix == ".py":
            add_missing_names(file_path)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._record.clear(item.nodeid)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        yield
        with Path(self._settings.entries).open("a", encoding="utf-8") as file:
            file.write(json.dumps(self._record.to_dict()) + "\n")

    def pytest_unconfigure(self) -> None:
        self._stack.close()


# (2) Names that are gone.


class Missing:
    """Stands for a name that the installed version of a package no longer has."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if len(arguments) == 1 and not named and callable(arguments[0]):
            return pytest.mark.skip(reason=f"{self._name} is gone")(arguments[0])
        if self._name.rpartition(".")[2].startswith("is_"):  # what it asks about isn't there
            return False
        raise AttributeError(f"{self._name} isn't in the installed version")

    def __getattr__(self, attribute: str) -> Any:
        raise AttributeError(f"{self._name} isn't in the installed version")


def add_missing_names(path: Path) -> None:
    """Gives every module that a test file imports from the names that it lacks."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or node.level or not node.module:
            continue
        top = node.module.partition(".")[0]
        if top not in sys.modules or top in ("tests", "pytest"):
            continue
        try:
            module: Any = importlib.import_module(node.module)
        except ImportError:
            module = types.ModuleType(node.module)
            sys.modules[node.module] = module
        for alias in node.names:
            if alias.name != "*" and not _has(module, alias.name):
                setattr(module, alias.name, Missing(f"{node.module}.{alias.name}"))


def _has(module: Any, name: str) -> bool:
    try:
        getattr(module, name)
    except Exception:  # lazy modules raise errors of several kinds
        try:
            importlib.import_module(f"{module.__name__}.{name}")
        except ImportError:
            return False
    return True


# (4) Where techniques join.

Application = Callable[[Any], None]


def _application(package: str, mode: str) -> Application:
    """The function that applies the mode's techniques to a trainer."""
    if mode == PLAIN:
        return lambda trainer: None
    if package == "accelerate":
        return _edit_model
    hasten: Any = importlib.import_module("hasten")
    if mode == USUAL:
        return hasten.speed_up  # type: ignore[no-any-return]

    def with_plan(trainer: Any) -> None:
        """Adds the plan's techniques one by one; what this trainer refuses is left out."""
        from hasten.errors import InputError
        from hasten.integrations import speed_up, transformers
        from hasten.integrations.adapt import prepare_recognised

        carried: list[str] = []
        for name in mode.split(","):
            try:
                plan = speed_up._techniques([*carried, name])
                prepare_recognised(transformers.HostTrainer(trainer), plan)
            except InputError as error:
                logging.getLogger("hasten").warning("%s isn't carried: %s", name, error)
            else:
                carried.append(name)
        if carried:
            hasten.speed_up(trainer, plan=carried)

    return with_plan


def _once(trainer: Any, models: Iterable[Any], apply: Application, example: TestRecord) -> None:
    if "_techniques_applied" not in vars(trainer):
        trainer._techniques_applied = True
        example.trainers.append(_described(trainer, models))
        with example.counts.paused():  # kernels may be tried and timed here
            apply(trainer)


def _described(trainer: Any, models: Iterable[Any]) -> str:
    """The kinds of trainer and model; `causal` if a causal language model is inside."""
    from torch import nn

    modules = [m for model in models if isinstance(model, nn.Module) for m in model.modules()]
    names = [type(module).__name__ for module in modules]
    causal = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)
    return " ".join([type(trainer).__name__, *names[:1], *(["causal"] if causal else [])])


def _train(usual: Callable[..., Any], apply: Application, example: TestRecord) -> Any:
    """transformers' `Trainer.train`."""

    def train(self: Any, *arguments: Any, **named: Any) -> Any:
        _once(self, [self.model], apply, example)
        try:
            return usual(self, *arguments, **named)
        finally:
            history = self.state.log_history
            example.losses.append([line[k] for line in history for k in LOSSES if k in line])

    return train


def _fit(usual: Callable[..., Any], apply: Application, example: TestRecord) -> Any:
    """Lightning's `Trainer.fit`; `speed_up` binds another one to the instance."""

    def fit(self: Any, *arguments: Any, **named: Any) -> Any:
        if "_techniques_applied" in vars(self):
            return usual(self, *arguments, **named)
        _once(self, [*arguments, *named.values()], apply, example)
        return self.fit(*arguments, **named)

    return fit


def _prepare(usual: Callable[..., Any], apply: Application, example: TestRecord) -> Any:
    """accelerate's `Accelerator.prepare`."""

    def prepare(self: Any, *arguments: Any, **named: Any) -> Any:
        _once(self, arguments, lambda accelerator: apply(arguments), example)
        return usual(self, *arguments, **named)

    return prepare


def _edit_model(prepared: tuple[Any, ...]) -> None:
    """Puts techniques into a causal language model that a script's own loop will train.

    The script's loader stays, with its collator, and so does the optimizer, which a schedule holds.
    """
    from torch import nn
    from torch.utils.data import DataLoader

    from hasten.errors import InputError
    from hasten.integrations.loop import in_loop
    from hasten.techniques.attention import DocumentAttention
    from hasten.techniques.experts import ExpertsImplementation
    from hasten.techniques.layers import FusedLayers
    from hasten.techniques.loss import LabelledTokenLoss

    models = [value for value in prepared if isinstance(value, nn.Module)]
    loaders: list[Any] = [value for value in prepared if isinstance(value, DataLoader)]
    if not models or not loaders:
        return
    size = loaders[0].batch_size or 1
    edits = (ExpertsImplementation(), DocumentAttention(), FusedLayers(), LabelledTokenLoss())
    for technique in edits:
        try:
            in_loop(models[0], [technique], examples=loaders[0].dataset, batch=size)
        except InputError as error:
            logging.getLogger("hasten").warning("%s isn't carried: %s", technique.name(), error)


_LOOPS: dict[str, tuple[str, str, str, Callable[..., Any]]] = {
    "transformers": ("transformers", "Trainer", "train", _train),
    "trl": ("transformers", "Trainer", "train", _train),
    "lightning": ("lightning.pytorch", "Trainer", "fit", _fit),
    "accelerate": ("accelerate", "Accelerator", "prepare", _prepare),
}


def pytest_configure(config: pytest.Config) -> None:
    settings = Settings.read(os.environ["PEER_SETTINGS"])
    module = importlib.import_module(settings.package)
    header = f"{settings.package} {getattr(module, '__version__', '?')} from {module.__file__}"
    config.stash[_HEADER] = header
    peer_stand_ins.install(Path(settings.hub), Path(settings.trl) if settings.trl else None)
    config.pluginmanager.register(PeerPlugin(settings))


_HEADER = pytest.StashKey[str]()


def pytest_report_header(config: pytest.Config) -> str:
    return config.stash[_HEADER]
