"""From a JSONL file to token examples on disk: hasten beside the preprocessing of TRL's SFTTrainer.

    export HASTEN_TEST_DATA=...  # a folder with gsm8k_train.jsonl and alpaca_en_demo.json
    python benchmarks/bench_tokenize.py --examples 20000
    python benchmarks/bench_tokenize.py --trl PYTHON   # of an environment with trl and datasets

Examples are dialogues of one or two turns, their texts slices and joins of the two data sets'; the
same file, tokenizer and chat template for all. Each variant is a process of its own; they take
turns. TRL's part is ``load_dataset`` and ``SFTTrainer._prepare_dataset`` (assistant-only loss),
called without a model; hasten's is ``prepare_data``. Seconds are taken after the imports. The
second start is a new process that finds everything prepared. CPU seconds count all processes of a
variant and hardly depend on what else the machine does. Memory is the peak over the whole tree of
processes, sampled: resident pages, and with shared ones divided by who shares them (PSS). The
trained tokens must be the same in all variants, or nothing is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from smoke import arguments

VOCABULARY = 8192
CUTOFF = 2048
# deepseek-llm's format with the answers marked, as TRL needs it; hasten reads the mark as nothing.
TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- 'User: ' + message.content + '\\n\\n' }}
    {%- else %}
        {{- 'Assistant:' }}
        {%- generation %}{{- ' ' + message.content + eos_token }}{%- endgeneration %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'Assistant:' }}
{%- endif %}"""


def pairs(folder: Path | None) -> list[tuple[str, str]]:
    """Questions and answers of the two data sets; made up where there is no folder."""
    if folder is None:
        return [(f"What is {n} and {n + 1}?", f"It is {2 * n + 1}.") for n in range(100)]
    with (folder / "gsm8k_train.jsonl").open() as file:
        found = [(row["question"], row["answer"]) for row in map(json.loads, file)]
    rows = json.loads((folder / "alpaca_en_demo.json").read_text())
    return found + [(f"{r['instruction']}\n{r['input']}".strip(), r["output"]) for r in rows]


def write_records(known: list[tuple[str, str]], path: Path, count: int) -> None:
    """Dialogues of uneven lengths, the same for the same count."""
    draw = random.Random(0)

    def text(side: int) -> str:
        whole = " ".join(draw.choice(known)[side] for _ in range(draw.choice((1, 1, 1, 2))))
        first = draw.randrange(len(whole) // 3 + 1)
        return whole[first:].strip() or "yes"

    with path.open("w") as file:
        for _ in range(count):
            turns: list[dict[str, str]] = []
            for _ in range(draw.choice((1, 1, 1, 2))):
                turns += (
                    {"role": r, "content": text(s)} for s, r in enumerate(("user", "assistant"))
                )
            file.write(json.dumps({"messages": turns}) + "\n")


def now() -> tuple[float, float]:
    """Seconds on the clock, and of processors by this process and its ended children."""
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.perf_counter(), sum(use.ru_utime + use.ru_stime for use in uses)


def hasten_variant(folder: Path, out: Path, workers: int) -> dict[str, Any]:
    from hasten.recipe.prepared_data import prepare_data
    from hasten.recipe.schema import Recipe

    began = now()
    recipe = Recipe(
        model=str(folder / "tokenizer"),
        dataset=str(folder / "records.jsonl"),
        data_workers=workers,
        cutoff_len=CUTOFF,
        eval_data=0,
        max_steps=1,
    )
    train = prepare_data(recipe, out).train
    seconds, cpu = (end - start for start, end in zip(began, now(), strict=True))
    marked = sum(int(train[i].trained.sum()) for i in range(0, len(train), 97))
    return {"seconds": seconds, "cpu": cpu, "tokens": int(train.lengths.sum()), "marked": marked}


def trl_variant(folder: Path, out: Path, workers: int) -> dict[str, Any]:
    from types import SimpleNamespace

    from datasets import disable_progress_bars, load_dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(str(folder / "tokenizer"))
    args = SFTConfig(
        output_dir=str(out / "trainer"),
        max_length=CUTOFF,
        assistant_only_loss=True,
        dataset_num_proc=workers if workers > 1 else None,
        use_cpu=True,
        bf16=False,
    )
    began = now()
    files = str(folder / "records.jsonl")
    data = load_dataset("json", data_files=files, split="train", cache_dir=str(out / "cache"))
    trainer: Any = SimpleNamespace(
        _tokenizer=tokenizer, chat_template=tokenizer.chat_template, completion_only_loss=False
    )
    made = SFTTrainer._prepare_dataset(trainer, data, tokenizer, args, False, None, "train")
    seconds, cpu = (end - start for start, end in zip(began, now(), strict=True))
    column = made.with_format("arrow")
    tokens = marked = 0
    for at in range(0, len(made), 1000):
        tokens += len(column[at : at + 1000]["input_ids"].combine_chunks().flatten())
    for at in range(0, len(made), 97):
        marked += sum(label != -100 for label in made[at]["labels"])
    return {"seconds": seconds, "cpu": cpu, "tokens": tokens, "marked": marked}


def run_variant(python: str, variant: str, workers: int, folder: Path, out: Path) -> dict[str, Any]:
    """One variant in a process of its own, watched."""
    import psutil

    order = [python, __file__, "--variant", variant, "--workers", str(workers)]
    order += ["--folder", str(folder), "--out", str(out)]
    quiet = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(out / "hf")}
    process = subprocess.Popen(order, stdout=subprocess.PIPE, env={**os.environ, **quiet})
    root = psutil.Process(process.pid)
    resident = shared = 0
    while process.poll() is None:
        try:
            tree = [root, *root.children(recursive=True)]
            memory = [one.memory_full_info() for one in tree]
            resident = max(resident, sum(one.rss for one in memory))
            shared = max(shared, sum(one.pss for one in memory))
        except psutil.Error:
            pass  # one has just ended
        time.sleep(0.1)
    assert process.stdout is not None
    said = process.stdout.read().splitlines()
    if process.returncode:
        raise SystemExit(f"{variant} failed with code {process.returncode}")
    return {**json.loads(said[-1]), "rss": resident, "pss": shared}


