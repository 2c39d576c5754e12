"""LoRA on the right modules of every architecture, and a table of adapted modules.

The usual q/k/v/o_proj miss most of latent attention without a message. DeepSeek-V3 has
only o_proj of the four, V2-Lite only q_proj and o_proj. The others are q_a_proj,
q_b_proj, kv_a_proj_with_mqa and kv_b_proj. So this module resolves targets to full
module names, by the position of a projection and not by its name. A target without any
match is an error.

Three kinds of modules are never adapted:

- the head, because fused losses read its weight directly
- a router, because its small changes send tokens to other experts
- the indexer of DeepSeek-V3.2 and V4, which only chooses keys: it gets no gradient in
  transformers. If it learns (technique ``indexer_loss``), it does so as a whole, and an adapter's
  files hold it as PEFT's ``modules_to_save``.

Routed experts (one fused tensor for all) are left out unless a target is ``experts``.

Other trainers pass their names to PEFT, which means other weights by the same words. In a
mixture of experts its ``all-linear`` and its ``gate_proj``, ``up_proj`` and ``down_proj`` are
the routed experts, and not the dense and shared layers. Imported recipes therefore let PEFT
resolve the names (``resolver``).
"""

from __future__ import annotations

import math
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import torch
from torch import Tensor, nn

from hasten.errors import InputError
from hasten.foreign_files import read_json_object, unwritable_character
from hasten.formatting import number
from hasten.models.load import quiet
from hasten.models.presets import PRESETS
from hasten.models.weights import ADAPTER
from hasten.parts.nn.causal_lm import is_indexer
from hasten.parts.nn.late_weights import (
    MARK,
    LateWeight,
    is_late,
    late_weight,
    read_now,
    stand_ins,
    values_of,
)
from hasten.parts.nn.new_weights import seeded
from hasten.parts.nn.quantised import (
    Kind,
    QuantisedLinear,
    is_plain_linear,
    quantise_linears,
    rounded,
)

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel

ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
LARGEST_RANK: Final = 1 << 16
ATTENTION: Final = "self_attn"
EXPERTS: Final = "experts"
ALL_LINEAR: Final = "all-linear"
Resolver = Literal["hasten", "peft", "linear_names"]
RESOLVERS: Final = get_args(Resolver)
_BARE: Final = (
    "LoRA on routed experts, routers or their dense layers has neither dropout nor DoRA: switch "
    "both off, or list other targets"
)
# In a model with routed experts, peft 0.21 takes any module with this name for an expert of an
# older transformers and adapts the experts instead. As a tensor's name it isn't changed.
_MISTAKEN_FOR_EXPERTS: Final = frozenset({"gate_proj", "up_proj", "down_proj"})
# PEFT warns that its own patterns for fused experts match no module, but applies them.
_PATTERNS: Final = r"The following (rank|alpha)_pattern keys"
_ROUTERS: Final = frozenset({"gate", "router", "shared_expert_gate"})
SCORE: Final = "score"  # the head of transformers' reward models
_LAYER_NUMBER: Final = re.compile(r"\.\d+(?=\.|$)")


def _is_rank(setting: object) -> bool:
    return type(setting) is int and 1 <= setting <= LARGEST_RANK


def _is_scale(setting: object, most: float = math.inf) -> bool:
    return 0 < (number(setting) or 0.0) <= most


def _is_names(setting: object) -> bool:
    return isinstance(setting, list) and all(isinstance(name, str) for name in setting)


def _is_plain(setting: object) -> bool:
    """Returns True for a name, also with ``^`` and ``$``."""
    plain = r"(\^|\.\*\\\.)?([\w.]|\\[.])+\$?"
    return isinstance(setting, str) and re.fullmatch(plain, setting) is not None


def _is_pattern(setting: object, is_right: Callable[[object], bool]) -> bool:
    """Returns True for names with valid values; peft takes the names for regular expressions."""
    return isinstance(setting, dict) and all(
        _is_plain(k) and is_right(v) for k, v in setting.items()
    )


