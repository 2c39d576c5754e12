"""Builds job context, plan and job from a recipe and its data."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Iterable, Mapping
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
    Collate,
    GlobalBatch,
    Job,
    NamedParameters,
    Sampler,
    Schedule,
    Stop,
    share_of,
    with_language_counts,
    with_pair_counts,
)
from hasten.core.plan import Plan
from hasten.core.resume_check import batch_record, check_same_job
from hasten.core.setup import Session, prepare, unsupported_reasons
from hasten.core.slot import Slot
from hasten.core.step import assemble
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
    as_reward_model,
    check_rows,
    load_model,
    read_config,
    skeleton_of,
    take_own_attention,
)
from hasten.parts.checkpoint.format import read_manifest
from hasten.parts.data.collate import padded
from hasten.parts.data.pairs import padded_pairs
from hasten.parts.kernels.registry import is_refused
from hasten.parts.nn.causal_lm import routed_experts
from hasten.parts.nn.head_form import asks_router_loss, head_form
from hasten.parts.nn.losses import LossTerms, TokenAccuracy, WholeLogitsLoss
from hasten.parts.nn.new_weights import UnknownSourceError
from hasten.parts.nn.preference import PreferenceLoss, RewardLoss
from hasten.parts.optim.weight_average import decayed_groups
from hasten.recipe.gpu_check import check_kernels
from hasten.recipe.peak_flops import resolve_ceiling
from hasten.recipe.prepare import (
    Tell,
    check_folder,
    check_reference,
    check_space,
    check_writers,
    newest_checkpoint,
    weight_notes,
)
from hasten.recipe.prepared_data import advice_on, prepare_data
from hasten.recipe.reference import ReferenceSums
from hasten.recipe.schema import DEFAULT_BATCH, Recipe
from hasten.recipe.shorthands import catalogue
from hasten.techniques.adapter import LoRA
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.layout.hybrid import Hybrid
from hasten.techniques.layout.pipeline import Pipeline
from hasten.techniques.layout.tensor import TensorParallel
from hasten.techniques.routing import RealTokens

_LOG = logging.getLogger(__name__)


def mixed_layouts(ranks: int) -> list[Technique]:
    """Returns layouts of these ranks that combine kinds of parallelism.

    All ranks with the same stage, or the same pieces of layers, share its experts.

    Their ``unsupported_reasons`` decide if a model can be split this way.
    """
    shares = [n for n in range(1, ranks + 1) if ranks % n == 0]
    layouts: list[Technique] = []
    for dp, shard, tp in itertools.product(shares, repeat=3):
        if dp * shard * tp == ranks and sum(n > 1 for n in (dp, shard, tp)) > 1:
            layouts.append(Hybrid(dp=dp, shard=shard, tp=tp))
    for part in shares[1:-1]:
        layouts.append(Hybrid(dp=ranks // part, pp=part))
        layouts.append(Hybrid(dp=ranks, ep=part))
        others = ranks // part
        layouts.append(Hybrid(dp=others, tp=part, ep=others))
        layouts.append(Hybrid(dp=others, pp=part, ep=others))
    return layouts


def supervision_of(recipe: Recipe) -> Supervision:
    """Returns the limits for the supervisor of the recipe's ranks."""
    return Supervision(
        recipe.max_restarts,
        RankTimeouts(recipe.hang_seconds, recipe.start_seconds),
        recipe.min_nproc,
    )


# Recipe keys that a checkpoint stores: a resumed run must have the same values.
TERM_KEYS = (
    *("from_scratch", "weights_dtype", "finetuning_type", "learning_rate", "weight_decay"),
    *("adam_betas", "label_smoothing", "z_loss", "stage", "preference", "reference"),
)
# Settings that don't change the log-probabilities of the initial policy.
NOT_OF_REFERENCE = ("learning_rate", "weight_decay", "adam_betas", "preference")
# Fields of a model's config that have no effect on its computation.
ORIGIN_FIELDS = ("transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype")


