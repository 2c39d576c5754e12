"""What ``hasten.speed_up`` gains in other trainers: tokens per second with it over those without.

    python benchmarks/bench_hosts.py [--hosts trainer,sft,sft_packed] [--runs 3] [--steps 30]

A run trains the same model on the same rows in the same order, once plainly and once with
``speed_up``, one after the other, in turns. Tokens are those of the data, without padding; the
first steps, with the proof, are left out of the speed. A ratio is with / without; its interval is
Student's over the logarithms of the runs. ``sft`` and ``sft_packed`` need trl and datasets.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from smoke import arguments
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import hasten
from hasten.integrations.batches import padded_rows
from hasten.machine import host
from hasten.measure.statistics import paired_ratio

WARM_UP = 5  # steps without a part in the speed
HIDDEN, LAYERS, VOCABULARY, MEAN, BATCH = 256, 4, 8192, 96, 8  # mean length of a row


class StepClock(TrainerCallback):
    """Seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.seconds.append(time.perf_counter() - self._began)


def rows(count: int) -> list[list[int]]:
    """Token rows of uneven length: walks with small steps, so that there is something to learn."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.empty(count).log_normal_(math.log(MEAN * 0.7), 0.8, generator=draw)
    found = []
    for length in lengths.clamp(8, 4 * MEAN).long().tolist():
        steps = torch.randint(0, 5, (length,), generator=draw)
        found.append(((steps.cumsum(0) + 7) % (VOCABULARY - 4) + 4).tolist())
    return found


def model_of() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=int(HIDDEN * 2.75),
            num_hidden_layers=LAYERS,
            num_attention_heads=max(HIDDEN // 64, 1),
            max_position_embeddings=8 * MEAN,
            pad_token_id=0,
        )
    )


def settings_of(steps: int, folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "max_steps": steps,
        "per_device_train_batch_size": BATCH,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "use_cpu": not torch.accelerator.is_available(),
        "seed": 1,
    }


def trainer(steps: int, folder: str) -> Any:
    data: Any = [{"input_ids": ids, "labels": ids} for ids in rows(steps * BATCH)]
    settings = TrainingArguments(**settings_of(steps, folder))
    return Trainer(model_of(), settings, data_collator=padded_rows, train_dataset=data)


def sft(steps: int, folder: str, packing: bool = False) -> Any:
    trl: Any = importlib.import_module("trl")
    datasets: Any = importlib.import_module("datasets")
    lists = rows(steps * BATCH * (8 if packing else 1))
    more = {"packing": packing, "max_length": 4 * MEAN, "bf16": False}
    more["gradient_checkpointing"] = False
    settings = trl.SFTConfig(**settings_of(steps, folder), **more)
    return trl.SFTTrainer(
        model=model_of(),
        args=settings,
        train_dataset=datasets.Dataset.from_list([{"input_ids": ids} for ids in lists]),
        processing_class=_tokenizer(VOCABULARY),
    )


def _tokenizer(vocabulary: int) -> Any:
    """One token per word; TRL asks for one although the rows are tokens already."""
    tokenizers: Any = importlib.import_module("tokenizers")
    transformers: Any = importlib.import_module("transformers")
    words = {f"w{i}": i for i in range(vocabulary)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="w0", bos_token="w1", eos_token="w2"
    )


HOSTS: dict[str, Callable[[int, str], Any]] = {
    "trainer": trainer,
    "sft": sft,
    "sft_packed": partial(sft, packing=True),
}


def run(name: str, steps: int, fast: bool) -> tuple[float, list[float]]:
    """Seconds of the steps after the warm-up, and all losses."""
    with tempfile.TemporaryDirectory() as folder:
        made, clock = HOSTS[name](steps, folder), StepClock()
        made.add_callback(clock)
        if fast:
            hasten.speed_up(made)
        made.train()
    losses = [line["loss"] for line in made.state.log_history if "loss" in line]
    return sum(clock.seconds[WARM_UP:]), [float(loss) for loss in losses]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hosts", default=",".join(HOSTS), help="which, separated by commas")
    parser.add_argument("--runs", type=int, default=3, help="runs of each [default: 3]")
    parser.add_argument("--steps", type=int, default=30, help="steps of a run [default: 30]")
    small = {"HIDDEN": 32, "LAYERS": 1, "VOCABULARY": 128, "MEAN": 16, "BATCH": 4}
    chosen = arguments(parser, runs=2, steps=7, **small)
    hardware = host.hardware()
    print(f"{hardware.cpu}, {host.usable_cores()} cores, torch {torch.__version__}")
    print("\n| trainer | tokens/s with / without | largest difference of a step's loss |")
    print("|---|---|---|")
    for name in chosen.hosts.split(","):
        if name != "trainer" and not all(map(importlib.util.find_spec, ("trl", "datasets"))):
            print(f"| {name} | not run: needs trl and datasets | |")
            continue
        seconds: dict[bool, list[float]] = {False: [], True: []}
        apart = 0.0
        for number in range(chosen.runs):
            order = (False, True) if number % 2 == 0 else (True, False)
            found = {fast: run(name, chosen.steps, fast) for fast in order}
            for fast in order:
                seconds[fast].append(found[fast][0])
            pairs = zip(found[False][1], found[True][1], strict=True)
            apart = max(apart, *(abs(a - b) / a for a, b in pairs))
        gain = paired_ratio(seconds[True], seconds[False])  # the same tokens in both
        shown = f"{gain.median:.2f}x [{gain.low:.2f}, {gain.high:.2f}]"
        print(f"| {name} | {shown} | {apart:.1e} |", flush=True)


if __name__ == "__main__":
    main()