# Supported keys of an adapter's config, the description of each, and its check. Every other key
# must be off, because some name modules to import or other ways to change a base.
_SWITCH: Final = ("true or false", lambda setting: setting is True)
_A_RANK: Final = f"a whole number from 1 to {LARGEST_RANK:,}"
_ADAPTER_KEYS: Final[Mapping[str, tuple[str, Callable[[object], bool]]]] = {
    "r": (_A_RANK, _is_rank),
    "rank_pattern": (f"names, each with {_A_RANK}", lambda v: _is_pattern(v, _is_rank)),
    "lora_alpha": ("a number above 0", _is_scale),
    "alpha_pattern": ("names, each with a number above 0", lambda v: _is_pattern(v, _is_scale)),
    "lora_dropout": ("from 0 to 1", lambda v: _is_scale(v, 1.0)),
    # A foreign regular expression can run for years.
    "target_modules": ("a list of names", lambda v: _is_names(v) or v == ALL_LINEAR),
    "target_parameters": ("a list of names", _is_names),
    "exclude_modules": ("a list of names", _is_names),
    "modules_to_save": ("a list of names", _is_names),
    "layers_to_transform": (
        "a list of whole numbers",
        lambda v: all(type(n) is int for n in (v if isinstance(v, list) else [v])),
    ),
    "layers_pattern": ("a name", _is_plain),
    "bias": ("none, all or lora_only", lambda v: v in ("none", "all", "lora_only")),
    "task_type": ("CAUSAL_LM", lambda v: v == "CAUSAL_LM"),
    # Others compute a new base before anything is loaded.
    "init_lora_weights": ("true, false or gaussian", lambda v: v is True or v == "gaussian"),
    **dict.fromkeys(("use_rslora", "use_dora", "lora_bias", "fan_in_fan_out"), _SWITCH),
}
# Keys that describe an adapter's origin, or belong to a feature that is off.
_DESCRIBING: Final = frozenset(
    {
        *("peft_type", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
        *("auto_mapping", "megatron_core", "qalora_group_size"),
    }
)


@dataclass(frozen=True)
class AdaptedRow:
    """Adapted modules that differ only in their layer's number."""

    modules: str  # full name with * for the layer, such as model.layers.*.self_attn.q_a_proj
    count: int
    rank: int
    parameters: int  # trainable ones of all these modules


def lora_targets(model: PreTrainedModel, targets: str | Sequence[str] = "auto") -> list[str]:
    """Returns full names of the linear modules and fused expert tensors that targets select.

    ``auto`` and ``attention``: every projection of attention, whatever its architecture calls it,
    but the indexer's, which don't learn.
    ``all-linear``: those and the dense and shared-expert projections; no head, no router, no routed
    experts. A list holds full names or consecutive parts of them, as ``q_proj``,
    ``self_attn.q_proj``, ``layers.3`` or ``shared_experts``; routed experts need ``experts`` or
    ``experts.down_proj``. Another text is a regular expression that matches whole full names, as in
    peft. Raises InputError for a target that finds nothing, listing what exists.
    """
    linears = _adaptable_linears(model)
    if not linears:
        raise InputError(
            f"a {model.config.model_type} model has no linear layers to adapt: set "
            "finetuning_type: full, or choose another model"
        )
    if isinstance(targets, str):
        if targets == ALL_LINEAR:
            return linears
        if targets not in ("auto", "attention"):
            return _matched(linears, _expert_tensors(model), targets)
        projections = [name for name in linears if name.split(".")[-2:-1] == [ATTENTION]]
        if not projections:
            raise InputError(
                f"a {model.config.model_type} model has no {ATTENTION} to adapt: list names from "
                f"{_kinds(linears)}"
            )
        return projections
    return _listed(linears, _expert_tensors(model), targets)


def add_lora(
    model: PreTrainedModel,
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    targets: str | Sequence[str] = "auto",
    seed: int = 0,
    rslora: bool = False,
    dora: bool = False,
    base: Kind | None = None,
    resolver: Resolver = "hasten",
) -> PeftModel:
    """Freezes the model and adds low-rank updates to its targets (LoRA, arXiv 2106.09685).

    The update of a weight is ``alpha / rank * B @ A``, or ``alpha / sqrt(rank)`` with
    ``rslora`` (arXiv 2312.03732).

    The option ``dora`` learns each row's length separately
    (arXiv 2402.09353).

    If ``base`` is set, frozen linear layers, except head and router, are stored in int8 or
    nf4 (QLoRA, arXiv 2305.14314). On the meta device they stay as they are.

    A is drawn from ``seed`` and B is zero, so the adapted model starts as the same
    function. In a half-precision model the adapter is float32. The model is changed in
    place and returned wrapped. The score of a reward model is trained as a whole.

    Args:
        resolver: ``hasten`` reads ``targets`` by `lora_targets`. ``peft`` gives them to PEFT, as
            TRL does. There ``auto`` is PEFT's own list for the architecture. ``linear_names`` is
            the same, with the names of all linear layers in place of ``all-linear``. LLaMA-Factory,
            axolotl and ms-swift do that.

    Raises:
        InputError: impossible numbers; a second adapter; DoRA on a quantised base; names that PEFT
            refuses, or by which it adapts head or embedding. Also dropout or DoRA if LoRA is on
            bare tensors: routed experts, routers, and dense and shared projections of the same
            model. The last ones have no quantised base either.
    """
    from peft import LoraConfig, PeftModel, get_peft_model

    _check_numbers(rank, alpha, dropout)
    if isinstance(model, PeftModel):
        raise InputError("this model carries an adapter already: merge it before adding another")
    names: list[str] = []
    modules: str | list[str] | None
    if resolver == "hasten":
        names = lora_targets(model, targets)
        modules, tensors = _as_peft_takes_them(
            names, _expert_tensors(model), _computing_apart(model)
        )
    else:
        modules, tensors = _as_other_tools_give_them(model, targets, resolver), []
    if base and dora:
        raise InputError(
            f"DoRA measures the base weight in each pass, which {base} keeps in few bits: "
            "switch one of them off"
        )
    config = LoraConfig(
        task_type="SEQ_CLS" if hasattr(model, SCORE) else "CAUSAL_LM",  # PEFT trains the score
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=modules,
        target_parameters=tensors or None,
        use_rslora=rslora,
        use_dora=dora,
    )
    try:
        with quiet(), seeded(seed), warnings.catch_warnings():
            warnings.filterwarnings("ignore", _PATTERNS)
            # By default PEFT draws the weights of a meta model in memory, and discards them.
            on_meta = model.device.type == "meta" and not is_late(model)
            with stand_ins(model):
                adapted: PeftModel = get_peft_model(model, config, low_cpu_mem_usage=on_meta)
    except ValueError as error:
        reason = _BARE if "ParamWrapper" in str(error) else " ".join(str(error).split())
        raise InputError(f"PEFT can't adapt lora_targets {targets!r}: {reason}") from error
    _check_adapted(adapted, names)
    if dora and not on_meta:
        _measure_rows(adapted)
    if base:
        if linear := next((n for n, _, x in _bare_tensors(adapted) if is_plain_linear(x)), None):
            raise InputError(
                f"{linear} is adapted as a bare tensor, which {base} can't keep in few bits: "
                "leave lora_base out, or list targets without it"
            )
        plain = set(_adaptable_linears(adapted)) - _computing_apart(adapted)
        frozen = sorted(name for name in plain if ".lora_" not in name)
        if not on_meta:
            quantise_linears(adapted, frozen, base)
    return adapted


def _measure_rows(model: PeftModel) -> None:
    """Sets DoRA's magnitudes to the lengths of the base weights' rows, in the adapter's format.

    Those of weights that are read later are read later too: a rank reads the rows of its part.
    """
    from peft.tuners.lora import LoraLayer

    layers = [(name, x) for name, x in model.named_modules() if isinstance(x, LoraLayer)]
    for name, layer in layers:
        for part in layer.lora_magnitude_vector.values():
            weight, dtype = layer.get_base_layer().weight, part.weight.dtype
            if (late := late_weight(weight)) is None:
                lengths = torch.linalg.norm(weight.detach().to(dtype), dim=1)
                part.weight = nn.Parameter(lengths)
                continue
            copy = partial(_copy_lengths, late)
            magnitude = LateWeight(name, late.shape[:1], dtype, copy, together=late.together)
            part.weight = nn.Parameter(torch.empty(late.shape[:1], dtype=dtype, device="meta"))
            setattr(part.weight, MARK, magnitude)


def _copy_lengths(weight: LateWeight, start: Sequence[int], part: Tensor) -> None:
    rows = weight.read([start[0], 0], [len(part), weight.shape[1]])
    part.copy_(torch.linalg.norm(rows.to(part.dtype), dim=1))


def merged_weights(model: nn.Module) -> int:
    """Returns the weights of bare tensors that an adapter is added to in each pass.

    PEFT computes their sum for all experts of a layer, whichever tokens come.
    """
    return sum(tensor.numel() for _, tensor, _ in _bare_tensors(model))


def merge(model: PeftModel) -> PreTrainedModel:
    """Adds the adapter to the base model's weights and removes the adapter.

    Raises InputError for a quantised base, because its few bits can't hold the sum.
    """
    if quantised_layers(model):
        raise InputError(
            "an adapter can't be merged into a quantised base: few bits would round it away. "
            "Attach it to the full weights with with_adapter(), and merge it there"
        )
    return model.merge_and_unload()


def merged_values(base: PreTrainedModel, adapted: PeftModel) -> Callable[[Tensor], Tensor]:
    """Returns a function that returns a weight of ``base`` with the adapter added to it.

    Args:
        base: a model with late weights.
        adapted: another one of the same, with the adapter.
    """
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper

    layers: dict[str, LoraLayer] = {}
    for name, layer in adapted.named_modules():
        if isinstance(layer, LoraLayer):
            own_name = _adapted_name(name, layer)
            is_bare = isinstance(layer, ParamWrapper) and layer.parameter_name != "weight"
            layers[own_name if is_bare else f"{own_name}.weight"] = layer
    by_weight = {id(p): layers[n] for n, p in base.named_parameters() if n in layers}

    # Modules that learnt as a whole; PEFT's wrapper of one has the former weights too.
    saved = {
        re.sub(r"^base_model\.model\.|\.modules_to_save\.[^.]+", "", name): weight
        for name, weight in adapted.named_parameters()
        if ".modules_to_save." in name
    }
    replaced = {id(p): saved[n] for n, p in base.named_parameters() if n in saved}

    def values(weight: Tensor) -> Tensor:
        if (learnt := replaced.get(id(weight))) is not None:
            return learnt.detach()
        if (layer := by_weight.get(id(weight))) is None:
            return values_of(weight)
        put_back = read_now(layer)
        layer.merge()
        by_name = isinstance(layer, ParamWrapper)
        merged: Tensor = layer.get_param() if by_name else layer.get_base_layer().weight
        layer.merged_adapters.clear()
        put_back()
        return merged.detach()

    return values


def round_base(model: PreTrainedModel, base: Kind) -> None:
    """Rounds the weights in place that a quantised base rounds, as in training."""
    for name in set(_adaptable_linears(model)) - _computing_apart(model):
        weight = model.get_submodule(name).weight
        weight.data = rounded(weight.data, base)


def with_adapter(model: PreTrainedModel, adapter: Path) -> PeftModel:
    """Returns ``model`` with the saved adapter of a folder on top; nothing is merged.

    Raises:
        InputError: the folder holds no adapter, or one of another model.
    """
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors import safe_open

    config = _adapter_config(adapter)
    try:
        with quiet(), warnings.catch_warnings(), stand_ins(model):
            warnings.filterwarnings("ignore", _PATTERNS)
            warnings.filterwarnings("error", "Found missing adapter keys")  # peft only warns
            adapted: PeftModel = PeftModel.from_pretrained(model, str(adapter), config=config)
        with safe_open(adapter / ADAPTER_WEIGHTS, "pt") as saved:
            # By default peft asks the hub for the size of the base's embedding.
            names = get_peft_model_state_dict(adapted, save_embedding_layers=False)
            strange = sorted(set(saved.keys()) - set(names))
    except Exception as error:  # any error of peft about a config or a file
        reason = str(error).split("\n")[0] or type(error).__name__
        raise InputError(f"{adapter} is no adapter of this model: {reason}") from error
    if strange:  # peft drops them silently
        raise InputError(
            f"{adapter} is no adapter of this model, which has no place for {strange[0]} and "
            f"{len(strange) - 1} others: give the base that it was trained on"
        )
    return adapted


def _adapter_config(adapter: Path) -> LoraConfig:
    """Returns the config of a folder with a LoRA adapter in safetensors.

    Left to itself, peft reads pickles and builds adapters of any kind and size. It imports modules
    that a config names, and takes its names for regular expressions.

    Raises:
        InputError: a file is missing, or the config needs or holds anything else.
    """
    from peft import LoraConfig

    if not (adapter / ADAPTER).is_file():
        raise InputError(f"{adapter} holds no adapter: give the folder of a finished LoRA run")
    if not (adapter / ADAPTER_WEIGHTS).is_file():
        raise InputError(
            f"{adapter} has no {ADAPTER_WEIGHTS}: adapters are read from safetensors alone; "
            f"`hasten checkpoint convert {adapter} -o NEW_FOLDER` writes it from a pickle"
        )
    config = read_json_object(adapter / ADAPTER, "adapter's config")
    if config.get("peft_type") != "LORA":
        raise InputError(
            f"{adapter / ADAPTER} has peft_type {str(config.get('peft_type'))[:40]!r}; "
            "supported: LORA"
        )
    read: dict[str, Any] = {}
    for key, setting in config.items():
        if setting in (None, False, "", [], {}) or key in _DESCRIBING:
            continue
        expected, is_right = _ADAPTER_KEYS.get(key, ("left out: hasten doesn't read it", None))
        if is_right is None or not is_right(setting):
            raise InputError(
                f"{adapter / ADAPTER} has {key} {str(setting)[:40]!r}; it must be {expected}"
            )
        read[key] = setting
    if "r" not in read:
        raise InputError(f"{adapter / ADAPTER} has no rank r; copy the adapter again")
    return LoraConfig(**{**read, "task_type": "CAUSAL_LM"})


def other_base(adapter: Path, source: str) -> str:
    """Returns the base that a saved adapter names, if it isn't ``source``; else an empty string.

    Of a folder the last two parts of its path count: trees may move.
    """
    named = read_json_object(adapter / ADAPTER, "adapter's config").get("base_model_name_or_path")
    if not named or source in PRESETS or named == source:
        return ""
    name = str(named)
    if unwritable_character(name) is None:
        one, other = (Path(each).resolve().parts[-2:] for each in (name, source))
        name = "" if one == other else name
    return name


def quantised_layers(model: nn.Module) -> int:
    """Returns the number of quantised frozen layers."""
    return sum(isinstance(module, QuantisedLinear) for module in model.modules())


def adapted_table(model: nn.Module) -> list[AdaptedRow]:
    """Returns rows of adapted modules, one per kind and rank, in the model's order."""
    from peft.tuners.lora import LoraLayer

    groups: dict[tuple[str, int], list[int]] = defaultdict(list)
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            parts = (layer.lora_A, layer.lora_B, layer.lora_magnitude_vector)
            size = sum(p.numel() for part in parts for p in part.parameters())
            kind = _LAYER_NUMBER.sub(".*", _adapted_name(name, layer))
            groups[kind, layer.r[layer.active_adapters[0]]].append(size)
    return [
        AdaptedRow(kind, len(sizes), rank, sum(sizes)) for (kind, rank), sizes in groups.items()
    ]


def parameter_counts(model: nn.Module) -> tuple[int, int]:
    """Returns (trainable, all) parameters of the model with adapters; tied ones count once."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(size for size, learns in sizes if learns), sum(size for size, _ in sizes)


def _adaptable_linears(model: PreTrainedModel) -> list[str]:
    head = model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module is not head
        and name.split(".")[-1] not in (*_ROUTERS, SCORE)
        and not is_indexer(name)
    ]


def _expert_tensors(model: PreTrainedModel) -> list[str]:
    """Returns fused expert weights, each (experts, out, in), by their full parameter names."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() == 3 and name.split(".")[-2:-1] == [EXPERTS]
    ]


