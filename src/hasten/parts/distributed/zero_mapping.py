"""What a DeepSpeed configuration means without DeepSpeed: settings, and a row for each of its keys.

The settings are plain values (how weights are dealt out, number format, batch sizes); whoever
trains turns them into its own switches. The rows say of every key whether it is honoured, ignored
(with the reason) or refused, so that nothing is dropped in silence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hasten.parts.distributed.zero_config import (
    AUTO,
    Known,
    batch_sizes,
    check_keys,
    enabled,
    explicit,
)
from hasten.parts.distributed.zero_keys import HONOURED, IGNORED, INSIDE, REFUSED, TOP

ADAMW = frozenset({"adamw", "fusedadam", "deepspeedcpuadam"})
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
EPS = 1e-8


@dataclass(frozen=True)
class Row:
    """One key of the file, what becomes of it, and as what or why."""

    key: str
    fate: str  # honoured, ignored, refused
    words: str


@dataclass(frozen=True)
class Mapped:
    """The configuration's meaning; None and empty where it leaves the choice to the trainer."""

    stage: int = 0
    offload: bool = False
    precision: str | None = None  # bf16, fp16
    initial_scale: float = 65536.0
    scale_window: int = 1000
    recompute: bool = False
    micro_batch: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # batch, rate, decay, clipping, ...
    rows: tuple[Row, ...] = ()

    @property
    def refused(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.fate == REFUSED)


def mapped(config: Mapping[str, Any], known: Known) -> Mapped:
    """Read a configuration as settings.

    Raises:
        ValueError: an unknown key, or sizes that contradict each other.
    """
    check_keys(config)
    sizes = batch_sizes(config, known)
    zero = _section(config, "zero_optimization")
    given = _given(config)
    if config.get("train_batch_size") is not None or given.get("micro"):
        given["batch"] = sizes.train if sizes.train != known.batch else None
    fp16 = _section(config, "fp16")
    power, window = _number(fp16, "initial_scale_power"), _number(fp16, "loss_scale_window")
    precision = [name for name in ("bf16", "fp16") if enabled(config, name) is True]
    activations = _section(config, "activation_checkpointing")
    micro = sizes.micro if given.pop("micro", None) else None
    return Mapped(
        stage=zero.get("stage", 0),
        offload=any(_offloads(zero, name) for name in ("optimizer", "param")),
        precision=precision[0] if precision else None,
        initial_scale=2.0 ** min(16 if power is None else int(power), 64),
        scale_window=1000 if window is None else int(window),
        recompute=bool(
            activations.get("partition_activations") or activations.get("number_checkpoints")
        ),
        micro_batch=micro,
        settings={key: value for key, value in given.items() if value is not None},
        rows=tuple(_rows(config)),
    )


def _offloads(zero: Mapping[str, Any], what: str) -> bool:
    place = zero.get(f"offload_{what}")
    device = place.get("device", "none") if isinstance(place, Mapping) else "none"
    old = "cpu_offload" if what == "optimizer" else "cpu_offload_param"
    return device == "cpu" or zero.get(old) is True


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """What a key holds, nothing where it is left out or null.

    Raises:
        ValueError: it is something else.
    """
    found = config.get(name)
    if found is not None and not isinstance(found, Mapping):
        raise ValueError(f"{name} is {found!r}; it must be a JSON object")
    return found or {}


def _number(section: Mapping[str, Any], name: str) -> float | None:
    """A number from 0 on, or None where it is left to the trainer.

    Raises:
        ValueError: it is something else.
    """
    value = explicit(section.get(name))
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e18:
        raise ValueError(f"{name} is {value!r}; it must be a number from 0 on, or auto")
    return value


def _given(config: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers that the file says itself."""
    optimizer = _section(_section(config, "optimizer"), "params")
    scheduler = _section(config, "scheduler")
    timing = _section(scheduler, "params")
    rate = _number(optimizer, "lr")
    steps = _number(timing, "warmup_num_steps")
    clipping = _number(config, "gradient_clipping")
    passes = explicit(config.get("gradient_accumulation_steps"))
    return {
        "micro": explicit(config.get("train_micro_batch_size_per_gpu")) or passes,
        "learning_rate": rate if rate is not None else _number(timing, "warmup_max_lr"),
        "weight_decay": _number(optimizer, "weight_decay"),
        "betas": explicit(optimizer.get("betas")),
        "lr_schedule": SCHEDULES.get(str(scheduler.get("type"))),
        "warmup_steps": None if steps is None else int(steps),
        "max_grad_norm": clipping or None,  # 0 is no clipping
        "no_clipping": True if clipping == 0 else None,
    }


def _rows(config: Mapping[str, Any]) -> Iterator[Row]:
    for key, value in config.items():
        inside = INSIDE.get(key)
        if inside is None or not isinstance(value, Mapping):
            yield _row(key, key, value, TOP[key])
            continue
        if key in ("fp16", "bf16", "bfloat16") and enabled(config, key) is not True:
            auto = enabled(config, key) == AUTO
            yield Row(key, HONOURED, "auto: as the plan says" if auto else "off")
            continue
        for name, item in value.items():
            yield _row(f"{key}.{name}", name, item, inside[name])


def _row(key: str, name: str, value: Any, fate: tuple[str, str]) -> Row:
    """The table's word, unless the value changes it."""
    kind, words = fate
    if kind == REFUSED and not _switched_on(value):
        return Row(key, IGNORED, "off")
    if key in SPECIAL:
        reason = SPECIAL[key](value)
        if reason:
            return Row(key, REFUSED, reason)
    if name == "overlap_comm" and value is False:
        return Row(key, IGNORED, "FSDP2 and DDP always overlap")
    return Row(key, kind, words)


def _switched_on(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value.get("enabled", bool(value)))
    # A partition or pipeline of one is none; true isn't that one, though it equals it.
    return bool(value) and (value is True or value != 1)


def _wrong_offload(value: Any) -> str | None:
    device = value.get("device", "none") if isinstance(value, Mapping) else "none"
    return None if device in ("cpu", "none") else f"can't offload to {device}: only to cpu"


def _wrong_optimizer(value: Any) -> str | None:
    known = isinstance(value, str) and value.lower() in {*ADAMW, "adam"}
    return None if known else f"{value!r} has no counterpart; AdamW has"


def _wrong_parameters(value: Any) -> str | None:
    found = value if isinstance(value, Mapping) else {}
    eps = explicit(found.get("eps"))
    if eps is not None and eps != EPS:
        return f"eps is {eps}; a recipe's AdamW has {EPS}: say auto"
    if found.get("adam_w_mode") is False:
        return "adam_w_mode is false: L2 decay has no counterpart, AdamW's has"
    return None


def _wrong_schedule(value: Any) -> str | None:
    return None if str(value) in SCHEDULES else f"{value!r} is none of {', '.join(SCHEDULES)}"


def _wrong_scale(value: Any) -> str | None:
    return None if value == 0 else f"a fixed loss scale of {value}: say 0, a dynamic one"


SPECIAL = {
    "zero_optimization.offload_optimizer": _wrong_offload,
    "zero_optimization.offload_param": _wrong_offload,
    "optimizer.type": _wrong_optimizer,
    "optimizer.params": _wrong_parameters,
    "scheduler.type": _wrong_schedule,
    "fp16.loss_scale": _wrong_scale,
}
