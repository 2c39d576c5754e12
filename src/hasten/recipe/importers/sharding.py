"""FSDP settings of other trainers: words of ``fsdp``, keys of ``fsdp_config``.

Strategies are those of PyTorch's ``ShardingStrategy``, as words and as accelerate's
numbers: https://huggingface.co/docs/accelerate/usage_guides/fsdp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hasten.recipe.importers.draft import ROWS, RecipeDraft

FULL, GRADIENTS_ONLY, NONE = "full_shard", "shard_grad_op", "no_shard"
NUMBERS = {
    "1": FULL,
    "2": GRADIENTS_ONLY,
    "3": NONE,
    "4": "hybrid_shard",
    "5": "hybrid_shard_zero2",
}
COPIES = "one sharded copy a host is `fsdp2: {replicas: N}` in the plan, N being the hosts"
NEEDLESS: Mapping[str, str] = {
    key: why for why, keys in ROWS["sharding"]["needless"].items() for key in keys
}


def fsdp_options(draft: RecipeDraft, key: str, setting: Any) -> None:
    """Maps ``fsdp: "shard_grad_op offload auto_wrap"``, as text or list; true: full shards."""
    if setting in (True, "true"):
        setting = FULL
    options = setting.replace(",", " ").split() if isinstance(setting, str) else list(setting or ())
    if not options:
        draft.note(key, "needless", "it is off")
        return
    draft.say(key, "layout", "fsdp2")
    for word in options:
        name = str(word).lower()
        if name == "offload":
            _set(draft, f"{key}: {word}", word, "offload", True)
        elif name in NEEDLESS:
            draft.row(f"{key}: {word}", word, "needless", NEEDLESS[name])
        else:
            _strategy(draft, f"{key}: {word}", word)


def config(is_on: Callable[[Mapping[str, Any]], bool]) -> Callable[[RecipeDraft, str, Any], None]:
    """Returns the handler of ``fsdp_config``, with a row for each of its keys.

    Args:
        is_on: returns True if a configuration uses FSDP at all.
    """

    def handle(draft: RecipeDraft, key: str, setting: Any) -> None:
        settings = setting if isinstance(setting, Mapping) else {}
        if not settings or not is_on(draft.source):
            draft.note(key, "needless", "it is off")
            return
        if draft.values.get("layout") is None:
            draft.say(key, "layout", "fsdp2")
        for name, part_setting in settings.items():
            _key(draft, f"{key}.{name}", str(name).removeprefix("fsdp_"), part_setting)

    return handle


def resolve_sharding(draft: RecipeDraft) -> None:
    """Resolves sharding after all keys: settings of fsdp2 in the plan replace the layout."""
    if "fsdp2" in draft.techniques and draft.values.get("layout") == "fsdp2":
        del draft.values["layout"]
    elif draft.values.get("layout") == "ddp":  # NO_SHARD: replicas
        draft.plan = [e for e in draft.plan if not (isinstance(e, dict) and "fsdp2" in e)]


def _key(draft: RecipeDraft, key: str, name: str, setting: Any) -> None:
    is_word = str(setting).lower() not in ("true", "false")
    if name == "sharding_strategy" or (name == "reshard_after_forward" and is_word):
        _strategy(draft, key, setting)
    elif name == "reshard_after_forward":
        _set(draft, key, setting, "reshard", bool(setting))
    elif name in ("offload_params", "cpu_offload") and setting in (True, "true"):
        _set(draft, key, setting, "offload", True)
    elif name == "activation_checkpointing" and setting in (True, "true"):
        draft.add("activation_checkpointing")
        draft.row(key, setting, "mapped", "plan: activation_checkpointing")
    elif name in ("offload_params", "cpu_offload", "activation_checkpointing"):
        draft.row(key, setting, "needless", "it is off")
    elif name in NEEDLESS:
        draft.row(key, setting, "needless", NEEDLESS[name])
    elif setting in (None, False, 0, "", "none"):
        draft.row(key, setting, "needless", "it is off")
    else:
        draft.row(key, setting, "unmapped", "hasten doesn't know this key")


def _strategy(draft: RecipeDraft, key: str, setting: Any) -> None:
    name = NUMBERS.get(str(setting), str(setting).lower())
    if name == FULL:
        _set(draft, key, setting, "reshard", True)
    elif name == GRADIENTS_ONLY:
        _set(draft, key, setting, "reshard", False)
    elif name == NONE:
        draft.values["layout"], draft.why["layout"] = "ddp", key
        draft.row(key, setting, "mapped", "layout: ddp, whole replicas")
    elif name.startswith("hybrid"):
        draft.row(key, setting, "unmapped", COPIES)
    else:
        draft.row(key, setting, "unmapped", f"there is no way of sharding {setting!r}")


def _set(draft: RecipeDraft, key: str, setting: Any, name: str, wanted: bool) -> None:
    """Sets a setting of fsdp2; if another key has set it before, that value stays."""
    entry = next((e for e in draft.plan if isinstance(e, dict) and "fsdp2" in e), None)
    if entry is None:
        entry = {"fsdp2": {}}
        draft.plan.append(entry)
    settings = entry["fsdp2"]
    if settings.setdefault(name, wanted) != wanted:
        explanation = f"another key has already made {name} {settings[name]!r}, which is kept"
        draft.row(key, setting, "contradicts", explanation)
        return
    draft.row(key, setting, "mapped", f"fsdp2: {name}: {str(wanted).lower()}")
