"""Local stand-ins for the models, data sets and metrics that other projects' tests take from a hub.

A stand-in has the architecture and the size of the tiny model that a test asks for, random weights
from a fixed seed, and a tokenizer trained on a few sentences. It lies in a folder laid out as the
hub's own cache, so that `from_pretrained(name)` finds it offline. Nothing is downloaded.

The sizes of TRL's tiny models, its chat templates and the rows of its data sets are read from its
checkout: literals alone, no code of it runs here.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REVISION = "0" * 40
TRL = "trl-internal-testing"
SEED = 0
SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
}
# What the tests of transformers and accelerate load; a test that asks for another fails plainly.
OTHERS: dict[str, str] = {
    "hf-internal-testing/tiny-random-LlamaForCausalLM": "LlamaForCausalLM",
    "nickypro/tinyllama-15M": "LlamaForCausalLM",
    "roneneldan/TinyStories-33M": "LlamaForCausalLM",
    "HuggingFaceTB/SmolLM-360M": "LlamaForCausalLM",
    "openai-community/gpt2": "GPT2LMHeadModel",
    "bert-base-cased": "BertForSequenceClassification",
    "bert-base-uncased": "BertForSequenceClassification",
    "google-bert/bert-base-cased": "BertForSequenceClassification",
}
SENTENCES = ["The cat sat on the mat and then it ran home."]
VOCABULARY = 700
MARKS = ("<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>")
TEMPLATE = "qwen2_5"  # for a family without a chat template of its own


def build(hub: Path, trl: Path | None) -> None:
    """Writes the stand-ins that aren't in the folder yet."""
    sentences = SENTENCES if trl is None else _sentences(trl)
    for name, architecture in OTHERS.items():
        sizes = {} if architecture == "GPT2LMHeadModel" else SMALL
        _add_model(hub, name, architecture, sizes, sentences)
    if trl is not None:
        for script in sorted((trl / "scripts/generate_tiny_models/for_causal_lm").glob("*.py")):
            _add_trl_model(hub, trl, script, sentences)


def install(hub: Path, trl: Path | None) -> None:
    """Makes this process take data sets and metrics from stand-ins; models lie in the cache."""
    build(hub, trl)
    if importlib.util.find_spec("evaluate") is not None:
        evaluate: Any = importlib.import_module("evaluate")
        evaluate.load = lambda *names, **settings: ShareRight()
    if importlib.util.find_spec("datasets") is None:
        return
    datasets: Any = importlib.import_module("datasets")
    usual = datasets.load_dataset
    tables = {} if trl is None else {f"{TRL}/{n}": _trl_tables(trl, n) for n in ("zen", "harmony")}
    texts = {"text": 4 * (SENTENCES if trl is None else _sentences(trl))}

    def load_dataset(path: str, name: str | None = None, **named: Any) -> Any:
        split, stream = named.get("split"), named.get("streaming", False)
        if path in tables and name in tables[path]:
            rows = datasets.Dataset.from_dict(tables[path][name])
            parts = rows.train_test_split(test_size=0.1, shuffle=False)
        elif path in ("wikitext", "Salesforce/wikitext", "stanfordnlp/imdb"):
            rows = datasets.Dataset.from_dict(texts)
            parts = datasets.DatasetDict(train=rows, validation=rows, test=rows)
        elif path in ("text", "csv", "json"):
            return usual(path, name, **named)
        else:
            raise ConnectionError(f"there is no stand-in for {path} {name or ''}")
        return _split(datasets, parts, split, stream)

    datasets.load_dataset = load_dataset


class ShareRight:
    """Stands for a metric of the hub: the share of predictions that are their references."""

    def __init__(self) -> None:
        self._hits: list[bool] = []

    def add_batch(self, predictions: Any, references: Any) -> None:
        pairs = zip(predictions, references, strict=True)
        self._hits += [bool(prediction == reference) for prediction, reference in pairs]

    def compute(self, predictions: Any = (), references: Any = ()) -> dict[str, float]:
        """The share since the last call, under the names that tests read."""
        self.add_batch(predictions, references)
        share = sum(self._hits) / max(len(self._hits), 1)
        self._hits = []
        return {"accuracy": share, "f1": share}


