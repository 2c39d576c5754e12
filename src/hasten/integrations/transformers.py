"""Techniques in Hugging Face's Trainer and TRL, and a line per step for ``hasten report``.

    trainer = with_techniques(Trainer(...), [Packed(), FusedLayers()], evidence="runs/theirs")
    trainer.train() # hasten report runs/theirs runs/ours

A step's time runs from the end of the step before, so waiting for data is part of it; evaluation,
logging and saving between two steps are not. Tokens are counted where the model is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import nn
from transformers import Trainer, TrainerCallback

from hasten.core.setup import Setup
from hasten.core.slot import Slot
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.integrations.adapt import (
    EDITS,
    Host,
    HostRun,
    attach_wire,
    edit_model,
    optimizer_of,
    prepare_host,
)
from hasten.integrations.batches import StepBatches, StepLoader, collator, record_of
from hasten.integrations.checkpoints import (
    CheckpointSchedule,
    StepLog,
    TokenCount,
    keep_wire,
    step_log,
    take_wire,
)
from hasten.machine import environment

HOST = Host(
    "the Trainer",
    frozenset((*EDITS, Slot.SAMPLER, Slot.COLLATE, Slot.WIRE, Slot.OPTIMIZER, Slot.CHECKPOINT)),
    {
        Slot.FEED: "give TrainingArguments dataloader_num_workers and dataloader_prefetch_factor",
        Slot.BATCH: "give TrainingArguments gradient_accumulation_steps or auto_find_batch_size",
        Slot.ADAPTER: "give the Trainer a model that peft.get_peft_model has wrapped",
        Slot.ROUTING: "train with `hasten train` for it, or set router_aux_loss_coef of the model",
        Slot.COMPILE: "give TrainingArguments torch_compile=True",
        Slot.PRECISION: "give TrainingArguments bf16=True or fp16=True",
        Slot.LAYOUT: "start it with torchrun, and give TrainingArguments ddp_bucket_cap_mb or fsdp",
        Slot.AVERAGE: "train with `hasten train` for it, or call hasten.parts.optim.weight_average "
        "in a callback",
        Slot.ALLOCATOR: "start the program with the variables that `hasten doctor` names",
    },
)
Theirs = TypeVar("Theirs", bound=Trainer)


def with_techniques(
    trainer: Theirs, techniques: Iterable[Technique], *, evidence: str | Path | None = None
) -> Theirs:
    """The same trainer, in which the techniques have taken their slots; call it before ``train``.

    The model, the loader, the collator and the optimizer of this trainer are changed, classes are
    not. Checkpoints without a folder go to ``hasten`` under the trainer's ``output_dir``.

    Args:
        evidence: a folder of its own for ``metrics.jsonl``, see :class:`StepEvidence`.

    Raises:
        InputError: a technique whose slot this trainer doesn't offer, with what to do instead, or
            one that can't work on this job.
    """
    model: Any = trainer.model
    setup = _fitted(trainer, list(techniques))
    saves = CheckpointSchedule.of(setup)
    edit_model(model, setup)
    if Slot.COLLATE in setup.plan:
        assert setup.collate is not None  # prepare() put the job's there
        trainer.data_collator = collator(setup.collate)
    if Slot.SAMPLER in setup.plan:
        _take_loader(trainer, setup)
    if Slot.OPTIMIZER in setup.plan:
        _take_optimizer(trainer, setup)
    seams = _TechniqueCallback(trainer, setup, saves)
    trainer.add_callback(seams)
    _tell_resumed(trainer, seams)
    if evidence is not None:
        trainer.add_callback(StepEvidence(evidence))
    return trainer


def check(trainer: Trainer, techniques: Sequence[Technique]) -> None:
    """Raise InputError where `with_techniques` would; nothing is changed."""
    _fitted(trainer, techniques)


def _fitted(trainer: Trainer, plan: Sequence[Technique]) -> Setup:
    for technique in plan:
        _check(trainer, technique)
    model: Any = trainer.model
    return prepare_host(HOST, model, plan, _host_run(trainer, plan))


def _check(trainer: Trainer, technique: Technique) -> None:
    """Refuse what this trainer, and not every one, decides by itself."""
    kind, args, slot, name = type(trainer), trainer.args, technique.slot, technique.name()
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or args.n_gpu > 1:
        raise InputError(
            f"{name}: this trainer shards the model or runs several GPUs in one process; start "
            "one process per GPU with torchrun, without fsdp and deepspeed"
        )
    if slot in (Slot.LOSS, Slot.COLLATE) and (
        kind.compute_loss is not Trainer.compute_loss
        or trainer.compute_loss_func is not None
        or trainer.label_smoother is not None
    ):
        raise InputError(
            f"{name}: {kind.__name__} computes its own loss from logits and batches of its own, "
            "which leaves no room for another; with TRL's SFT say packing=True or "
            "use_liger_kernel=True in its settings"
        )
    own_loader = (
        kind.get_train_dataloader is not Trainer.get_train_dataloader
        or kind._get_train_sampler is not Trainer._get_train_sampler
    )
    if slot is Slot.SAMPLER and own_loader:
        raise InputError(f"{name}: {kind.__name__} draws its records itself; leave it out")
    twice = args.gradient_checkpointing or args.activation_checkpointing
    if slot is Slot.RECOMPUTE and twice:
        raise InputError(
            f"{name}: TrainingArguments' activation_checkpointing (gradient_checkpointing) "
            "recomputes the same blocks; say False, or leave the technique out"
        )
    if slot is Slot.ATTENTION and getattr(args, "num_generations", None) is not None:
        raise InputError(
            f"{name}: it is for training passes, and {kind.__name__} generates between them; leave "
            "it out"
        )
    if slot is Slot.WIRE and args.fp16:
        raise InputError(f"{name}: with fp16 the Trainer scales gradients; say bf16=True instead")
    if slot is Slot.OPTIMIZER and trainer.optimizer is not None:
        raise InputError(f"{name}: this trainer was given its optimizer; leave one of them out")


def _host_run(trainer: Trainer, plan: Iterable[Technique]) -> HostRun:
    args = trainer.args
    sampled = any(t.slot is Slot.SAMPLER for t in plan)
    data: Any = trainer.train_dataset if sampled else ()
    if not hasattr(data, "__len__"):
        raise InputError("a sampler needs a train_dataset with a length; this one is a stream")
    return HostRun(
        device=str(args.device),
        records=data,
        lengths=[record_of(data[i]).length for i in range(len(data))],
        batch=args.per_device_train_batch_size
        * args.gradient_accumulation_steps
        * environment.world().size,
        steps=args.max_steps if args.max_steps > 0 else None,
        epochs=max(round(args.num_train_epochs), 1),
        seed=args.seed if args.data_seed is None else args.data_seed,
        folder=Path(str(args.output_dir)) / "hasten",
    )


def _take_loader(trainer: Trainer, setup: Setup) -> None:
    """The loader isn't prepared by accelerate: its batches are this rank's already."""
    args, world = trainer.args, setup.facts.world
    assert setup.sampler is not None  # there are records
    order = StepBatches(setup.sampler, args.gradient_accumulation_steps, world.rank, world.size)

    def loader() -> StepLoader:
        return StepLoader(
            trainer.train_dataset,
            order,
            trainer._get_collator_with_removed_columns(trainer.data_collator, "training"),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and setup.facts.on_gpu,
        )

    trainer.get_train_dataloader = loader  # this instance alone


def _take_optimizer(trainer: Trainer, setup: Setup) -> None:
    """Its own AdamW is built as ever and read; the technique's has the same groups and rates."""
    usual = trainer.create_optimizer

    def create(model: Any = None) -> Any:
        if trainer.optimizer is None:
            built: Any = usual(model)
            trained: Any = trainer.model if model is None else model
            trainer.optimizer = optimizer_of(setup, trained, built)
        return trainer.optimizer

    trainer.create_optimizer = create  # this instance alone


