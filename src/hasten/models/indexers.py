"""Gives a DeepSeek-V3 model the indexers of DeepSeek-V3.2, so that its attention can become sparse.

The classes differ in nothing but the indexers: every weight of V3 is one of V3.2 under the same
name. In documents of at most ``index_topk`` tokens both models have the same outputs. In longer
ones a new indexer chooses at random until it has learnt (``indexer_loss`` with ``stage: warmup``).
Then the whole model is trained with it (``stage: sparse``).

Source: DeepSeek-V3.2, arXiv:2512.02556, section 2.1.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from hasten.errors import InputError
from hasten.foreign_files import read_json_object
from hasten.models.convert import COPIED_FILES, INDEXES
from hasten.models.load import (
    check_weights,
    local_folder,
    quiet,
    read_config,
    skeleton_of,
)
from hasten.models.save import appearing_at_once, older_rope
from hasten.models.weights import StoredWeights, read_weights, weight_files
from hasten.parts.nn.late_weights import MARK
from hasten.parts.nn.new_weights import expect_weights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SPARSE: Final = "deepseek_v32"
_FLOAT32: Final = "weights_proj"  # in float32 in transformers' class and in DeepSeek's code
_LINEAR: Final = ("wq_b", "wk", "weights_proj")
# Settings of V3's config that V3.2's class doesn't have; it computes as with these values.
_FIXED: Final = {"rope_interleave": True, "pretraining_tp": 1}
_LEFT_OUT: Final = (
    *_FIXED,
    "auto_map",
    "custom_pipelines",
    "transformers_version",
    "_name_or_path",
)


def add_indexers(
    source: str,
    to: Path,
    *,
    heads: int = 64,
    width: int = 128,
    topk: int = 2048,
    tell: Callable[[str], None] = lambda text: None,
) -> int:
    """Writes a folder of DeepSeek-V3's class as one of DeepSeek-V3.2's, with new indexers.

    The weights are copied byte by byte; those of the indexers are drawn by the class's own rule
    from their names. The folder appears under its name when all of it is there.

    Args:
        source: a folder with weights, or a name on the hub.
        to: the folder to write.
        heads: of an indexer.
        width: of each of its heads; at least the rotary columns of an attention head.
        topk: keys that it chooses for each query.

    Returns:
        The number of new tensors.

    Raises:
        InputError: a model of another class or without a query latent, numbers that make no
            sense, weights that don't fit their config, no room.
    """
    config = _sparse_config(source, {"heads": heads, "width": width, "topk": topk})
    folder = local_folder(source)
    stored = read_weights(folder, read_config(source, needs_weights=True))
    new = _new_weights(config, stored)
    with appearing_at_once(to) as made:
        others = chain.from_iterable(folder.glob(pattern) for pattern in COPIED_FILES)
        for file in others:
            if file.is_file() and file.name not in (*INDEXES, "config.json"):
                shutil.copyfile(file, made / file.name)
        _write_config(folder, config, stored, made)
        _write_weights(folder, new, made, tell)
        check_weights(str(to), made, read_config(str(made)))
    return len(new)


def _sparse_config(source: str, sizes: dict[str, int]) -> PreTrainedConfig:
    """Returns the config of the same model with indexers of these sizes."""
    from transformers import DeepseekV32Config

    config = read_config(source, needs_weights=True)
    refused = f"{source} can't become a {SPARSE} model: "
    if config.model_type != "deepseek_v3":
        raise InputError(
            f"{refused}it is a {config.model_type} model, and only DeepSeek-V3's class has the "
            "same weights; choose a folder of DeepSeek-V3, V3.1 or R1"
        )
    if config.q_lora_rank is None:
        raise InputError(
            f"{refused}its q_lora_rank is null, and an indexer reads the query's latent; choose a "
            "model that has one"
        )
    for name, only in _FIXED.items():
        if getattr(config, name, only) not in (None, only):
            raise InputError(
                f"{refused}its {name} is {getattr(config, name)}, and that class computes as "
                f"with {only}; choose a model with {name} {only}"
            )
    if wrong := [f"{name} {size}" for name, size in sizes.items() if size < 1]:
        raise InputError(f"{refused}an indexer with {wrong[0]} makes no sense; give 1 or more")
    rotary = config.qk_rope_head_dim
    if sizes["width"] < rotary:
        raise InputError(
            f"{refused}a head of an indexer holds the {rotary} rotary columns of the attention, "
            f"and its width is {sizes['width']}; give {rotary} or more"
        )
    fields = {k: v for k, v in config.to_dict().items() if k not in (*_LEFT_OUT, "model_type")}
    index = {"index_n_heads": sizes["heads"], "index_head_dim": sizes["width"]}
    with quiet():
        return DeepseekV32Config(**fields, **index, index_topk=sizes["topk"])


def _new_weights(config: PreTrainedConfig, stored: StoredWeights) -> dict[str, torch.Tensor]:
    """Returns the weights of all indexers, in the format of most stored weights."""
    model = skeleton_of(config)
    expect_weights(model, 0, {})  # nothing is drawn before it is asked for, but small buffers
    most = stored.formats().most or torch.float32
    new = {}
    for name, parameter in model.named_parameters():
        if ".indexer." in name:
            kind = torch.float32 if _FLOAT32 in name else most
            new[name] = getattr(parameter, MARK).full().to(kind)
    return new


def _write_config(
    folder: Path, config: PreTrainedConfig, stored: StoredWeights, made: Path
) -> None:
    fields = json.loads(config.to_json_string(use_diff=False))
    fields["architectures"] = ["DeepseekV32ForCausalLM"]
    most = stored.formats().most or torch.float32
    fields["dtype"] = fields["torch_dtype"] = str(most).removeprefix("torch.")
    fields |= older_rope(fields)
    raw = read_json_object(folder / "config.json", "model's config")
    if isinstance(quantised := raw.get("quantization_config"), dict):
        names = list(quantised.get("modules_to_not_convert") or [])
        names += [f"indexer.{name}" for name in _LINEAR]
        fields["quantization_config"] = {**quantised, "modules_to_not_convert": names}
    (made / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _write_weights(
    folder: Path, new: dict[str, torch.Tensor], made: Path, tell: Callable[[str], None]
) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    files = weight_files(folder)
    count = len(files) + 1
    placed: dict[str, str] = {}
    total = 0
    for number, file in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{count:05d}.safetensors"
        tell(f"copying {file.name} ({number}/{len(files)}, {file.stat().st_size / 1e9:.2f} GB)")
        shutil.copyfile(file, made / name)
        with safe_open(file, framework="pt") as weights:
            placed |= dict.fromkeys(weights.keys(), name)
            total += file.stat().st_size
    name = f"model-{count:05d}-of-{count:05d}.safetensors"
    save_file(new, made / name, metadata={"format": "pt"})
    placed |= dict.fromkeys(new, name)
    total += sum(tensor.nbytes for tensor in new.values())
    index: dict[str, Any] = {
        "metadata": {"total_size": total},
        "weight_map": dict(sorted(placed.items())),
    }
    (made / INDEXES[1]).write_text(json.dumps(index, indent=1), encoding="utf-8")
