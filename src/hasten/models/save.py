"""Saves models and adapters as Hugging Face folders, complete or not at all.

(1) Everything is written into a hidden sibling, ``.name.partial-...``, the weights
    first.
(2) Its files are forced to the disk.
(3) One rename gives it its name. So a folder with this name is always complete.

If a folder of that name exists, it is moved to ``.name.replaced-...`` just before (3)
and deleted afterwards. If the machine stops between the two renames, both folders
remain complete under those names. A file other than the weights may fail (for example a
config that its own library refuses). The weights and the other files are still written,
and the failed file is returned by name.

A folder can be read by several releases. Version 4 of transformers and tools based on
it (vLLM, llama.cpp's converter) use other names for some keys than transformers 5. Both
are written.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from hasten.errors import InputError
from hasten.foreign_files import read_bounded, read_json_object
from hasten.machine.files import sync
from hasten.models.adapters import ADAPTER_WEIGHTS
from hasten.models.load import quiet
from hasten.models.weight_files import UNSPLIT, GathersWeights, WeightPlan
from hasten.models.weights import ADAPTER, NumberFormats
from hasten.parts.nn.causal_lm import INDEXER, is_indexer

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# The only folder that transformers writes into a model's folder.
_OWN_FOLDERS: Final = frozenset({"additional_chat_templates"})
_MARKS: Final = ("config.json", ADAPTER)
_LARGEST_VOCABULARY: Final = 64 << 20  # bytes; Gemma's with 256,000 tokens has 4 million
# Configs' names for the number of multi-token-prediction layers, which are never saved.
_AHEAD_COUNTS: Final = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
# Models with two kinds of layers, and the older name of the theta of sliding attention.
_LOCAL_THETAS: Final = {
    "gemma3_text": ("rope_local_base_freq",),
    "gemma3n_text": ("rope_local_base_freq",),
    "olmo3": (),
}
AS_IN_MEMORY: Final = NumberFormats()


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    formats: NumberFormats = AS_IN_MEMORY,
    source: GathersWeights = UNSPLIT,
    is_first: bool = True,
) -> list[str]:
    """Writes a full model: safetensors weights, config, generation_config and the tokenizer.

    The weights get the published names (one tensor per expert), tied ones are written once, and
    every value keeps its bits unless ``formats`` rounds it. Files are as those of transformers'
    ``save_pretrained``.

    Args:
        source: the layout, if ranks hold parts of the model; then all ranks call this function.
        is_first: this rank writes.

    Returns:
        A sentence for each part that couldn't be written; the weights are there.

    Raises:
        InputError: ``folder`` exists and is not a model's, or the model still carries an adapter.
    """
    from peft import PeftModel

    if isinstance(model, PeftModel):
        raise InputError(
            "this model carries an adapter: save the adapter alone with save_adapter, or merge it "
            "into the weights first"
        )
    writer = _FileWriter()
    with quiet(), source.all_modules(model):
        plan = WeightPlan(model, formats, source)
        groups = plan.gathered()
        try:
            if is_first:
                with appearing_at_once(folder) as partial:
                    plan.write(groups, partial)
                    writer.problems += plan.problems
                    _write_files(model, tokenizer, partial, plan.most, writer)
        finally:
            for _ in groups:  # other ranks send all weights, also if they can't be written
                pass
    return writer.problems


def _write_files(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    most: torch.dtype,
    writer: _FileWriter,
) -> None:
    """Writes the files other than the weights; ``most`` is the format of most weights."""
    writer.write("config.json", lambda: _write_config(model, most, folder))
    if hasattr(model, "generation_config"):  # a reward model generates nothing
        writer.write("generation_config.json", lambda: _write_generation_config(model, folder))
    if tokenizer is not None:
        writer.write("the tokenizer", lambda: _write_tokenizer(tokenizer, folder))


def save_adapter(
    model: PeftModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    source: GathersWeights = UNSPLIT,
    is_first: bool = True,
) -> list[str]:
    """Writes only the adapter of a PEFT model (safetensors, adapter_config) and the tokenizer.

    The base model is not written: loading starts with the same base. ``source`` and ``is_first``
    are those of ``save_model``.

    Returns:
        A sentence for each part that couldn't be written; the weights are there.

    Raises:
        InputError: ``folder`` exists and is not a model's, or the model carries no adapter.
    """
    from peft import PeftModel

    if not isinstance(model, PeftModel):
        raise InputError("this model carries no adapter: save it whole with save_model")
    writer = _FileWriter()
    with quiet(), source.all_modules(model):
        state = _adapter_state(model, source)
        if not is_first:
            return []
        with appearing_at_once(folder) as partial:
            # Embeddings are never adapted here; by default peft asks the hub for their size.
            model.save_pretrained(
                partial, safe_serialization=True, state_dict=state, save_embedding_layers=False
            )
            _add_indexers(partial, state)
            # An empty template of a model card, without information on this adapter.
            (partial / "README.md").unlink(missing_ok=True)
            if tokenizer is not None:
                writer.write("the tokenizer", lambda: _write_tokenizer(tokenizer, partial))
    return writer.problems


def _adapter_state(model: PeftModel, source: GathersWeights) -> dict[str, torch.Tensor]:
    """Returns the adapter's weights by their names in the model; one rank has room for them.

    All ranks call it.
    """
    from peft import get_peft_model_state_dict

    weights = model.state_dict(keep_vars=True)
    adapter = get_peft_model_state_dict(model, state_dict=weights, save_embedding_layers=False)
    saved = {id(weight) for weight in adapter.values()}
    return {
        name: source.gather_weight(weight, weight.dtype)
        for name, weight in weights.items()
        if id(weight) in saved or (is_indexer(name) and weight.requires_grad)
    }


def _add_indexers(folder: Path, state: Mapping[str, torch.Tensor]) -> None:
    """Adds indexers that learnt together with an adapter, as PEFT's ``modules_to_save``."""
    from safetensors.torch import load_file, save_file

    learnt = {n: t.contiguous() for n, t in state.items() if is_indexer(n)}
    if not learnt or "modules_to_save" in next(iter(learnt)):
        return
    file = folder / ADAPTER_WEIGHTS
    save_file({**load_file(file), **learnt}, file, {"format": "pt"})
    fields = read_json_object(folder / ADAPTER, "adapter's config")
    _write_json(folder / ADAPTER, {**fields, "modules_to_save": [INDEXER]})