def _split(datasets: Any, parts: Any, split: str | None, stream: bool) -> Any:
    """The parts, or the one that is asked for, as in `train[:10]`."""
    if split is not None:
        match = re.fullmatch(r"(\w+)(?:\[:(\d+)(%?)\])?", split)
        if match is None:
            raise ValueError(f"the split {split} isn't of a form that stand-ins have")
        rows = parts[match[1]]
        if match[2]:
            count = int(match[2]) * len(rows) // 100 if match[3] else int(match[2])
            rows = rows.select(range(min(count, len(rows))))
        return rows.to_iterable_dataset() if stream else rows
    if stream:
        return datasets.IterableDatasetDict(
            {name: rows.to_iterable_dataset() for name, rows in parts.items()}
        )
    return parts


# Models in a hub's cache.


def _add_model(
    hub: Path,
    name: str,
    architecture: str,
    sizes: Mapping[str, Any],
    sentences: Sequence[str],
    template: str | None = None,
) -> None:
    """Writes a model and its tokenizer, as a snapshot of one revision."""
    folder = hub / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / REVISION
    if (folder / "refs" / "main").exists():
        return
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    tokenizer = _tokenizer(sentences, template)
    kind = getattr(transformers, architecture)
    marks = {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.eos_token_id,
    }
    config = kind.config_class(**{**sizes, "vocab_size": len(tokenizer), **marks})
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model = kind(config)
    if name.startswith(TRL):
        model = model.to(torch.bfloat16)  # as TRL's are
    model.save_pretrained(snapshot)
    tokenizer.save_pretrained(snapshot)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(REVISION)


def _tokenizer(sentences: Sequence[str], template: str | None) -> Any:
    """Pairs of bytes that the sentences have, all bytes, and the marks of chats."""
    tokenizers: Any = importlib.import_module("tokenizers")
    transformers: Any = importlib.import_module("transformers")
    pairs = tokenizers.Tokenizer(tokenizers.models.BPE())
    pairs.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(MARKS),
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    pairs.train_from_iterator(sentences, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=pairs,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=list(MARKS),
    )
    tokenizer.chat_template = template
    return tokenizer


# What TRL's checkout says.


def _add_trl_model(hub: Path, trl: Path, script: Path, sentences: Sequence[str]) -> None:
    """The model that one of TRL's scripts would push, from the literals in it."""
    calls = [node for node in ast.walk(ast.parse(script.read_text())) if isinstance(node, ast.Call)]
    by_name = {node.func.id: node for node in calls if isinstance(node.func, ast.Name)}
    transformers: Any = importlib.import_module("transformers")
    architecture = next((name for name in by_name if name.endswith("ForCausalLM")), "")
    config = next((name for name in by_name if name.endswith("Config")), "")
    push = by_name.get("push_to_hub")
    if push is None or not config or not hasattr(transformers, architecture):
        return
    label = [str(arg.value) for arg in push.args if isinstance(arg, ast.Constant)]
    name = "-".join([label[0], architecture, *label[1:]])
    words = {word.arg: _literal(word.value) for word in by_name[config].keywords if word.arg}
    sizes = {key: value for key, value in words.items() if value and not key.endswith("token_id")}
    family = re.sub(r"\W", "_", "-".join([architecture.removesuffix("ForCausalLM"), *label[1:]]))
    templates = trl / "trl" / "chat_templates"
    chosen = [templates / f"{family.lower()}.jinja", templates / f"{TEMPLATE}.jinja"]
    template = next((path.read_text() for path in chosen if path.exists()), None)
    try:
        _add_model(hub, f"{TRL}/{name}", architecture, sizes, sentences, template)
    except Exception as error:  # of any kind: a size that this version doesn't have
        print(f"no stand-in for {name}: {error}", file=sys.stderr)


def _sentences(trl: Path) -> list[str]:
    """TRL's proverbs."""
    rows = _trl_tables(trl, "zen").get("standard_language_modeling", {})
    return list(rows.get("text", SENTENCES))


def _trl_tables(trl: Path, name: str) -> dict[str, dict[str, Any]]:
    """The rows of one of TRL's data sets, by configuration."""
    script = trl / "scripts" / f"generate_{name}_dataset.py"
    if not script.exists():
        return {}
    tables = {}
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
            continue
        target, call = node.targets[0], node.value
        made = isinstance(call.func, ast.Attribute) and call.func.attr == "from_dict"
        if made and isinstance(target, ast.Name) and (rows := _literal(call.args[0])):
            tables[target.id.removesuffix("_dataset")] = rows
    return tables


def _literal(node: ast.expr) -> Any:
    """The value of a literal; None for any other expression."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None