def _listed(linears: list[str], experts: list[str], targets: Sequence[str]) -> list[str]:
    chosen: set[str] = set()
    for target in targets:
        pool = [*linears, *experts] if EXPERTS in target.split(".") else linears
        matches = [name for name in pool if f".{target}." in f".{name}."]
        if not matches:
            raise InputError(
                f"the target {target!r} finds nothing to adapt: choose from "
                f"{_kinds([*linears, *experts])}"
            )
        chosen.update(matches)
    if not chosen:
        raise InputError("the list of targets is empty: name at least one, or write auto")
    return [name for name in [*linears, *experts] if name in chosen]


def _matched(linears: list[str], experts: list[str], expression: str) -> list[str]:
    try:
        matches = [name for name in [*linears, *experts] if re.fullmatch(expression, name)]
    except re.error as error:
        raise InputError(f"targets {expression!r} isn't a regular expression: {error}") from error
    if not matches:
        raise InputError(
            f"targets {expression!r} matches no full name such as {linears[0]}: write auto, "
            f"attention or all-linear, or list names from {_kinds([*linears, *experts])}"
        )
    return matches


def _check_numbers(rank: int, alpha: float, dropout: float) -> None:
    if rank < 1:
        raise InputError(f"a LoRA rank of {rank} adapts nothing: give at least 1")
    if alpha <= 0:
        raise InputError(f"a LoRA alpha of {alpha} switches the adapter off: give more than 0")
    if not 0 <= dropout < 1:
        raise InputError(f"a LoRA dropout of {dropout} is not in [0, 1): 0 and 0.05 are usual")


