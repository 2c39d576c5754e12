"""CPU time and memory of a DPO step: TRL, TRL with ``speed_up``, and hasten's own parts.

    HASTEN_TEST_DATA=FOLDER python benchmarks/bench_preference.py [--jobs uneven,long,gsm8k,curve]
        [--rounds 5] [--pairs 4] [--threads 1]

A step is the reference's pass, the policy's pass and the gradients, in float32, without gradient
checkpointing. The ways take turns on the same pairs, and begin with another one in each round. A
ratio is the median over rounds of TRL's CPU seconds to a way's in the same round; with a cached
reference both lack its pass. Memory is what a step adds to the process at its highest, each in a
process of its own. The folder has ``alpaca_en_demo.json`` (uneven answers) and
``gsm8k_train.jsonl``; ``long`` puts three solved problems before each question. TRL is needed for
its rows alone. ``plain`` is hasten's baseline: padded rows and the logits of all positions.

``curve`` trains a toy preference by hasten and by TRL's DPOTrainer: the same model, pairs, order
and optimizer. Its rows are the reward accuracy on pairs that were held out. It fails if they are
further apart than 0.02, or if the preference isn't learnt.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import io
import json
import logging
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from smoke import arguments
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import hasten
from hasten.core.context import ExampleStats, JobContext, ModelFacts
from hasten.core.job import GlobalBatch, Job, Stop, with_pair_counts
from hasten.core.loop import evaluate
from hasten.core.plan import Plan
from hasten.core.setup import prepare
from hasten.core.step import assemble, training
from hasten.machine import host, processes
from hasten.machine.environment import World
from hasten.parts.data.collate import TokenizedExample
from hasten.parts.data.pairs import PreferencePair, packed_pairs, padded_pairs
from hasten.parts.nn.attention import use_document_attention
from hasten.parts.nn.fused_layers import fuse_layers
from hasten.parts.nn.preference import OnePassPreferenceLoss, PreferenceLoss
from hasten.parts.nn.preference_objectives import Objective
from hasten.recipe.reference import ReferenceSums
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.collate import Packed
from hasten.techniques.layers import FusedLayers
from hasten.techniques.loss import LabelledTokenLoss

# The proportions of deepseek-llm-7b, with 14 million weights.
WIDTH, INNER, LAYERS, HEADS, VOCABULARY = 320, 864, 7, 5, 8192
LONGEST = 1024  # tokens of a row
SWITCHES, STEPS, HELD_OUT, RATE, APART = 5, 40, 200, 1e-3, 0.02  # of the curve
TOY = {"width": 64, "inner": 176, "layers": 2, "heads": 2}
SHARED = 0.1  # share of tokens in common prompts from which they are laid out once
BETA = 0.1
HAS_TRL = all(importlib.util.find_spec(name) for name in ("trl", "datasets"))


def texts(job: str, count: int) -> list[tuple[str, str, str]]:
    """Prompt, chosen and rejected answer; the rejected one answers another prompt."""
    folder = os.environ.get("HASTEN_TEST_DATA")
    draw = random.Random(0)
    if folder is None:
        words = [chr(97 + a) + chr(97 + b) for a in range(20) for b in range(20)]
        solved = [
            (
                " ".join(draw.choices(words, k=8)),
                " ".join(draw.choices(words, k=draw.randint(4, 40))),
            )
            for _ in range(200)
        ]
    elif job == "uneven":
        rows = json.loads((Path(folder) / "alpaca_en_demo.json").read_text())
        solved = [(f"{r['instruction']}\n{r['input']}", r["output"]) for r in rows if r["output"]]
    else:
        lines = (Path(folder) / "gsm8k_train.jsonl").read_text().splitlines()[:2000]
        solved = [(r["question"], r["answer"]) for r in map(json.loads, lines)]
    found = []
    for prompt, answer in solved[:count]:
        before = draw.sample(solved, 3) if job == "long" else []
        shown = [f"{question}\n{reply}" for question, reply in before]
        found.append(("\n\n".join([*shown, prompt]) + "\n", answer, draw.choice(solved)[1]))
    return found


def tokenizer_of(rows: list[tuple[str, str, str]]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made: Any = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special)
    made.train_from_iterator([text for row in rows for text in row], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def pair_of(tokenizer: Any, row: tuple[str, str, str]) -> PreferencePair:
    prompt, *answers = (tokenizer(text)["input_ids"] for text in row)
    ends = [[*answer, tokenizer.eos_token_id] for answer in answers]
    examples = []
    for answer in ends:
        ids = np.asarray((prompt + answer)[:LONGEST], np.int32)
        examples.append(TokenizedExample(ids, np.arange(len(ids)) >= len(prompt)))
    chosen, rejected = examples
    return PreferencePair(chosen, rejected)


def model_of(noise: float = 0.0, **sizes: int) -> LlamaForCausalLM:
    """The model; with noise, a policy that has left its reference."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=sizes.get("width", WIDTH),
            intermediate_size=sizes.get("inner", INNER),
            num_hidden_layers=sizes.get("layers", LAYERS),
            num_attention_heads=sizes.get("heads", HEADS),
            max_position_embeddings=2 * LONGEST,
            tie_word_embeddings=False,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += noise * parameter.std() * torch.randn_like(parameter)
    return model.train()


