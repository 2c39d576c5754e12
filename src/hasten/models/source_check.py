"""Checks of a model's source before loading; each problem is one sentence.

transformers meets an incomplete folder late and in its own words. It reports a cut-off file as a
parse error without a file name, and a missing shard as a failed download. These checks read names,
headers and configs only, so they cost milliseconds. They name the wrong file and the remedy.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from hasten.errors import InputError
from hasten.foreign_files import read_json_object
from hasten.machine import versions
from hasten.models.presets import near_presets
from hasten.models.weights import (
    ADAPTER,
    INDEX,
    WEIGHTS,
    is_block_scaled,
    weight_files,
)

_HUB_NAME: Final = re.compile(r"[\w.-]+/[\w.-]+")
_KERNEL_KEY: Final = re.compile(r"_?(attn|experts)_implementation(_internal)?")
# Numbers that decide a model's size; building one takes time and memory in proportion.
_COUNT_KEY: Final = re.compile(
    r"(num|n)_[a-z0-9_]*(layers?|heads|experts|groups)|n_(layer|head|embd|inner)"
    r"|(hidden|intermediate|vocab|moe_intermediate)_size|[a-z_]*(head_dim|lora_rank)"
)
_MOST_LAYERS: Final = 10_000
_LARGEST_TOKENIZER: Final = 256 << 20  # bytes; a file of 256,000 tokens has 35 million
_MOST_GROWTH: Final = 1000  # growth in characters
_MOST_ADDED: Final = 1 << 20
_MOST_FEATURES: Final = 1 << 30
# Implementations in transformers itself. Any other name is a kernel, which transformers would
# download from the hub and run.
_OWN_KERNELS: Final = {
    "attn": ("eager", "sdpa", "flex_attention"),
    "experts": ("eager", "grouped_mm", "batched_mm"),
}
# Fixed computations of transformers' classes, whatever the config has. A published model with other
# values runs with code in its own folder.
_SIGMOID: Final = {
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
}
_COMPUTED: Final[dict[str, dict[str, tuple[Any, ...]]]] = {
    "deepseek_v2": {
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy"),
        "norm_topk_prob": (False,),
        "moe_layer_freq": (1,),
    },
    "deepseek_v3": _SIGMOID,
    "deepseek_v32": _SIGMOID,
}


def check_source(source: str) -> Path | None:
    """Returns the source's folder, or None for a hub name; raises InputError if it is neither."""
    folder = Path(source)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise InputError(f"{source} is a file: give the folder that holds config.json and weights")
    if _HUB_NAME.fullmatch(source) and not source.startswith("."):
        return None
    advice = near_presets(source) or "check the path"
    raise InputError(f"{source!r} is no preset, no folder here and no hub name (a/b): {advice}")


def check_folder(folder: Path, *, needs_weights: bool) -> None:
    """Raises InputError unless the folder has a config and, if needed, complete safetensors."""
    if (folder / ADAPTER).is_file():
        _check_adapter(folder, needs_weights)
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} has no config.json: give the folder of a saved model")
    if needs_weights:
        weight_files(folder)


def _check_adapter(folder: Path, needs_weights: bool) -> None:
    """Raises InputError for an adapter in the folder, which transformers would load unasked."""
    complete = (folder / "config.json").is_file()
    if needs_weights:
        complete = complete and any((folder / name).is_file() for name in (WEIGHTS, INDEX))
    adapter = read_json_object(folder / ADAPTER, "adapter's config")
    base = adapter.get("base_model_name_or_path") or "not named in it"
    if not complete:
        raise InputError(
            f"{folder} holds an adapter, not a model: load the model it was trained on ({base}) "
            "and put the adapter on top"
        )
    if needs_weights:
        raise InputError(
            f"{folder} holds an adapter ({ADAPTER}, of {base}) together with a model's weights: "
            "move the adapter to another folder, or merge it into the weights first"
        )


def check_native(source: str, raw: dict[str, Any], *, needs_weights: bool) -> None:
    """Raises InputError if transformers itself can't build or train the config's model.

    A config with custom code (``auto_map``) is accepted if its model type is native, as in
    the published DeepSeek-V2 and V3. The native class is used and the code is never read.
    """
    import transformers

    model_type = raw.get("model_type")
    if model_type is None:
        raise InputError(f"the config.json of {source} has no model_type: add it, like llama")
    if model_type not in transformers.CONFIG_MAPPING:
        if "auto_map" in raw:
            raise InputError(
                f"{source} needs its own code to run (model type {model_type!r}), and code from a "
                "model's folder is never executed: choose an architecture that transformers has"
            )
        raise InputError(
            f"{source} is of model type {model_type!r}, unknown to transformers "
            f"{transformers.__version__}: {_where_known(model_type)}"
        )
    quantization = raw.get("quantization_config")
    if needs_weights and quantization and not is_block_scaled(quantization):
        method = quantization.get("quant_method", "an unnamed method")
        raise InputError(
            f"by its config.json the weights of {source} are quantised ({method}), which can't be "
            "trained: convert them to bfloat16, or delete quantization_config if they are plain"
        )
    for part in _parts(raw):
        for key, setting in part.items():
            match = _KERNEL_KEY.fullmatch(key)
            for name in _names(setting) if match else ():
                kernels = _OWN_KERNELS[match[1]] if match else ()
                if name not in kernels and not _is_installed(name):
                    raise InputError(
                        f"the config.json of {source} sets {key} to {name!r}, and kernels that a "
                        f"model's folder names are never fetched or run: remove the key, or set it "
                        f"to one of {', '.join(kernels)}"
                    )
        _check_numbers(source, part)
        _check_routing(source, part)