def _kinds(names: Sequence[str]) -> str:
    """Returns the shortest names for the modules of the list, sorted."""
    kinds = set()
    for name in names:
        parts = name.split(".")
        kinds.add(".".join(parts[-2:]) if parts[-2:-1] == [EXPERTS] else parts[-1])
    return ", ".join(sorted(kinds))


def _computing_apart(model: PreTrainedModel) -> set[str]:
    """Returns linear layers with a forward of their own, as V4's grouped projection.

    peft's adapter of a linear layer would answer in another shape; one of the bare weight fits.
    """
    return {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not is_plain_linear(module)
    }


def _as_peft_takes_them(
    names: list[str], experts: list[str], tensor_names: set[str]
) -> tuple[list[str], list[str]]:
    """Returns the names split into modules and tensors, which peft takes separately."""
    modules, tensors = [], []
    for name in names:
        if name in experts:
            tensors.append(name)
        elif name in tensor_names or (experts and name.split(".")[-1] in _MISTAKEN_FOR_EXPERTS):
            tensors.append(f"{name}.weight")
        else:
            modules.append(name)
    return modules, tensors


def _as_other_tools_give_them(
    model: PreTrainedModel, targets: str | Sequence[str], resolver: Resolver
) -> str | list[str] | None:
    """Returns PEFT's ``target_modules``; None is its own list for the architecture."""
    if resolver == "peft" or not (targets == ALL_LINEAR or ALL_LINEAR in [*targets]):
        return None if targets == "auto" else targets if isinstance(targets, str) else [*targets]
    head = model.get_output_embeddings()
    linears = (
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if "Linear" in type(module).__name__ and module is not head and name != SCORE
    )
    listed = [] if isinstance(targets, str) else targets
    return sorted({*linears, *listed} - {ALL_LINEAR})


