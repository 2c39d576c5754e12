"""Techniques in Hugging Face's Trainer and TRL; a line per step for ``hasten report``.

    trainer = with_techniques(Trainer(...), [Packed(), FusedLayers()],
    evidence="runs/theirs") trainer.train() # hasten report runs/theirs runs/ours

A step's time runs from the end of the step before. It includes waiting for data.
Evaluation, logging and saving between two steps are not included. Tokens are counted
where the model is called.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback

from hasten.core.setup import Setup
from hasten.core.slot import CHANGES_A_PASS, Slot
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.integrations.adapt import (
    EDITS,
    HostedTechniques,
    HostRun,
    NoContext,
    TrainerAdapter,
    attach_communication,
    model_loss_reason,
    optimizer_of,
    optimizer_reason,
    plain_forward,
    prepare_recognised,
)
from hasten.integrations.batches import (
    KEEP,
    HostBatches,
    PackedBatch,
    PackedCollator,
    StepBatches,
    StepLoader,
    batch_for,
    packed_call,
    packs,
    row_sizes,
)
from hasten.integrations.checkpoints import (
    CheckpointSchedule,
    StepLog,
    TokenCount,
    keep_communication,
    step_log,
    take_communication,
)
from hasten.machine import environment, memory
from hasten.measure.quality.first_step import FirstStepProof, proof_is_on
from hasten.measure.quality.preserved import library_of
from hasten.measure.quality.replay import (
    Outputs,
    OwnPass,
    Recorder,
    ReplayPasses,
    detached,
    recorded_gradient,
)
from hasten.parts.nn.causal_lm import callable_modules

_LOG = logging.getLogger(__name__)
HOST = TrainerAdapter(
    "the Trainer",
    frozenset(
        (*EDITS, Slot.SAMPLER, Slot.COLLATE, Slot.COMMUNICATION, Slot.OPTIMIZER, Slot.CHECKPOINT)
    ),
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
        Slot.ALLOCATOR: "start the program with the variables that `hasten check` names",
    },
)
Theirs = TypeVar("Theirs", bound=Trainer)
JOINED = "_hasten_techniques"  # the attribute of a trainer that has some
TRL_DFT = ("trl.trainer.sft_trainer", "dft_loss")  # of TRL 1.0: a mean over labelled tokens


def with_techniques(
    trainer: Theirs, techniques: Iterable[Technique], *, evidence: str | Path | None = None
) -> Theirs:
    """Returns the same trainer with the techniques; call it before ``train``.

    They are added each time it trains, and hold for its training passes alone. Evaluation,
    prediction and generation, copies and saved files are those of the plain trainer. Before
    the first update they are compared with the trainer's own passes
    (:mod:`hasten.measure.quality.first_step`). A technique that differs is removed, with a
    warning. A second call replaces the techniques of the first. Checkpoints without a
    folder go to ``hasten`` under the trainer's ``output_dir``.

    Args:
        evidence: a folder of its own for ``metrics.jsonl``, see :class:`StepEvidence`.

    Raises:
        InputError: a technique can't work on this job, or this trainer doesn't offer its
            slot; then the message has what to do instead.
    """
    former = vars(trainer).get(JOINED)
    if former is not None:
        former.leave()
    TrainerTechniques(trainer, list(techniques)).join()
    if evidence is not None:
        trainer.add_callback(StepEvidence(evidence))
    return trainer


def check(trainer: Trainer, techniques: Sequence[Technique]) -> None:
    """Raise InputError where `with_techniques` would; nothing is changed."""
    _require_fitting(trainer, techniques)


def _require_fitting(trainer: Trainer, plan: Sequence[Technique]) -> Setup:
    for technique in plan:
        _check(trainer, technique)
    model: Any = trainer.model
    host_run = _host_run(trainer, plan)
    return prepare_recognised(HOST, model, plan, host_run)


def _check(trainer: Trainer, technique: Technique) -> None:  # noqa: C901  # a clause for each refusal
    """Refuse what this trainer, and not every one, decides by itself."""
    kind, args, slot, name = type(trainer), trainer.args, technique.slot, technique.name()
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or args.n_gpu > 1:
        raise InputError(
            f"{name}: this trainer shards the model or runs several GPUs in one process; start "
            "one process per GPU with torchrun, without fsdp and deepspeed"
        )
    if slot in EDITS and args.torch_compile:
        raise InputError(
            f"{name}: torch_compile compiles the model once, for training and evaluation; leave "
            "one of them out"
        )
    if slot is Slot.LOSS:
        reason = _own_loss(trainer)
        if reason:
            raise InputError(f"{name}: {reason}; it is left as it is")
    if slot is Slot.COLLATE:
        reason = _needs_rows(trainer)
        if reason:
            raise InputError(f"{name}: {reason}; its batches are left as they are")
    own_loader = any(
        _origin(trainer, method)[0] != "transformers"
        for method in ("get_train_dataloader", "_get_train_sampler")
    )
    if slot is Slot.SAMPLER and own_loader:
        raise InputError(f"{name}: {kind.__name__} draws its examples itself; leave it out")
    twice = args.gradient_checkpointing or getattr(args, "activation_checkpointing", False)
    if slot is Slot.ACTIVATION_CHECKPOINTING and twice:
        raise InputError(
            f"{name}: TrainingArguments' activation_checkpointing (gradient_checkpointing) "
            "recomputes the same blocks; set it to False, or leave the technique out"
        )
    if slot is Slot.ATTENTION and getattr(args, "num_generations", None) is not None:
        raise InputError(
            f"{name}: it is for training passes, and {kind.__name__} generates between them; leave "
            "it out"
        )
    if slot is Slot.COMMUNICATION and args.fp16:
        raise InputError(f"{name}: with fp16 the Trainer scales gradients; use bf16=True instead")
    if slot is Slot.OPTIMIZER:
        reason = _own_optimizer(trainer, technique)
        if reason:
            raise InputError(f"{name}: {reason}; it is left as it is")


def _own_loss(trainer: Trainer) -> str:
    """Why the trainer's loss can't come without logits; empty if it can."""
    if trainer.compute_loss_func is not None:
        return "compute_loss_func reads the logits"
    if trainer.label_smoother is not None:
        return "label_smoothing_factor reads the logits"
    if _origin(trainer, "compute_loss") != LOSS_OF_TRAINER:
        return f"{type(trainer).__name__} has a compute_loss of its own"
    model: Any = trainer.model
    return model_loss_reason(model)


def _needs_rows(trainer: Trainer) -> str:  # noqa: C901  # a clause for each reason
    """Why the trainer needs one example a row; empty if documents may share one."""
    kind, args = type(trainer), trainer.args
    function = trainer.compute_loss_func
    source = tuple(getattr(function, name, "") for name in ("__module__", "__name__"))
    if function is not None and source != TRL_DFT:
        return "compute_loss_func may need one example a row"
    if _origin(trainer, "compute_loss") not in (LOSS_OF_TRAINER, LOSS_OF_SFT):
        return f"{kind.__name__} has a compute_loss of its own"
    for name in READ_BATCHES:
        if _origin(trainer, name)[0] not in ("transformers", "trl"):
            return f"{kind.__name__} has a {name} of its own, which may read padded rows"
    if holds_documents(trainer):
        return "its rows hold several documents already"
    if getattr(args, "neftune_noise_alpha", None) is not None:
        return "NEFTune's noise depends on the length of a row"
    if getattr(args, "include_num_input_tokens_seen", "no") not in ("no", False):
        return "include_num_input_tokens_seen counts the tokens of its own rows"
    adapters = getattr(trainer.model, "peft_config", None) or {}
    if any(getattr(one, "is_prompt_learning", False) for one in adapters.values()):
        return "a learned prompt comes before each row"
    dispatched = trainer.accelerator.dispatch_batches
    streamed = not hasattr(trainer.train_dataset, "__len__")
    if dispatched or (dispatched is None and streamed):  # accelerate does so with one rank too
        return "accelerate reads the batches on one rank and deals out their rows"
    if getattr(trainer.accelerator, "split_batches", False) and args.world_size > 1:
        return "split_batches deals out the rows of a batch"
    return ""


READ_BATCHES = ("training_step", "_prepare_inputs", "get_batch_samples")


LOSS_OF_TRAINER = ("transformers", "Trainer.compute_loss")
LOSS_OF_SFT = ("trl", "SFTTrainer.compute_loss")  # a mean over labelled tokens of any rows


def _origin(trainer: Trainer, name: str) -> tuple[str, str]:
    """The library and the qualified name of a trainer's method, under hasten's own."""
    joined = vars(trainer).get(JOINED)
    method = getattr(trainer, name) if joined is None else joined.host_method(name)
    return library_of(method), getattr(method, "__qualname__", "")


def runs_user_code(trainer: Trainer) -> bool:
    """Returns True if code that isn't a library's may run inside the trainer's loss.

    The search begins with ``compute_loss`` and follows the names in the code of each method.
    """
    joined = vars(trainer).get(JOINED)
    instance = vars(trainer) if joined is None else {**vars(trainer), **joined.host_methods}
    visited, waiting = {"compute_loss"}, ["compute_loss"]
    while waiting:
        name = waiting.pop()
        methods = [vars(kind)[name] for kind in type(trainer).__mro__ if name in vars(kind)]
        for method in (*methods, *([instance[name]] if name in instance else [])):
            function = inspect.unwrap(getattr(method, "fget", method))
            if not callable(function) or isinstance(function, nn.Module):
                continue
            if library_of(function) not in ("transformers", "trl"):
                return True
            names = set(_names_in(getattr(function, "__code__", None))) - visited
            visited |= names
            waiting += names
    return False


def _names_in(code: Any) -> Iterator[str]:
    """The names of attributes and functions in a function's code and in those within it."""
    if code is not None:
        yield from code.co_names
        for constant in code.co_consts:
            if hasattr(constant, "co_names"):
                yield from _names_in(constant)


