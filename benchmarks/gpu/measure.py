"""One row, measured: variants are built once and take turns, five repeats each, until the time is
up.

  1. for each variant the first choice that fits by simulation, and that gets through its warm-up in
  truth
  2. one step in which the host's waits for the device are counted
  3. turns of some steps, all variants in each repeat, the order shifted from repeat to repeat
  4. after every repeat the file is written

A turn's speed is the tokens of its steps over its wall time, the device waited for at both ends;
padding is no token.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gpu.predictions import simulated_step
from gpu.results import Found, summary, write
from gpu.rows import Choice, Row
from gpu.work import Variant, Work
from hasten.core.context import ExampleStats, JobContext, ModelFacts
from hasten.core.job import GlobalBatch, Job, Stop, with_language_counts
from hasten.core.plan import Plan
from hasten.core.setup import Session, prepare, unsupported_reasons
from hasten.core.step import assemble, training
from hasten.core.timing import clock_on
from hasten.machine import host
from hasten.models.flops import ModelFlops, model_flops
from hasten.parts.data.collate import TokenizedExample, padded, tokenized_example
from hasten.parts.nn.causal_lm import routed_experts
from hasten.parts.nn.head_form import plain_head_reason
from hasten.parts.nn.losses import WholeLogitsLoss
from hasten.parts.optim.weight_average import decayed_groups

REPEATS, WARMUP, MOST_STEPS = 5, 2, 10
REHEARSED = 2  # repeats, where their times mean nothing
SHARE = 0.92  # of a device's memory that a choice may need by simulation
STEPS_OF_RECORDS = 32


class OutOfTimeError(RuntimeError):
    """The minutes given were over before the first repeat."""


def device_memory(device: str) -> int:
    """Bytes of the device, or of this machine as far as this process may have them."""
    here = host.hardware()
    return here.accelerators[0].memory_bytes if device != "cpu" else here.memory_limit_bytes


def examples_of(row: Row) -> list[TokenizedExample]:
    """The same for every variant: full rows, or lengths of a log-normal kind as dialogues have
    them.
    """
    draw = np.random.default_rng(0)
    count = row.batch * STEPS_OF_RECORDS
    lengths = np.full(count, row.length)
    if row.uneven:
        lengths = np.exp(draw.normal(np.log(row.length / 4), 0.8, count)).astype(int)
        lengths = lengths.clip(8, row.length)
    vocabulary = row.shape["vocab_size"]
    return [tokenized_example(draw.integers(3, vocabulary, n, dtype=np.int32)) for n in lengths]


def config_of(row: Row) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[row.architecture](**row.shape)


def model_on(row: Row, device: str, weights: str) -> nn.Module:
    """Random weights of the row's shape, made on the device in their format, not on the host."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(
            config_of(row), dtype=getattr(torch, weights), attn_implementation="sdpa"
        )
    model.config.use_cache = False
    found: nn.Module = model
    return found


