"""Models and adapters as Hugging Face folders, complete under their name or not there at all.

(1) Everything is written into a hidden sibling, ``.name.partial-...`` => (2) its files are forced
to the disk => (3) one rename gives it its name. Who finds the folder finds all of it. Where a
folder of that name exists it is moved aside, to ``.name.replaced-...``, just before (3) and deleted
after; a machine that dies between the two renames leaves both, whole, under those names.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hasten.errors import InputError
from hasten.models.load import quiet

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# The one folder that transformers itself puts into a model's folder.
_OWN_FOLDERS: Final = frozenset({"additional_chat_templates"})
_MARKS: Final = ("config.json", "adapter_config.json")


def save_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path
) -> None:
    """Write a full model: safetensors weights, config, generation_config and the tokenizer.

    The weights get the published names (one tensor per expert), tied ones are written once, and
    every value keeps its bits. The chat template becomes ``chat_template.jinja``. Raises InputError
    if ``folder`` exists and is not a model's, or if the model still carries an adapter.
    """
    from peft import PeftModel

    if isinstance(model, PeftModel):
        raise InputError(
            "this model carries an adapter: save the adapter alone with save_adapter, or merge it "
            "into the weights first"
        )
    with quiet(), appearing_at_once(folder) as partial:
        model.save_pretrained(partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)


def save_adapter(model: PeftModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> None:
    """Write the adapter of a PEFT model alone (safetensors, adapter_config) and the tokenizer.

    The base model is not written: loading starts with the same base. Raises InputError if
    ``folder`` exists and is not a model's, or if the model carries no adapter.
    """
    from peft import PeftModel

    if not isinstance(model, PeftModel):
        raise InputError("this model carries no adapter: save it whole with save_model")
    with quiet(), appearing_at_once(folder) as partial:
        # Embeddings are never adapted here; left to itself, peft asks the hub about their size.
        model.save_pretrained(partial, safe_serialization=True, save_embedding_layers=False)
        # An empty form of a model card, which says nothing about this adapter.
        (partial / "README.md").unlink(missing_ok=True)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)


@contextmanager
def appearing_at_once(folder: Path) -> Iterator[Path]:
    """A new folder that takes the final name when the block ends, and vanishes if it fails."""
    final = folder.resolve()  # a link keeps pointing to where it points
    _check_replaceable(final)
    token = uuid.uuid4().hex[:8]
    partial = final.with_name(f".{final.name}.partial-{token}")
    partial.mkdir(parents=True)
    try:
        yield partial
        # Without this a power cut soon after could leave the name with empty files.
        for entry in [*partial.rglob("*"), partial]:
            _force(entry)
        _take_place(partial, final, final.with_name(f".{final.name}.replaced-{token}"))
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _check_replaceable(final: Path) -> None:
    """InputError if saving would delete something other than an earlier model."""
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
        _force(final.parent)
        return
    final.rename(aside)
    try:
        partial.rename(final)
    except OSError:
        aside.rename(final)
        raise
    _force(final.parent)
    shutil.rmtree(aside)


def _force(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