def _parts(raw: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the objects of a config: itself and those in it."""
    values: list[Any] = [raw]
    while values:
        setting = values.pop()
        if isinstance(setting, dict):
            yield setting
            values += setting.values()
        elif isinstance(setting, list):
            values += setting


def _check_numbers(source: str, part: dict[str, Any]) -> None:
    """Raises InputError if a number isn't finite, or a size is larger than any model's."""
    for key, setting in part.items():
        several = setting if isinstance(setting, list) else [setting]
        if any(isinstance(each, float) and not math.isfinite(each) for each in several):
            raise InputError(
                f"the config.json of {source} sets {key} to a number that isn't finite; correct it"
            )
        if not _COUNT_KEY.fullmatch(key) or not isinstance(setting, int | float):
            continue
        most = _MOST_LAYERS if key.endswith(("layers", "n_layer")) else _MOST_FEATURES
        if not 0 <= setting <= most:
            raise InputError(
                f"the config.json of {source} sets {key} to {setting}; write a number from 0 to "
                f"{most:,}"
            )


def _check_routing(source: str, part: dict[str, Any]) -> None:
    """Raises InputError if the class would choose other experts than the config requires."""
    model_type = part.get("model_type")
    for key, values in _COMPUTED.get(str(model_type), {}).items():
        if part.get(key) is not None and part[key] not in values:
            computed = " or ".join(map(repr, values))
            raise InputError(
                f"the config.json of {source} sets {key} to {part[key]!r}, but transformers' "
                f"{model_type} computes {computed}: the model would be another one. Choose a model "
                "of that kind, or correct the key"
            )


def _where_known(model_type: Any) -> str:
    """Returns advice for a model type that the installed transformers doesn't support."""
    import transformers

    since = versions.knows_since(str(model_type))
    if since is not None:
        return f"install {since} or newer, or choose another model"
    newest = versions.tested()["ranges"]["transformers"][1]
    near = difflib.get_close_matches(str(model_type), list(transformers.CONFIG_MAPPING), n=3)
    return f"no release up to {newest} has it either, so choose another model" + (
        f", or correct model_type ({' or '.join(near)})" if near else ""
    )


def _names(setting: Any) -> Iterator[Any]:
    """Returns the names in an implementation's key: one, or one for each part of the model."""
    if isinstance(setting, dict):
        for inner in setting.values():
            yield from _names(inner)
    elif setting is not None:
        yield setting


def _is_installed(name: Any) -> bool:
    """Returns True for flash attention of an installed package; others would be downloaded."""
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    checks = {
        "flash_attention_2": is_flash_attn_2_available,
        "flash_attention_3": is_flash_attn_3_available,
    }
    return isinstance(name, str) and name in checks and bool(checks[name]())


def check_tokenizer(folder: Path) -> None:
    """Raises InputError if the files of a folder show that it holds no usable tokenizer."""
    if (folder / "tokenizer.json").is_file():
        _check_growth(folder / "tokenizer.json")
        return
    vocabularies = [name for name in ("tokenizer.model", "vocab.json") if (folder / name).is_file()]
    if not vocabularies:
        raise InputError(f"{folder} has no tokenizer.json: give the folder of a saved tokenizer")
    raise InputError(
        f"{folder} has {vocabularies[0]} but no tokenizer.json: write it once with "
        "transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
    )


def _check_growth(file: Path) -> None:
    """Raises InputError if a tokenizer makes long texts of short ones, without a memory limit."""
    content = read_json_object(file, "tokenizer", _LARGEST_TOKENIZER)
    growth, added = 1, 0
    for part in _parts({"normalizer": content.get("normalizer")}):
        growth *= max(1, _length(part.get("content")))
        added += _length(part.get("prepend"))
    padding = content.get("padding")
    fixed = padding.get("strategy") if isinstance(padding, dict) else None
    if isinstance(fixed, dict) and isinstance(fixed.get("Fixed"), int):
        added += fixed["Fixed"]
    for part in _parts({"post_processor": content.get("post_processor")}):
        added += _length(part.get("ids"))
    if growth > _MOST_GROWTH or added > _MOST_ADDED:
        raise InputError(
            f"{file} makes up to {growth:,} characters of one and adds {added:,} to a text, which "
            "no tokenizer needs: correct its normalizer, post_processor and padding"
        )


def _length(text: Any) -> int:
    return len(text) if isinstance(text, str | list) else 0
