"""``autocast`` and ``GradScaler`` for a loop of your own: torch's, in the format that pays here.

    scaler = GradScaler()
    with autocast():
        loss = criterion(model(data), target)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

The format is bf16 where the device multiplies it, fp16 on a GPU without bf16, and float32 where
either would be slower. Only fp16 needs a loss scale.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace

import torch

from hasten.core import context as facts
from hasten.techniques.precision import Autocast


def autocast(
    device_type: str | None = None,
    dtype: torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
) -> torch.autocast:
    """Returns ``torch.autocast`` of the default device, as a context or a decorator.

    Args:
        device_type: as torch's; if left out, the accelerator, or "cpu" without one.
        dtype: as torch's; if left out, the format that has a gain on that device.

    If 16 bits have no gain, products stay in float32, and a warning is printed. With
    ``torch.float16``, give the same format to :class:`GradScaler`.
    """
    kind = _device_kind(device_type)
    if dtype is None:
        dtype, why = format_of(kind)
        if dtype is None and enabled:
            warnings.warn(f"autocast: products stay in float32: {why}", stacklevel=2)
    if dtype is None:
        return torch.autocast(kind, enabled=False)
    return torch.autocast(kind, dtype, enabled, cache_enabled)


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` of the default device; off if no loss scale is needed.

    Args:
        dtype: the format of the autocast region next to it; that of ``autocast()`` if left
            out. This format decides if a loss scale is needed.
        device, init_scale, growth_factor, backoff_factor, growth_interval, enabled: as
            torch's.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        kind = _device_kind(device)
        wanted = format_of(kind)[0] if dtype is None else dtype
        super().__init__(
            kind,
            init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            enabled and wanted is torch.float16,
        )


@functools.cache
def format_of(kind: str) -> tuple[torch.dtype | None, str]:
    """The 16-bit format that pays on a kind of device, or None and why there is none."""
    context = facts.seen_at_start()
    problems: list[str] = []
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        reasons = Autocast(name).unsupported_reasons(replace(context, device=kind))
        if not reasons:
            return dtype, ""
        problems.append(reasons[0])
    return None, problems[0]


def _device_kind(device: str | None) -> str:
    kind: str = torch.device(facts.seen_at_start().device if device is None else device).type
    return kind