def shares(pairs: list[PreferencePair]) -> bool:
    shared = sum(pair.shared_tokens for pair in pairs)
    return shared > SHARED * sum(pair.length for pair in pairs)


class OwnStep:
    """A step by hasten's parts; ``plain``: padded rows, all logits, no kernels of hasten."""

    def __init__(self, plain: bool) -> None:
        self.model, reference = model_of(0.02), model_of()
        objective = Objective(beta=BETA)
        kind = PreferenceLoss if plain else OnePassPreferenceLoss
        for model in () if plain else (self.model, reference):
            use_document_attention(model)
            fuse_layers(model)
        self._loss, self._reference = kind(self.model, objective), kind(reference, objective)
        self._plain, self.loss = plain, 0.0

    def __call__(self, pairs: list[PreferencePair]) -> tuple[float, float]:
        """CPU seconds of a step, and of one with a cached reference."""
        began = time.process_time()
        batch = padded_pairs(pairs) if self._plain else packed_pairs(pairs, shares(pairs))
        laid_out = time.process_time()
        sums, _ = self._reference(**batch, log_probs=True)
        referred = time.process_time()
        loss, count = self._loss(**batch, reference=sums)
        (loss / count).backward()
        self.loss = float(loss.detach() / count)
        whole = time.process_time() - began
        return whole, whole - (referred - laid_out)


class TrlStep:
    """A step of TRL's DPOTrainer, as it is or with ``speed_up``."""

    def __init__(self, fast: bool, rows: list[tuple[str, str, str]], tokenizer: Any) -> None:
        from datasets import Dataset
        from trl import DPOConfig, DPOTrainer

        columns = ("prompt", "chosen", "rejected")
        data = Dataset.from_list([dict(zip(columns, row, strict=True)) for row in rows[:2]])
        settings = DPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=2,
            gradient_checkpointing=False,
            max_steps=1,
            learning_rate=0.0,
            beta=BETA,
            max_length=LONGEST,
            bf16=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        self.model = model_of(0.02)
        trainer = DPOTrainer(
            self.model, model_of(), settings, train_dataset=data, processing_class=tokenizer
        )
        self.trainer = hasten.speed_up(trainer) if fast else trainer
        self.trainer.train()  # the first step, with the proof
        self.model.zero_grad()
        self.loss = 0.0

    def batch(self, pairs: list[PreferencePair]) -> dict[str, Tensor]:
        rows = []
        for pair in pairs:
            length = int(pair.chosen.trained.argmax())
            ids = [example.input_ids.tolist() for example in (pair.chosen, pair.rejected)]
            names = ("prompt_ids", "chosen_ids", "rejected_ids")
            parts = (ids[0][:length], ids[0][length:], ids[1][length:])
            rows.append(dict(zip(names, parts, strict=True)))
        batch: dict[str, Tensor] = self.trainer.data_collator(rows)
        return batch

    def __call__(self, pairs: list[PreferencePair]) -> tuple[float, float]:
        trainer, batch = self.trainer, self.batch(pairs)
        trainer.precompute_ref_logps = False
        whole, self.loss = clocked(lambda: trainer.training_step(self.model, dict(batch)))
        self.model.zero_grad()
        for name in ("ref_chosen_logps", "ref_rejected_logps"):
            batch[name] = torch.full((len(pairs),), -1000.0)
        trainer.precompute_ref_logps = True
        policy, _ = clocked(lambda: trainer.training_step(self.model, dict(batch)))
        return whole, policy


