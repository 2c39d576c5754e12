"""Techniques in Lightning, and a callback that leaves a line per step for ``hasten report``.

    trainer = lightning.Trainer(..., callbacks=[step_evidence("runs/theirs")])
    trainer.fit(*with_techniques(trainer, module, loader, [LengthGrouped(), Packed()]))

Of several processes each calls this; they are started by torchrun, with strategy="ddp".
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hasten.core.setup import Setup
from hasten.core.slot import CHANGES_A_PASS, Slot
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.integrations.adapt import (
    EDITS,
    HostedTechniques,
    HostRun,
    TrainerAdapter,
    attach_communication,
    optimizer_of,
    prepare_recognised,
)
from hasten.integrations.batches import (
    KEEP,
    PackedCollator,
    StepBatches,
    StepLoader,
    WeightedBatches,
    packed_call,
    packs,
    row_sizes,
)
from hasten.integrations.checkpoints import (
    CheckpointSchedule,
    StepLog,
    TokenCount,
    has_communication_memory,
    step_log,
)
from hasten.machine import environment, memory
from hasten.measure.quality.first_step import FirstStepProof, proof_is_on
from hasten.measure.quality.replay import OwnPass, Recorder, ReplayPasses
from hasten.parts.nn.causal_lm import callable_modules, causal_lm

_LOG = logging.getLogger(__name__)

# The moments of a Lightning training at which COMMUNICATION and CHECKPOINT are called, as a
# callback.
#
#     (1) training begins    DDP stands: the communication method hooks into it, and takes back what
# it remembered
#     (2) before an update   the step counts
#     (3) after an update    weights are compared at times, a checkpoint is begun
#     (4) Lightning saves    what the communication method has left out so far goes into Lightning's
# checkpoint
#
# Lightning isn't one of hasten's dependencies, so its class is imported when a function asks.


def callback_class() -> Any:
    """Lightning's class of callbacks.

    Raises:
        InputError: Lightning isn't installed.
    """
    for name in ("lightning.pytorch", "pytorch_lightning"):
        try:
            return importlib.import_module(name).Callback
        except ImportError:
            continue
    raise InputError("Lightning is not installed here: pip install lightning")


def seams(  # noqa: C901  # a class within: its methods count
    setup: Setup, model: nn.Module, saves: CheckpointSchedule, passes: ModulePasses
) -> Any:
    """A callback that calls them for the model of one training."""
    base = callback_class()
    remembers = has_communication_memory(setup)
    communication: Any = setup.communication

    class Seams(base):  # type: ignore[misc, valid-type]  # known only now
        def __init__(self) -> None:
            self.setup, self._step = setup, 0
            self._remembered: dict[str, Any] | None = None

        @property
        def state_key(self) -> str:
            """The name of its state in Lightning's checkpoints."""
            return "hasten"

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self._step = trainer.global_step
            attach_communication(setup, trainer.strategy.model)
            if remembers and self._remembered is not None:
                communication.load_state_dict(self._remembered)
                self._remembered = None
            saves.begin(model=model, optimizer=trainer.optimizers[0])
            passes.begin()

        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            passes.prove()

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            passes.end_first_step()
            setup.communication.before_update(self._parameters())

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            passes.close()
            if trainer.global_step > self._step:
                self._step = trainer.global_step
                setup.communication.after_update(self._parameters())
                saves.after_step(self._step)

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            saves.after_epoch(trainer.global_step)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            passes.close()
            saves.close()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            passes.close()

        def state_dict(self) -> dict[str, Any]:
            """Returns the state of all ranks; Lightning calls it on each, the first writes."""
            return {"communication": communication.state_dict()} if remembers else {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self._remembered = state_dict["communication"]

        def _parameters(self) -> list[Any]:
            return [p for p in model.parameters() if p.requires_grad]

    return Seams()


# What a user calls.

HOST = TrainerAdapter(
    "Lightning",
    frozenset(
        (*EDITS, Slot.SAMPLER, Slot.COLLATE, Slot.COMMUNICATION, Slot.OPTIMIZER, Slot.CHECKPOINT)
    ),
    {
        Slot.FEED: "give the DataLoader num_workers and prefetch_factor",
        Slot.BATCH: "give lightning.Trainer accumulate_grad_batches",
        Slot.ADAPTER: "give the module a model that peft.get_peft_model has wrapped",
        Slot.COMPILE: "call torch.compile on the module",
        Slot.PRECISION: 'give lightning.Trainer precision="bf16-mixed"',
        Slot.LAYOUT: 'give lightning.Trainer strategy="ddp"',
        Slot.AVERAGE: "give lightning.Trainer its callback WeightAveraging",
        Slot.ALLOCATOR: "start the program with the variables that `hasten check` names",
    },
)
REPLICATED = ("SingleDeviceStrategy", "DDPStrategy")  # every process holds the whole model


def with_techniques(
    trainer: Any,
    module: Any,
    loader: DataLoader[Any],
    techniques: Iterable[Technique],
    *,
    seed: int = 0,
) -> tuple[Any, DataLoader[Any]]:
    """Returns the arguments of ``trainer.fit``: module with edited model, and loader.

    The module's model is the Hugging Face causal language model among its attributes. Its
    ``training_step`` has to return ``self.model(**batch).loss``. Lightning takes the mean
    of the losses of a step's passes and processes. If hasten chooses the examples and their
    layout, each loss is weighted. Then Lightning's mean is the mean over the step's trained
    tokens.

    Args:
        loader: over examples; it keeps its dataset and batch size if a SAMPLER changes the
            order.

    Raises:
        InputError: a technique can't work on this job, or Lightning doesn't offer its slot;
            then the message has what to do instead.
    """
    model, plan = model_of(module), list(techniques)
    setup, trained = _require_fitting(trainer, module, loader, plan, seed)
    saves = CheckpointSchedule(setup)
    if Slot.OPTIMIZER in setup.plan:
        usual = module.configure_optimizers
        module.configure_optimizers = lambda: _optimizers(setup, model, usual())
    passes = ModulePasses(trainer, module, model, setup)
    trainer.callbacks.insert(0, seams(setup, model, saves, passes))  # before those that save
    return module, _loader(trainer, setup, loader, trained)


def check(
    trainer: Any, module: Any, loader: DataLoader[Any], techniques: Sequence[Technique]
) -> None:
    """Raise InputError where `with_techniques` would; nothing is changed."""
    _require_fitting(trainer, module, loader, techniques)


def _require_fitting(
    trainer: Any, module: Any, loader: Any, plan: Sequence[Technique], seed: int = 0
) -> tuple[Setup, list[int]]:
    _check(trainer, module, loader, plan)
    model = model_of(module)
    host_run, trained = _host_run(trainer, loader, plan, seed)
    return prepare_recognised(HOST, model, plan, host_run), trained


class ModulePasses:
    """A module's training passes with techniques, and the proof on its first step.

    The edits hold from the call of the model in ``training_step`` until the batch ends, since the
    backward pass runs between them.
    """

    def __init__(self, trainer: Any, module: Any, model: nn.Module, setup: Setup) -> None:
        self._trainer, self._module, self._model = trainer, module, model
        self._techniques = [t for t in setup.plan if t.slot in CHANGES_A_PASS]
        self._others = HOST.others(setup.plan)
        host_run = HostRun(str(trainer.strategy.root_device), epochs=1)
        self._hosted = HostedTechniques(HOST, model, host_run)
        self._window = contextlib.ExitStack()
        self._proof: FirstStepProof | None = None
        self._recorder = Recorder(callable_modules(model))
        self._is_recorded = False  # the pass whose backward pass runs
        self._plain_until = 0  # the step after which techniques act
        self._own_pass: OwnPass
        self._replay: ReplayPasses
        self._reported: set[str] = set()
        self._usual = module.training_step

        @functools.wraps(self._usual)  # Lightning reads the parameters of the module's own
        def training_step(batch: Any, *index: Any, **more: Any) -> Any:
            return self._training_step(batch, *index, **more)

        module.training_step = training_step

    # Moments of a training.

    def begin(self) -> None:
        """The model is on its device."""
        if not self._techniques:
            return
        if not self._model.training:
            self._report(
                "the model is in eval mode, as from_pretrained leaves it. Its dropout is off, with "
                "and without hasten. To switch it on, call model.train() in the module"
            )
        if proof_is_on():
            pad_id = getattr(getattr(self._model, "config", None), "pad_token_id", None) or 0
            self._replay = ReplayPasses(self._hosted, packed_call, packs)
            self._proof = FirstStepProof(self._replay, self._techniques, "Lightning", pad_id)

    def prove(self) -> None:
        """The backward pass of a batch is done: compares it with one that has the techniques."""
        if self._proof is None or not self._is_recorded:
            return
        self._is_recorded = False
        calls = self._recorder.calls
        trained = self._own_pass.ended(self._replay.recorded_sums(calls))
        for removal in self._proof.check(calls, trained=trained):
            self._report(f"{removal.technique.name()} was taken out: {removal.difference}")
        self._techniques, self._recorder.calls = self._proof.techniques, []
        for log in self._logs():
            log.exclude(self._proof.seconds)

    def _logs(self) -> list[StepLog]:
        logs = [getattr(callback, "evidence", None) for callback in self._trainer.callbacks]
        return [log for log in logs if isinstance(log, StepLog)]

    def end_first_step(self) -> None:
        """The passes of a step are done."""
        if self._proof is not None and self._proof.is_settled:
            if self._proof.batches and self._techniques:
                count = len(self._techniques) + self._others
                self._report(f"{self._proof}; {count} technique{'s' if count != 1 else ''} joined")
            compared = max((log.steps_to_compare for log in self._logs()), default=0)
            step, steps = self._trainer.global_step, self._trainer.estimated_stepping_batches
            if self._proof.batches and 0 < compared <= steps - step:
                self._plain_until = step + 2
            self._proof = None

    def close(self) -> None:
        """The model is plain again."""
        self._window.close()

    # Passes. A batch is packed where training_step calls the model. So Lightning, hooks, callbacks
    # and the module's own code have the loader's batch: they count its rows and may change it.

    def _training_step(self, batch: Any, *index: Any, **more: Any) -> Any:
        self.close()  # of a pass that ended early
        self._techniques = self._hosted.fitting(self._techniques, self._report)
        if self._proof is not None:
            self._proof.techniques = list(self._techniques)
            self._is_recorded = True
            device = str(self._trainer.strategy.root_device)
            self._own_pass = OwnPass(self._model, memory.free_bytes(device))
            with self._recorder.active():
                return self._usual(batch, *index, **more)
        if self._trainer.global_step < self._plain_until:
            return self._usual(batch, *index, **more)
        self._window.enter_context(self._hosted.active(self._techniques))
        if packs(self._techniques):
            self._window.enter_context(self._packing())
        return self._usual(batch, *index, **more)

    @contextlib.contextmanager
    def _packing(self) -> Iterator[None]:
        """Inside, calls of the model are packed; only the loss leaves them."""
        packed_depth = 0

        def pack(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal packed_depth
            inputs = dict(zip(("input_ids",), args, strict=False)) | kwargs
            packed = packed_call(inputs) if torch.is_grad_enabled() and len(args) < 2 else ""
            if isinstance(packed, str):
                if packed:
                    self._report(f"packed: left out for some batches: {packed}")
                return None
            packed_depth += 1
            return (), packed

        def keep_loss(module: nn.Module, args: Any, output: Any) -> Any:
            nonlocal packed_depth
            if not packed_depth:
                return None
            packed_depth -= 1
            return type(output)(loss=output.loss)

        handles = [
            self._model.register_forward_pre_hook(pack, with_kwargs=True),
            self._model.register_forward_hook(keep_loss),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _report(self, text: str) -> None:
        if text not in self._reported and environment.world().is_main:
            _LOG.warning("speed_up: %s", text)
        self._reported.add(text)


def model_of(module: nn.Module) -> nn.Module:
    """The Hugging Face causal language model among a module's attributes.

    Raises:
        InputError: there is none.
    """
    for child in module.children():
        try:
            causal_lm(child)
        except ValueError:
            continue
        return child
    raise InputError(
        f"{type(module).__name__} has no Hugging Face causal language model among its attributes"
    )


def _check(trainer: Any, module: Any, loader: Any, plan: Iterable[Technique]) -> None:
    """Refuse what this trainer, and not every one, decides by itself."""
    world, filled = environment.world(), {t.slot: t.name() for t in plan}
    if trainer.world_size != world.size:
        raise InputError(
            f"Lightning will start {trainer.world_size} processes by itself; start them with "
            "torchrun, so that techniques know of each other"
        )
    strategy = type(trainer.strategy).__name__
    if strategy not in REPLICATED:
        raise InputError(
            f"{strategy} deals the model out or has a step of its own, and techniques work on a "
            'whole one; give lightning.Trainer strategy="ddp", or train with `hasten train`'
        )
    changes = [filled[slot] for slot in CHANGES_A_PASS if slot in filled]
    if changes and not getattr(module, "automatic_optimization", True):
        raise InputError(
            f"{', '.join(changes)}: {type(module).__name__} has automatic_optimization = False, so "
            "its training_step also updates the weights and can't be compared before; leave it out"
        )
    sampler = filled.get(Slot.SAMPLER)
    if sampler is not None and not hasattr(loader.dataset, "__len__"):
        raise InputError(f"{sampler}: it needs a dataset with a length; this one is a stream")
    replaced = trainer._accelerator_connector.use_distributed_sampler
    if sampler is not None and world.size > 1 and replaced:
        raise InputError(
            f"{sampler}: Lightning would replace it with a sampler of its own; give "
            "lightning.Trainer use_distributed_sampler=False"
        )
    if Slot.COMMUNICATION in filled and trainer.scaler is not None:
        raise InputError(
            f"{filled[Slot.COMMUNICATION]}: with 16-mixed Lightning scales gradients; use "
            f"bf16-mixed instead"
        )


def _host_run(
    trainer: Any, loader: Any, plan: Iterable[Technique], seed: int
) -> tuple[HostRun, list[int]]:
    """Returns the facts of the run, and the number of tokens with loss in each example."""
    sampled = any(t.slot is Slot.SAMPLER for t in plan)
    data: Any = loader.dataset if sampled else ()
    lengths, trained = row_sizes(data)
    host_run = HostRun(
        device=str(trainer.strategy.root_device),  # the module goes there when `fit` begins
        examples=data,
        lengths=lengths,
        batch=(loader.batch_size or 1) * trainer.accumulate_grad_batches * environment.world().size,
        steps=trainer.max_steps if trainer.max_steps > 0 else None,
        epochs=max(trainer.max_epochs or 1, 1),
        seed=seed,
        folder=Path(trainer.default_root_dir) / "hasten",
    )
    return host_run, trained


def _loader(
    trainer: Any, setup: Setup, loader: DataLoader[Any], trained: list[int]
) -> DataLoader[Any]:
    if Slot.SAMPLER not in setup.plan:
        return loader
    packs, world = Slot.COLLATE in setup.plan, setup.context.world
    assert setup.sampler is not None  # there are examples
    parts = trainer.accumulate_grad_batches
    # Without packing a loss is weighted as Lightning does.
    order = StepBatches(setup.sampler, parts, world.rank, world.size, trained if packs else None)
    collate = PackedCollator(loader.collate_fn, KEEP)  # gives each batch its weight
    return StepLoader(
        WeightedBatches(loader.dataset), order, collate, num_workers=loader.num_workers
    )


def _optimizers(setup: Setup, model: nn.Module, configured: Any) -> Any:
    """Returns the module's optimizer, or the technique's if no schedule holds the module's."""
    if isinstance(configured, Optimizer):
        return optimizer_of(setup, model, configured)
    is_one = isinstance(configured, list | tuple) and len(configured) == 1
    if is_one and isinstance(configured[0], Optimizer):
        return [optimizer_of(setup, model, configured[0])]
    name = next(t.name() for t in setup.plan if t.slot is Slot.OPTIMIZER)
    _LOG.warning(
        "speed_up: %s is left out: configure_optimizers returns more than an optimizer; a "
        "schedule keeps the optimizer that it was made for",
        name,
    )
    return configured


def step_evidence(folder: str | Path | StepLog) -> Any:
    """A Lightning callback that writes ``metrics.jsonl`` into a folder of its own.

    A batch is counted where it is a mapping with ``input_ids``, as Transformers' collators make
    it. With accumulation a line is an optimizer step, and its loss the mean of the step's batches.

    Raises:
        InputError: Lightning isn't installed, or the folder can't be written.
    """
    base = callback_class()

    class LightningEvidence(base):  # type: ignore[misc, valid-type]  # known only now
        def __init__(self) -> None:
            self.evidence = step_log(folder)
            self._count, self._step = TokenCount(), 0
            self._losses: list[Tensor] = []

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self._step = trainer.global_step
            self.evidence.begin()

        def on_train_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
        ) -> None:
            self._count.add(batch)

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if not environment.world().is_main:  # nobody waits for the device there
                return
            self._losses += _loss(outputs)
            if trainer.global_step > self._step:
                self._step = trainer.global_step
                losses, self._losses = self._losses, []
                # Lightning has divided each batch's by how many make up a step.
                loss = float(torch.stack(losses).sum()) if losses else None
                self.evidence.step(self._step, self._count, loss)

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            self.evidence.begin()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.evidence.close()

    return LightningEvidence()


def _loss(outputs: Any) -> list[Tensor]:
    """The loss in what ``training_step`` returned, a tensor or a mapping; nothing without one."""
    value = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if not isinstance(value, Tensor) or value.numel() != 1:
        return []
    return [value.detach().flatten()]
