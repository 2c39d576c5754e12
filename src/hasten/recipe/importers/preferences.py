"""Preference training of other trainers: stage, preference and reference of a recipe.

The trainers name alike what they take from TRL, so one table of keys serves all. They differ in
defaults, and in the meaning of two settings (`TOOLS`). TRL's files don't name their trainer: a
key that only one of its configurations has decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hasten.parts.nn.preference_objectives import STAGES as OURS
from hasten.recipe.importers.draft import ROWS, Handler, RecipeDraft, is_off, later, table

# A training's name in other trainers, and hasten's stage.
STAGES: Mapping[str, str] = {
    **{name: name for name in ("dpo", "kto", "orpo", "simpo", "rm")},
    "ipo": "dpo",
    "cpo": "simpo",
    "reward": "rm",
}
STAGE_KEYS = ("stage", "rl", "rlhf_type")
# Losses by their names in TRL and LLaMA-Factory: stage and hasten's name.
OWN_NAMES = ("cdpo", "nca", "sppo", "cpo", "bradley_terry")  # no trainer's loss has such a name
LOSSES: Mapping[str, tuple[str, str]] = {
    **{n: (stage, n) for stage, names in OURS.items() for n in names if n not in OWN_NAMES},
    "nca_pair": ("dpo", "nca"),
    "sppo_hard": ("dpo", "sppo"),
}
FIRST = {stage: loss for loss, (stage, _) in reversed([*LOSSES.items()])}
LOSS_KEYS = ("pref_loss", "dpo_loss_type", "loss_type")
WEIGHTS = ("loss_weights", "dpo_loss_weights")
# The recipe's setting, the keys that mean it, and the stages in which it acts.
SETTINGS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "beta": (("pref_beta", "rl_beta", "orpo_alpha", "beta"), ("dpo", "kto", "orpo", "simpo")),
    "label_smoothing": (("dpo_label_smoothing", "label_smoothing"), ("dpo", "simpo")),
    "sft_weight": (("pref_ftx", "rpo_alpha", "cpo_alpha"), ("dpo", "simpo")),
    "gamma": (("simpo_gamma",), ("simpo",)),
    "ld_alpha": (("ld_alpha",), ("dpo",)),
    "desirable_weight": (
        ("kto_chosen_weight", "kto_desirable_weight", "desirable_weight"),
        ("kto",),
    ),
    "undesirable_weight": (
        ("kto_rejected_weight", "kto_undesirable_weight", "undesirable_weight"),
        ("kto",),
    ),
    "centre": (("center_rewards_coefficient",), ("rm",)),
}
# TRL's configurations, by a key that the ones before lack.
TRL_SIGNS: Mapping[str, tuple[str, ...]] = {
    "rm": ("center_rewards_coefficient",),
    "kto": ("desirable_weight", "undesirable_weight"),
    "cpo": ("cpo_alpha", "simpo_gamma"),
    "dpo": ("beta", "ld_alpha", "sync_ref_model", "precompute_ref_log_probs", "use_weighting"),
}
LACKED: Mapping[str, str] = {
    key: what for what, keys in ROWS["preferences"]["refused"].items() for key in keys
}
# Keys that are signs of another training in a file without a stage of preferences.
NEXT_TO_STAGE = ("max_completion_length", "num_labels", "trl")


class _Tool(NamedTuple):
    """A trainer's defaults, and its meanings of two settings."""

    smoothing: str | None  # the loss that label_smoothing makes of sigmoid; None: no effect
    sft_mean: str
    sft_span: str  # tokens in ORPO's cross-entropy
    simpo: Mapping[str, float]  # defaults for SimPO


TOOLS: Mapping[str, _Tool] = {
    "LLaMA-Factory": _Tool("cdpo", "examples", "answer", {"beta": 0.1, "gamma": 0.5}),
    "axolotl": _Tool(None, "tokens", "all", {"beta": 0.1, "gamma": 0.5, "sft_weight": 1.0}),
    "ms-swift": _Tool("cdpo", "tokens", "all", {"beta": 2.0, "gamma": 1.0, "sft_weight": 1.0}),
    "TRL": _Tool(None, "tokens", "all", {"beta": 0.1, "gamma": 0.5, "sft_weight": 1.0}),
}


class Training(NamedTuple):
    """A file's preference training: the key that names it, the stage, and the loss."""

    key: str
    stage: str
    loss: str


def training_of(source: Mapping[str, Any]) -> Training | None:
    """Returns the preference training of a file; None for another training.

    Raises:
        KeyError: hasten lacks the loss; the error has its key.
    """
    key, kind = _kind(source)
    if not kind:
        return None
    name, loss_key = kind, ""
    for loss_key in LOSS_KEYS:
        ignored = loss_key == "pref_loss" and kind != "dpo"
        if (names := _losses(source, loss_key)) and not ignored:
            name = names[0]
            break
    if len(_losses(source, loss_key)) > 1 or (name != kind and name not in LOSSES):
        raise KeyError(loss_key)
    stage, loss = LOSSES.get(name, (STAGES.get(kind, "dpo"), ""))
    if kind in ("simpo", "cpo"):
        if name not in ("simpo", "cpo", "sigmoid"):
            raise KeyError(loss_key)
        stage, loss = "simpo", "simpo" if "simpo" in (kind, name) else "cpo"
    elif STAGES[kind] not in (stage, "dpo"):
        raise KeyError(loss_key)
    return Training(key, stage, loss or FIRST.get(stage, ""))