def clocked(call: Callable[[], Any]) -> tuple[float, float]:
    began = time.process_time()
    value = float(call())
    return time.process_time() - began, value


def ways(rows: list[tuple[str, str, str]], tokenizer: Any) -> dict[str, Any]:
    makers: dict[str, Callable[[], Any]] = {"plain": partial(OwnStep, True)}
    if HAS_TRL:
        makers = {
            "TRL": partial(TrlStep, False, rows, tokenizer),
            "TRL, speed_up": partial(TrlStep, True, rows, tokenizer),
        }
    makers["hasten"] = partial(OwnStep, False)
    return {name: make() for name, make in makers.items()}


def added_megabytes(step: Any, pairs: list[PreferencePair]) -> float:
    """The highest memory of a step over that before it, in a child process."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            for parameter in step.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            ctypes.CDLL(None).malloc_trim(0)  # what earlier steps have freed would hide this one's
            host.reset_memory_peak("cpu")
            before = processes.host_memory_peak()
            step(pairs)
            os.write(writer, str((processes.host_memory_peak() - before) / 2**20).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        return float(pipe.read())


def measured(job: str, rounds: int, count: int) -> Iterator[str]:
    rows = texts(job, 512)
    tokenizer = tokenizer_of(rows)
    steps = ways(rows, tokenizer)
    names = list(steps)
    whole: dict[str, list[float]] = {name: [] for name in names}
    cached: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, float] = {}
    for number in range(rounds + 1):  # the first round warms up
        batch = [pair_of(tokenizer, row) for row in rows[number * count : (number + 1) * count]]
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            step = steps[name]
            seconds = step(batch)
            if number:
                whole[name].append(seconds[0])
                cached[name].append(seconds[1])
            else:
                losses[name] = step.loss
            step.model.zero_grad()
    base = names[0]
    memory = {name: added_megabytes(steps[name], batch) for name in names}
    for name in names:
        ratios = [
            [a / b for a, b in zip(times[base], times[name], strict=True)]
            for times in (whole, cached)
        ]
        shown = " | ".join(
            f"{statistics.median(each):.2f}x [{min(each):.2f}, {max(each):.2f}]" for each in ratios
        )
        yield (
            f"| {job} | {name} | {statistics.median(whole[name]):.2f} | {shown} | "
            f"{memory[name]:.0f} | {memory[name] / memory[base]:.2f} | "
            f"{abs(losses[name] / losses[base] - 1):.0e} |"
        )


class Pairs(list[PreferencePair]):
    """A list with the interface of stored pairs."""

    @property
    def lengths(self) -> Any:
        return np.array([pair.length for pair in self])

    @property
    def trained_counts(self) -> Any:
        return np.array([pair.trained_tokens for pair in self])


def toy_texts(count: int) -> list[tuple[str, str, str]]:
    """Answers of random words; in better ones, words from a to j are three times as frequent."""
    draw = random.Random(1)
    words = [chr(97 + a) + chr(97 + b) for a in range(20) for b in range(20)]
    tilted = [3.0 if word[0] < "k" else 1.0 for word in words]

    def text(weights: list[float] | None = None) -> str:
        return " ".join(draw.choices(words, weights, k=draw.randint(10, 30)))

    return [(text() + "\n", text(tilted), text(tilted[::-1])) for _ in range(count)]


def own_curve(train: Pairs, held_out: Pairs, size: int) -> tuple[list[list[int]], list[float]]:
    """The order of the pairs, and the accuracy after each fifth of the training, by hasten."""
    reference = ReferenceSums(train, held_out, "curve")
    with_counts = partial(with_pair_counts, reference=reference)
    job = Job(
        model=partial(model_of, **TOY),
        loss=partial(PreferenceLoss, objective=Objective(beta=BETA)),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], RATE, weight_decay=0.0),
        stop=Stop(steps=STEPS),
        examples=reference.train,
        lengths=train.lengths.tolist(),
        collate=with_counts(padded_pairs),
        with_counts=with_counts,
        unit="pairs",
        reference=reference,
        eval_data=reference.eval_data,
        batch=GlobalBatch(examples=size),
    )
    weights = sum(p.numel() for p in model_of(**TOY).parameters())
    shape = weights, TOY["width"], TOY["layers"], VOCABULARY
    facts = ModelFacts("llama", *shape, head_reason="")
    tokens = ExampleStats(len(train), int(train.lengths.sum()), int(train.lengths.max()), 0.5)
    context = JobContext(host.hardware(), world=World(), model=facts, examples=tokens)
    plan = Plan([Packed(), DocumentAttention(), LabelledTokenLoss(), FusedLayers()])
    session = assemble(prepare(job, plan, context, Path(tempfile.mkdtemp())))
    accuracies = [
        evaluate(session).metrics["reward_accuracy"]
        for metrics in training(session)
        if metrics.step % (STEPS // SWITCHES) == 0
    ]
    assert session.setup.sampler is not None
    return list(session.setup.sampler.steps(0)), accuracies


def trl_curve(train: list[Any], held_out: list[Any], size: int, tokenizer: Any) -> list[float]:
    """The accuracies of TRL's DPOTrainer, which takes the texts in this order."""
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from trl import DPOConfig, DPOTrainer

    class InOrder(DPOTrainer):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(dataset or self.train_dataset)

    settings = DPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=size,
        per_device_eval_batch_size=size,
        gradient_checkpointing=False,
        max_steps=STEPS,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        beta=BETA,
        max_length=LONGEST,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        eval_strategy="steps",
        eval_steps=STEPS // SWITCHES,
        disable_tqdm=True,
    )
    columns = ("prompt", "chosen", "rejected")
    tables = [
        Dataset.from_list([dict(zip(columns, row, strict=True)) for row in rows])
        for rows in (train, held_out)
    ]
    trainer = InOrder(
        model_of(**TOY), model_of(**TOY), settings, train_dataset=tables[0], eval_dataset=tables[1],
        processing_class=tokenizer,
    )  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    history = trainer.state.log_history
    return [e["eval_rewards/accuracies"] for e in history if "eval_rewards/accuracies" in e]