class _FileWriter:
    """Writes the files of a folder other than its weights and collects the problems."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def write(self, name: str, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # any error of a library: the weights must not be lost
            reason = " ".join(str(error).split())[:200]
            self.problems.append(f"{name} couldn't be written: {reason or type(error).__name__}")


def _write_config(model: PreTrainedModel, most: torch.dtype, folder: Path) -> None:
    fields = json.loads(model.config.to_json_string())
    fields["architectures"] = [type(model).__name__.removeprefix("FSDP")]
    # ``torch_dtype`` is the name of releases before 4.56.
    fields["dtype"] = fields["torch_dtype"] = str(most).removeprefix("torch.")
    # Foreign code isn't saved, so no key may refer to its files.
    for key in ("auto_map", "custom_pipelines"):
        fields.pop(key, None)
    for key in _AHEAD_COUNTS:
        if fields.get(key) or getattr(model.config, key, None):
            fields[key] = 0
    fields |= older_rope(fields)
    _write_json(folder / "config.json", fields)


def older_rope(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns ``rope_parameters`` under the names of releases before 5; empty if unsupported.

    If both are present, transformers 5 reads ``rope_scaling`` instead of
    ``rope_parameters`` (modeling_rope_utils.py, convert_rope_params_to_dict). So both have
    the same values. Where layers differ, the older names are those of full attention.
    """
    rope, local = fields.get("rope_parameters"), {}
    names = _LOCAL_THETAS.get(str(fields.get("model_type")))
    if isinstance(rope, dict) and names is not None and "sliding_attention" in rope:
        local = dict.fromkeys(names, rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        return {}
    older = {"rope_theta": rope["rope_theta"]}
    if "partial_rotary_factor" in rope:
        older["partial_rotary_factor"] = rope["partial_rotary_factor"]
    scaling = {key: setting for key, setting in rope.items() if key not in older}
    kind = scaling.get("rope_type", "default")
    older["rope_scaling"] = None if kind == "default" else {**scaling, "type": kind}
    return older | local


def _write_generation_config(model: PreTrainedModel, folder: Path) -> None:
    """Writes the generation config unchecked: transformers' writer is stricter than its reader."""
    generation = model.generation_config
    if generation is None:
        return
    fields = generation.to_diff_dict()
    fields.pop("_from_model_config", None)
    _write_json(folder / "generation_config.json", fields)


def _write_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes the tokenizer's files so that transformers 4 and 5 can read them.

    transformers 5 names the class TokenizersBackend. It lists further special tokens under
    ``extra_special_tokens``, which 4 expects to be an object. Both releases read the names
    of 4.
    """
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    fields = json.loads(file.read_text(encoding="utf-8"))
    for key in ("auto_map", "is_local", "local_files_only"):  # refers to the original folder
        fields.pop(key, None)
    if fields.get("tokenizer_class") == "TokenizersBackend":
        fields["tokenizer_class"] = "PreTrainedTokenizerFast"
    # The same class of transformers 4 also returns token_type_ids, which its generate refuses.
    fields.setdefault("model_input_names", list(tokenizer.model_input_names))
    if tokenizer.bos_token is not None:  # for llama.cpp's converter
        first = tokenizer("a")["input_ids"][:1]
        fields["add_bos_token"] = first == [tokenizer.bos_token_id]
    further = fields.get("extra_special_tokens")
    if isinstance(further, list):
        fields["additional_special_tokens"] = fields.pop("extra_special_tokens")
    if template := stored_template(tokenizer):
        fields["chat_template"] = template
    _write_json(file, fields)
    # The same vocabulary for readers of SentencePiece, such as llama.cpp's converter for Gemma.
    vocabulary = Path(tokenizer.name_or_path or folder) / "tokenizer.model"
    if vocabulary.is_file():
        content = read_bounded(vocabulary, _LARGEST_VOCABULARY, "SentencePiece vocabulary")
        (folder / vocabulary.name).write_bytes(content)


def stored_template(tokenizer: PreTrainedTokenizerBase) -> str | list[dict[str, str]]:
    """Returns the chat template, or several with their names, as in files; or an empty string."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        return [{"name": name, "template": text} for name, text in template.items()]
    return template or ""


def _write_json(file: Path, fields: dict[str, Any]) -> None:
    text = json.dumps(fields, indent=2, sort_keys=True, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")


@contextmanager
def appearing_at_once(folder: Path) -> Iterator[Path]:
    """Yields a new folder that gets its final name at the block's end; removes it on failure."""
    final = folder.resolve()  # a link keeps its target
    _check_replaceable(final)
    token = uuid.uuid4().hex[:8]
    partial = final.with_name(f".{final.name}.partial-{token}")
    partial.mkdir(parents=True)
    try:
        yield partial
        # Without it, a power cut could leave the name with empty files.
        for entry in [*partial.rglob("*"), partial]:
            sync(entry)
        _take_place(partial, final, final.with_name(f".{final.name}.replaced-{token}"))
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _check_replaceable(final: Path) -> None:
    """Raises InputError if saving would delete something other than an earlier model."""
    if not final.exists():
        return
    if not final.is_dir():
        raise InputError(f"{final} is a file: choose another name for the model's folder")
    inside = list(final.iterdir())
    folders = [entry.name for entry in inside if entry.is_dir() and entry.name not in _OWN_FOLDERS]
    if inside and (folders or not any((final / mark).is_file() for mark in _MARKS)):
        raise InputError(
            f"{final} holds {(folders or [entry.name for entry in inside])[0]}, which saving here "
            "would delete: choose a new folder or one with nothing but a saved model"
        )


def _take_place(partial: Path, final: Path, aside: Path) -> None:
    if not final.exists():
        partial.rename(final)
        sync(final.parent)
        return
    final.rename(aside)
    try:
        partial.rename(final)
    except OSError:
        aside.rename(final)
        raise
    sync(final.parent)
    shutil.rmtree(aside)
