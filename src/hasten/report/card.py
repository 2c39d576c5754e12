"""Model card: README.md in the model's folder, written only from the run's own files.

The front matter is that of Hugging Face's hub (huggingface.co/docs/hub/model-cards).
Facts that only the author has (licence, use, limits) are marked as open. A card that a
person wrote or changed stays: only a file with hasten's mark is written again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hasten.formatting import duration
from hasten.machine.files import write_atomic
from hasten.models.presets import PRESETS
from hasten.report.markup import cell, code, markdown_table
from hasten.report.page import table_of
from hasten.report.schema import read_report

CARD = "README.md"
MARK = "<!-- written by hasten from the run's own files; delete this line to keep your changes -->"
SHOWN = ("name", "effect", "verdict", "quality")  # columns of the table of variants
JobContext = Mapping[str, Any]


def write_card(
    folder: Path,
    recipe: JobContext,
    summary: JobContext,
    report: JobContext | None = None,
    comparison: Sequence[Sequence[str]] = (),
) -> bool:
    """Writes the card into a model's or adapter's folder; False if another card stays.

    Args:
        folder: with the weights.
        recipe: the resolved recipe.
        summary: what ``summary.json`` holds.
        report: what an experiment's ``report.json`` holds: gains, verdicts, quality.
        comparison: rows with a head: the exported files compared with the trained model.
    """
    card_path = folder / CARD
    if card_path.exists() and MARK not in card_path.read_text(encoding="utf-8", errors="replace"):
        return False
    adapter = (folder / "adapter_config.json").is_file()
    library = "gguf" if any(folder.glob("*.gguf")) else "peft" if adapter else "transformers"
    write_atomic(card_path, card_text(recipe, summary, report, library, comparison))
    return True


def card_text(
    recipe: JobContext,
    summary: JobContext,
    report: JobContext | None,
    library: str,
    comparison: Sequence[Sequence[str]] = (),
) -> str:
    """Returns the card's text, always the same for the same run.

    ``library`` loads the weights: transformers, peft or gguf.
    """
    adapter = library == "peft"
    base = str(recipe["model"])
    random = " (random weights)" if recipe.get("from_scratch") or base in PRESETS else ""
    base = base if _is_hub_name(base) else Path(base).name  # a local path is useless to others
    what = "An adapter (LoRA) for" if adapter else "A language model trained from"
    parts = [
        _front_matter(recipe, library),
        MARK,
        f"# {'Adapter' if adapter else 'Model'} from {code(base)}",
        f"{what} {code(base)}{random} on {_data(recipe)}.",
        "## Training",
        markdown_table([("", ""), *_training(recipe, summary)]).rstrip(),
        "## Techniques",
        _techniques(summary),
    ]
    if report is not None:
        read = read_report(report)
        table = table_of(read)
        cells = [[cell(row[key]) for key in SHOWN] for row in (table.columns, *table.rows)]
        heading = "## What each switch gained, measured on this job"
        parts += [heading, markdown_table(cells).rstrip()]
        if quality_text := (read["quality"] or {}).get("text"):
            parts.append(cell(quality_text))
    if comparison:
        rows = [[cell(value) for value in row] for row in comparison]
        parts += [
            "## Exported files compared with the trained model",
            markdown_table(rows).rstrip(),
        ]
    parts += [
        "## Left to the author",
        "Licence, intended use and limits are not known to the trainer; the licences of base model "
        "and data decide on the first.",
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(recipe: JobContext, library: str) -> str:
    base = str(recipe["model"])
    meta: dict[str, Any] = {
        "library_name": library,
        "pipeline_tag": "text-generation",
        "tags": ["hasten", *(["lora"] if library == "peft" else [])],
    }
    if base not in PRESETS and _is_hub_name(base):
        meta["base_model"] = base
    return f"---\n{yaml.safe_dump(meta, sort_keys=False).strip()}\n---"


def _is_hub_name(base: str) -> bool:
    return not base.startswith((".", "/", "~")) and base.count("/") == 1


def _data(recipe: JobContext) -> str:
    dataset = recipe["dataset"]
    sources = [dataset] if isinstance(dataset, str) else list(dataset)
    names = [one if isinstance(one, str) else one["path"] for one in sources]
    return ", ".join(code(Path(name).name or name) for name in names)


def _training(recipe: JobContext, summary: JobContext) -> Iterable[tuple[str, str]]:
    hardware, versions = summary["hardware"], summary["versions"]
    gpus = hardware["accelerators"]
    where = f"{len(gpus)} x {gpus[0]['name']}" if gpus else hardware["cpu"]
    yield "steps", f"{summary['steps']:,} ({summary['stopped']})"
    yield "tokens", f"{summary['tokens']:,}, of which {summary['trained_tokens']:,} carry loss"
    yield "time", time_and_speed(summary)
    yield "processes", f"{summary['world_size']} on {where}"
    yield "peak memory of one", f"{summary['peak_memory_bytes'] / 1e9:,.2f} GB"
    loss = summary["eval_loss"]
    unit = "a token" if recipe.get("stage", "sft") == "sft" else "a pair"
    yield "eval loss", "nothing was held out" if loss is None else f"{loss:.4f} nats {unit}"
    for name, value in summary["metrics"].items():
        yield name.replace("_", " "), f"{value:.4f}"
    yield "learning rate", f"{recipe['learning_rate']:g}, {recipe['lr_schedule']}"
    yield "seed", str(summary["seed"])
    if summary.get("corpus_sha256"):
        yield "data (SHA-256)", code(summary["corpus_sha256"])
    yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())


def time_and_speed(summary: JobContext) -> str:
    """Returns seconds and tokens/s of the last process, with the steps that they are of."""
    rate = summary["tokens_per_second"]  # None: the run was resumed after its last step
    text = duration(summary["seconds"]) + ("" if rate is None else f", {rate:,.0f} tokens/s")
    if not (before := summary["resumed_step"]):
        return text
    steps, tokens = summary["steps"] - before, summary["tokens"] - summary["resumed_tokens"]
    return f"{text} since the resume at step {before:,} ({steps:,} steps, {tokens:,} tokens)"


def _techniques(summary: JobContext) -> str:
    rows = [
        (code(name), "effective" if proof["effective"] else "did not act", cell(proof["evidence"]))
        for name, proof in summary["effective"].items()
    ]
    if not rows:
        return "None."
    return markdown_table([("technique", "", "what was seen"), *rows]).rstrip()