def _tell_resumed(trainer: Trainer, seams: _TechniqueCallback) -> None:
    """The one place where the Trainer has the name of the checkpoint that it goes on from."""
    usual = trainer._load_optimizer_and_scheduler

    def load(checkpoint: Any) -> None:
        usual(checkpoint)
        seams.resumed = Path(checkpoint) if checkpoint else None

    trainer._load_optimizer_and_scheduler = load  # this instance alone


class _TechniqueCallback(TrainerCallback):
    """The moments at which WIRE and CHECKPOINT are called."""

    def __init__(self, trainer: Trainer, setup: Setup, saves: CheckpointSchedule | None) -> None:
        self._trainer, self._setup, self._saves = trainer, setup, saves
        self._attached: Any = None
        self.resumed: Path | None = None  # the Trainer's checkpoint that it goes on from

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        module: Any = self._trainer.model_wrapped
        if module is not self._attached:  # DDP takes one hook in its life
            attach_wire(self._setup, module)
            self._attached = module
        if self.resumed is not None:
            take_wire(self._setup, self.resumed)
            self.resumed = None
        if self._saves is not None:
            self._saves.begin(
                model=given["model"], optimizer=given["optimizer"], schedule=given["lr_scheduler"]
            )

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._setup.wire.before_update(self._parameters())

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._setup.wire.after_update(self._parameters())

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self._saves is not None:
            self._saves.after_step(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if not args.save_only_model:
            folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
            keep_wire(self._setup, folder)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self._saves is not None:
            self._saves.after_epoch(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self._saves is not None:
            self._saves.close()

    def _parameters(self) -> list[Any]:
        model: Any = self._trainer.model
        return [p for p in model.parameters() if p.requires_grad]


class StepEvidence(TrainerCallback):
    """Writes ``metrics.jsonl``; of several ranks the first writes, about its own share.

    Args:
        folder: of its own for every run; or another log of steps.

    Raises:
        InputError: the folder holds an earlier run's lines or can't be written.
    """

    def __init__(self, folder: str | Path | StepLog) -> None:
        self._file = step_log(folder)
        self._count = TokenCount()
        self._hook: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model: nn.Module = kwargs["model"]
        if self._hook is None:
            self._hook = model.register_forward_pre_hook(self._called, with_kwargs=True)
        self._begin()

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training:  # an evaluation's tokens are nobody's step
            given = {"input_ids": args[0]} if args else {}
            self._count.add({**given, **kwargs})

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._file is not None:
            self._file.step(state.global_step, self._count)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self._file is not None and isinstance(logs, dict):
            self._file.loss(logs.get("loss"))
        self._begin()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begin()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begin()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self._file is not None:
            self._file.close()

    def _begin(self) -> None:
        if self._file is not None:
            self._file.begin()