def curve(size: int) -> Iterator[str]:
    rows = toy_texts(STEPS * size + HELD_OUT)
    tokenizer = tokenizer_of(rows)
    pairs = [pair_of(tokenizer, row) for row in rows]
    order, ours = own_curve(Pairs(pairs[HELD_OUT:]), Pairs(pairs[:HELD_OUT]), size)
    theirs: list[float] = []
    if HAS_TRL:
        in_order = [rows[HELD_OUT + index] for step in order for index in step]
        theirs = trl_curve(in_order, rows[:HELD_OUT], size, tokenizer)
    apart = 0.0
    for number, (own, other) in enumerate(zip_longest(ours, theirs), 1):
        line = f"| {number * STEPS // SWITCHES} | {own:.3f} |"
        if other is not None:
            apart = max(apart, abs(own - other))
            line += f" {other:.3f} | {abs(own - other):.3f} |"
        yield line
    if HELD_OUT >= 200 and not (apart <= APART and ours[-1] >= 0.95):
        raise SystemExit(f"the curves are {apart:.3f} apart, or end at {ours[-1]:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", default="uneven,long,gsm8k", help="which, separated by commas")
    parser.add_argument("--rounds", type=int, default=5, help="rounds [default: 5]")
    parser.add_argument("--pairs", type=int, default=4, help="pairs of a step [default: 4]")
    parser.add_argument("--threads", type=int, default=1, help="threads [default: 1]")
    small = {"WIDTH": 32, "INNER": 64, "LAYERS": 1, "HEADS": 2, "VOCABULARY": 512, "LONGEST": 128}
    small |= {"STEPS": 5, "HELD_OUT": 16}
    chosen = arguments(parser, rounds=1, pairs=2, jobs="uneven,curve", **small)
    torch.set_num_threads(chosen.threads)
    logging.getLogger("hasten").setLevel(logging.WARNING)
    hardware = host.hardware()
    print(f"{hardware.cpu}, torch {torch.__version__}, {chosen.threads} threads, float32")
    jobs = chosen.jobs.split(",")
    if "curve" in jobs:
        print("\n| step | hasten |" + (" TRL | apart |" if HAS_TRL else ""))
        print("|---|---|" + ("---|---|" if HAS_TRL else ""))
        for line in curve(chosen.pairs):
            print(line, flush=True)
        jobs.remove("curve")
        if not jobs:
            return
    base = "TRL" if HAS_TRL else "plain"
    print(f"\n| job | way | CPU s | {base} / way | reference cached | MB | share | loss differs |")
    print("|---|---|---|---|---|---|---|---|")
    for job in jobs:
        for line in measured(job, chosen.rounds, chosen.pairs):
            print(line, flush=True)


if __name__ == "__main__":
    main()
