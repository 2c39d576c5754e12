"""From a recipe and its data to facts, a plan and a job."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

from hasten.core import context as facts
from hasten.core.context import ExampleStats, JobContext, ModelFacts
from hasten.core.health import NEEDS_CHECKPOINTS
from hasten.core.job import (
    GlobalBatch,
    Job,
    NamedParameters,
    Sampler,
    Schedule,
    Stop,
    share_of,
    with_language_counts,
)
from hasten.core.plan import Plan
from hasten.core.resume_check import batch_record, check_same_job
from hasten.core.setup import prepare, unsupported_reasons
from hasten.core.slot import Slot
from hasten.core.technique import Technique
from hasten.data.prepared import PreparedData
from hasten.errors import InputError
from hasten.launch.ranks import backend_for
from hasten.launch.supervisor import RankTimeouts, Supervision
from hasten.machine import environment
from hasten.machine.environment import World
from hasten.machine.locks import only_run_in
from hasten.models.adapters import merged_weights, parameter_counts
from hasten.models.load import (
    check_rows,
    load_model,
    read_config,
    skeleton_of,
    take_own_attention,
)
from hasten.parts.checkpoint.format import read_manifest
from hasten.parts.data.collate import padded
from hasten.parts.kernels.registry import is_refused
from hasten.parts.nn.causal_lm import routed_experts
from hasten.parts.nn.head_form import asks_router_loss, head_form
from hasten.parts.nn.losses import ROWS, LossTerms, WholeLogitsLoss, token_accuracy
from hasten.parts.optim.weight_average import decayed_groups
from hasten.recipe.gpu_check import check_kernels
from hasten.recipe.peak_flops import resolve_ceiling
from hasten.recipe.prepare import (
    Tell,
    check_folder,
    check_space,
    check_writers,
    newest_checkpoint,
    weight_notes,
)
from hasten.recipe.prepared_data import advice_on, prepare_data
from hasten.recipe.schema import DEFAULT_BATCH, Recipe
from hasten.recipe.shorthands import catalogue
from hasten.techniques.adapter import LoRA
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.layout.hybrid import Hybrid
from hasten.techniques.layout.pipeline import Pipeline
from hasten.techniques.layout.tensor import TensorParallel
from hasten.techniques.routing import RealTokens

# Every way to deal ranks out to two or three layouts at once, for those who choose among them.


def mixed_layouts(ranks: int) -> list[Technique]:
    """Layouts of these ranks that no single technique has; none for two or three ranks.

    Their unsupported_reasons decide if a model can be split this way.
    """
    shares = [n for n in range(1, ranks + 1) if ranks % n == 0]
    layouts: list[Technique] = []
    for dp, shard, tp in itertools.product(shares, repeat=3):
        if dp * shard * tp == ranks and sum(n > 1 for n in (dp, shard, tp)) > 1:
            layouts.append(Hybrid(dp=dp, shard=shard, tp=tp))
    for part in shares[1:-1]:
        layouts.append(Hybrid(dp=ranks // part, pp=part))
        layouts.append(Hybrid(dp=ranks, ep=part))
    return layouts


# A recipe's keys for what can go wrong, as the objects that watch for it.


def supervision_of(recipe: Recipe) -> Supervision:
    """The actions that the supervisor of the recipe's ranks may take."""
    return Supervision(
        recipe.max_restarts,
        RankTimeouts(recipe.hang_seconds, recipe.start_seconds),
        recipe.min_nproc,
    )


# What of a recipe decides the training, beside what every job knows; checkpoints note it.

TERM_KEYS = (
    *("from_scratch", "finetuning_type", "learning_rate", "weight_decay"),
    *("adam_betas", "label_smoothing", "z_loss"),
)
# Of a model's config, what says where it came from and not how it computes.
OF_ORIGIN = ("transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype")


def words_of(recipe: Recipe) -> dict[str, Any]:
    """The recipe's settings that decide the training, before any data is read."""
    lora = {key for key in Recipe.model_fields if key.startswith("lora_")}
    keys = {*TERM_KEYS, *(lora if recipe.finetuning_type == "lora" else ())}
    settings = recipe.model_dump(mode="json", include=keys)
    path = Path(recipe.model)
    # Of a folder its own name and its parent's: trees may move, and runs/a/model isn't b's.
    name = "/".join(path.resolve().parts[-2:]) if path.is_dir() else recipe.model.rstrip("/")
    return {"model": name, **settings}


def terms_of(recipe: Recipe, data: PreparedData) -> dict[str, Any]:
    """All of it: the model's config and the prepared data by their hashes, too."""
    config = read_config(recipe.model, vocab_size=len(data.tokenizer)).to_diff_dict()
    config_fields = {key: value for key, value in config.items() if key not in OF_ORIGIN}
    text = json.dumps(config_fields, sort_keys=True, default=str)
    return {
        **words_of(recipe),
        "model_config": hashlib.sha256(text.encode()).hexdigest()[:16],
        "data": data.identity,
    }


