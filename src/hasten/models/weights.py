"""Stored weights of a model's folder: files, names, number formats, refused contents.

Trainers leave the names of their wrappers in saved files: ``_orig_mod.`` of
torch.compile, ``module.`` of data parallelism, ``base_model.model.`` of PEFT. Folders
also hold tensors that a language model doesn't use. Examples are layers that predict
further tokens ahead and, in folders of old releases, rotary frequencies. Weights in
block-scaled float8 mean nothing without their scales.

(1) All files are located.
(2) Their headers are read.
(3) Wrapper prefixes are removed from names. Each tensor belongs to the model, is left
    out on purpose, or is refused.
(4) transformers takes the tensors one by one. float8 is multiplied by its scales then.

Steps 1 to 3 read no weights.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from hasten.errors import InputError
from hasten.foreign_files import first_bytes, path_inside, read_json_object

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
ADAPTER: Final = "adapter_config.json"
# Prefixes of wrappers in torch: torch.compile, DataParallel and DDP, FSDP, activation
# checkpointing.
_WRAPPERS: Final = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
_ADAPTED: Final = re.compile(r"\.(lora_\w+|base_layer|modules_to_save|ia3_l|oft_\w+)(\.|$)")
_ROTARY: Final = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
_LAYER: Final = re.compile(r"^(?:model\.)?layers\.(\d+)\.")
# Multi-token prediction: separate layers (Qwen3-Next, MiMo, DeepSeek-V4), or layers after the last
# with these parts (DeepSeek-V3's README_WEIGHTS.md, "MTP Modules"; GLM-4.5).
_AHEAD: Final = re.compile(r"^(?:model\.)?mtp[._]")
_AHEAD_PARTS: Final = frozenset({"eh_proj", "enorm", "hnorm", "shared_head"})
# safetensors' names of formats of trained weights and tables.
_PLAIN: Final = {"F64", "F32", "F16", "BF16", "I64", "I32", "BOOL"}
_FORMATS: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_FLOAT8: Final = "F8_E4M3"
_SCALES: Final = ".weight_scale_inv"


@dataclass(frozen=True)
class NumberFormats:
    """Formats of stored weights: most in one, those of ``exceptions`` in others."""

    most: torch.dtype | None = None  # None: as in memory
    exceptions: Mapping[str, torch.dtype] = field(default_factory=dict)

    def of(self, name: str, weight: Tensor) -> torch.dtype:
        """Returns the format of a parameter; tensors that aren't floating point are unchanged."""
        if self.most is None or not weight.is_floating_point():
            return weight.dtype
        return self.exceptions.get(name, self.most)

    def __str__(self) -> str:
        most = "as in memory" if self.most is None else str(self.most).removeprefix("torch.")
        others = sorted({str(d).removeprefix("torch.") for d in self.exceptions.values()} - {most})
        return f"{most}, some in {', '.join(others)}" if others else most


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: ``tensor[...]`` reads it, as transformers does; ``copy`` reads a part."""

    file: Any  # an open safetensors file
    name: str  # name in the file
    shape: tuple[int, ...]
    dtype: str  # safetensors' name: BF16, F8_E4M3
    scales: StoredTensor | None = None  # float8 only: factors of the blocks
    block: tuple[int, int] = (0, 0)  # rows and columns with one scale

    def __getitem__(self, index: Any) -> Tensor:
        if self.scales is None:
            values: Tensor = self.file.get_tensor(self.name)
            return values[index]
        return self._scaled([0] * len(self.shape), self.shape)[index]

    def copy(self, start: Sequence[int], part: Tensor) -> None:
        """Writes the part of this tensor that begins at ``start`` into ``part``, in its format.

        Only that part of the file is read.
        """
        if self.scales is not None:
            part.copy_(self._scaled(start, part.shape))
        else:
            part.copy_(self._box(start, part.shape))

    def _box(self, start: Sequence[int], size: Sequence[int]) -> Tensor:
        if not self.shape:
            scalar: Tensor = self.file.get_tensor(self.name)
            return scalar
        box = tuple(slice(s, s + n) for s, n in zip(start, size, strict=True))
        values: Tensor = self.file.get_slice(self.name)[box]
        return values

    def _scaled(self, start: Sequence[int], size: Sequence[int]) -> Tensor:
        """Returns a part of a float8 weight in float32, multiplied by its scales."""
        # DeepSeek-V3, inference/kernel.py, weight_dequant: each block times its scale.
        assert self.scales is not None
        first = [s // b for s, b in zip(start, self.block, strict=True)]
        ends = [-(-(s + n) // b) for s, n, b in zip(start, size, self.block, strict=True)]
        counts = [end - begin for begin, end in zip(first, ends, strict=True)]
        factors = self.scales._box(first, counts).float()
        for axis, block in enumerate(self.block):  # the part may begin and end inside a block
            factors = factors.repeat_interleave(block, axis)
            factors = factors.narrow(axis, start[axis] - first[axis] * block, size[axis])
        return self._box(start, size).float() * factors

    def skeleton(self) -> Tensor:
        """Returns a tensor of its shape on the meta device."""
        return torch.empty(self.shape, device="meta")


@dataclass(frozen=True)
class StoredWeights:
    """Contents of a folder's files, under the names that transformers uses."""

    tensors: Mapping[str, StoredTensor]
    ahead: tuple[str, ...] = ()  # left out: tensors of multi-token prediction
    frequencies: tuple[StoredTensor, ...] = ()  # left out: rotary frequencies

    def formats(self) -> NumberFormats:
        """Returns the formats for saving the weights again; float8 becomes bfloat16."""
        sizes: Counter[torch.dtype] = Counter()
        by_name = {}
        for name, tensor in self.tensors.items():
            if tensor.dtype in _FORMATS or tensor.scales is not None:
                by_name[name] = _FORMATS.get(tensor.dtype, torch.bfloat16)
                sizes[by_name[name]] += math.prod(tensor.shape)
        most = sizes.most_common(1)[0][0] if sizes else None
        return NumberFormats(most, {name: kind for name, kind in by_name.items() if kind != most})

    def notes(self) -> Iterator[str]:
        """Returns a sentence for each kind of tensor that isn't read unchanged."""
        if self.ahead:
            yield (
                f"{len(self.ahead)} tensors of multi-token prediction ({self.ahead[0]} is the "
                "first) are neither trained nor saved; the saved config counts none"
            )
        scaled = sum(tensor.scales is not None for tensor in self.tensors.values())
        if scaled:
            yield f"{scaled} weights in block-scaled float8 are read as numbers times their scales"