def holds_documents(trainer: Trainer) -> bool:
    """Returns True if the trainer's rows hold several documents, separated by positions."""
    flattens = isinstance(trainer.data_collator, DataCollatorWithFlattening)
    return flattens or bool(getattr(trainer, "padding_free", False))  # TRL's


def has_already(trainer: Trainer, technique: Technique) -> bool:
    """True if the trainer was set to do by itself what the technique does."""
    mixed = trainer.args.bf16 or trainer.args.fp16
    if technique.slot is Slot.PRECISION:
        return bool(mixed)
    return technique.slot is Slot.COLLATE and holds_documents(trainer)


def _own_optimizer(trainer: Trainer, technique: Technique) -> str:
    """Why the trainer's optimizer isn't torch's AdamW, built by the trainer; empty if it is."""
    args = trainer.args
    joined = vars(trainer).get(JOINED)
    before = None if joined is None else joined.built
    if trainer.optimizer is not None and trainer.optimizer is not before:
        return "this trainer was given its optimizer"
    if trainer.optimizer_cls_and_kwargs is not None:
        return "this trainer was given a class of optimizer"
    name = str(getattr(args.optim, "value", args.optim))
    if name not in ("adamw_torch", "adamw_torch_fused"):
        return f"optim is {name}, and the technique reads torch's AdamW"
    model: Any = trainer.model
    return optimizer_reason(technique, None, model.parameters())