def head_reason_of(row: Row) -> str:
    """Why a loss may not call the row's trunk and head by itself; empty if it may."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config_of(row))
    return plain_head_reason(skeleton) or ""


def context_of(row: Row, device: str, lengths: list[int]) -> JobContext:
    """What techniques are asked about before they run."""
    shape = row.shape
    model = ModelFacts(
        *(row.architecture, 0, shape["hidden_size"], shape["num_hidden_layers"]),
        vocabulary=shape["vocab_size"],
        experts=routed_experts(config_of(row)),
        head_reason=head_reason_of(row),
    )
    return JobContext(
        host.hardware(),
        device,
        model=model,
        examples=ExampleStats(len(lengths), sum(lengths), max(lengths)),
        versions=host.versions(),
    )


class HastenVariant:
    """A session of hasten, a few steps at a time."""

    def __init__(
        self, row: Row, choice: Choice, device: str, examples: list[TokenizedExample]
    ) -> None:
        lengths = [r.length for r in examples]
        context = context_of(row, device, lengths)
        asked = Plan(choice.techniques(row.batch))
        self.left_out = unsupported_reasons(asked, context)
        able = [t for t in asked if not t.unsupported_reasons(context)]
        self.plan = Plan(able)
        job = Job(
            model=lambda: model_on(row, device, choice.weights),
            loss=WholeLogitsLoss,
            optimizer=lambda named: torch.optim.AdamW(
                decayed_groups(named, 0.0), lr=1e-5, fused=True
            ),
            stop=Stop(steps=10**9),
            examples=examples,
            lengths=lengths,
            collate=with_language_counts(padded),
            batch=GlobalBatch(examples=row.batch),
            device=device,
        )
        self.session: Session = assemble(prepare(job, self.plan, context))
        self.session.setup.clock = clock_on(device)
        self.flops: ModelFlops = model_flops(self.session.model)
        self._steps = training(self.session)
        self._pairs = sum(n * n for n in lengths) / sum(lengths)  # per token, over the epoch

    def steps(self, count: int) -> Work:
        tokens = sum(next(self._steps).tokens for _ in range(count))
        return Work(tokens, int(tokens * self._pairs))

    def parts(self) -> Found:
        """Seconds of each part of a step: the median over the steps so far."""
        steps = list(self.session.setup.clock.steps)
        names = {name for step in steps for name in step}
        return {n: statistics.median(step.get(n, 0.0) for step in steps) for n in sorted(names)}

    def proofs(self) -> list[str]:
        """What each technique was seen to do."""
        probes = ((t.name(), t.check_effect(self.session)) for t in self.plan)
        return [
            f"{name}: {'' if p.effective else 'DID NOT ACT: '}{p.evidence}" for name, p in probes
        ]


def first_that_fits(
    row: Row, variant: str, device: str, examples: list[TokenizedExample], tried: list[Found]
) -> tuple[HastenVariant, Found]:
    """The variant of the first choice that gets through its warm-up, and what is to be kept of it.

    ``tried`` gets a line for each choice that was passed over, with the reason.

    Raises:
        MemoryError: none fits.
    """
    limit = device_memory(device)
    for choice in row.variants[variant]:
        words = [str(t) for t in choice.techniques(row.batch)]
        paper = simulated_step(row, choice)
        line: Found = {"variant": variant, "plan": words, "paper": paper and paper.to_dict()}
        tried.append(line)
        if paper is not None and paper.needed_bytes > SHARE * limit:
            needed = paper.needed_bytes / 1e9
            line["outcome"] = f"not tried: needs {needed:.0f} of {limit / 1e9:.0f} GB by simulation"
            continue
        found = None
        host.reset_memory_peak(device)
        try:
            found = HastenVariant(row, choice, device, examples)
            found.steps(WARMUP)
        except torch.OutOfMemoryError as error:
            line["outcome"] = f"ran out of memory: {str(error).splitlines()[0]:.200}"
        if found is not None and "outcome" not in line:
            line["outcome"] = "fits"
            kept = {
                "plan": found.plan.to_list(),
                "plan_words": [str(t) for t in found.plan],
                "weights": choice.weights,
                "left_out": found.left_out,
                "paper": line["paper"],
                "flops_per_token": found.flops.per_token,
                "flops_per_pair": found.flops.per_pair,
            }
            return found, kept
        del found  # outside of the handler: its traceback holds the tensors
        gc.collect()
        if device != "cpu":
            torch.accelerator.memory.empty_cache()
    raise MemoryError(
        f"no choice of {row.name} fits {limit / 1e9:.0f} GB: "
        + "; ".join(f"{t['plan'][-1]}: {t['outcome']}" for t in tried if t["variant"] == variant)
    )


def waits_of_step(variant: HastenVariant, device: str) -> int | None:
    """Times that the host waits for the GPU in a step, as CUDA's debug mode counts them."""
    if device == "cpu":
        return None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            variant.steps(1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(one.message) for one in told)