# The global batch against the ranks: one that is smaller leaves ranks without an example.
#
# Ranks that hold pieces of one copy of the model share its examples, so the batch is compared with
# the number of copies.


def check_batch_of_ranks(recipe: Recipe, ranks: int, tokens_of_example: float = 2.0) -> None:
    """Refuse a step that has fewer examples than the ranks that take their own.

    Args:
        ranks: processes of the run.
        tokens_of_example: mean length, for a batch that is given in tokens; 2 is the least that
            trains anything.

    Raises:
        InputError: ranks would be without an example in every step.
    """
    copies = model_copies(requested_plan(recipe), ranks)
    batch = batch_of(recipe)
    key, size, unit = "global_batch_size", batch.examples or 0, "examples"
    examples = float(size)
    if batch.tokens:
        key, size, unit = "global_batch_tokens", batch.tokens, "tokens"
        examples = size / tokens_of_example
    if examples >= copies:
        return
    of = f"{ranks} ranks" if copies == ranks else f"{ranks} ranks with {copies} copies of the model"
    least = copies if key == "global_batch_size" else round(copies * tokens_of_example)
    raise InputError(
        f"{key}: {size} {unit} a step are too few for {of}, some of which would never have an "
        f"example: give at least {key}: {least}, or start fewer ranks"
    )