def recipe_terms(recipe: Recipe) -> dict[str, Any]:
    """Returns the recipe's settings that decide the training, without its data."""
    lora = {key for key in Recipe.model_fields if key.startswith("lora_")}
    keys = {*TERM_KEYS, *(lora if recipe.finetuning_type == "lora" else ())}
    settings = recipe.model_dump(mode="json", include=keys)
    path = Path(recipe.model)
    # The last two names of a folder's path: a tree of folders may move.
    name = "/".join(path.resolve().parts[-2:]) if path.is_dir() else recipe.model.rstrip("/")
    return {"model": name, **settings}


def check_batch_of_ranks(recipe: Recipe, ranks: int, tokens_of_example: float = 2.0) -> None:
    """Checks that a step has an example for each copy of the model.

    Args:
        ranks: processes of the run.
        tokens_of_example: mean length of an example, for a batch in tokens.

    Raises:
        InputError: some ranks would never have an example.
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
    """Returns the number of copies of the model on all ranks; each copy gets its own examples."""
    for technique in plan:
        if isinstance(technique, TensorParallel):
            return max(ranks // (technique.size or ranks), 1)
        if isinstance(technique, Pipeline):
            return max(ranks // technique.ranks(ranks), 1)
        if isinstance(technique, Hybrid):
            return max(ranks // (technique.tp * technique.pp), 1)
    return ranks


METRICS = {"token_accuracy": TokenAccuracy}


def context_of(
    recipe: Recipe,
    prepared_data: PreparedData | None = None,
    config_facts: ModelFacts | None = None,
) -> JobContext:
    """Returns the facts about machine, model and examples; nothing is built.

    ``config_facts`` are the model's facts without the data. They are used again if the data doesn't
    change the size of the vocabulary.
    """
    start_context = facts.seen_at_start()
    device = start_context.device if recipe.device == "auto" else recipe.device
    if device.startswith("cuda") and not start_context.hardware.accelerators:
        raise InputError("device: this machine has no CUDA device; set device: auto or cpu")
    if recipe.device == "cuda":
        device = start_context.device
    model = model_facts(recipe, prepared_data, config_facts)
    context = replace(start_context, device=device, model=model)
    if prepared_data is None:
        return context
    return replace(context, examples=ExampleStats(**asdict(prepared_data.example_stats)))


def model_facts(
    recipe: Recipe, prepared_data: PreparedData | None, config_facts: ModelFacts | None = None
) -> ModelFacts:
    """Returns the model's shape from its config; no weights are loaded."""
    rows = len(prepared_data.tokenizer) if prepared_data else None
    config = read_config(recipe.model, needs_weights=not recipe.from_scratch, vocab_size=rows)
    if prepared_data:
        check_rows(recipe.model, config, prepared_data.tokenizer, from_scratch=recipe.from_scratch)
    if config_facts is not None and config_facts.vocabulary == config.vocab_size:
        return config_facts
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
        index_topk=getattr(config, "index_topk", 0) or 0,
        heads=getattr(config, "num_attention_heads", 0) or 0,
        key_value_heads=getattr(config, "num_key_value_heads", 0) or 0,
        head_reason=reason,
        router_loss=router_loss,
        adapter_weights=parameter_counts(adapted)[0] if adapted else 0,
        merged_weights=merged_weights(adapted) if adapted else 0,
        weight_bytes=weights_dtype(recipe).itemsize,
    )


def requested_plan(recipe: Recipe, more: Iterable[type[Technique]] = ()) -> Plan:
    """Returns the recipe's techniques, supported on this machine or not."""
    plan = Plan.from_list(recipe.plan, (*catalogue(), *more))
    if recipe.finetuning_type == "lora" and Slot.ADAPTER in plan:
        raise InputError(
            "finetuning_type: lora and a technique of the plan both decide which parameters learn; "
            "keep one of them"
        )
    return plan