def _bare_tensors(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, nn.Module]]:
    """Yields tensors that PEFT adapts directly: name, tensor, module.

    By the class's name, so that a model of which PEFT made nothing doesn't import it.
    """
    for name, layer in model.named_modules():
        if type(layer).__name__ == "ParamWrapper":
            wrapper: Any = layer
            yield _adapted_name(name, layer), wrapper.get_param(), wrapper.get_base_layer()


def _check_adapted(model: PeftModel, names: list[str]) -> None:
    """Raises InputError if peft adapted other names, because it rewrites supposedly old targets.

    Without names, PEFT has chosen: then an adapter where it has no effect or doesn't fit is one.
    """
    import peft
    from peft.tuners.lora import LoraLayer

    layers = [(name, x) for name, x in model.named_modules() if isinstance(x, LoraLayer)]
    if not names:
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        own_forms = _computing_apart(model)
        for name, layer in layers:
            if layer in ends or f"{name}.base_layer" in own_forms:
                raise InputError(
                    f"lora_targets adapt {_adapted_name(name, layer)}, where LoRA can't be here: "
                    "hasten's losses read head and embedding directly, and layers of an own form "
                    "answer in another shape. List targets without it"
                )
        return
    wrong = {_adapted_name(name, layer) for name, layer in layers} ^ set(names)
    if wrong:
        raise InputError(
            f"peft {peft.__version__} disagrees on adapting {min(wrong)} and {len(wrong) - 1} "
            "others: adapt attention only, or install the version in the constraints file"
        )


def _adapted_name(name: str, layer: nn.Module) -> str:
    """Returns the name of an adapted module or expert tensor before peft wrapped it."""
    from peft.tuners.lora.layer import ParamWrapper

    bare = name.removeprefix("base_model.model.").replace(".base_layer", "")
    if isinstance(layer, ParamWrapper) and layer.parameter_name != "weight":
        return f"{bare}.{layer.parameter_name}"
    return bare
