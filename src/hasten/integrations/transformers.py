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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback

from hasten.core.slot import Slot
from hasten.core.technique import Technique
from hasten.integrations.adapt import (
    EDITS,
    HostRun,
    HostSlots,
    optimizer_of,
    optimizer_reason,
    ordered_loader,
    plain_forward,
    prepare_recognised,
)
from hasten.integrations.checkpoints import (
    StepLog,
    TokenCount,
    keep_communication,
    step_log,
    take_communication,
)
from hasten.integrations.hosted import HostedTraining
from hasten.integrations.scored_labels import FusedHead, fused_head
from hasten.machine import environment
from hasten.measure.quality.preserved import library_of

HOST = HostSlots(
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
LOG_PROBS_OF_GRPO = "_get_per_token_logps_and_entropies"
JOINED = "_hasten_techniques"  # the attribute of a trainer that has some
LOSS_OF_TRAINER = ("transformers", "Trainer.compute_loss")
# A mean over labelled tokens of any rows; the other one is TRL's.
LOSSES_OF_ROWS = (LOSS_OF_TRAINER, ("trl", "SFTTrainer.compute_loss"))


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


class HostTrainer:
    """A Trainer as a :class:`~hasten.integrations.adapt.TrainerAdapter`."""

    slots = HOST

    def __init__(self, trainer: Trainer, reference: nn.Module | None = None) -> None:
        self.trainer = trainer
        self.items: Any = None  # labels of the whole step, for a batch of it
        self._reference = reference

    def model(self) -> Any:
        return self.trainer.model if self._reference is None else self._reference

    def replicas(self) -> Any:
        return self.trainer.model_wrapped

    def run(self) -> HostRun:
        args = self.trainer.args
        return HostRun(
            device=str(args.device),
            batch=args.per_device_train_batch_size
            * args.gradient_accumulation_steps
            * environment.world().size,
            steps=args.max_steps if args.max_steps > 0 else None,
            epochs=max(round(args.num_train_epochs), 1),
            seed=args.seed if args.data_seed is None else args.data_seed,
            folder=Path(str(args.output_dir)) / "hasten",
        )

    def examples(self) -> Any:
        return self.trainer.train_dataset

    def reason(self, technique: Technique) -> str:
        trainer, args, slot = self.trainer, self.trainer.args, technique.slot
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or args.n_gpu > 1:
            return (
                "this trainer shards the model or runs several GPUs in one process; start one "
                "process per GPU with torchrun, without fsdp and deepspeed"
            )
        edits = slot in EDITS or (slot is Slot.COLLATE and self.packs_calls())
        if edits and args.torch_compile:
            return (
                "torch_compile compiles the model once, for training and evaluation; leave one of "
                "them out"
            )
        if edits and getattr(trainer, "precompute_ref_logps", False) and self._is_half():
            return (
                "other kernels computed the reference's log-probabilities, and in half precision "
                "theirs differ; leave precompute_ref_log_probs out"
            )
        if slot is Slot.COMMUNICATION and args.fp16:
            return "with fp16 the Trainer scales gradients; use bf16=True instead"
        foreign = self._unrecognised(technique)
        return foreign and f"{foreign}; it is left as it is"

    def _unrecognised(self, technique: Technique) -> str:
        """The code in this slot that isn't the library's own, or its setting; empty if neither."""
        trainer, args, slot = self.trainer, self.trainer.args, technique.slot
        kind = type(trainer).__name__
        loaders = ("get_train_dataloader", "_get_train_sampler")
        if slot in HOST.offers and self.has_already(technique):
            return "the arguments of this trainer have it switched on"
        if slot is Slot.OPTIMIZER:
            return self._foreign_optimizer(technique)
        if slot is Slot.SAMPLER and any(self.origin(n)[0] != "transformers" for n in loaders):
            return f"{kind} draws its examples itself"
        if slot is Slot.LOSS and (trainer.compute_loss_func or trainer.label_smoother):
            name = "compute_loss_func" if trainer.compute_loss_func else "label_smoothing_factor"
            return f"{name} reads the logits"
        losses = {Slot.LOSS: (LOSS_OF_TRAINER,), Slot.COLLATE: LOSSES_OF_ROWS}
        if slot in losses and self.origin("compute_loss") not in losses[slot]:
            head = None if runs_user_code(trainer) else self._fused_head()
            if head is None:
                return f"{kind} has a compute_loss of its own"
            if slot is Slot.LOSS and head.difference:
                return head.difference
        if slot is Slot.COLLATE and runs_user_code(trainer):
            return "the code of its loss may need one example a row"
        if slot is Slot.COLLATE and getattr(args, "neftune_noise_alpha", None) is not None:
            return "NEFTune's noise depends on the length of a row"
        return ""

    def _foreign_optimizer(self, technique: Technique) -> str:
        trainer, joined = self.trainer, vars(self.trainer).get(JOINED)
        before = None if joined is None else joined.built
        is_given = trainer.optimizer is not None and trainer.optimizer is not before
        if is_given or trainer.optimizer_cls_and_kwargs is not None:
            return "this trainer was given its optimizer"
        name = str(getattr(trainer.args.optim, "value", trainer.args.optim))
        if name not in ("adamw_torch", "adamw_torch_fused"):
            return f"optim is {name}, and the technique reads torch's AdamW"
        return optimizer_reason(technique, None, self.model().parameters())

    def has_already(self, technique: Technique) -> bool:
        """True if the trainer was set to do by itself what the technique does."""
        trainer, args = self.trainer, self.trainer.args
        checkpointed = getattr(args, "activation_checkpointing", False)
        flattens = isinstance(trainer.data_collator, DataCollatorWithFlattening)
        done = {
            Slot.PRECISION: args.bf16 or args.fp16,
            Slot.ACTIVATION_CHECKPOINTING: args.gradient_checkpointing or checkpointed,
            # Rows hold several documents, separated by positions; the second is TRL's.
            Slot.COLLATE: flattens or getattr(trainer, "padding_free", False),
        }
        return bool(done.get(technique.slot))

    def autocast(self) -> AbstractContextManager[Any] | None:
        accelerator = self.trainer.accelerator
        return accelerator.autocast() if accelerator.native_amp else None

    def loss(self) -> Callable[[Any, bool], Tensor] | None:
        return None if runs_user_code(self.trainer) else self._library_loss

    def _library_loss(self, batch: Any, is_real: bool) -> Tensor:
        items = self.items if is_real else None
        with self.trainer.compute_loss_context_manager():
            compute_loss = self.method("compute_loss")
            loss: Tensor = compute_loss(self.model(), batch, num_items_in_batch=items)
        return loss

    def packs_calls(self) -> bool:
        is_rows = self.origin("compute_loss") in LOSSES_OF_ROWS
        return not is_rows and self._fused_head() is not None

    def reference(self) -> HostTrainer | None:
        model = vars(self.trainer).get("ref_model")
        is_known = self.origin("compute_loss")[0] == "trl" and isinstance(model, nn.Module)
        return HostTrainer(self.trainer, model) if is_known and self._reference is None else None

    def _is_half(self) -> bool:
        kinds = {p.dtype for p in self.model().parameters()}
        return self.autocast() is not None or bool(kinds & {torch.bfloat16, torch.float16})

    def _fused_head(self) -> FusedHead | None:
        with plain_forward(self.model()):
            return fused_head(self.model())

    def step(self) -> int:
        return int(self.trainer.state.global_step)

    def steps(self) -> float:
        return float(self.trainer.state.max_steps)

    def evidence(self) -> list[StepEvidence]:
        callbacks = self.trainer.callback_handler.callbacks
        return [one for one in callbacks if isinstance(one, StepEvidence)]

    def method(self, name: str) -> Any:
        """Returns a method of the trainer as it was before it got techniques."""
        joined = vars(self.trainer).get(JOINED)
        return (joined and joined.usual.get(name)) or getattr(self.trainer, name)

    def origin(self, name: str) -> tuple[str, str]:
        """The library and the qualified name of such a method."""
        method = self.method(name)
        return library_of(method), getattr(method, "__qualname__", "")


def runs_user_code(trainer: Trainer) -> bool:
    """Returns True if code that isn't a library's may run inside the trainer's loss.

    The search begins with ``compute_loss`` and follows the names in the code of each method.
    """
    joined = vars(trainer).get(JOINED)
    instance = vars(trainer) if joined is None else {**vars(trainer), **joined.usual}
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


class TrainerTechniques(TrainerCallback):
    """The techniques of one trainer, through all its trainings.

    It takes the places of some methods of the trainer, of this instance alone:

        1. ``training_step``: a pass, with its backward pass.
        2. ``compute_loss``, inside it: the batch is packed, and the model's edits are active
           until the pass ends. So the rest of the trainer has its own padded batches.
        3. ``get_train_dataloader``: the order of a SAMPLER technique.
        4. ``create_optimizer``: the optimizer of an OPTIMIZER technique.
        5. TRL's log-probabilities before a loss of GRPO, which need the same kernels.
    """

    def __init__(self, trainer: Trainer, plan: Sequence[Technique]) -> None:
        self.host = HostTrainer(trainer)
        self.setup = prepare_recognised(self.host, plan)
        self.training = HostedTraining(self.host, self.setup)
        self.built: Any = None  # the technique's optimizer
        self.resumed: Path | None = None  # the Trainer's checkpoint from which it resumes
        self.usual: dict[str, Any] = {}  # the replaced methods
        self._trainer, self._is_in_step = trainer, False

    def join(self) -> None:
        """Take the places in the trainer that the plan needs."""
        places: dict[str, Any] = {
            "training_step": self._training_step,
            "compute_loss": self._compute_loss,
            "_load_optimizer_and_scheduler": self._load_optimizer_and_scheduler,
        }
        if Slot.SAMPLER in self.setup.plan:
            places["get_train_dataloader"] = self._get_train_dataloader
        if Slot.OPTIMIZER in self.setup.plan:
            places["create_optimizer"] = self._create_optimizer
        if hasattr(self._trainer, LOG_PROBS_OF_GRPO) and self.host.packs_calls():
            places[LOG_PROBS_OF_GRPO] = self._log_probs
        for name, method in places.items():
            self.usual[name] = getattr(self._trainer, name)
            setattr(self._trainer, name, method)
        vars(self._trainer)[JOINED] = self
        self._trainer.add_callback(self)

    def leave(self) -> None:
        """Give the trainer its own places back."""
        for name, usual in self.usual.items():
            if getattr(usual, "__self__", None) is self._trainer:
                vars(self._trainer).pop(name, None)
            else:  # somebody else's, of this instance
                setattr(self._trainer, name, usual)
        vars(self._trainer).pop(JOINED, None)
        self._trainer.remove_callback(self)

    def _get_train_dataloader(self) -> Any:
        """Returns the loader unprepared by accelerate: its batches are this rank's already."""
        trainer, args = self._trainer, self._trainer.args
        return ordered_loader(
            self.setup,
            trainer._get_collator_with_removed_columns(trainer.data_collator, "training"),
            args.gradient_accumulation_steps,
            weighted=False,  # the Trainer divides by the labels of a step
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and self.setup.context.on_gpu,
        )

    def _training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self._is_in_step = True
        try:
            loss = self.usual["training_step"](model, inputs, *args, **kwargs)
        finally:
            self._is_in_step = False
            self.training.close()
        self.training.prove()
        return loss

    def _compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        usual = self.usual["compute_loss"]
        if not self._is_in_step:  # evaluation, or somebody's own call
            return usual(model, inputs, *args, **kwargs)
        self.host.items = kwargs.get("num_items_in_batch")
        return self.training.loss(inputs, lambda batch: usual(model, batch, *args, **kwargs))

    def _log_probs(self, *args: Any, **kwargs: Any) -> Any:
        """Also those of the reference and of the policy that generated, before the loss."""
        with self.training.around_loss() if self._is_in_step else contextlib.nullcontext():
            return self.usual[LOG_PROBS_OF_GRPO](*args, **kwargs)

    def _create_optimizer(self, model: Any = None) -> Any:
        """Read the trainer's own AdamW; the technique's has the same groups and rates."""
        trainer = self._trainer
        if trainer.optimizer is None:
            optimizer: Any = self.usual["create_optimizer"](model)
            trained: Any = trainer.model if model is None else model
            trainer.optimizer = self.built = optimizer_of(self.setup, trained, optimizer)
        return trainer.optimizer

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        """The one place where the Trainer has the name of the checkpoint from which it resumes."""
        self.usual["_load_optimizer_and_scheduler"](checkpoint)
        self.resumed = Path(checkpoint) if checkpoint else None

    def _restore(self) -> None:
        if self.resumed is not None:
            take_communication(self.setup, self.resumed)
            self.resumed = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        objects = {"optimizer": kwargs["optimizer"], "schedule": kwargs["lr_scheduler"]}
        self.training.begin(self._restore, **objects)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.training.before_update()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.training.after_update(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not args.save_only_model:
            folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
            keep_communication(self.setup, folder)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.training.after_epoch(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.training.end()


class StepEvidence(TrainerCallback):
    """Writes ``metrics.jsonl``; of several ranks the first writes, about its own share.

    Args:
        folder: of its own for every run; or another log of steps.

    Raises:
        InputError: the folder holds an earlier run's lines or can't be written.
    """

    def __init__(self, folder: str | Path | StepLog) -> None:
        self.lines = step_log(folder)
        self.count = TokenCount()
        self._hook: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model: nn.Module = kwargs["model"]
        if self._hook is None:
            self._hook = model.register_forward_pre_hook(self.count.before_call, with_kwargs=True)
        self.lines.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.lines.step(state.global_step, self.count)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if isinstance(logs, dict):
            self.lines.loss(logs.get("loss"))
        self.lines.begin()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.lines.begin()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.lines.begin()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self.lines.close()
