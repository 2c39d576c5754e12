"""Recipe keys that are short forms of techniques: checkpoints, layout, deepspeed.

They are moved into the plan when a recipe is read. The resolved recipe, a plan's hash
and an experiment therefore use only the plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hasten.core.plan import name_and_settings, name_of
from hasten.core.slot import Slot
from hasten.core.technique import Technique
from hasten.formatting import did_you_mean
from hasten.machine import environment, host
from hasten.parts.distributed.deepspeed_config import (
    MappedConfig,
    TrainerSettings,
    read_config,
    read_settings,
)
from hasten.techniques import CATALOGUE

# ``checkpoint_every`` and ``checkpoint_dir``: settings of the technique ``checkpoints``.

NAME = "checkpoints"


def with_checkpoint_keys(values: Mapping[str, Any], plan: list[Any]) -> dict[str, Any]:
    """Returns the recipe's values with the two keys moved into ``plan``.

    Raises:
        ValueError: a key has an invalid value or no effect.
    """
    every, folder = values.get("checkpoint_every"), values.get("checkpoint_dir")
    if every is not None and every != "dynamic" and not (type(every) is int and every >= 1):
        raise ValueError(f"checkpoint_every is {every!r}; give dynamic, or a number of steps")
    if folder is not None and not (isinstance(folder, str) and folder):
        raise ValueError(f"checkpoint_dir is {folder!r}; give a folder or an address")
    index = next((i for i, entry in enumerate(plan) if name_of(entry) == NAME), None)
    if every is not None:
        if index is not None:
            raise ValueError(
                "checkpoint_every and checkpoints in the plan both set when to save; keep one"
            )
        plan, index = [*plan, {NAME: {"interval": every}}], len(plan)
    if folder is not None:
        if index is None:
            raise ValueError(
                "checkpoint_dir has no effect: set checkpoint_every, or put checkpoints into plan"
            )
        _, settings = name_and_settings(plan[index])
        plan = [*plan[:index], {NAME: {**settings, "folder": folder}}, *plan[index + 1 :]]
    return {**values, "plan": plan, "checkpoint_every": None, "checkpoint_dir": None}


def read_resume(setting: Any) -> Any:
    """Checks ``resume``: auto, never, or a path with a slash; another word is likely a mistake."""
    if setting in ("auto", "never") or (isinstance(setting, str) and "/" in setting):
        return setting
    raise ValueError("give auto, never, or the path of a checkpoint, such as ./step-00000100")


# ``layout``: the distribution of the model over ranks.
#
#     layout: fsdp2                        a technique by its name
#     layout: {fsdp2: {reshard: false}}    the same with settings
#     layout: {dp: 2, tp: 2}               sizes of a mesh: the technique hybrid

AXES = ("dp", "shard", "tp", "pp", "ep")


def with_layout_key(values: Mapping[str, Any], plan: list[Any]) -> dict[str, Any]:
    """Returns the recipe's values with layout and checkpoint keys moved into ``plan``.

    Raises:
        ValueError: an unknown layout or axis; or an error of ``with_checkpoint_keys``.
    """
    layout = values.get("layout")
    folded = with_checkpoint_keys(values, plan if layout is None else [*plan, _entry(layout)])
    return {**folded, "layout": None}


def _entry(layout: Any) -> Any:
    """Returns the plan's entry for a layout."""
    # Imported here, because it loads torch.
    from hasten.techniques.layout.hybrid import Hybrid

    layouts = tuple(kind.name() for kind in catalogue() if kind.slot is Slot.LAYOUT)
    settings = tuple(field.name for field in dataclasses.fields(Hybrid))
    if isinstance(layout, str):
        _check(layout.lower().replace("-", "_"), layouts, "layout", "layouts")
        return layout
    if not isinstance(layout, Mapping) or not layout:
        raise ValueError(
            f"layout is {layout!r}; give a name ({', '.join(layouts)}) or sizes: {{dp: 2, tp: 2}}"
        )
    names = [str(key) for key in layout]
    if len(names) == 1 and names[0].lower().replace("-", "_") in layouts:
        return dict(layout)
    for name in names:
        _check(name, settings, "layout's", "sizes", shown=AXES)
    for name in AXES:
        size = layout.get(name, 1)
        if type(size) is not int or size < 1:
            raise ValueError(f"layout's {name} is {size!r}; it is a number of ranks, at least 1")
    return {Hybrid.name(): dict(layout)}


def _check(
    name: str, choices: tuple[str, ...], whose: str, what: str, shown: tuple[str, ...] = ()
) -> None:
    if name not in choices:
        hint = did_you_mean(name, choices) or f" ({what}: {', '.join(shown or choices)})"
        raise ValueError(f"{whose} {name!r} isn't known{hint}")


# ``deepspeed``: the name or contents of a ds_config.json, converted into settings and techniques.
#
# The resolved recipe doesn't need the file. The recipe's own keys may repeat the file's settings,
# but not contradict them. ``hasten check --ds-config FILE`` shows the use of each key.

ACCUMULATE, SIZE = "gradient_accumulation", "micro_batch_size"
NAMES = {
    "batch": "global_batch_size",
    **{n: n for n in ("learning_rate", "weight_decay", "lr_schedule", "warmup_steps")},
    "betas": "adam_betas",
    **{name: name for name in ("max_grad_norm", "min_lr_ratio")},
}