def measure(row: Row, device: str, found: Found, path: Path | None, until: float) -> Found:
    """Fill ``found`` with the row's repeats; the file at ``path`` follows after each.

    Raises:
        MemoryError: no choice of a variant fits.
        OutOfTimeError: nothing could be measured before ``until`` (``time.monotonic``).
    """
    examples = examples_of(row)
    variants: dict[str, Variant] = {}
    found |= {"status": "partial", "said": "", "variants": {}, "tried": [], "repeats": {}}
    for name in row.variants:
        made, found["variants"][name] = first_that_fits(row, name, device, examples, found["tried"])
        variants[name] = made
        found["variants"][name]["syncs"] = waits_of_step(made, device)
    found["left_out"] = sorted({r for a in found["variants"].values() for r in a["left_out"]})
    found["peers"] = {peer: _add_peer(peer, row, device, examples, variants) for peer in row.peers}
    found["repeats"] = {name: [] for name in variants}
    write(path, found)
    each = {name: _seconds(variant, device) for name, variant in variants.items()}
    left = until - time.monotonic()
    count = int(0.85 * left / REPEATS / sum(each.values()))
    if left <= sum(each.values()):
        raise OutOfTimeError(f"a step of every variant takes {sum(each.values()):.0f} s; give more")
    few = bool(found.get("rehearsal"))
    count = found["steps_per_turn"] = min(max(count, 1), 1 if few else MOST_STEPS)
    for order in _orders(list(variants), REHEARSED if few else REPEATS):
        if time.monotonic() + count * sum(each.values()) > until:
            found["said"] = f"the time was up after {len(found['repeats'][order[0]])} repeats"
            break
        for name in order:
            found["repeats"][name].append(turn(variants[name], device, count))
        _digest(found)
        write(path, found)
    else:
        found["status"] = "complete"
    for name, variant in variants.items():
        if isinstance(variant, HastenVariant):
            found["variants"][name] |= {"proofs": variant.proofs(), "parts": variant.parts()}
    write(path, found)
    return found


def _add_peer(
    peer: str, row: Row, device: str, examples: list[TokenizedExample], variants: dict[str, Variant]
) -> str:
    """Put it among the variants; why it isn't there, or nothing."""
    from gpu.peer import TrainerVariant, missing

    liger = peer.endswith("liger")
    reason = missing(liger)
    if not reason:
        try:
            variant = TrainerVariant(row, model_on(row, device, "float32"), examples, liger)
            variant.steps(WARMUP)
            variants[peer] = variant
        except Exception as error:  # whatever stops a peer, the row's own figures go on
            lines = str(error).splitlines() or [""]
            reason = f"{type(error).__name__}: {lines[0]:.200}"
    if reason and device != "cpu":
        gc.collect()
        torch.accelerator.memory.empty_cache()
    return reason


def _orders(names: list[str], repeats: int) -> Iterator[list[str]]:
    for repeat in range(repeats):
        shift = repeat % len(names)
        yield names[shift:] + names[:shift]


def _seconds(variant: Variant, device: str) -> float:
    """Of one step, after the warm-up."""
    return float(turn(variant, device, 1)["seconds"])


def turn(variant: Variant, device: str, count: int) -> Found:
    """Some steps of a variant on the clock, and the peak of memory in them."""
    wait: Callable[[], object] = (
        (lambda: None) if device == "cpu" else torch.accelerator.synchronize
    )
    wait()
    host.reset_memory_peak(device)
    began = time.perf_counter()
    tokens, pairs, clocked = variant.steps(count)
    wait()
    seconds = time.perf_counter() - began if clocked is None else clocked
    return {
        "steps": count,
        "tokens": tokens,
        "pairs": pairs,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "peak_memory_bytes": host.memory_peak(device),  # of all variants that live in this process
    }


def _digest(found: Found) -> None:
    """Medians, intervals, MFU and peaks of what there is so far."""
    found["summary"] = summary(found["repeats"])
    machine = found["machine"]
    for name, variant in found["variants"].items():
        turns = found["repeats"][name]
        variant["peak_memory_bytes"] = max(t["peak_memory_bytes"] for t in turns)
        rates = [
            (variant["flops_per_token"] * t["tokens"] + variant["flops_per_pair"] * t["pairs"])
            / t["seconds"]
            for t in turns
        ]
        variant["model_flops_per_second"] = statistics.median(rates)
        for kind in ("datasheet", "measured"):
            ceiling = machine.get(f"{kind}_flops_per_second")
            variant[f"mfu_{kind}"] = (
                variant["model_flops_per_second"] / ceiling if ceiling else None
            )