def skip_sentence(recipe: Recipe, technique: Technique, context: JobContext) -> str:
    """Returns why a run leaves the technique out; empty if it uses the technique."""
    reasons = technique.unsupported_reasons(context) if recipe.on_obstacle == "skip" else ()
    return f"continuing without {technique}: {reasons[0]}" if reasons else ""


def plan_of(
    recipe: Recipe,
    context: JobContext,
    tell: Callable[[str], None] = lambda text: None,
    more: Iterable[type[Technique]] = (),
) -> Plan:
    """Returns the recipe's techniques; with ``on_obstacle: skip`` only the supported ones.

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


def job_of(recipe: Recipe, prepared_data: PreparedData, context: JobContext, plan: Plan) -> Job:
    """Returns the recipe's job: a new model, AdamW, padded batches, logits for every position.

    The plan decides the number of steps, and therefore the length of the schedule. With
    preference pairs, the loss is the recipe's, and examples are numbered for their reference.
    """
    measures = recipe.metrics if recipe.eval_data else []
    lora = lora_of(recipe, Plan())
    building = Building(recipe, prepared_data)
    # The settings that decide the training, with hashes of model config and data.
    config = read_config(recipe.model, vocab_size=len(prepared_data.tokenizer)).to_diff_dict()
    config_fields = {key: setting for key, setting in config.items() if key not in ORIGIN_FIELDS}
    text = json.dumps(config_fields, sort_keys=True, default=str)
    pad_id = prepared_data.tokenizer.pad_token_id or 0
    job = Job(
        model=building,
        loss=partial(WholeLogitsLoss, terms=LossTerms(recipe.label_smoothing, recipe.z_loss)),
        optimizer=partial(adamw, recipe),
        stop=Stop(recipe.max_steps, recipe.epochs, recipe.max_tokens),
        examples=prepared_data.train,
        lengths=prepared_data.train.lengths.tolist(),
        collate=with_language_counts(partial(padded, pad_id=pad_id)),
        batch=batch_of(recipe),
        adapter=(lambda model: model) if lora is None else lora.adapt,
        routing=RealTokens if context.model.router_loss else None,
        eval_data=prepared_data.eval_data,
        metrics={name: METRICS[name]() for name in measures},
        max_grad_norm=recipe.max_grad_norm,
        seed=recipe.seed,
        device=context.device,
        terms={
            **recipe_terms(recipe),
            "model_config": hashlib.sha256(text.encode()).hexdigest()[:16],
            "data": prepared_data.identity,
        },
    )
    if recipe.stage != "sft":
        job = _with_preferences(job, recipe, prepared_data, context, plan)
    sampler = prepare(job, plan, context, Path(recipe.output)).sampler
    steps = total_steps(job, sampler) if sampler else 1
    warmup = share_of(recipe.warmup_steps, steps)
    schedule = Schedule(
        recipe.lr_schedule, warmup, steps, floor=recipe.min_lr_ratio, extend=recipe.extend
    )
    return replace(job, schedule=schedule)


def _with_preferences(
    job: Job, recipe: Recipe, prepared_data: PreparedData, context: JobContext, plan: Plan
) -> Job:
    """Returns the job with preference pairs for examples."""
    if context.model.router_loss:
        raise InputError(
            f"model: the config of {recipe.model} requests a loss of its routers "
            "(output_router_logits), which preference training doesn't add; set it to false"
        )
    objective = recipe.objective
    reference = None
    examples, eval_data = prepared_data.train, prepared_data.eval_data
    if objective.needs_reference:
        other = None
        if recipe.reference != "start":
            rows = len(prepared_data.tokenizer)
            config = read_config(recipe.reference, needs_weights=True, vocab_size=rows)
            check_rows(recipe.reference, config, prepared_data.tokenizer, from_scratch=False)
            other = partial(_reference_session, recipe, prepared_data, context, plan)
        terms = {k: v for k, v in job.terms.items() if k not in NOT_OF_REFERENCE}
        settings = [
            terms,
            recipe.preference.ld_alpha,
            plan.to_list(),
            context.device,
            dict(context.versions),
            prepared_data.note.eval_data,  # the file's name is a hash of the tokens
        ]
        key = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
        reference = ReferenceSums(
            examples, eval_data, key.hexdigest()[:16], other, objective.needs_kl
        )
        examples, eval_data = reference.train, reference.eval_data
    pad_id = prepared_data.tokenizer.pad_token_id or 0

    def with_counts(lay_out: Callable[..., Mapping[str, Any]]) -> Collate:
        return with_pair_counts(lay_out, reference, pad_id=pad_id, **objective.layout)

    if recipe.stage == "rm":
        build = job.build_model
        job = replace(
            job,
            model=lambda: as_reward_model(build(), recipe.seed),
            loss=partial(RewardLoss, objective=objective),
        )
    else:
        job = replace(job, loss=partial(PreferenceLoss, objective=objective))
    return replace(
        job,
        examples=examples,
        eval_data=eval_data,
        collate=with_counts(padded_pairs),
        with_counts=with_counts,
        reference=reference,
        unit="pairs",
    )


def _reference_session(
    recipe: Recipe, prepared_data: PreparedData, context: JobContext, plan: Plan
) -> Session:
    """Returns a session of the reference model, with the kernels of the policy."""
    changes = {"model": recipe.reference, "reference": "start", "finetuning_type": "full"}
    others = (Slot.ADAPTER, Slot.CHECKPOINT, Slot.AVERAGE)
    plan = Plan(technique for technique in plan if technique.slot not in others)
    job = job_of(recipe.model_copy(update=changes), prepared_data, context, plan)
    return assemble(prepare(job, plan, context, Path(recipe.output)))


def model_for(
    recipe: Recipe,
    tokenizer: Any,
    stop_token: int | None = None,
    skeleton: bool = False,
    late: bool = False,
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Returns the run's initial model in ``dtype``, with SDPA if the model supports it.

    Generated text also ends at ``stop_token``, the last token of a trained answer. A
    ``skeleton`` has no memory for weights. With ``late`` they are read later, in parts.
    """
    model: Any = load_model(
        recipe.model,
        dtype=dtype,
        from_scratch=recipe.from_scratch,
        seed=recipe.seed,
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        stop_token_id=stop_token,
        skeleton=skeleton,
        late=late,
    )
    take_own_attention(model)
    built: nn.Module = model
    return built


