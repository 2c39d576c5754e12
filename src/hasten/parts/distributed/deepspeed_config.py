"""A DeepSpeed configuration (``ds_config.json``): reads and checks it, fills "auto".

(1) Every key must be a DeepSpeed key. Otherwise an error names the nearest one.
(2) Batch sizes agree with each other, the number of ranks and the trainer's settings.
(3) Each "auto" takes the trainer's value.

DeepSpeed leaves "auto" to its caller. Sizes that follow from the model's width are
those of Transformers' integration. These are buckets of hidden^2 and prefetch of 0.9
hidden^2. Parameters below 10 hidden elements stay on every rank
(https://huggingface.co/docs/transformers/deepspeed). Keys and rules:
https://www.deepspeed.ai/docs/config-json/.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hasten.foreign_files import read_json_object
from hasten.formatting import did_you_mean

# The keys of a DeepSpeed configuration, and how hasten's own trainer treats each.
#
# - honoured: a setting of hasten corresponds to it.
# - ignored: it doesn't affect the result; the text is the reason.
# - refused: it would change the computation, and hasten can't do the same. It counts only if it is
# switched on.
#
# Keys are those of DeepSpeed 0.19 (its ``runtime/*config*.py``) and of the documentation,
# https://www.deepspeed.ai/docs/config-json/.

HONOURED, IGNORED, REFUSED = "honoured", "ignored", "refused"
_KEYS = json.loads(Path(__file__).with_name("deepspeed_keys.json").read_text(encoding="utf-8"))
TOP: Mapping[str, Sequence[str]] = _KEYS["top"]  # (treatment; counterpart or reason) by key
INSIDE: Mapping[str, Mapping[str, Sequence[str]]] = _KEYS["inside"]
OFFLOAD: Mapping[str, Sequence[str]] = _KEYS["offload"]

AUTO = "auto"
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True)
class TrainerSettings:
    """Settings of the trainer, for "auto"; None: not set."""

    world: int = 1
    batch: int | None = None  # examples of one step over all ranks
    micro_batch: int | None = None  # examples of one pass on one rank
    clipping: float | None = None
    learning_rate: float = 2e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 0
    total_steps: int = 1
    hidden: int = 0
    fp16: bool = False
    bf16: bool = False


@dataclass(frozen=True)
class BatchSizes:
    """Examples of a step on all ranks, of a pass on one rank, and passes; None: not set."""

    train: int | None
    micro: int | None
    steps: int | None


def read_config(path: Path) -> dict[str, Any]:
    """Returns the file as a dictionary, with valid DeepSpeed keys only.

    Raises:
        ValueError: no such file, not JSON, an unknown key.
    """
    config = read_json_object(path, "DeepSpeed configuration")
    check_keys(config, str(path))
    return config


def check_keys(config: Mapping[str, Any], source: str = "ds_config") -> None:
    """Raises ValueError at a key that isn't DeepSpeed's, with the nearest valid one."""
    _check(config, TOP, source)
    for name, allowed_keys in INSIDE.items():
        section = config.get(name)
        if section is None:
            continue
        if not isinstance(section, Mapping):
            raise ValueError(f"{source}: {name} is {section!r}; it must be a JSON object")
        _check(section, allowed_keys, f"{source}: {name}")
    zero = config.get("zero_optimization") or {}
    for name in ("offload_optimizer", "offload_param"):
        if isinstance(zero.get(name), Mapping):
            _check(zero[name], OFFLOAD, f"{source}: zero_optimization: {name}")
    stage = zero.get("stage", 0)
    if type(stage) is not int or not 0 <= stage <= 3:
        raise ValueError(f"{source}: zero_optimization: stage is {stage!r}; it is 0, 1, 2 or 3")
    on = [section_enabled(config, name) for name in ("fp16", "bf16")]
    if on == [True, True]:
        raise ValueError(f"{source}: fp16 and bf16 are both enabled; keep one of them")


def _check(section: Mapping[str, Any], allowed_keys: Collection[str], source: str) -> None:
    for key in section:
        if key not in allowed_keys and not is_comment(key):
            raise ValueError(f"{source}: unknown key {key!r}{did_you_mean(key, allowed_keys)}")


def is_comment(key: str) -> bool:
    """Returns True for a key that people use for comments in JSON."""
    return key.startswith("_") or key.lower() in ("comment", "comments")


def section_enabled(config: Mapping[str, Any], name: str) -> bool | str | None:
    """Returns the switch of a section: True, False or "auto"; None without such a section."""
    section = config.get(name)
    if name == "bf16" and section is None:
        section = config.get("bfloat16")
    if not isinstance(section, Mapping):
        return None
    value = section.get("enabled", False)
    if isinstance(value, bool):
        return value
    if value != AUTO:
        raise ValueError(f"{name}: enabled is {value!r}; it is true, false or auto")
    return AUTO


def explicit(value: Any) -> Any:
    """Returns the value, or None if the trainer decides."""
    return None if value == AUTO else value


def batch_sizes(config: Mapping[str, Any], trainer_settings: TrainerSettings) -> BatchSizes:
    """Completes the three sizes from each other and from the trainer's settings.

    Raises:
        ValueError: two of them contradict each other, or the trainer.
    """
    sizes = [_size(config, key) for key in BATCH_KEYS]
    train, micro, steps = sizes
    world = trainer_settings.world
    if train and trainer_settings.batch and train != trainer_settings.batch:
        raise ValueError(
            f"train_batch_size is {train} and global_batch_size is {trainer_settings.batch}"
        )
    if micro and trainer_settings.micro_batch and micro != trainer_settings.micro_batch:
        raise ValueError(
            f"train_micro_batch_size_per_gpu is {micro} and micro_batch_size is "
            f"{trainer_settings.micro_batch}"
        )
    micro, train = micro or trainer_settings.micro_batch, train or trainer_settings.batch
    if micro and steps and not train:
        train = micro * steps * world
    if train and steps and not micro:
        if train % (steps * world):
            raise ValueError(
                f"a step of {train} examples can't be dealt evenly to {steps} passes on {world} "
                "rank(s)"
            )
        micro = train // (steps * world)
    if train and micro and not steps:
        steps = -(-train // (micro * world))  # the last pass of a step may be smaller
        if sizes[0] and sizes[1] and train % (micro * world):
            raise ValueError(
                f"train_batch_size {train} can't be dealt to {world} rank(s) in passes of {micro} "
                "(train_micro_batch_size_per_gpu) examples"
            )
    if train and not micro and not steps and train % world == 0:
        micro, steps = train // world, 1
    product = (micro or 0) * (steps or 0) * world
    if sizes[1] and sizes[2] and train and train != product:
        actual = f"train_batch_size is {train}" if sizes[0] else f"the step has {train} examples"
        raise ValueError(
            f"{actual}, but train_micro_batch_size_per_gpu {micro} x "
            f"gradient_accumulation_steps {steps} x {world} rank(s) is {product}"
        )
    return BatchSizes(train, micro, steps)


def _size(config: Mapping[str, Any], key: str) -> int | None:
    value = explicit(config.get(key))
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"{key} is {value!r}; it must be a number from 1 on, or auto")
    return value


def fill_auto(config: Mapping[str, Any], trainer_settings: TrainerSettings) -> dict[str, Any]:
    """Returns a copy without any "auto".

    Raises:
        ValueError: sizes that contradict, or an "auto" that nothing decides.
    """
    filled = copy.deepcopy(dict(config))
    sizes = batch_sizes(config, trainer_settings)
    for key, value in zip(BATCH_KEYS, (sizes.train, sizes.micro, sizes.steps), strict=True):
        if key in filled and value is not None:
            filled[key] = value
        elif explicit(filled.get(key)) is None:
            filled.pop(key, None)  # two of the three are enough for DeepSpeed
    hidden = trainer_settings.hidden
    by_width = {
        "reduce_bucket_size": hidden * hidden,
        "allgather_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        "stage3_param_persistence_threshold": 10 * hidden,
    }
    values: dict[tuple[str, ...], Any] = {
        **{
            ("zero_optimization", key): size
            for key, size in by_width.items()
            if hidden  # 0: the model's width isn't known
        },
        ("gradient_clipping",): trainer_settings.clipping or 0.0,
        ("fp16", "enabled"): trainer_settings.fp16,
        ("bf16", "enabled"): trainer_settings.bf16,
        ("bfloat16", "enabled"): trainer_settings.bf16,
        ("optimizer", "params", "lr"): trainer_settings.learning_rate,
        ("optimizer", "params", "betas"): list(trainer_settings.betas),
        ("optimizer", "params", "eps"): trainer_settings.eps,
        ("optimizer", "params", "weight_decay"): trainer_settings.weight_decay,
        ("scheduler", "params", "warmup_min_lr"): 0,
        ("scheduler", "params", "warmup_max_lr"): trainer_settings.learning_rate,
        ("scheduler", "params", "warmup_num_steps"): trainer_settings.warmup_steps,
        ("scheduler", "params", "total_num_steps"): trainer_settings.total_steps,
    }
    undecided = [path for path in _autos(filled) if path not in values]
    if undecided:
        raise ValueError(f"nothing decides {': '.join(undecided[0])}, which is auto: give a value")
    for path in list(_autos(filled)):
        section = filled
        for name in path[:-1]:
            section = section[name]
        section[path[-1]] = values[path]
    return filled


def _autos(section: Mapping[str, Any], above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    paths: list[tuple[str, ...]] = []
    for key, value in section.items():
        if isinstance(value, Mapping):
            paths += _autos(value, (*above, key))
        elif value == AUTO:
            paths.append((*above, key))
    return paths


# The meaning of a DeepSpeed configuration without DeepSpeed: settings, and a row for each key.
#
# The settings are plain values (sharding of weights, number format, batch sizes), which the trainer
# turns into techniques. Each row says if its key is honoured, ignored (with the reason) or refused.
# So no key is dropped silently.

ADAMW = frozenset({"adam", "adamw", "fusedadam", "deepspeedcpuadam"})
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
EPS = 1e-8
# From DeepSpeed's runtime/lr_schedules.py: schedules that set the rate themselves, defaults.
SETS_RATE = ("WarmupLR", "WarmupDecayLR")
WARMUP_MAX_LR, WARMUP_STEPS = 1e-3, 1000
# From its ops/adam: defaults of an optimizer without params.
ADAM_LR, ADAM_BETAS = 1e-3, [0.9, 0.999]


@dataclass(frozen=True)
class DeepSpeedKey:
    """One key of the file, its treatment, and its counterpart or the reason."""

    key: str
    fate: str  # honoured, ignored, refused
    explanation: str


@dataclass(frozen=True)
class MappedConfig:
    """The configuration's meaning; None and empty if it leaves the choice to the trainer."""

    stage: int = 0
    offload: bool = False
    precision: str | None = None  # bf16, fp16
    initial_scale: float = 65536.0
    scale_window: int = 1000
    recompute: bool = False
    micro_batch: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # batch, rate, decay, clipping, ...
    rows: tuple[DeepSpeedKey, ...] = ()

    @property
    def refused(self) -> tuple[DeepSpeedKey, ...]:
        return tuple(row for row in self.rows if row.fate == REFUSED)


