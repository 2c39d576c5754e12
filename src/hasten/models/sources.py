"""What a model's source must hold before anything is loaded from it, each lack as one sentence.

transformers meets an incomplete folder late and in its own words: a cut-off file as a parse error
without a file name, a missing shard as a failed download. These checks read names, headers and
configs only, so they cost milliseconds, and they say which file is wrong and what to do about it.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from hasten.errors import InputError
from hasten.models.presets import PRESETS

WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
_HUB_NAME: Final = re.compile(r"[\w.-]+/[\w.-]+")
_KERNEL_KEY: Final = re.compile(r"_?(attn|experts)_implementation(_internal)?")
# What transformers computes with code of its own. Any other name is a kernel: transformers would
# fetch it from the hub and run it.
_OWN_KERNELS: Final = {
    "attn": ("eager", "sdpa", "flex_attention"),
    "experts": ("eager", "grouped_mm", "batched_mm"),
}


def check_source(source: str) -> Path | None:
    """The folder that the source names, or None for a hub name; InputError when it is neither."""
    folder = Path(source)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise InputError(f"{source} is a file: give the folder that holds config.json and weights")
    if _HUB_NAME.fullmatch(source) and not source.startswith("."):
        return None
    near = difflib.get_close_matches(source, PRESETS, n=3, cutoff=0.5)
    advice = f"did you mean {' or '.join(near)}?" if near else "check the path"
    raise InputError(f"{source!r} is no preset, no folder here and no hub name (a/b): {advice}")


def check_folder(folder: Path, *, needs_weights: bool) -> None:
    """InputError unless the folder holds a config and, if needed, complete safetensors weights."""
    if not (folder / "config.json").is_file():
        adapter = folder / "adapter_config.json"
        if adapter.is_file():
            base = read_json(adapter).get("base_model_name_or_path")
            raise InputError(
                f"{folder} holds an adapter, not a model: load the model it was trained on "
                f"({base or 'not named in it'}) and put the adapter on top"
            )
        raise InputError(f"{folder} has no config.json: give the folder of a saved model")
    if needs_weights:
        for file in _weight_files(folder):
            _check_whole(file)


def check_native(source: str, raw: dict[str, Any], *, needs_weights: bool) -> None:
    """InputError when the raw config names a model that transformers itself can't build or train.

    A config with custom code (``auto_map``) is fine where its model type is native, as in the
    published DeepSeek-V2 and V3: the native class is taken and the code never looked at.
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
            f"{transformers.__version__}: install a newer one or choose another model"
        )
    if needs_weights and raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "an unnamed method")
        raise InputError(
            f"the weights of {source} are quantised ({method}) and can't be trained as they are: "
            "convert them to bfloat16 first"
        )
    _check_kernels(source, raw)


def _check_kernels(source: str, raw: dict[str, Any]) -> None:
    """InputError where a config or a part of it names code for attention or experts to fetch."""
    parts: list[Any] = [raw]
    while parts:
        part = parts.pop()
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        for key, value in part.items() if isinstance(part, dict) else ():
            found = _KERNEL_KEY.fullmatch(key)
            for name in _names(value) if found else ():
                known = _OWN_KERNELS[found[1]] if found else ()
                if name not in known and not _is_installed(name):
                    raise InputError(
                        f"the config.json of {source} sets {key} to {name!r}, and kernels that a "
                        f"model's folder names are never fetched or run: remove the key, or set it "
                        f"to one of {', '.join(known)}"
                    )


def _names(value: Any) -> Iterator[Any]:
    """The names in the value of an implementation's key: one, or one for each part of the model."""
    if isinstance(value, dict):
        for inner in value.values():
            yield from _names(inner)
    elif value is not None:
        yield value


def _is_installed(name: Any) -> bool:
    """Whether it is flash attention from an installed package; else transformers would fetch it."""
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    checks = {
        "flash_attention_2": is_flash_attn_2_available,
        "flash_attention_3": is_flash_attn_3_available,
    }
    return isinstance(name, str) and name in checks and bool(checks[name]())


def check_tokenizer(source: str) -> None:
    """InputError when the source is known, without loading it, to hold no usable tokenizer."""
    if source in PRESETS:
        raise InputError(
            f"the preset {source} has no tokenizer: give the folder of one, or train one"
        )
    folder = check_source(source)
    if folder is None or (folder / "tokenizer.json").is_file():
        return
    found = [name for name in ("tokenizer.model", "vocab.json") if (folder / name).is_file()]
    if not found:
        raise InputError(f"{folder} has no tokenizer.json: give the folder of a saved tokenizer")
    raise InputError(
        f"{folder} has {found[0]} but no tokenizer.json: write it once with "
        "transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
    )


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; InputError naming the file and line if it is not one."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise InputError(f"{file}:{error.lineno} is not JSON: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not UTF-8 text: {error.reason}") from error
    if not isinstance(content, dict):
        raise InputError(f"{file} holds a {type(content).__name__}, expected an object")
    return content


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files that the folder's weights are made of."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        named = read_json(folder / INDEX).get("weight_map", {})
        files = [folder / name for name in sorted(set(named.values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise InputError(
                f"{folder} lacks {len(missing)} of {len(files)} weight files named in {INDEX}, "
                f"the first is {missing[0]}: copy or download the folder again"
            )
        return files
    if any(folder.glob("pytorch_model*.bin")):
        raise InputError(
            f"{folder} has its weights as pytorch_model.bin, a pickle that can run code when read: "
            f"convert it once with `hasten checkpoint convert {folder} --to NEW_FOLDER` and give "
            "the new folder"
        )
    raise InputError(f"{folder} has no {WEIGHTS}: give a folder with weights or start from scratch")


def _check_whole(file: Path) -> None:
    """InputError if the file is cut off or not safetensors; reads its header only."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt"):
            pass
    except SafetensorError as error:
        raise InputError(
            f"{file} is damaged or cut off ({error}): copy or download it again"
        ) from error
