"""Writes a model's weights as Hugging Face stores them, a few at a time.

(1) From shapes alone a plan is made: saved names, number formats, files and places in them.
(2) Group by group the weights come to the first rank. A group is what transformers' weight
    conversion needs together, one weight in most cases.
(3) Each group is rounded, converted to its saved names and written at its places.

All ranks of a layout make the same plan, and the others contribute their parts. So the first rank
holds one group besides its own part of the model, and a file needs no buffer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from hasten.machine.lazy_torch import is_dtensor
from hasten.models.weights import INDEX, NumberFormats
from hasten.parts.nn.late_weights import values_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARD_BYTES: Final = 50 * 10**9  # largest file, as transformers' default
_PATTERN: Final = "model{suffix}.safetensors"
_LAYER: Final = re.compile(r".*?\.\d+\.")
# safetensors' names of number formats, in the order in which it places tensors in a file.
_FORMATS: Final = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@runtime_checkable
class GathersWeights(Protocol):
    """A layout that gives the first rank the weights of a model which ranks hold in parts."""

    def all_modules(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context in which ``model`` has every module; those of other ranks have no memory."""

    def full_like(self, weight: Tensor) -> Tensor:
        """Returns a tensor of the full weight's shape and format on the meta device."""

    def gather_weight(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the full weight in ``dtype`` on the first rank's host; all ranks call it.

        The return value of other ranks has no meaning.
        """

    def all_reduce_world(self, values: Tensor) -> Tensor:
        """Returns the elementwise sum over all ranks of a float64 tensor on the host."""


class UnsplitModel:
    """A model that this process holds whole, or reads one weight after the other.

    Args:
        values: returns a weight's values; default: its own, or those that are read later.
    """

    def __init__(self, values: Callable[[Tensor], Tensor] = values_of) -> None:
        self.values = values

    def all_modules(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def full_like(self, weight: Tensor) -> Tensor:
        return torch.empty_like(weight, device="meta")

    def gather_weight(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        return self.values(weight).to("cpu", dtype)

    def all_reduce_world(self, values: Tensor) -> Tensor:
        return values


UNSPLIT: Final = UnsplitModel()


def weight_source(layout: Any) -> GathersWeights:
    """Returns the source of a layout's weights: this process, if it has them all."""
    split = not layout.replicated and isinstance(layout, GathersWeights)
    return layout if split else UNSPLIT


class WeightPlan:
    """The weights of a model as they will be saved; all ranks make it inside ``all_modules``.

    Args:
        formats: rounds weights; if a value doesn't fit (``problems``), none is rounded.

    ``most`` is the format of most weights.
    """

    def __init__(
        self, model: PreTrainedModel, formats: NumberFormats, source: GathersWeights
    ) -> None:
        self._model, self._source = model, source
        self.problems: list[str] = []
        if overflowing := _overflowing(model, formats, source):
            self.problems.append(
                f"{overflowing} has values that {str(formats.most).removeprefix('torch.')} can't "
                "hold, so all weights are saved as they are in memory"
            )
            formats = NumberFormats()
        self.most = formats.most or source.full_like(next(model.parameters())).dtype
        buffers = {name for name, _ in model.named_buffers()}
        self._weights: dict[str, Tensor] = model.state_dict(keep_vars=True)
        state = {}
        for name, weight in self._weights.items():
            full = source.full_like(weight)
            dtype = full.dtype if name in buffers else formats.of(name, full)
            state[name] = full.to(dtype)
        self._state = _without_tied(model, state)
        self.saved = _converted(model, self._state)
        self._groups = _groups(model, self._state, self.saved)

    def gathered(self) -> Iterator[dict[str, Tensor]]:
        """Yields the tensors of each group by saved name, on the first rank's host.

        All ranks iterate to the end; what others get has no meaning.
        """
        for names in self._groups:
            yield {
                name: self._source.gather_weight(self._weights[name], self._state[name].dtype)
                for name in names
            }

    def write(self, groups: Iterator[dict[str, Tensor]], folder: Path) -> None:
        """Writes ``gathered()`` into files of at most ``SHARD_BYTES``, and their index."""
        files = WeightFiles(folder, self.saved)
        parameters = {id(p): self._source.full_like(p).numel() for p in self._model.parameters()}
        files.write_index(sum(parameters.values()))
        for group in groups:
            files.write(_converted(self._model, group))
            group.clear()  # before the next one is gathered
        files.finish()


def _overflowing(model: nn.Module, formats: NumberFormats, source: GathersWeights) -> str:
    """Returns the first weight with a finite value beyond float16's largest, if saved so."""
    if torch.float16 not in {formats.most, *formats.exceptions.values()}:
        return ""
    largest = torch.finfo(torch.float16).max
    names, flags = [], []
    for name, weight in model.named_parameters():
        names.append(name)
        flags.append(0.0)
        if formats.of(name, weight) != torch.float16 or weight.dtype == torch.float16:
            continue
        local = source.values(weight) if isinstance(source, UnsplitModel) else weight.detach()
        local = local.to_local() if is_dtensor(local) else local
        if not local.is_meta:
            flags[-1] = float((local.abs().nan_to_num(0.0, 0.0, 0.0) > largest).any())
    counts = source.all_reduce_world(torch.tensor(flags, dtype=torch.float64)).tolist()
    return next((name for name, count in zip(names, counts, strict=True) if count), "")


def _without_tied(model: PreTrainedModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the state without the names that transformers doesn't save."""
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    return dict(remove_tied_weights_from_state_dict(state, model))


def _converted(model: PreTrainedModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors under their saved names, for example one for each expert."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, dict(state)))


def _groups(
    model: PreTrainedModel, state: Mapping[str, Tensor], saved: Mapping[str, Tensor]
) -> list[list[str]]:
    """Returns the smallest groups of names that are converted as in the full state.

    A weight that can't be converted alone is grouped with its layer, or else with all weights.
    """

    def is_same(names: Sequence[str]) -> bool:
        try:
            converted = _converted(model, {name: state[name] for name in names})
        except Exception:  # transformers' error for a conversion that lacks a weight
            return False
        return sum(t.numel() for t in converted.values()) == sum(
            state[name].numel() for name in names
        ) and all(n in saved and t.shape == saved[n].shape for n, t in converted.items())

    layers: dict[str, list[str]] = {}
    for name in state:
        match = _LAYER.match(name)
        layers.setdefault(match[0] if match else name, []).append(name)
    groups: list[list[str]] = []
    for names in layers.values():
        if all(is_same([name]) for name in names):
            groups += [[name] for name in names]
        elif is_same(names):
            groups.append(names)
        else:
            return [list(state)]
    return groups


class WeightFiles:
    """safetensors files with a place for each tensor, filled in any order."""

    def __init__(self, folder: Path, saved: Mapping[str, Tensor]) -> None:
        from huggingface_hub import split_torch_state_dict_into_shards

        # Converted tensors may be views, and a view has the size of its whole storage.
        sizes = {name: torch.empty_like(t).contiguous() for name, t in saved.items()}
        self._split = split_torch_state_dict_into_shards(
            sizes, filename_pattern=_PATTERN, max_shard_size=SHARD_BYTES
        )
        self._folder, self._saved = folder, sizes
        self._places: dict[str, tuple[Path, int]] = {}
        for file, names in self._split.filename_to_tensors.items():
            self._create(folder / file, names)

    def _create(self, path: Path, names: Sequence[str]) -> None:
        order = list(_FORMATS)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        begin = 0
        for name in sorted(names, key=lambda name: (order.index(self._saved[name].dtype), name)):
            tensor = self._saved[name]
            end = begin + tensor.nbytes
            header[name] = {
                "dtype": _FORMATS[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [begin, end],
            }
            begin = end
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        start = 8 + len(text)
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        with path.open("r+b") as file:
            file.truncate(start + begin)
        for name in names:
            self._places[name] = path, start + header[name]["data_offsets"][0]

    def write_index(self, parameters: int) -> None:
        """Writes the index of several files; one file needs none."""
        if not self._split.is_sharded:
            return
        index = {
            "metadata": {"total_parameters": parameters, **self._split.metadata},
            "weight_map": self._split.tensor_to_filename,
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (self._folder / INDEX).write_text(text, encoding="utf-8")

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Writes tensors at their places."""
        for name, tensor in tensors.items():
            path, start = self._places.pop(name)
            planned = self._saved[name]
            if (tensor.shape, tensor.dtype) != (planned.shape, planned.dtype):
                raise RuntimeError(
                    f"{name} is {tensor.dtype} {list(tensor.shape)} and was planned as "
                    f"{planned.dtype} {list(planned.shape)}"
                )
            if tensor.numel():
                content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
                with path.open("r+b") as file:
                    file.seek(start)
                    file.write(memoryview(content))

    def finish(self) -> None:
        """Raises RuntimeError if a tensor hasn't been written."""
        if self._places:
            raise RuntimeError(f"{len(self._places)} tensors are missing, {min(self._places)} too")