def read_settings(config: Mapping[str, Any], trainer_settings: TrainerSettings) -> MappedConfig:
    """Reads a configuration as settings.

    Raises:
        ValueError: an unknown key, or sizes or rates that contradict each other.
    """
    check_keys(config)
    sizes = batch_sizes(config, trainer_settings)
    zero = _section(config, "zero_optimization")
    settings = _given(config)
    if config.get("train_batch_size") is not None or settings.get("micro"):
        settings["batch"] = sizes.train if sizes.train != trainer_settings.batch else None
    fp16 = _section(config, "fp16")
    power, window = _number(fp16, "initial_scale_power"), _number(fp16, "loss_scale_window")
    precision = [name for name in ("bf16", "fp16") if section_enabled(config, name) is True]
    activations = _section(config, "activation_checkpointing")
    micro = sizes.micro if settings.pop("micro", None) else None
    return MappedConfig(
        stage=zero.get("stage", 0),
        offload=any(_offloads(zero, name) for name in ("optimizer", "param")),
        precision=precision[0] if precision else None,
        initial_scale=2.0 ** min(16 if power is None else int(power), 64),
        scale_window=1000 if window is None else int(window),
        recompute=bool(
            activations.get("partition_activations") or activations.get("number_checkpoints")
        ),
        micro_batch=micro,
        settings={key: value for key, value in settings.items() if value is not None},
        rows=(
            *_rows(config),
            *(DeepSpeedKey(key, IGNORED, why) for key, why in schedule_differences(config)),
        ),
    )


