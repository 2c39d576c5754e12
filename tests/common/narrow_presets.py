"""The presets ``*-tiny`` a quarter as wide: most tests train them to see that something works.

All layers, head groups, experts and ranks of the latent attention stay as they are. What is about
the presets themselves, or measures bytes and seconds, takes them as they are (`as_published`). So
do fresh processes (`warm`): one that goes on with what another has begun must be of its kind.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, cast

from hasten.models.presets import PRESETS, Preset

NARROW = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "moe_intermediate_size": 32,
}
presets = cast(dict[str, Preset], PRESETS)
_published = dict(presets)


def narrow() -> None:
    """From now on in this process."""
    for name, preset in _published.items():
        if name.endswith("-tiny"):
            config: dict[str, Any] = dict(preset.config)
            config |= {key: value for key, value in NARROW.items() if key in config}
            config["num_key_value_heads"] = min(4, config["num_key_value_heads"])
            presets[name] = dataclasses.replace(preset, config=config)


@contextlib.contextmanager
def as_published() -> Iterator[None]:
    """Inside, all presets are those of the package."""
    presets.update(_published)
    yield
    narrow()