def compare(
    examples: int,
    rounds: int,
    trl: str | None,
    workers: list[int],
    trl_workers: list[int],
    place: Path,
    smoke: bool,
) -> None:
    from hasten.data.tokenize import train_bpe
    from hasten.models.presets import build_config, preset

    known = pairs(None if smoke else Path(os.environ["HASTEN_TEST_DATA"]))
    tokenizer = train_bpe((text for pair in known for text in pair), VOCABULARY)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(place / "tokenizer")
    config = build_config(preset("deepseek-llm-tiny"), vocab_size=len(tokenizer))
    config.save_pretrained(place / "tokenizer")
    write_records(known, place / "records.jsonl", examples)
    variants = [("hasten", sys.executable, n) for n in workers]
    variants += [("trl", trl, n) for n in trl_workers] if trl else []
    first: dict[Any, list[dict[str, Any]]] = {variant: [] for variant in variants}
    second: dict[Any, list[float]] = {variant: [] for variant in variants}
    for _ in range(rounds):
        for variant in variants:
            name, python, count = variant
            out = place / f"{name}-{count}"
            shutil.rmtree(out, ignore_errors=True)
            first[variant].append(run_variant(python, name, count, place, out))
            second[variant].append(run_variant(python, name, count, place, out)["seconds"])
            shutil.rmtree(out)
    counts = {(one["tokens"], one["marked"]) for found in first.values() for one in found}
    if len(counts) > 1:
        raise SystemExit(f"the variants disagree about the tokens: {first}")
    ((tokens, _),) = counts
    print(f"{examples:,} examples, {tokens:,} tokens, {rounds} rounds\n")
    columns = "| variant | processes | seconds | tokens/s | CPU seconds | tokens/CPU second "
    print(columns + "| second start, s | peak RSS | peak PSS |")
    print("|---|---|---|---|---|---|---|---|---|")
    for (name, python, count), found in first.items():
        seconds = statistics.median(one["seconds"] for one in found)
        cpu = statistics.median(one["cpu"] for one in found)
        again = statistics.median(second[name, python, count])
        rss, pss = (max(one[key] for one in found) / 1e9 for key in ("rss", "pss"))
        print(
            f"| {name} | {count} | {seconds:.1f} | {tokens / seconds:,.0f} "
            f"| {cpu:.1f} | {tokens / cpu:,.0f} | {again:.2f} "
            f"| {rss:.2f} GB | {pss:.2f} GB |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--trl", help="the Python of an environment with trl and datasets")
    parser.add_argument("--hasten-workers", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--trl-workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--variant", choices=("hasten", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help="where to work; a temporary one if left out")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    chosen = arguments(parser, examples=40, hasten_workers=[1], trl_workers=[1], VOCABULARY=300)
    if chosen.variant:
        variant = hasten_variant if chosen.variant == "hasten" else trl_variant
        print(json.dumps(variant(chosen.folder, chosen.out, chosen.workers)))
        return
    with tempfile.TemporaryDirectory(dir=chosen.folder) as place:
        compare(
            chosen.examples,
            chosen.rounds,
            chosen.trl,
            chosen.hasten_workers,
            chosen.trl_workers,
            Path(place),
            chosen.smoke,
        )


if __name__ == "__main__":
    main()