def _offloads(zero: Mapping[str, Any], what: str) -> bool:
    section = zero.get(f"offload_{what}")
    device = section.get("device", "none") if isinstance(section, Mapping) else "none"
    old = "cpu_offload" if what == "optimizer" else "cpu_offload_param"
    return device == "cpu" or zero.get(old) is True


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns the mapping under a key, empty if it is missing or null."""
    section = config.get(name)
    if section is not None and not isinstance(section, Mapping):
        raise ValueError(f"{name} is {section!r}; it must be a JSON object")
    return section or {}


def _number(section: Mapping[str, Any], name: str) -> float | None:
    """Returns a number from 0 on, or None if the trainer decides."""
    value = explicit(section.get(name))
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e18:
        raise ValueError(f"{name} is {value!r}; it must be a number from 0 on, or auto")
    return value


def _given(config: Mapping[str, Any]) -> dict[str, Any]:
    optimizer = _section(_section(config, "optimizer"), "params")
    scheduler = _section(config, "scheduler")
    timing = _section(scheduler, "params")
    kind = str(scheduler.get("type"))
    steps = _number(timing, "warmup_num_steps")
    if kind in SCHEDULES and "warmup_num_steps" not in timing:
        steps = WARMUP_STEPS
    clipping = _number(config, "gradient_clipping")
    passes = explicit(config.get("gradient_accumulation_steps"))
    return {
        "micro": explicit(config.get("train_micro_batch_size_per_gpu")) or passes,
        "learning_rate": _peak_rate(optimizer, timing, kind),
        "weight_decay": _number(optimizer, "weight_decay"),
        "betas": explicit(optimizer.get("betas")),
        "lr_schedule": SCHEDULES.get(kind),
        "min_lr_ratio": _number(timing, "cos_min_ratio") if kind == "WarmupCosineLR" else None,
        "warmup_steps": None if steps is None else int(steps),
        "max_grad_norm": clipping or None,  # 0 means no clipping
        "no_clipping": True if clipping == 0 else None,
    }


def defaults_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that DeepSpeed uses where the configuration has none.

    Without ``gradient_clipping``, DeepSpeed clips nothing, for any setting of the trainer.
    """
    settings: dict[str, Any] = {}
    if "gradient_clipping" not in config:
        settings["max_grad_norm"] = None
    optimizer = _section(config, "optimizer")
    if str(optimizer.get("type")).lower() in ADAMW:
        params = _section(optimizer, "params")
        if "betas" not in params:
            settings["adam_betas"] = ADAM_BETAS
        sets_rate = str(_section(config, "scheduler").get("type")) in SETS_RATE
        if "lr" not in params and not sets_rate:
            settings["learning_rate"] = ADAM_LR
    return settings