def weights_dtype(recipe: Recipe) -> torch.dtype:
    """Returns the format in which the model's own weights are held and trained."""
    dtype: torch.dtype = getattr(torch, recipe.weights_dtype)
    return dtype


def adamw(recipe: Recipe, named: NamedParameters) -> torch.optim.Optimizer:
    """Returns torch's fused AdamW; only matrices have weight decay."""
    groups = decayed_groups(named, recipe.weight_decay)
    fused = not is_refused("fused_adamw")
    return AdamW(groups, lr=recipe.learning_rate, betas=recipe.adam_betas, fused=fused)


def batch_of(recipe: Recipe) -> GlobalBatch:
    """Returns the global batch in the recipe's unit."""
    if recipe.global_batch_tokens:
        return GlobalBatch(examples=None, tokens=recipe.global_batch_tokens)
    return GlobalBatch(examples=recipe.global_batch_size or DEFAULT_BATCH)


@dataclass(frozen=True)
class Building:
    """Builds a recipe's model, or its skeleton, fitted to the data's tokenizer."""

    recipe: Recipe
    data: PreparedData

    def __call__(self, **how: bool) -> nn.Module:
        stop, dtype = self.data.note.stop_token, weights_dtype(self.recipe)
        return model_for(self.recipe, self.data.tokenizer, stop, dtype=dtype, **how)

    def skeleton(self) -> nn.Module:
        return self(skeleton=True)

    def late(self) -> nn.Module | None:
        """Returns the model without memory for parameters; None if some can't be read in parts."""
        try:
            return self(late=True)
        except UnknownSourceError as reason:
            if environment.world().is_main:
                _LOG.warning(
                    "one rank of each host loads all of %s and sends the others their parts: %s",
                    *(self.recipe.model, reason),
                )
            return None