def model_copies(plan: Plan, ranks: int) -> int:
    """How many copies of the model the ranks hold together; each takes examples of its own."""
    for technique in plan:
        if isinstance(technique, TensorParallel):
            return max(ranks // (technique.size or ranks), 1)
        if isinstance(technique, Pipeline):
            return max(ranks // technique.ranks(ranks), 1)
        if isinstance(technique, Hybrid):
            return max(ranks // (technique.tp * technique.pp), 1)
    return ranks


# JobContext, plan and job.

METRICS = {"token_accuracy": token_accuracy}


def context_of(recipe: Recipe, data: PreparedData | None = None) -> JobContext:
    """The facts about machine, model and examples before anything is built."""
    start_context = facts.seen_at_start()
    device = start_context.device if recipe.device == "auto" else recipe.device
    if device.startswith("cuda") and not start_context.hardware.accelerators:
        raise InputError("device: this machine has no CUDA device; set device: auto or cpu")
    if recipe.device == "cuda":
        device = start_context.device
    context = replace(start_context, device=device, model=model_facts(recipe, data))
    if data is None:
        return context
    return replace(context, examples=ExampleStats(**asdict(data.example_stats)))


def model_facts(recipe: Recipe, data: PreparedData | None) -> ModelFacts:
    """The model's shape from its config; nothing is loaded."""
    rows = len(data.tokenizer) if data else None
    config = read_config(recipe.model, needs_weights=not recipe.from_scratch, vocab_size=rows)
    if data:
        check_rows(recipe.model, config, data.tokenizer, from_scratch=recipe.from_scratch)
    skeleton = skeleton_of(config)
    reason, router_loss = "", False
    try:
        router_loss = head_form(skeleton).router_weight != 0
    except ValueError as error:
        reason = str(error)
    if reason and asks_router_loss(skeleton):
        raise InputError(
            f"model: the config of {recipe.model} requests a loss of its routers "
            f"(output_router_logits), which can't be added here: {reason}; set it to false"
        )
    parameters, lora = parameter_counts(skeleton)[1], lora_of(recipe, Plan())
    adapted = None if lora is None else lora.adapt(skeleton)
    return ModelFacts(
        architecture=config.model_type,
        parameters=parameters,
        hidden_size=config.hidden_size,
        layers=config.num_hidden_layers,
        vocabulary=config.vocab_size,
        tied_head=bool(config.tie_word_embeddings),
        experts=routed_experts(config),
        sliding_window=bool(getattr(config, "use_sliding_window", False)),
        heads=getattr(config, "num_attention_heads", 0) or 0,
        key_value_heads=getattr(config, "num_key_value_heads", 0) or 0,
        head_reason=reason,
        router_loss=router_loss,
        adapter_weights=parameter_counts(adapted)[0] if adapted else 0,
        merged_weights=merged_weights(adapted) if adapted else 0,
    )


def requested_plan(recipe: Recipe, more: Iterable[type[Technique]] = ()) -> Plan:
    """The recipe's techniques as they are written, whether they can work here or not."""
    plan = Plan.from_list(recipe.plan, (*catalogue(), *more))
    if recipe.finetuning_type == "lora" and Slot.ADAPTER in plan:
        raise InputError(
            "finetuning_type: lora and a technique of the plan both decide which parameters learn; "
            "keep one of them"
        )
    return plan


def skip_sentence(recipe: Recipe, technique: Technique, context: JobContext) -> str:
    """Says that a run leaves the technique out, and why; empty if it doesn't."""
    reasons = technique.unsupported_reasons(context) if recipe.on_obstacle == "skip" else ()
    return f"continuing without {technique}: {reasons[0]}" if reasons else ""


def plan_of(
    recipe: Recipe,
    context: JobContext,
    tell: Callable[[str], None] = lambda text: None,
    more: Iterable[type[Technique]] = (),
) -> Plan:
    """The recipe's techniques; with ``on_obstacle: skip``, unsupported ones are left out.

    ``more`` are techniques in addition to the catalogue's.

    Raises:
        InputError: an unknown technique or setting, two for one slot, an unsupported
            technique.
    """
    plan = requested_plan(recipe, more)
    if context.world.size > 1 and Slot.LAYOUT not in plan:
        plan = plan.with_(DDP())
    for technique in plan:
        if skipped := skip_sentence(recipe, technique, context):
            tell(skipped)
            plan = plan.without(technique)
    conflicts = unsupported_reasons(plan, context)
    if conflicts:
        raise InputError(f"plan: {conflicts[0]} (on_obstacle: skip continues without it)")
    return plan


def job_of(recipe: Recipe, data: PreparedData, context: JobContext, plan: Plan) -> Job:
    """The recipe as a job: a fresh model, AdamW, padded batches, logits for every slot.

    The plan decides how many steps the data makes, and so the length of the schedule.
    """
    # The run's adapter may have to see weights, which a skeleton doesn't have.
    sees = recipe.finetuning_type != "full" and (recipe.lora_base or recipe.lora_dora)
    measures = recipe.metrics if recipe.eval_data else []
    lora = lora_of(recipe, Plan())
    # Examples of one pass of a metric: those of a micro-batch, if the plan limits them.
    sizes = (t.micro_batch_size for t in plan if isinstance(t, GradientAccumulation))
    at_once = min(ROWS, next(sizes, 0) or ROWS)
    building = Building(recipe, data)
    job = Job(
        model=partial(building) if sees else building,
        loss=partial(WholeLogitsLoss, terms=LossTerms(recipe.label_smoothing, recipe.z_loss)),
        optimizer=partial(adamw, recipe),
        stop=Stop(recipe.max_steps, recipe.epochs, recipe.max_tokens),
        examples=data.train,
        lengths=data.train.lengths.tolist(),
        collate=with_language_counts(partial(padded, pad_id=data.tokenizer.pad_token_id or 0)),
        batch=batch_of(recipe),
        adapter=(lambda model: model) if lora is None else lora.adapt,
        routing=RealTokens if context.model.router_loss else None,
        eval_data=data.eval_data,
        metrics={
            name: partial(METRICS[name], examples=data.eval_data, at_once=at_once)
            for name in measures
        },
        max_grad_norm=recipe.max_grad_norm,
        seed=recipe.seed,
        device=context.device,
        terms=terms_of(recipe, data),
    )
    sampler = prepare(job, plan, context, Path(recipe.output)).sampler
    steps = total_steps(job, sampler) if sampler else 1
    warmup = share_of(recipe.warmup_steps, steps)
    schedule = Schedule(
        recipe.lr_schedule, warmup, steps, floor=recipe.min_lr_ratio, extend=recipe.extend
    )
    return replace(job, schedule=schedule)


def model_for(
    recipe: Recipe, tokenizer: Any, stop_token: int | None = None, skeleton: bool = False
) -> nn.Module:
    """The model as the run begins with it: in float32, through SDPA where it can.

    Text that it writes ends at ``stop_token``, too: the last token of a trained answer. A
    ``skeleton`` has no memory for weights.
    """
    model: Any = load_model(
        recipe.model,
        from_scratch=recipe.from_scratch,
        seed=recipe.seed,
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        stop_token_id=stop_token,
        skeleton=skeleton,
    )
    take_own_attention(model)
    built: nn.Module = model
    return built


def adamw(recipe: Recipe, named: NamedParameters) -> torch.optim.Optimizer:
    """AdamW as language models use it, in torch's fused form."""
    groups = decayed_groups(named, recipe.weight_decay)
    fused = not is_refused("fused_adamw")
    return AdamW(groups, lr=recipe.learning_rate, betas=recipe.adam_betas, fused=fused)


def batch_of(recipe: Recipe) -> GlobalBatch:
    """The global batch in the unit the recipe uses."""
    if recipe.global_batch_tokens:
        return GlobalBatch(examples=None, tokens=recipe.global_batch_tokens)
    return GlobalBatch(examples=recipe.global_batch_size or DEFAULT_BATCH)


@dataclass(frozen=True)
class Building:
    """Builds a recipe's model, or its skeleton, fitted to the data's tokenizer."""

    recipe: Recipe
    data: PreparedData

    def __call__(self, skeleton: bool = False) -> nn.Module:
        return model_for(self.recipe, self.data.tokenizer, self.data.note.stop_token, skeleton)

    def skeleton(self) -> nn.Module:
        return self(skeleton=True)


def lora_of(recipe: Recipe, plan: Plan) -> LoRA | None:
    """The adapter that the plan or the recipe's keys ask for; None if all weights learn."""
    if (planned := next((t for t in plan if isinstance(t, LoRA)), None)) is not None:
        return planned
    if recipe.finetuning_type == "full":
        return None
    targets = recipe.lora_targets
    return LoRA(
        rank=recipe.lora_rank,
        alpha=recipe.lora_alpha,
        dropout=recipe.lora_dropout,
        targets=tuple(targets) if isinstance(targets, list) else targets,
        rslora=recipe.lora_rslora,
        dora=recipe.lora_dora,
        resolver=recipe.lora_resolver,
        base=recipe.lora_base,
    )


def total_steps(job: Job, sampler: Sampler) -> int:
    """Steps until the first of the job's limits, as the order of the data has them."""
    sizes = [sum(job.lengths[i] for i in step) for step in sampler.steps(0)]
    limits = [job.stop.steps or 10**12]
    if job.stop.epochs:
        limits.append(job.stop.epochs * len(sizes))
    if job.stop.tokens:
        limits.append(-(-job.stop.tokens * len(sizes) // sum(sizes)))
    return min(limits)


# All of it at once, before anything is trained.


@dataclass(frozen=True)
class PreparedJob:
    """A recipe that was found good, and what a run of it is built from."""

    recipe: Recipe
    context: JobContext
    plan: Plan
    data: PreparedData
    job: Job


def prepare_run(
    recipe: Recipe,
    tell: Tell,
    on_tokens: Callable[[int, int], None] | None = None,
    ranks: int = 1,
    exit_stack: ExitStack | None = None,
) -> PreparedJob:
    """Prepares a run and checks the whole recipe before anything is trained.

    If this process isn't a rank itself, ``ranks`` is the number of ranks that start later.
    The stack ``exit_stack`` locks the run's folder before anything is written there. If it is
    None, there is only a check, without a run.
    """
    output = Path(recipe.output)
    # The cheap part first: names, slots, architecture.
    first_look = context_of(recipe)
    world = World(size=ranks) if ranks > 1 else first_look.world
    backend_for(
        first_look.device, recipe.backend, max(ranks, environment.ranks_here(first_look.world))
    )
    plan = plan_of(recipe, replace(first_look, world=world))
    if recipe.loss_spike is not None and Slot.CHECKPOINT not in plan:
        raise InputError(NEEDS_CHECKPOINTS)
    if not environment.started_by_hasten():  # or who started this rank has looked
        for note in weight_notes(recipe, fetch=exit_stack is not None):
            tell(note)
    check_writers(recipe.log_to)
    check_folder(output)
    if exit_stack is not None:
        if not environment.started_by_hasten():  # or who started this rank has the folder for it
            start = environment.meeting()[1] if first_look.world.size > 1 else ""
            exit_stack.enter_context(only_run_in(output, start, first_look.world.is_main))
        check_resumable(recipe, plan)
    data = prepare_data(recipe, output / "data", tell, on_tokens)
    context = context_of(recipe, data)
    plan = plan_of(recipe, replace(context, world=world), tell)
    if ranks == 1:  # or each of the ranks does so itself
        check_kernels(context, tell if context.world.local_rank == 0 else lambda text: None)
    job = job_of(recipe, data, replace(context, world=world), plan)
    check_space(output, context)
    resolve_ceiling(recipe, context, tell)
    for sentence in advice_on(recipe, data):
        tell(sentence)
    return PreparedJob(recipe, context, plan, data, job)


def check_resumable(recipe: Recipe, plan: Plan) -> None:
    """Refuse another training's checkpoint before data is prepared and a model is built.

    A first look at the newest manifest: what it doesn't find, or can't read, is checked later.

    Raises:
        InputError: the recipe's own words differ from those that the checkpoint notes.
    """
    job: Any = None
    if recipe.resume != "never" and (path := newest_checkpoint(recipe, plan)) is not None:
        with contextlib.suppress(ValueError, LookupError, OSError):
            job = read_manifest(path)["meta"]["job"]
    settings = {
        **words_of(recipe),
        **batch_record(batch_of(recipe)),
        "seed": recipe.seed,
        "max_grad_norm": recipe.max_grad_norm,
    }
    check_same_job(job if isinstance(job, dict) else {}, settings, step=0)


def environ_of(recipe: Recipe) -> dict[str, str]:
    """Variables that the recipe's techniques want before the process starts."""
    context = context_of(recipe)
    return plan_of(recipe, context).environment(context)