def read_weights(folder: Path, config: PreTrainedConfig) -> StoredWeights:
    """Returns the folder's weights, from the headers of its files.

    Raises:
        InputError: no complete files, tensors of an adapter, or layers that the config
            doesn't count. Also a number format that can't be trained, or two tensors of one
            name.
    """
    named: dict[str, StoredTensor] = {}
    for tensor in _stored(folder):
        name = own_name(tensor.name)
        if _ADAPTED.search(name):
            raise InputError(
                f"the weights of {folder} hold tensors of an adapter ({tensor.name}): merge it "
                "into the weights with the tool that trained it, and give the merged folder"
            )
        if name in named:
            raise InputError(
                f"the weights of {folder} hold {name} twice, as {named[name].name} and "
                f"{tensor.name}: remove one of the two"
            )
        named[name] = tensor
    ahead = _ahead(folder, named, config)
    frequencies = tuple(t for n, t in named.items() if n.endswith("rotary_emb.inv_freq"))
    trunk = {n: t for n, t in named.items() if n not in ahead and not _ROTARY.search(n)}
    return StoredWeights(_with_scales(folder, trunk), tuple(sorted(ahead)), frequencies)


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files with the folder's weights.

    Raises:
        InputError: there are none, or two sets of them. Or one that the index names is missing,
            damaged or cut off.
    """
    if (folder / WEIGHTS).is_file():
        files = [folder / WEIGHTS]
        _refuse_second_set(folder)
    elif (folder / INDEX).is_file():
        files = _indexed_files(folder)
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise InputError(
                f"{folder} lacks {len(missing)} of {len(files)} weight files named in {INDEX}, "
                f"the first is {missing[0]}: copy or download the folder again"
            )
    elif any(folder.glob("pytorch_model*.bin")):
        raise InputError(
            f"{folder} has its weights as pytorch_model.bin, a pickle that can run code when read: "
            f"convert it once with `hasten checkpoint convert {folder} -o NEW_FOLDER` and give "
            "the new folder"
        )
    else:
        raise InputError(
            f"{folder} has no {WEIGHTS}: give a folder with weights or start from scratch"
        )
    for file in files:
        _open(file)
    return files


def _refuse_second_set(folder: Path) -> None:
    """Raises InputError if the index names other files than the single one.

    A model that is saved again in more or fewer files leaves the former ones in its folder.
    """
    files: list[Path] = []
    with suppress(InputError):  # an unused index
        files = _indexed_files(folder) if (folder / INDEX).is_file() else []
    others = [file.name for file in files if file.name != WEIGHTS and file.is_file()]
    if others:
        raise InputError(
            f"{folder} has two sets of weights: {WEIGHTS}, and {len(others)} files that {INDEX} "
            f"names, the first is {others[0]}. Remove the older set; the index belongs to the "
            "second one"
        )


def _indexed_files(folder: Path) -> list[Path]:
    """Returns the files in the index of a folder.

    Raises:
        InputError: the index has no map of tensors to files, or one of these is elsewhere.
    """
    index = folder / INDEX
    named = read_json_object(index, "model's index").get("weight_map")
    if not isinstance(named, dict) or not named:
        raise InputError(
            f"{index}: weight_map is not an object of tensors and their files; copy or download "
            "the folder again"
        )
    # In the hub's cache the files are links to another folder.
    files = {str(n): path_inside(folder, n, str(index), follow_links=True) for n in named.values()}
    return [files[name] for name in sorted(files)]


def is_block_scaled(quantization: Mapping[str, Any]) -> bool:
    """Returns True for float8 with a scale for each block of a weight."""
    block = quantization.get("weight_block_size")
    return quantization.get("quant_method") == "fp8" and _is_block(block)


def _is_block(block: Any) -> bool:
    return (
        isinstance(block, list | tuple)
        and len(block) == 2
        and all(isinstance(n, int) and n > 0 for n in block)
    )


def _open(file: Path) -> Any:
    """Opens the file and reads its header; raises InputError if it is cut or not safetensors."""
    from safetensors import SafetensorError, safe_open

    first_bytes(file)
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError, MemoryError) as error:
        raise InputError(
            f"{file} is damaged or cut off ({error}): copy or download it again"
        ) from error


def _stored(folder: Path) -> Iterator[StoredTensor]:
    for path in weight_files(folder):
        file = _open(path)
        for name in file.keys():  # noqa: SIM118  # it isn't a mapping
            part = file.get_slice(name)
            yield StoredTensor(file, name, tuple(part.get_shape()), part.get_dtype())


def own_name(name: str) -> str:
    """Returns the name without wrapper prefixes; transformers adds a missing ``model.``."""
    name = _WRAPPERS.sub("", name).removeprefix("base_model.model.")
    while name.startswith(("model.model.", "model.lm_head.")):
        name = name.removeprefix("model.")
    return name


def _ahead(folder: Path, named: Mapping[str, Any], config: PreTrainedConfig) -> set[str]:
    """Returns the tensors of multi-token prediction, in separate layers or after the last."""
    count = config.get_text_config().num_hidden_layers
    behind: dict[int, list[str]] = {}
    for name in named:
        if (match := _LAYER.match(name)) and int(match[1]) >= count:
            behind.setdefault(int(match[1]), []).append(name)
    for layer, names in behind.items():
        if not any(_AHEAD_PARTS & set(name.split(".")) for name in names):
            raise InputError(
                f"the weights of {folder} hold layer {layer} ({names[0]}) and its config.json has "
                f"num_hidden_layers {count}: give the config and the weights of the same model"
            )
    ahead_names = {name for name in named if _AHEAD.match(name)}
    return ahead_names.union(*behind.values())


def _with_scales(folder: Path, named: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns the tensors, float8 weights together with their scales."""
    scales = {n.removesuffix(_SCALES) + ".weight": t for n, t in named.items() if _SCALES in n}
    tensors = {name: tensor for name, tensor in named.items() if _SCALES not in name}
    block = None
    if scales:
        config_json = read_json_object(folder / "config.json", "model's config")
        block = (config_json.get("quantization_config") or {}).get("weight_block_size")
        if not _is_block(block):
            raise InputError(
                f"the weights of {folder} have block scales ({_SCALES[1:]}) and its config.json "
                "names no weight_block_size: add the quantization_config of the published model"
            )
    for name, tensor in tensors.items():
        weight_scales = scales.pop(name, None)
        if weight_scales is not None and block is not None:
            blocks = tuple(-(-n // b) for n, b in zip(tensor.shape, block, strict=False))
            if tensor.dtype != _FLOAT8 or len(tensor.shape) != 2 or weight_scales.shape != blocks:
                raise InputError(
                    f"{tensor.name} of {folder} is {tensor.dtype} {list(tensor.shape)} with scales "
                    f"{list(weight_scales.shape)}, which blocks of {list(block)} don't fit: "
                    "convert the weights to bfloat16 first"
                )
            tensors[name] = replace(tensor, scales=weight_scales, block=(block[0], block[1]))
        elif tensor.dtype not in _PLAIN:
            raise InputError(
                f"the weights of {folder} are quantised ({tensor.name} is {tensor.dtype}) and "
                "can't be trained as they are: convert them to bfloat16 first"
            )
    if scales:
        raise InputError(
            f"the weights of {folder} have scales without a weight ({next(iter(scales))}): copy or "
            "download the folder again"
        )
    return tensors