def lora_of(recipe: Recipe, plan: Plan) -> LoRA | None:
    """Returns the adapter of the plan or of the recipe's keys; None if all weights are trained."""
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
    """Returns the number of steps until the first of the job's limits."""
    sizes = [sum(job.lengths[i] for i in step) for step in sampler.steps(0)]
    limits = [job.stop.steps or 10**12]
    if job.stop.epochs:
        limits.append(job.stop.epochs * len(sizes))
    if job.stop.tokens:
        limits.append(-(-job.stop.tokens * len(sizes) // sum(sizes)))
    return min(limits)


@dataclass(frozen=True)
class PreparedJob:
    """A checked recipe with the objects that a run is built from."""

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
    # The fast checks first: names, slots, architecture.
    first_look = context_of(recipe)
    world = World(size=ranks) if ranks > 1 else first_look.world
    backend_for(
        first_look.device, recipe.backend, max(ranks, environment.ranks_here(first_look.world))
    )
    plan = plan_of(recipe, replace(first_look, world=world))
    if recipe.loss_spike is not None and Slot.CHECKPOINT not in plan:
        raise InputError(NEEDS_CHECKPOINTS)
    # A process that started this rank has checked the weights and locked the folder.
    is_first = not environment.started_by_hasten()
    if is_first:
        for note in weight_notes(recipe, fetch=exit_stack is not None):
            tell(note)
        check_reference(recipe, fetch=exit_stack is not None)
    if recipe.stage != "sft" and recipe.lora_dropout:
        tell("lora_dropout has no effect: policy and reference are compared without dropout")
    check_writers(recipe.log_to)
    check_folder(output)
    if exit_stack is not None:
        if is_first:
            start = environment.meeting()[1] if first_look.world.size > 1 else ""
            exit_stack.enter_context(only_run_in(output, start, first_look.world.is_main))
        check_resumable(recipe, plan)
    prepared_data = prepare_data(recipe, output / "data", tell, on_tokens)
    context = context_of(recipe, prepared_data, first_look.model)
    plan = plan_of(recipe, replace(context, world=world), tell)
    if ranks == 1:  # several ranks check the kernels themselves
        check_kernels(context, tell if context.world.local_rank == 0 else lambda text: None)
    job = job_of(recipe, prepared_data, replace(context, world=world), plan)
    check_space(output, context)
    resolve_ceiling(recipe, context, tell)
    for sentence in advice_on(recipe, prepared_data):
        tell(sentence)
    return PreparedJob(recipe, context, plan, prepared_data, job)


def check_resumable(recipe: Recipe, plan: Plan) -> None:
    """Checks early that the newest checkpoint belongs to this training.

    A manifest that is missing or can't be read is checked later.

    Raises:
        InputError: the recipe's settings differ from those of the checkpoint.
    """
    job: Any = None
    if recipe.resume != "never" and (path := newest_checkpoint(recipe, plan)) is not None:
        with contextlib.suppress(ValueError, LookupError, OSError):
            job = read_manifest(path)["meta"]["job"]
    settings = {
        **recipe_terms(recipe),
        **batch_record(batch_of(recipe)),
        "seed": recipe.seed,
        "max_grad_norm": recipe.max_grad_norm,
    }
    check_same_job(job if isinstance(job, dict) else {}, settings, step=0)


def environ_of(recipe: Recipe) -> dict[str, str]:
    """Returns the variables that the recipe's techniques need when the process starts."""
    context = context_of(recipe)
    return plan_of(recipe, context).environment(context)