def with_deepspeed(values: Mapping[str, Any], plan: list[Any]) -> dict[str, Any]:
    """Returns the recipe's values with the file's settings, and its techniques in ``plan``.

    Raises:
        ValueError: the file can't be used, a key isn't supported, or file and recipe differ.
    """
    config: Any = values["deepspeed"]
    file = "deepspeed"
    if isinstance(config, str):
        file = config
        config = Path(file)
    elif not isinstance(config, Mapping):
        raise ValueError(f"deepspeed is {config!r}; give a ds_config.json, or what one holds")
    mapped_config = meaning_of(config, values, plan)
    if mapped_config.refused:
        row = mapped_config.refused[0]
        raise ValueError(f"{file}: {row.key}: {row.explanation}")
    merged = _merged(values, mapped_config, file)
    more = [entry for entry in techniques_of(mapped_config, values) if entry not in plan]
    names = {name_of(entry) for entry in plan}
    twice = next((entry for entry in more if name_of(entry) in names), None)
    if twice is not None:
        raise ValueError(f"{file} requests {twice} and the plan has {name_of(twice)} too; keep one")
    return {**merged, "plan": [*plan, *more], "deepspeed": None}


def beside_deepspeed(values: Mapping[str, Any], plan: list[Any]) -> dict[str, Any]:
    """Returns the recipe's values with the settings of DeepSpeed's file in the plan, if any.

    Raises:
        ValueError: as for ``with_deepspeed``.
    """
    entry = next((e for e in plan if name_of(e).replace("_", "") == "deepspeed"), None)
    file = _setting(entry, "config")
    if not isinstance(file, str) or not file:
        return dict(values)
    mapped_config = meaning_of(Path(file), values, plan)
    merged = _merged(values, mapped_config, file)
    if mapped_config.micro_batch is None or _micro_batch(plan) is not None:
        return merged
    return {**merged, "plan": [*plan, {ACCUMULATE: {SIZE: mapped_config.micro_batch}}]}


def meaning_of(
    config: Path | Mapping[str, Any], values: Mapping[str, Any], plan: list[Any]
) -> MappedConfig:
    """Returns the settings of a DeepSpeed file or its contents, for a recipe's ranks and batch."""
    return read_settings(
        read_config(config) if isinstance(config, Path) else config,
        TrainerSettings(
            world=world_of(values),
            batch=values.get("global_batch_size"),
            micro_batch=_micro_batch(plan),
        ),
    )


def techniques_of(mapped_config: MappedConfig, values: Mapping[str, Any]) -> list[Any]:
    """Returns plan entries for the file's settings, on the available ranks and device."""
    entries: list[Any] = []
    if mapped_config.micro_batch is not None:
        entries.append({ACCUMULATE: {SIZE: mapped_config.micro_batch}})
    if mapped_config.recompute:
        entries.append("activation_checkpointing")
    if mapped_config.precision == "bf16":
        entries.append("bf16_master_weights")
    elif mapped_config.precision == "fp16":
        settings = {
            "initial_scale": mapped_config.initial_scale,
            "growth_interval": mapped_config.scale_window,
        }
        entries.append({"autocast": {"dtype": "fp16", **settings}})
    if mapped_config.stage and world_of(values) > 1:  # one rank has nothing to shard
        # On a processor all state is in host memory anyway.
        on_gpu = values.get("device", "auto") != "cpu" and host.default_device() != "cpu"
        settings = {
            "reshard": mapped_config.stage == 3,
            "offload": mapped_config.offload and on_gpu,
        }
        entries.append({"fsdp2": settings})
    return entries


def _merged(values: Mapping[str, Any], mapped_config: MappedConfig, file: str) -> dict[str, Any]:
    merged = dict(values)
    for name, setting in settings_of(mapped_config).items():
        recipe_setting = merged.get(name)
        if recipe_setting is not None and recipe_setting != setting:
            raise ValueError(
                f"{file} sets {name} to {setting}, the recipe to {recipe_setting}; keep one"
            )
        merged[name] = setting
    return merged


def settings_of(mapped_config: MappedConfig) -> dict[str, Any]:
    """Returns the recipe's keys that the file decides."""
    settings = {
        NAMES[key]: setting for key, setting in mapped_config.settings.items() if key in NAMES
    }
    return settings | ({"max_grad_norm": None} if mapped_config.settings.get("no_clipping") else {})


def world_of(values: Mapping[str, Any]) -> int:
    """Returns the launcher's number of ranks, or the number that the recipe starts."""
    launched = environment.world().size
    requested = values.get("nproc", 1)
    return launched if launched > 1 or type(requested) is not int else max(requested, 1)


def _micro_batch(plan: list[Any]) -> int | None:
    entry = next((entry for entry in plan if name_of(entry) == ACCUMULATE), None)
    size = _setting(entry, SIZE)
    return size if type(size) is int and size > 0 else None


def _setting(entry: Any, name: str) -> Any:
    """Returns a setting of a plan's entry; None if it has none."""
    return None if entry is None else name_and_settings(entry)[1].get(name)


def catalogue() -> tuple[type[Technique], ...]:
    """Returns all techniques, for packages that don't import ``hasten.techniques``."""
    return CATALOGUE
