"""Refusal of other trainers' files for kinds of training that hasten doesn't support.

A recipe from a file of reinforcement learning would train on prompts. A recipe from a file that
trains some of the weights would train all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hasten.data.stages import elsewhere
from hasten.errors import InputError
from hasten.recipe.importers import preferences
from hasten.recipe.importers.draft import ROWS, is_off
from hasten.recipe.yaml_reader import one_line

OURS = ("sft", "pt", "pretrain", "llm", "causal_lm")
STAGE_KEYS = ("stage", "rl", "rlhf_type", "task_type", "model_class", "rl_type")
STAGES: Mapping[str, str] = ROWS["refused"]["stages"]
SIGNS: Mapping[str, str] = {  # keys that request another training if they are on
    key: what for what, keys in ROWS["refused"]["signs"].items() for key in keys
}
SCRIPT_FILES = ("train_file", "validation_file")  # keys of transformers' example scripts
WITH_DATA = ("sample_backend",)  # in a file with a data set, a setting of chats after training
STARTED = ("stage", "finetuning_type", *SCRIPT_FILES)  # tools that train only with do_train
TUNER_KEYS = ("finetuning_type", "tuner_type", "train_type", "adapter")
TUNERS = ("lora", "full", "qlora", "none")
SFT_LOSSES = ("nll", "dft", "chunked_nll", "cross_entropy")  # TRL's SFTConfig


def refuse_other_training(path: Path, source: Mapping[str, Any]) -> None:
    """Refuses a file with keys for an unsupported kind of training; names key and value.

    Raises:
        InputError: the file has such a key.
    """
    refusal = _other_training(source)
    if refusal is not None:
        key, what = refusal
        setting = one_line(f"{key}: {source[key]}")[:80]
        raise InputError(
            f"{path}: {setting} means {what}; hasten imports supervised fine-tuning, preference "
            "training and continued pretraining, of all weights or LoRA, so nothing was written"
            f"{elsewhere(what)}"
        )


def _other_training(source: Mapping[str, Any]) -> tuple[str, str] | None:  # noqa: C901  # a clause for each refusal
    """Returns the key that requests another kind of training, and the name of that training."""
    for key in STAGE_KEYS:
        setting = source.get(key)
        others = preferences.STAGES if key in preferences.STAGE_KEYS else ()
        if not is_off(setting) and str(setting).lower() not in (*OURS, *others):
            return key, STAGES.get(str(setting).lower(), "another training")
    for key, what in SIGNS.items():
        trains = key in WITH_DATA and source.get("train_dataset")
        if key in preferences.NEXT_TO_STAGE and preferences.is_preference_training(source):
            continue
        if not is_off(source.get(key)) and not trains:
            return key, what
    if refusal := preferences.lacked(source):
        return refusal
    for key in TUNER_KEYS:
        setting = source.get(key)
        if not is_off(setting) and str(setting).lower() not in TUNERS:
            return key, STAGES.get(str(setting).lower(), "another way of training")
    config = source.get("peft_config")
    name = config.get("name") if isinstance(config, Mapping) else None
    if isinstance(config, Mapping) and config.get("export_dir"):
        return "peft_config", "merging and exporting a model, which `hasten export` does"
    if name is not None and str(name) not in TUNERS:
        return "peft_config", STAGES.get(str(name), "another way of training")
    loss = source.get("loss_type")
    is_own = str(loss) in SFT_LOSSES or preferences.is_preference_training(source)
    if not is_off(loss) and not is_own:
        return "loss_type", "a preference loss that hasten lacks"
    for key in ("do_predict", "predict_with_generate"):
        if source.get(key) is True and source.get("do_train") is not True:
            return key, "predictions of a trained model"
    trains = source.get("do_train") is True or not source.keys() & {*STARTED}
    if source.get("do_eval") is True and not trains:
        return "do_eval", "the evaluation of a model"
    if source.get("tokenized_path") and source.get("do_train") is not True:
        return "tokenized_path", "preparing data without training"
    plugins = source.get("plugins")
    for plugin in plugins if isinstance(plugins, list) else ():
        if "diffusion" in str(plugin).lower():
            return "plugins", SIGNS["diffusion"]
    return None