def is_preference_training(source: Mapping[str, Any]) -> bool:
    """Returns True if a file trains on preferences, also with a loss that hasten lacks."""
    return bool(_kind(source)[1])


def _kind(source: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the key of a preference training and its name; both are empty for another one."""
    for key in STAGE_KEYS:
        if not is_off(setting := source.get(key)):
            return key, name if (name := str(setting).lower()) in STAGES else ""
    if source.get("reward_model") is True:
        return "reward_model", "rm"
    trl = ((name, key) for name, keys in TRL_SIGNS.items() for key in keys)
    name, key = next(((n, k) for n, k in trl if not is_off(source.get(k))), ("", ""))
    names = _losses(source, "loss_type")
    if names and names[0] in LOSSES and name in ("", "dpo"):
        return "loss_type", LOSSES[names[0]][0]
    return key, name


def _losses(source: Mapping[str, Any], key: str) -> list[str]:
    """Returns the losses under a key, without the supervised one that is added."""
    setting: Any = source.get(key)
    if is_off(setting):
        return []
    names = [setting] if isinstance(setting, str) else list(setting)
    return [str(name) for name in names if name != "sft"]


def lacked(source: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns a key of preference training that hasten lacks, and its meaning."""
    try:
        if training_of(source) is None:
            return None
    except KeyError as error:
        return str(error.args[0]), "a preference loss that hasten lacks"
    for key, what in LACKED.items():
        setting = str(source.get(key) or "").lower().rpartition(".")[2]
        if not is_off(source.get(key)) and setting not in ("false", "reverse_kl"):
            return key, what
    return None


def take_preferences(draft: RecipeDraft) -> None:
    """Sets stage, preference and reference of a file of preference training."""
    source = draft.source
    training = training_of(source)
    if training is None:
        return
    tool, (key, stage, loss) = TOOLS[draft.tool], training
    draft.rows = [row for row in draft.rows if row.key != key]
    draft.say(key, "stage", stage)
    if key in TRL_SIGNS["dpo"]:
        draft.note(key, "mapped", "the file names no trainer: read as a DPOConfig")
    settings = _settings(draft, stage, loss)
    smoothing = settings.get("label_smoothing")
    if smoothing and loss == "sigmoid" and tool.smoothing:
        loss = tool.smoothing
    elif smoothing and loss not in ("robust", "simpo", "cpo"):
        del settings["label_smoothing"]
        name = next(k for k in SETTINGS["label_smoothing"][0] if not is_off(source.get(k)))
        draft.rows = [row for row in draft.rows if row.key != name]
        draft.note(name, "needless", f"it has no effect there with the loss {loss}")
    if loss == "orpo":
        settings |= {"sft_mean": tool.sft_mean, "sft_span": tool.sft_span}
    elif settings.get("sft_weight"):
        settings["sft_mean"] = tool.sft_mean
    if loss and loss != FIRST[stage]:
        settings = {"loss": loss, **settings}
    if settings:
        draft.values["preference"], draft.why["preference"] = settings, key
    _reference(draft, stage)
    draft.withdraw("loss_on", f"with stage: {stage} the answers are compared")


def _settings(draft: RecipeDraft, stage: str, loss: str) -> dict[str, Any]:
    """Returns the settings that act in a stage, and notes the use of each key."""
    source, settings = draft.source, dict[str, Any]()
    defaults = TOOLS[draft.tool].simpo if stage == "simpo" else {}
    if loss == "cpo":
        defaults = {"beta": 0.1, "sft_weight": 1.0}
    for name, (keys, stages) in SETTINGS.items():
        present = [key for key in keys if source.get(key) is not None]
        if stage in stages and (present or name in defaults):
            number = float(source[present[0]] if present else defaults[name])
            if number or name in ("beta", "gamma", "ld_alpha"):
                settings[name] = number
        for key in present:
            used = stage in stages and key == present[0]
            explanation = f"preference: {name}: {source[key]}" if used else f"not of stage: {stage}"
            draft.note(key, "mapped" if used else "needless", explanation)
    if stage == "dpo" and (weight := _sft_weight(source)):
        settings["sft_weight"] = weight
    for key in (*LOSS_KEYS, *WEIGHTS):
        if not is_off(source.get(key)):
            draft.note(key, "mapped", "stage, and preference: loss")
    return settings


def _sft_weight(source: Mapping[str, Any]) -> float:
    """Returns the weight of the supervised loss in a list of losses, relative to the other one."""
    names: list[str] = next((source[k] for k in LOSS_KEYS if isinstance(source.get(k), list)), [])
    if "sft" not in names:
        return 0.0
    weights = next((source[key] for key in WEIGHTS if source.get(key)), [1.0] * len(names))
    by_name: dict[str, float] = dict(zip(names, map(float, weights), strict=True))
    sft = by_name.pop("sft")
    return sft / next(iter(by_name.values()), 1.0)


def _reference(draft: RecipeDraft, stage: str) -> None:
    """Maps a reference model; the trained model itself is ``start``, the default."""
    model = draft.source.get("ref_model")
    if is_off(model):
        return
    if stage in ("dpo", "kto") and model != draft.values.get("model"):
        draft.say("ref_model", "reference", str(model))
    else:
        draft.note("ref_model", "needless", "the reference is the model as loaded, if there is one")


KEYS: dict[str, Handler] = {
    **dict.fromkeys((key for keys, _ in SETTINGS.values() for key in keys), later),
    **dict.fromkeys((*LOSS_KEYS, *WEIGHTS, "ref_model", "rl", "reward_model", "rlhf_type"), later),
    **dict.fromkeys(LACKED, later),
    **table("preferences"),
}