def _peak_rate(optimizer: Mapping[str, Any], timing: Mapping[str, Any], kind: str) -> float | None:
    """Returns the rate after the warm-up; most of DeepSpeed's schedules set it themselves."""
    rate = _number(optimizer, "lr")
    if kind not in SETS_RATE:
        return rate
    is_left_out = "warmup_max_lr" not in timing
    peak = WARMUP_MAX_LR if is_left_out else _number(timing, "warmup_max_lr")
    if rate is not None and peak is not None and rate != peak:
        origin = "is left out, so DeepSpeed takes" if is_left_out else "is"
        raise ValueError(
            f"optimizer.params.lr is {rate:g}, but DeepSpeed trains with scheduler.params."
            f"warmup_max_lr, which {origin} {peak:g}; write the rate that you want into both"
        )
    return rate if peak is None else peak


def schedule_differences(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Returns the schedule's keys that hasten treats otherwise, and the differences."""
    scheduler = _section(config, "scheduler")
    timing = _section(scheduler, "params")
    if str(scheduler.get("type")) not in SCHEDULES:
        return
    if timing.get("warmup_type") != "linear" and explicit(timing.get("warmup_num_steps")) != 0:
        explanation = "the warm-up is linear; DeepSpeed's is logarithmic unless this is linear"
        yield "scheduler.params.warmup_type", explanation
    if explicit(timing.get("warmup_min_lr")) or timing.get("warmup_min_ratio"):
        yield "scheduler.params.warmup_min_lr", "the warm-up begins near zero"
    if explicit(timing.get("total_num_steps")) is not None:
        explanation = "the schedule ends with the last step of the run"
        yield "scheduler.params.total_num_steps", explanation


def _rows(config: Mapping[str, Any]) -> Iterator[DeepSpeedKey]:
    for key, value in config.items():
        inside = INSIDE.get(key)
        if is_comment(key):
            yield DeepSpeedKey(key, IGNORED, "a comment")
            continue
        if inside is None or not isinstance(value, Mapping):
            yield _row(key, key, value, TOP[key])
            continue
        if key in ("fp16", "bf16", "bfloat16") and section_enabled(config, key) is not True:
            auto = section_enabled(config, key) == AUTO
            yield DeepSpeedKey(key, HONOURED, "auto: the plan decides" if auto else "off")
            continue
        for name, item in value.items():
            if is_comment(name):
                continue
            yield _row(f"{key}.{name}", name, item, inside[name])
            if name in ("offload_optimizer", "offload_param") and isinstance(item, Mapping):
                for part, setting in item.items():
                    if is_comment(part):
                        continue
                    yield _row(f"{key}.{name}.{part}", part, setting, OFFLOAD[part])


def _row(key: str, name: str, value: Any, fate: Sequence[str]) -> DeepSpeedKey:
    """Returns the table's row, unless the value changes it."""
    kind, explanation = fate
    if isinstance(value, Mapping):
        is_on = bool(value.get("enabled", bool(value)))
    else:  # A partition or pipeline of size 1 has no effect; ``true`` equals 1 but isn't a size.
        is_on = bool(value) and (value is True or value != 1)
    if kind == REFUSED and not is_on:
        return DeepSpeedKey(key, IGNORED, "off")
    if key in SPECIAL:
        reason = SPECIAL[key](value)
        if reason:
            return DeepSpeedKey(key, REFUSED, reason)
    if name == "overlap_comm" and value is False:
        return DeepSpeedKey(key, IGNORED, "FSDP2 and DDP always overlap")
    if name == "pin_memory" and value is False:
        return DeepSpeedKey(key, IGNORED, "memory that a GPU copies from is always pinned")
    return DeepSpeedKey(key, kind, explanation)


def _wrong_offload(value: Any) -> str | None:
    device = value.get("device", "none") if isinstance(value, Mapping) else "none"
    return None if device in ("cpu", "none") else f"can't offload to {device}: only to cpu"


# False in adam_w_mode means L2 decay.
USUAL = {"adam_w_mode": True, "bias_correction": True, "amsgrad": False, "maximize": False}


def _wrong_parameters(value: Any) -> str | None:
    parameters = value if isinstance(value, Mapping) else {}
    eps = explicit(parameters.get("eps"))
    if eps is not None and eps != EPS:
        return f"eps is {eps}; a recipe's AdamW has {EPS}: say auto"
    for key, usual in USUAL.items():
        if parameters.get(key, usual) is not usual:
            return f"{key} is {str(parameters[key]).lower()}: a recipe's AdamW has no such form"
    return None


SPECIAL: dict[str, Callable[[Any], str | None]] = {
    "zero_optimization.offload_optimizer": _wrong_offload,
    "zero_optimization.offload_param": _wrong_offload,
    "optimizer.type": lambda value: (
        None
        if isinstance(value, str) and value.lower() in ADAMW
        else f"{value!r} has no counterpart; AdamW has"
    ),
    "optimizer.params": _wrong_parameters,
    "scheduler.type": lambda value: (
        None if str(value) in SCHEDULES else f"{value!r} is none of {', '.join(SCHEDULES)}"
    ),
    "fp16.loss_scale": lambda value: (
        None if value == 0 else f"a fixed loss scale of {value}: set 0 for a dynamic one"
    ),
}
