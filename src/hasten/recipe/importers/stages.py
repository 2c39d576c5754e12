"""Files of other trainers that ask for another training than hasten's: they are refused by name.

The keys are those of LLaMA-Factory, axolotl and TRL. A file of preference training that became a
recipe would train the rejected answers, or none.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hasten.errors import InputError
from hasten.recipe.yaml_reader import one_line

OURS = ("sft", "pt", "pretrain")
PREFERENCES, REWARDS = "preference training", "the training of a reward model"
REINFORCEMENT, MEDIA = "reinforcement learning", "training with images, audio or video"
STAGES = {
    **dict.fromkeys(("dpo", "kto", "orpo", "simpo", "ipo", "cpo", "bco", "nca"), PREFERENCES),
    **dict.fromkeys(("rm", "prm", "reward"), REWARDS),
    **dict.fromkeys(("ppo", "grpo", "gdpo", "rloo", "gkd"), REINFORCEMENT),
    "ebft": "training on energies",
}
# Keys that ask for such a training wherever they are on.
SIGNS = {
    **dict.fromkeys(("reward_model", "process_reward_model", "num_labels"), REWARDS),
    **dict.fromkeys(("center_rewards_coefficient",), REWARDS),
    **dict.fromkeys(("pref_loss", "simpo_gamma", "pref_ftx", "reference_free"), PREFERENCES),
    **dict.fromkeys(("desirable_weight", "undesirable_weight"), PREFERENCES),
    **dict.fromkeys(("precompute_ref_log_probs", "rpo_alpha", "dpo_beta"), PREFERENCES),
    **dict.fromkeys(("num_generations", "reward_funcs", "reward_model_path"), REINFORCEMENT),
    **dict.fromkeys(("num_ppo_epochs", "ppo_epochs", "trl", "vllm_mode"), REINFORCEMENT),
    **dict.fromkeys(("processor_type", "is_multimodal", "freeze_vision_tower"), MEDIA),
    **dict.fromkeys(("image_max_pixels", "video_max_pixels", "image_resolution"), MEDIA),
    "diffusion": "the training of a diffusion model",
    "export_dir": "merging and exporting a model, which `hasten merge` does",
    "infer_backend": "chatting with a model",
    "sample_backend": "chatting with a model",
}
PREFERENCE_LOSSES = ("sigmoid", "hinge", "ipo", "kto_pair", "orpo", "simpo", "apo_zero", "kto")
OFF = (None, False, 0, "", "none")


def refuse_other_training(path: Path, given: Mapping[str, Any]) -> None:
    """Refuse a file whose keys ask for another training, with the key and its value.

    Raises:
        InputError: it does.
    """
    found = _other_training(given)
    if found is not None:
        key, what = found
        asked = one_line(f"{key}: {given[key]}")[:80]
        raise InputError(
            f"{path}: {asked} means {what}; hasten imports supervised fine-tuning and continued "
            "pretraining alone, so nothing was written"
        )


def _other_training(given: Mapping[str, Any]) -> tuple[str, str] | None:
    """The key that asks for it, and what it is called."""
    for key in ("stage", "rl"):
        value = given.get(key)
        if value not in OFF and value not in OURS:
            return key, STAGES.get(str(value).lower(), "another training")
    for key, what in SIGNS.items():
        if given.get(key) not in OFF:
            return key, what
    if str(given.get("loss_type")).lower() in PREFERENCE_LOSSES:
        return "loss_type", PREFERENCES
    if given.get("do_predict") is True and given.get("do_train") is not True:
        return "do_predict", "predictions of a trained model"
    plugins = given.get("plugins")
    for plugin in plugins if isinstance(plugins, list) else ():
        if "diffusion" in str(plugin).lower():
            return "plugins", SIGNS["diffusion"]
    return None
