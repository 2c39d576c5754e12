"""The data of an experiment, made once: tokenizer, initial weights, examples, hasten's steps.

    model/        config, weights drawn from the seed, tokenizer     adapter/   LoRA's first state
    train.jsonl, eval_data.jsonl   what the recipe reads              data/      tokenised by hasten
    train.npz, eval_data.npz, steps.json   the same examples and hasten's order, for the peers

Examples are functions of Python's standard library with their docstrings as questions (``ragged``,
``lora``), or pieces of its modules of one length, trained throughout (``fixed``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hasten.core.job import GlobalBatch, ShuffledOrder
from hasten.data.chat_template import encode_all
from hasten.data.conversation import Conversation
from hasten.data.corpus import Corpus, SplitSide, stdlib_corpus
from hasten.data.tokenize import train_bpe
from hasten.models.adapters import add_lora
from hasten.models.load import quiet
from hasten.models.presets import PRESETS, build_config
from hasten.recipe.prepared_data import prepare_data
from hasten.recipe.schema import Recipe
from step.given import Examples, Given, Settings, write_settings

PRESET = {
    "llama": "deepseek-llm-small",
    "qwen2": "r1-distill-qwen-small",
    "v2_lite": "v2-lite-small",
    "v3": "v3-small",
}
FIXED = 512  # tokens of every example of the workload ``fixed``
HEAD = 64  # width of a head


def prepare(settings: Settings, folder: Path) -> Given:
    """Fill the folder and open it."""
    write_settings(settings, folder)
    corpus = stdlib_corpus()
    texts = (m.content for pair in corpus.train.pairs for m in pair.messages)
    tokenizer = train_bpe(texts, settings.vocabulary)
    tokenizer.save_pretrained(folder / "model")
    with quiet():  # no progress bars
        _save_model(settings, tokenizer, folder)
    _write_records(settings, corpus, tokenizer, folder)
    data = prepare_data(recipe_of(settings, folder, folder, []), folder / "data")
    for name, store in (("train", data.train), ("eval_data", data.eval_data)):
        _flat(store).write(folder / f"{name}.npz")
    if len(data.train) != settings.examples:
        raise SystemExit(f"{len(data.train)} examples were made of {settings.examples}")
    steps = _steps(settings, data.train.lengths.tolist())
    (folder / "steps.json").write_text(json.dumps(steps))
    return Given.read(folder)


def recipe_of(settings: Settings, folder: Path, output: Path, plan: Sequence[Any]) -> Recipe:
    """The experiment as a user of hasten would write it."""
    return Recipe(
        model=str(folder / "model"),
        dataset=str(folder / "train.jsonl"),
        eval_data=str(folder / "eval_data.jsonl"),
        cutoff_len=settings.longest,
        finetuning_type="lora" if settings.lora else "full",
        max_steps=settings.steps,
        global_batch_size=settings.batch,
        learning_rate=settings.learning_rate,
        lr_schedule="constant",
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.clip,
        seed=settings.seed,
        output=str(output),
        plan=list(plan),
        on_obstacle="skip",  # what was left out stands in the result
    )


def config_of(settings: Settings, tokenizer: Any) -> Any:
    """The architecture's small preset, at the width and depth asked for."""
    known = PRESETS[PRESET[settings.architecture]]
    return build_config(
        replace(known, config={**known.config, **_sizes(settings, known.config)}),
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _sizes(settings: Settings, known: Mapping[str, Any]) -> dict[str, int]:
    hidden = settings.hidden
    sizes = {"hidden_size": hidden, "num_hidden_layers": settings.layers}
    if settings.architecture == "llama":
        heads = max(1, hidden // HEAD)
        inner = -(-hidden * 8 // 3 // 32) * 32  # 384: 1024, 1024: 2752
        return {
            **sizes,
            "intermediate_size": inner,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
        }
    scale = hidden / known["hidden_size"]  # heads keep their width; there are more of them
    heads = max(2, round(known["num_attention_heads"] * scale / 2) * 2)
    return {
        **sizes,
        "intermediate_size": max(32, round(known["intermediate_size"] * scale / 32) * 32),
        "num_attention_heads": heads,
        "num_key_value_heads": 2 if settings.architecture == "qwen2" else heads,
    }


def _save_model(settings: Settings, tokenizer: Any, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(settings.seed)
    model = AutoModelForCausalLM.from_config(config_of(settings, tokenizer), dtype=torch.float32)
    model.save_pretrained(str(folder / "model"))
    if settings.lora:
        recipe = recipe_of(settings, folder, folder, [])
        adapted = add_lora(model, rank=recipe.lora_rank, alpha=recipe.lora_alpha)
        adapted.save_pretrained(str(folder / "adapter"))


def _write_records(settings: Settings, corpus: Corpus, tokenizer: Any, folder: Path) -> None:
    draw = np.random.default_rng(settings.seed)
    parts = (("train", corpus.train, settings.examples), ("eval_data", corpus.eval_data, 0))
    for name, portion, wanted in parts:
        wanted = wanted or settings.eval_data
        if settings.workload == "fixed":
            lines = list(_pieces(portion, tokenizer, min(FIXED, settings.longest)))
        else:
            lines = list(_dialogues(portion, tokenizer, settings.longest))
        if len(lines) < wanted:
            raise SystemExit(f"{name}: the corpus has {len(lines)} such examples, not {wanted}")
        chosen = np.sort(draw.choice(len(lines), wanted, replace=False)).tolist()
        (folder / f"{name}.jsonl").write_text("".join(lines[i] for i in chosen))


def _dialogues(portion: SplitSide, tokenizer: Any, longest: int) -> Iterator[str]:
    """Functions and their docstrings; whole classes are several times as long and left out."""
    pairs = [pair for pair in portion.pairs if not _of_a_class(pair)]
    encoded = encode_all(tokenizer, pairs, longest, "drop")
    for pair, found in zip(pairs, encoded, strict=True):
        if found.examples:
            turns = [{"role": m.role, "content": m.content} for m in pair.messages]
            yield json.dumps({"messages": turns}) + "\n"


def _of_a_class(pair: Conversation) -> bool:
    signature = pair.messages[0].content.split("\n\n")[1]  # as the corpus words its questions
    return any(line.startswith("class ") for line in signature.splitlines())


def _pieces(portion: SplitSide, tokenizer: Any, length: int) -> Iterator[str]:
    """Texts that tokenise to exactly ``length``; a cut may change how its borders tokenise."""
    drafts: list[Conversation] = []
    for whole in portion.texts:
        ids = tokenizer.encode(whole.text, add_special_tokens=False)
        for at in range(0, len(ids) - length, length):
            text = tokenizer.decode(ids[at : at + length - 2])  # bos and eos come to it
            drafts.append(Conversation((), text, whole.location))
    for draft, found in zip(drafts, encode_all(tokenizer, drafts, 2 * length), strict=True):
        if len(found.examples) == 1 and found.examples[0].length == length:
            yield json.dumps({"text": draft.text}) + "\n"


def _flat(store: Any) -> Examples:
    found = [store[i] for i in range(len(store))]
    starts = np.concatenate([[0], np.cumsum([r.length for r in found])])
    ids = np.concatenate([r.input_ids for r in found])
    return Examples(ids, np.concatenate([r.trained for r in found]), starts)


def _steps(settings: Settings, lengths: list[int]) -> list[list[int]]:
    """hasten's own order, epoch after epoch."""
    order = ShuffledOrder(lengths, GlobalBatch(examples=settings.batch), settings.seed)
    steps: list[list[int]] = []
    epoch = 0
    while len(steps) < settings.steps:
        steps += order.steps(epoch)
        epoch += 1
    return steps[: settings.steps]