def _host_run(trainer: Trainer, plan: Iterable[Technique]) -> HostRun:
    args = trainer.args
    sampled = any(t.slot is Slot.SAMPLER for t in plan)
    data: Any = trainer.train_dataset if sampled else ()
    if not hasattr(data, "__len__"):
        raise InputError("a sampler needs a train_dataset with a length; this one is a stream")
    return HostRun(
        device=str(args.device),
        examples=data,
        lengths=row_sizes(data)[0],
        batch=args.per_device_train_batch_size
        * args.gradient_accumulation_steps
        * environment.world().size,
        steps=args.max_steps if args.max_steps > 0 else None,
        epochs=max(round(args.num_train_epochs), 1),
        seed=args.seed if args.data_seed is None else args.data_seed,
        folder=Path(str(args.output_dir)) / "hasten",
    )


class TrainerTechniques(TrainerCallback):
    """The techniques of one trainer, through all its trainings.

    A step's way through it:

        1. In ``get_train_dataloader``: the trainer's own loader; its collator also packs.
        2. In ``get_batch_samples``: takes the layout that was decided; at first both are
           available.
        3. In ``training_step``: opens a window that ends with the pass. On the first step the
           pass runs without techniques, and the check follows it.
        4. In ``compute_loss``, inside that window: after the first step the model's edits are
           active until the window ends.
        5. Callbacks: hasten's communication method and checkpoints.
    """

    def __init__(self, trainer: Trainer, plan: Sequence[Technique]) -> None:
        self.setup = _require_fitting(trainer, plan)
        self.built: Any = None  # the technique's optimizer
        self.proof: FirstStepProof | None = None
        self.resumed: Path | None = None  # the Trainer's checkpoint from which it resumes
        self._trainer = trainer
        self._usual: dict[str, Any] = {}
        self._saves = CheckpointSchedule(self.setup)
        self._attached: Any = None
        self._hosted: HostedTechniques | None = None
        self._passes: _TrainerPasses | ReplayPasses
        self._recorder: Recorder
        self._own_pass: Any = None  # the gradients of a pass that is to be proven
        self._plain_until = 0  # the step after which techniques act
        self._first_pass: Any = None  # the inputs of a pass that is to be proven
        self._techniques: list[Technique] = []  # that change the training passes
        self._packing: PackedCollator | None = None
        self._window: contextlib.ExitStack | None = None
        self._is_open = False
        self._is_fitted = False  # in this step
        self._host_batch: Any = None
        self._hosts_loader = _HostsLoader(trainer)
        self._reported: set[str] = set()

    # Joining a trainer and leaving it. These attributes are the instance's alone.

    def join(self) -> None:
        """Take the places in the trainer that the plan needs."""
        plan = self.setup.plan
        places: dict[str, Any] = {}
        places["training_step"], places["compute_loss"] = self._training_step, self._compute_loss
        places["_load_optimizer_and_scheduler"] = self._load_optimizer_and_scheduler
        if Slot.COLLATE in plan or Slot.SAMPLER in plan:
            places["get_train_dataloader"] = self._get_train_dataloader
        if Slot.COLLATE in plan:
            places["get_batch_samples"] = self._get_batch_samples
        if Slot.OPTIMIZER in plan:
            places["create_optimizer"] = self._create_optimizer
        for name, method in places.items():
            self._usual[name] = getattr(self._trainer, name)
            setattr(self._trainer, name, method)
        vars(self._trainer)[JOINED] = self
        self._trainer.add_callback(self)
        if Slot.COLLATE in plan:
            self._trainer.callback_handler.callbacks.insert(0, self._hosts_loader)

    def leave(self) -> None:
        """Give the trainer its own places back."""
        for name, usual in self._usual.items():
            if getattr(usual, "__self__", None) is self._trainer:
                vars(self._trainer).pop(name, None)
            else:  # somebody else's, of this instance
                setattr(self._trainer, name, usual)
        vars(self._trainer).pop(JOINED, None)
        self._trainer.remove_callback(self)
        if self._hosts_loader in self._trainer.callback_handler.callbacks:
            self._trainer.remove_callback(self._hosts_loader)

    @property
    def host_methods(self) -> dict[str, Any]:
        """The replaced methods, as they were before the trainer got techniques."""
        return self._usual

    def host_method(self, name: str) -> Any:
        """Returns a method of the trainer as it was before it got techniques."""
        return self._usual.get(name) or getattr(self._trainer, name)

    # Data.

    def _get_train_dataloader(self) -> Any:
        trainer, usual = self._trainer, self._trainer.data_collator
        if Slot.COLLATE in self.setup.plan and trainer.is_in_train:  # else a user looks at batches
            self._packing = PackedCollator(usual, keeps_host=True)
            trainer.data_collator = self._packing
        try:
            if Slot.SAMPLER in self.setup.plan:
                return self._ordered_loader()
            return self._usual["get_train_dataloader"]()
        finally:
            trainer.data_collator = usual  # evaluation and prediction use it

    def _ordered_loader(self) -> StepLoader:
        """It isn't prepared by accelerate: its batches are this rank's already."""
        trainer, args, world = self._trainer, self._trainer.args, self.setup.context.world
        assert self.setup.sampler is not None  # there are examples
        passes = args.gradient_accumulation_steps
        return StepLoader(
            trainer.train_dataset,
            StepBatches(self.setup.sampler, passes, world.rank, world.size),
            trainer._get_collator_with_removed_columns(trainer.data_collator, "training"),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and self.setup.context.on_gpu,
        )

    def _get_batch_samples(self, iterator: Any, count: int, device: Any) -> Any:
        batches = list(itertools.islice(iterator, count))
        if self._packing is not None:
            chosen = [self._packing.chosen(batch) for batch in batches]
            for _, reason in chosen:
                if reason:
                    self._report(f"packed: left out for some batches: {reason}")
            batches = [batch for batch, _ in chosen]
        # A loss is divided by the number of labels that the trainer counts in its own batches.
        host_batches = [b.host if isinstance(b, PackedBatch) else b for b in batches]
        counted, items = self._usual["get_batch_samples"](iter(host_batches), count, device)
        return batches[: len(counted)], items

    # Passes.

    def _training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        host_batch = inputs.host if isinstance(inputs, PackedBatch) else None
        self._is_open, self._first_pass = False, None
        if self.proof is not None:
            self._own_pass = OwnPass(
                self._passes.model, memory.free_bytes(str(self._trainer.args.device))
            )
        is_plain = self.proof is not None or self._plain_until > 0
        if is_plain and host_batch is not None:
            inputs, host_batch = host_batch, None
        self._host_batch = host_batch
        with contextlib.ExitStack() as window:
            self._window = window
            try:
                loss = self._usual["training_step"](model, inputs, *args, **kwargs)
            finally:
                self._window = None
        if self._first_pass is not None:
            self._prove(*self._first_pass)
            self._first_pass = None
        return loss

    def _compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        usual = self._usual["compute_loss"]
        if self._window is None or self._hosted is None:  # evaluation, or somebody's own call
            return usual(model, inputs, *args, **kwargs)
        if not self._is_open:  # a step may compute several losses
            if not self._is_fitted:
                self._fit()
                self._is_fitted = True
            if self.proof is not None:
                self._first_pass = detached(inputs), kwargs.get("num_items_in_batch")
                if isinstance(self._passes, ReplayPasses):
                    self._window.enter_context(self._recorder.active())
            elif not self._plain_until:
                if self._host_batch is not None and not packs(self._techniques):  # since this step
                    inputs = Trainer._prepare_inputs(self._trainer, self._host_batch)
                self._window.enter_context(self._hosted.active(self._techniques))
            self._is_open = True
            if isinstance(self._passes, _TrainerPasses) and self._first_pass is not None:
                return self._passes.recorded(usual(model, inputs, *args, **kwargs))
        return usual(model, inputs, *args, **kwargs)

    def _prove(self, inputs: Any, items: Any) -> None:
        """Compares the pass that has just ended with one that has the techniques."""
        assert self.proof is not None
        evidence = self._evidence()
        counts = [one.count for one in evidence]
        if isinstance(self._passes, ReplayPasses):
            calls = self._recorder.calls
            trained = self._own_pass.ended(self._passes.recorded_sums(calls))
            removed = self.proof.check(calls, *counts, trained=trained)
        else:
            self._passes.items, self._passes.real = items, inputs
            trained = self._own_pass.ended(self._passes.sums)
            removed = self.proof.check(inputs, self._trainer, *counts, trained=trained)
        self._recorder.calls, self._own_pass = [], None
        self._techniques = self.proof.techniques
        for one in evidence:
            one.log.exclude(self.proof.seconds)
        for removal in removed:
            self._report(f"{removal.technique.name()} was taken out: {removal.difference}")

    def _evidence(self) -> list[StepEvidence]:
        callbacks = self._trainer.callback_handler.callbacks
        return [one for one in callbacks if isinstance(one, StepEvidence)]

    def _count(self) -> str:
        """The number of techniques that this trainer has."""
        count = HOST.others(self.setup.plan) + len(self._techniques)
        return f"{count} technique{'s' if count != 1 else ''}"

    def _report(self, text: str) -> None:
        if text not in self._reported and self.setup.context.world.is_main:
            _LOG.warning("speed_up: %s", text)
        self._reported.add(text)

    # Optimizer.

    def _create_optimizer(self, model: Any = None) -> Any:
        """Read the trainer's own AdamW; the technique's has the same groups and rates."""
        trainer = self._trainer
        if trainer.optimizer is None:
            optimizer: Any = self._usual["create_optimizer"](model)
            trained: Any = trainer.model if model is None else model
            trainer.optimizer = self.built = optimizer_of(self.setup, trained, optimizer)
        return trainer.optimizer

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        """The one place where the Trainer has the name of the checkpoint from which it resumes."""
        self._usual["_load_optimizer_and_scheduler"](checkpoint)
        self.resumed = Path(checkpoint) if checkpoint else None

    # Moments of a training.

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        module: Any = self._trainer.model_wrapped
        if module is not self._attached:  # DDP takes one hook in its life
            attach_communication(self.setup, module)
            self._attached = module
        if self.resumed is not None:
            take_communication(self.setup, self.resumed)
            self.resumed = None
        self._saves.begin(
            model=kwargs["model"], optimizer=kwargs["optimizer"], schedule=kwargs["lr_scheduler"]
        )
        self._begin_passes()

    def _begin_passes(self) -> None:
        """Recognise this training's model, which may be new, and begin the proof."""
        trainer = self._trainer
        model: Any = trainer.model
        is_new = self._hosted is None or self._hosted.model is not model
        if is_new:
            autocast = trainer.accelerator.autocast if trainer.accelerator.native_amp else NoContext
            hosted = HostedTechniques(HOST, model, _host_run(trainer, ()), autocast)
            self._recorder = Recorder(callable_modules(model), trainer.model_wrapped)
            self._passes = _TrainerPasses(trainer, hosted, self._usual["compute_loss"])
            if runs_user_code(trainer):
                mixed = bool(trainer.accelerator.native_amp)
                self._passes = ReplayPasses(
                    hosted, packed_call, packs, self._passes.in_float32, mixed
                )
            self._hosted = hosted
            self._techniques = [t for t in self.setup.plan if t.slot in CHANGES_A_PASS]
        self._fit()
        if is_new and proof_is_on() and self._techniques:
            pad_id = getattr(getattr(model, "config", None), "pad_token_id", None) or 0
            self.proof = FirstStepProof(self._passes, self._techniques, "the Trainer", pad_id)
        else:
            self._decide()

    def _fit(self) -> None:
        """Removes techniques that don't fit the trainer and the model as they are now."""
        assert self._hosted is not None  # the training has begun
        before = self._techniques
        self._techniques = self._hosted.fitting(before, self._report)
        if self.proof is not None:
            self.proof.techniques = list(self._techniques)
        if self._packing is not None and packs(before) and not packs(self._techniques):
            self._packing.decide(KEEP)

    def _decide(self) -> None:
        if self._packing is not None:
            self._packing.decide_by(self._techniques)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The first step's passes are done.
        if self.proof is not None and not self.proof.awaits_loss:
            if self.proof.batches and self._techniques:
                self._report(f"{self.proof}; {self._count()} joined")
            elif self._techniques and not self.proof.is_settled:
                self._report(
                    "this trainer's steps don't call compute_loss; techniques of the "
                    "model and its batches are left out"
                )
                self._techniques = []
            compared = max((one.log.steps_to_compare for one in self._evidence()), default=0)
            if self.proof.batches and 0 < compared <= state.max_steps - state.global_step:
                self._plain_until = state.global_step + 2
            self.proof = None
            if not self._plain_until:
                self._decide()
        self.setup.communication.before_update(self._parameters())

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.setup.communication.after_update(self._parameters())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._saves.after_step(state.global_step)
        self._is_fitted = False
        if self._plain_until and state.global_step >= self._plain_until:
            self._plain_until = 0
            self._decide()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not args.save_only_model:
            folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
            keep_communication(self.setup, folder)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._saves.after_epoch(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._saves.close()

    def _parameters(self) -> list[Any]:
        model: Any = self._trainer.model
        return [p for p in model.parameters() if p.requires_grad]


class _HostsLoader(TrainerCallback):
    """Before all other callbacks: they read the trainer's own batches of the loader."""

    def __init__(self, trainer: Trainer) -> None:
        self._handler = trainer.callback_handler

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._handler.train_dataloader = HostBatches(self._handler.train_dataloader)


class _TrainerPasses:
    """Passes for the proof: the trainer's own ``compute_loss`` on its unwrapped model."""

    def __init__(self, trainer: Trainer, hosted: HostedTechniques, compute_loss: Any) -> None:
        self._trainer, self._hosted, self._compute_loss = trainer, hosted, compute_loss
        self.items: Any = None  # labels of the whole step, for a batch of it
        self.real: Any = None  # that batch, as the trainer's collator made it
        self.sums: dict[str, tuple[float, float]] = {}  # of the training's own pass
        self._gradient: Tensor | None = None  # of its loss: accumulation divides there
        self._is_real = False

    def recorded(self, returned: Any) -> Any:
        """Returns what the training's own ``compute_loss`` returned, with its loss recorded."""
        self._gradient = None
        loss = returned[0] if isinstance(returned, tuple) else returned
        if not isinstance(loss, Tensor):
            return returned
        number = float(loss.detach())
        self.sums = {"the loss": (number, abs(number))}
        loss = recorded_gradient(loss, self._keep_gradient)
        return (loss, *returned[1:]) if isinstance(returned, tuple) else loss

    def _keep_gradient(self, gradient: Tensor | None) -> None:
        self._gradient = gradient

    @property
    def model(self) -> nn.Module:
        return self._hosted.model

    @property
    def is_mixed(self) -> bool:
        return bool(self._trainer.accelerator.native_amp)

    def loss(self, batch: Any) -> Outputs:
        trainer = self._trainer
        model: Any = trainer.model
        model.train()
        items = self.items if self._is_real else None
        with trainer.compute_loss_context_manager():
            loss: Tensor = self._compute_loss(model, batch, num_items_in_batch=items)
        number = float(loss.detach())
        gradient = self._gradient if self._is_real else None
        return Outputs([loss], [gradient], {"the loss": (number, abs(number))})

    def batch(self, host_batch: Any, techniques: Sequence[Technique]) -> Any:
        self._is_real = host_batch is self.real
        return batch_for(host_batch, techniques)

    def active(self, techniques: Sequence[Technique]) -> AbstractContextManager[None]:
        return self._hosted.active(techniques)

    @contextlib.contextmanager
    def in_float32(self) -> Iterator[None]:
        usual, self._hosted.context = self._hosted.context, NoContext
        try:
            with plain_forward(self.model):
                yield
        finally:
            self._hosted.context = usual


class StepEvidence(TrainerCallback):
    """Writes ``metrics.jsonl``; of several ranks the first writes, about its own share.

    Args:
        folder: of its own for every run; or another log of steps.

    Raises:
        InputError: the folder holds an earlier run's lines or can't be written.
    """

    def __init__(self, folder: str | Path | StepLog) -> None:
        self.log = step_log(folder)
        self.count = TokenCount()
        self._hook: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model: nn.Module = kwargs["model"]
        if self._hook is None:
            self._hook = model.register_forward_pre_hook(
                _CountBatches(self.count), with_kwargs=True
            )
        self.log.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.log.step(state.global_step, self.count)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if isinstance(logs, dict):
            self.log.loss(logs.get("loss"))
        self.log.begin()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.log.begin()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.log.begin()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self.log.close()


class _CountBatches:
    """A hook that counts the tokens of a model; those of a copy of the model aren't counted."""

    def __init__(self, count: TokenCount | None = None) -> None:
        self._count = count

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._count is not None and module.training:  # an evaluation's tokens are nobody's step
            first_input = {"input_ids": args[0]} if args else {}
            self._count.add({**first_input, **kwargs})

    def __reduce__(self) -> tuple[Any, ...]:  # for copy.deepcopy and torch.save of the model
        return _CountBatches, ()
