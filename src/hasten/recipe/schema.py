"""The recipe's schema: one flat YAML file with model, data, length of the training, techniques.

Every key is a field with its documentation. An unknown key is an error that names the
nearest known key, because a silently ignored key can waste a day of training.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from hasten.core.health import SpikePolicy
from hasten.data.stages import elsewhere
from hasten.errors import InputError
from hasten.foreign_files import unwritable_character
from hasten.formatting import did_you_mean
from hasten.launch.transport import checked
from hasten.parts.nn.preference_objectives import STAGES, Objective
from hasten.recipe.preset_plans import entries_of
from hasten.recipe.price import Price, price_of
from hasten.recipe.shorthands import beside_deepspeed, read_resume, with_deepspeed, with_layout_key
from hasten.recipe.yaml_reader import (
    first_complaint,
    read_duration,
    read_overrides,
    read_yaml,
    read_yaml_file,
)


class DataSource(BaseModel):
    """A source of examples with more settings than its path."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field(min_length=1, description="a file, a folder, or dataset_info.json:NAME")
    weight: float = Field(
        1.0, gt=0, le=1000, description="how often an epoch contains each of its examples"
    )
    columns: dict[str, str] | None = Field(
        None, description="as the recipe's columns, for this source alone"
    )
    max_examples: int | None = Field(
        None, ge=1, description="use at most this many of its examples"
    )


DEFAULT_BATCH = 32  # examples of a step if a recipe has no global batch
FIDELITIES = ("exact", "rounding", "lossy")


class AutoPlan(BaseModel):
    """The choices that ``plan: auto`` may use."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    fidelity: Literal["exact", "rounding", "lossy"] = Field(
        "rounding", description="how far the chosen techniques may change the mathematics"
    )


PREFERENCE_RATES = {"full": 1e-6, "lora": 5e-6}  # learning rates if a recipe has none


class Preference(BaseModel):
    """The loss of preference pairs."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    loss: str | None = Field(
        None,
        description="of dpo: sigmoid (default), robust, cdpo, hinge, ipo, sigmoid_norm, apo_zero, "
        "apo_down, nca, bco_pair, sppo; of simpo: simpo, cpo; of kto: kto, apo_zero_unpaired",
    )
    beta: float = Field(
        0.1, gt=0, description="strength of the preference; for orpo: weight of the odds ratio"
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="share of pairs with swapped answers, for robust and cdpo"
    )
    sft_weight: float = Field(
        0.0, ge=0, description="weight of the chosen answer's cross-entropy, added to the loss"
    )
    sft_mean: Literal["examples", "tokens"] = Field(
        "examples",
        description="mean of that: of each answer, then of pairs; or of a step's tokens",
    )
    sft_span: Literal["answer", "all"] | None = Field(
        None, description="tokens of that: the answer, or all; else all for orpo"
    )
    gamma: float = Field(0.5, ge=0, description="simpo's target margin of rewards")
    ld_alpha: float | None = Field(
        None, ge=0, le=1, description="weight of tokens beyond the shorter answer's length"
    )
    desirable_weight: float = Field(1.0, gt=0, description="kto: weight of good answers")
    undesirable_weight: float = Field(1.0, gt=0, description="kto: weight of bad answers")
    centre: float = Field(0.0, ge=0, description="rm: weight that keeps rewards near zero")


FINITE = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())
__all__ = ["AutoPlan", "DataSource", "Price", "Recipe", "load_recipe", "read_yaml", "recipe_from"]


class Recipe(BaseModel):
    """All keys of a recipe with their defaults."""

    model_config = FINITE

    # Model and data
    model: str = Field(description="a preset, a Hugging Face folder, or a hub name")
    tokenizer: str | None = Field(
        None, description="folder or hub name; of the model if left out, trained for presets"
    )
    from_scratch: bool = Field(False, description="random weights: pre-training")
    dataset: str | list[str | DataSource] = Field(
        description="files or folders, or the embedded corpus: stdlib, stdlib-text"
    )
    columns: dict[str, str] = Field(
        default_factory=dict, description="column of a data shape: its name in your data"
    )
    eval_data: float | str = Field(
        0.05, description="a share below 1, a number of examples, or a separate file"
    )
    max_examples: int | None = Field(None, ge=1, description="use at most this many examples")
    max_rejected: float = Field(
        0.001, ge=0, description="unusable examples allowed: a share below 1, or a number"
    )
    cutoff_len: int = Field(2048, ge=2, description="longest example in tokens")
    too_long: Literal["truncate", "split", "drop"] = Field(
        "truncate", description="what becomes of an example longer than cutoff_len"
    )
    chat_template: str = Field(
        "auto", description="auto, the name of a published format, or a .jinja file"
    )
    loss_on: Literal["answers", "last_answer", "everything"] = Field(
        "answers", description="which tokens of a dialogue are trained"
    )
    vocabulary: int = Field(4096, ge=300, description="size of a tokenizer trained for a preset")

    data_workers: Literal["auto"] | int = Field(
        "auto", description="processes that tokenise; auto: one for each usable core"
    )

    # Training
    stage: Literal["sft", "dpo", "orpo", "simpo", "rm", "kto"] = Field(
        "sft", description="what is learnt: answers (sft), or preferences between two answers"
    )
    preference: Preference = Field(
        default_factory=Preference, description="loss of the stages other than sft"
    )
    reference: str = Field(
        "start", description="model that the policy is compared with: start, or another model"
    )

    # Weights
    weights_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="format in which the model's weights are held and trained"
    )
    finetuning_type: Literal["full", "lora"] = Field("full", description="all weights, or LoRA")
    lora_rank: int = Field(16, ge=1, description="rank of the LoRA update")
    lora_alpha: int = Field(32, ge=1, description="the update is scaled by lora_alpha / lora_rank")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="dropout before the adapter")
    lora_targets: str | list[str] = Field(
        "auto", description="auto, all-linear, module names, or a regular expression of full names"
    )
    lora_resolver: Literal["hasten", "peft", "linear_names"] = Field(
        "hasten",
        description="what reads lora_targets: hasten, or PEFT as in other trainers; see below",
    )
    lora_rslora: bool = Field(False, description="scale by lora_alpha / sqrt(lora_rank) instead")
    lora_dora: bool = Field(
        False, description="learn direction and length of a weight separately (DoRA)"
    )
    lora_base: Literal["int8", "nf4"] | None = Field(
        None, description="frozen linear layers kept in int8 or nf4"
    )

    # Length
    max_steps: int | None = Field(None, ge=1, description="stop after this many steps")
    epochs: int | None = Field(None, ge=1, description="stop after this many passes over the data")
    max_tokens: int | None = Field(None, ge=1, description="stop after this many tokens")

    # Optimization
    global_batch_size: int | None = Field(
        None, ge=1, description="examples (or pairs) of one step, all ranks"
    )
    global_batch_tokens: int | None = Field(None, ge=1, description="tokens of one step, all ranks")
    learning_rate: float = Field(
        2e-4, gt=0, description="peak learning rate; with preferences 1e-6, LoRA 5e-6 if left out"
    )
    lr_schedule: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "cosine", description="shape of the learning rate after the warm-up"
    )
    warmup_steps: int | float = Field(
        0, ge=0, description="steps of linear rise; below 1: this share of all steps"
    )
    extend: Literal["stretch", "constant"] = Field(
        "stretch",
        description="schedule of a run that resumes with another end: over all steps, or last rate",
    )
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="lowest rate / peak rate")
    weight_decay: float = Field(0.0, ge=0, description="AdamW, matrices only")
    adam_betas: tuple[float, float] = Field(
        (0.9, 0.95), description="AdamW's decay rates of the means of gradients and their squares"
    )
    max_grad_norm: float | None = Field(1.0, gt=0, description="clip gradients to this norm")
    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="share of a label that is spread over the vocabulary"
    )
    z_loss: float = Field(
        0.0, ge=0, le=1, description="weight of the squared logsumexp of the logits; 1e-4 in PaLM"
    )
    # torch takes 64 bits, and ranks and passes add to the seed.
    seed: int = Field(0, ge=0, lt=2**63, description="seed of weights, data order and dropout")

    # Evaluation
    eval_every: int | float = Field(
        0, ge=0, description="steps between evaluations; below 1: a share of all; 0: at the end"
    )
    metrics: list[Literal["token_accuracy"]] = Field(
        default_factory=list, description="further metrics of eval examples: token_accuracy"
    )
    samples: int = Field(
        0, ge=0, le=16, description="answers to eval prompts that each evaluation writes"
    )
    patience: int = Field(0, ge=0, description="evaluations without gain before stopping; 0: off")
    best_metric: Literal["eval_loss", "token_accuracy", "reward_accuracy"] = Field(
        "eval_loss", description="what decides which weights are saved as best, and patience"
    )
    log_to: list[Literal["tensorboard", "wandb", "mlflow"]] = Field(
        default_factory=list, description="write the metrics for these tools too"
    )
    price: Price | None = Field(
        None, description="price of a device, or a YAML file with it; for the cost"
    )

    ceiling: str = Field(
        "auto", description="what MFU refers to: auto, measure, or a file of hasten env --bench"
    )

    # Machine
    output: str = Field("runs/train", description="the run's folder; nothing is written elsewhere")
    save_dtype: Literal["base", "float32", "bfloat16", "float16"] = Field(
        "base", description="number format of saved weights; base: that of the model's own weights"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where to train")
    nproc: int = Field(1, ge=1, description="processes on this machine, one rank each")
    backend: Literal["auto", "gloo", "nccl"] = Field(
        "auto", description="library for messages between ranks; auto: NCCL on GPUs, else gloo"
    )
    transport: dict[str, str] = Field(
        default_factory=dict, description="environment variables of gloo, NCCL or UCX"
    )
    checkpoint_every: Literal["dynamic"] | int | None = Field(
        None, description="dynamic, or steps from one checkpoint to the next; joins the plan"
    )
    checkpoint_dir: str | None = Field(
        None, description="where checkpoints are kept; output/checkpoints if left out"
    )
    resume: str = Field(
        "never",
        description="auto: continue from the newest checkpoint; a checkpoint's folder; never",
    )

    # Faults
    max_restarts: int = Field(0, ge=0, description="restarts after a rank has died or hangs")
    hang_seconds: float = Field(
        600, gt=0, description="seconds without a step after which a rank counts as hung"
    )
    start_seconds: float = Field(1800, gt=0, description="the same limit before the first step")
    link_seconds: float = Field(
        600, gt=0, le=1e8, description="seconds that a rank waits for others"
    )
    min_nproc: int | None = Field(
        None, ge=1, description="fewest ranks to continue with if one fails twice; none: nproc"
    )
    leave_file: str | None = Field(None, description="save and leave when this file appears")
    leave_command: list[str] | None = Field(
        None, description="save and leave when this command ends with code 0; run every 5 s"
    )
    max_skipped: int = Field(
        10, ge=1, description="consecutive steps without finite numbers before the run ends"
    )
    loss_spike: SpikePolicy | None = Field(
        None, description="action on a sudden rise of the loss; {}: the default settings"
    )
    check_replicas: int = Field(
        0, ge=0, description="steps between comparisons of the ranks' weights; 0: never"
    )

    # Techniques
    plan: list[Any] = Field(
        default_factory=list,
        description="techniques: name, or name: settings; a preset's name: article; or auto",
    )
    auto_plan: AutoPlan | None = Field(
        None,
        description="techniques are chosen in addition to the plan; set by plan: auto",
    )
    auto_budget: float | None = Field(
        None,
        gt=0,
        description="seconds, or 3m, for choosing; else 3 minutes, or 5 % of the training if fewer",
    )
    layout: Any = Field(
        None, description="which rank holds which part: fsdp2, {dp: 2, tp: 2}; joins the plan"
    )
    deepspeed: str | dict[str, Any] | None = Field(
        None, description="a ds_config.json, or what it holds: its settings join the recipe"
    )
    live_tuning: bool = Field(
        False, description="try safe settings while training; keep the faster"
    )
    on_obstacle: Literal["stop", "skip"] = Field(
        "stop", description="if a technique is unsupported: stop, or skip it"
    )
    require_effect: bool = Field(
        False, description="end with exit code 4 if a technique of the plan had no effect"
    )

    @field_validator("dataset", mode="before")
    @classmethod
    def _sources(cls, setting: Any) -> Any:
        """Checks each source here, because pydantic's error for a union lists every type."""
        if not isinstance(setting, list):
            return setting
        if not setting:
            raise ValueError("name at least one source")
        try:
            return [
                DataSource(**source) if isinstance(source, dict) else source for source in setting
            ]
        except ValidationError as error:
            raise ValueError(f"a source: {first_complaint(error)}") from error
        except TypeError as error:
            raise ValueError("a source's keys must be texts") from error

    @field_validator("price", mode="before")
    @classmethod
    def _priced(cls, setting: Any) -> Any:
        """Replaces a price file by its content; the resolved recipe needs no file."""
        return price_of(setting)

    @field_validator("transport", mode="before")
    @classmethod
    def _variables(cls, setting: Any) -> Any:
        return checked(setting) if isinstance(setting, dict) else setting

    @model_validator(mode="before")
    @classmethod
    def _plan_keys(cls, values: Any) -> Any:
        """Moves short forms of techniques into ``plan``, and reads ``plan: auto``."""
        if not isinstance(values, dict):
            return values
        if values.get("stage", "sft") != "sft" and values.get("learning_rate") is None:
            kind = values.get("finetuning_type", "full")
            values = {**values, "learning_rate": PREFERENCE_RATES.get(kind, 2e-4)}
        plan = values.get("plan")
        mixed = isinstance(plan, dict) and "auto" in plan and len(plan) > 1
        if mixed or (isinstance(plan, list) and any(_is_auto(entry) for entry in plan)):
            raise ValueError(
                "plan: auto chooses all techniques by itself; write plan: auto, or the list "
                "without it"
            )
        if _is_auto(plan):
            values = {**values, "plan": [], "auto_plan": _auto_settings(plan)}
        plan = entries_of(values.get("plan") or [], values.get("nproc"))
        if not isinstance(plan, list):
            return values
        if isinstance(values.get("plan"), str):  # a preset's name
            values = {**values, "plan": plan}
        values = (with_deepspeed if values.get("deepspeed") else beside_deepspeed)(values, plan)
        shorthand_keys = ("checkpoint_every", "checkpoint_dir", "layout")
        if all(values.get(key) is None for key in shorthand_keys):
            return values
        return with_layout_key(values, values.get("plan") or [])

    @field_validator("max_grad_norm", mode="before")
    @classmethod
    def _clipping(cls, setting: Any) -> Any:
        if setting == 0 and not isinstance(setting, bool):  # other trainers' "no clipping"
            raise ValueError("0 would remove every gradient; write null for no clipping")
        return setting

    @field_validator("auto_budget", mode="before")
    @classmethod
    def _budget(cls, setting: Any) -> Any:
        """Reads ``3m`` or a number of seconds."""
        if isinstance(setting, bool):
            raise ValueError("write 90s, 20m or 1h30m")  # pydantic would read true as 1 second
        if not isinstance(setting, str):
            return setting
        try:
            return read_duration(setting)
        except InputError as error:
            raise ValueError(str(error).removeprefix("budget: ")) from error

    @field_validator("resume", mode="before")
    @classmethod
    def _resumed(cls, setting: Any) -> Any:
        return read_resume(setting)

    @field_validator("lora_targets")
    @classmethod
    def _expression(cls, setting: Any) -> Any:
        if isinstance(setting, str):
            try:
                re.compile(setting)
            except re.error as error:
                raise ValueError(f"isn't a regular expression: {error}") from error
        return setting

    @field_validator("warmup_steps", "eval_every")
    @classmethod
    def _whole_or_share(cls, setting: int | float) -> int | float:
        if setting >= 1 and setting != int(setting):
            raise ValueError("give whole steps, or a share of all steps below 1")
        return int(setting) if setting >= 1 else setting

    @field_validator("adam_betas")
    @classmethod
    def _betas(cls, setting: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in setting):
            raise ValueError("both must be at least 0 and below 1")
        return setting

    @field_validator("data_workers", mode="before")
    @classmethod
    def _workers(cls, setting: Any) -> Any:
        """Checks both types here, because pydantic's error for a union lists every type."""
        if setting == "auto" or (type(setting) is int and setting >= 1):
            return setting
        raise ValueError("give auto, or a number of processes from 1 on")

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        if not (self.max_steps or self.epochs or self.max_tokens):
            raise ValueError("give max_steps, epochs or max_tokens, or the run has no end")
        if self.global_batch_size and self.global_batch_tokens:
            raise ValueError("give global_batch_size or global_batch_tokens, not both")
        if self.lora_base and self.lora_dora:
            raise ValueError("lora_dora needs the weights that lora_base rounds: keep one")
        lora_keys = sorted(name for name in self.model_fields_set if name.startswith("lora_"))
        changed = [n for n in lora_keys if getattr(self, n) != Recipe.model_fields[n].default]
        if self.finetuning_type == "full" and changed:
            raise ValueError(
                f"{changed[0]} has no effect on all weights: set finetuning_type: lora"
            )
        if self.min_nproc is not None and self.min_nproc > self.nproc:
            raise ValueError(f"min_nproc is {self.min_nproc}, above nproc, which is {self.nproc}")
        self._check_stage()
        measured = ("eval_loss", *self.metrics, *(["reward_accuracy"] * (self.stage != "sft")))
        if self.best_metric not in measured:
            raise ValueError(f"best_metric: {self.best_metric} must be one of metrics")
        if self.patience and not self.eval_every:
            raise ValueError("patience needs eval_every, the steps between two evaluations")
        return self

    def _check_stage(self) -> None:
        """Checks that the keys fit the stage."""
        if self.stage == "sft":
            changed = {"preference": self.preference != Preference()}
            changed["reference"] = self.reference != "start"
            if key := next((key for key, has_changed in changed.items() if has_changed), None):
                raise ValueError(f"{key} has no effect with stage: sft; set stage: dpo")
            return
        losses = STAGES[self.stage]
        if self.preference.loss not in (None, *losses):
            raise ValueError(
                f"preference: loss: {self.preference.loss!r} isn't a loss of stage: {self.stage}; "
                f"give {', '.join(losses)}"
            )
        try:
            needs_reference = self.objective.needs_reference
        except ValueError as error:
            raise ValueError(f"preference: {error}") from error
        if not needs_reference and self.reference != "start":
            raise ValueError(f"reference has no effect with stage: {self.stage}; leave it out")
        for key in ("label_smoothing", "z_loss", "metrics"):
            if getattr(self, key):
                hint = "; preference: label_smoothing may be meant" if "smooth" in key else ""
                raise ValueError(f"{key} is of stage: sft, and this is {self.stage}{hint}")
        if self.loss_on != "answers":
            raise ValueError(f"loss_on: {self.loss_on} is of stage: sft; leave it out")
        if self.too_long == "split":
            raise ValueError("too_long: split can't cut pairs; give truncate or drop")

    @property
    def objective(self) -> Objective:
        """Returns the loss of the stage's preferences."""
        settings = self.preference.model_dump(exclude={"loss"})
        return Objective(self.loss_name, **settings)

    @property
    def loss_name(self) -> str:
        """Returns the name of that loss."""
        return self.preference.loss or STAGES[self.stage][0]

    @property
    def datasets(self) -> list[DataSource]:
        names = [self.dataset] if isinstance(self.dataset, str) else self.dataset
        return [DataSource(path=n, columns=None) if isinstance(n, str) else n for n in names]

    def to_yaml(self) -> str:
        """Returns the resolved recipe with every key."""
        text: str = yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, width=100)
        return text


def _is_auto(plan: Any) -> bool:
    return plan == "auto" or (isinstance(plan, dict) and list(plan) == ["auto"])


def _auto_settings(plan: Any) -> dict[str, Any]:
    """Returns the settings in ``plan: {auto: {...}}``."""
    settings = plan["auto"] if isinstance(plan, dict) else None
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise ValueError(
            f"plan: auto: {settings!r} isn't a setting; write plan: auto, or "
            "plan: {auto: {fidelity: lossy}}"
        )
    for key, setting in settings.items():
        if key not in AutoPlan.model_fields:
            hint = did_you_mean(str(key), AutoPlan.model_fields)
            raise ValueError(f"plan: auto: unknown key {key!r:.62}{hint}; it has fidelity alone")
        if setting not in FIDELITIES:
            hint = did_you_mean(str(setting), FIDELITIES)
            raise ValueError(
                f"plan: auto: fidelity is {setting!r}{hint}; it is {', '.join(FIDELITIES[:-1])} or "
                f"{FIDELITIES[-1]}"
            )
    return settings


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe file and applies ``key=value`` overrides.

    Raises:
        InputError: no such file, not YAML, an unknown key or an invalid value.
    """
    contents = read_yaml_file(path, "recipe")
    if not isinstance(contents, dict):
        raise InputError(f"{path} is not a recipe: it must be lines of `key: value`")
    return recipe_from({**contents, **read_overrides(overrides)}, str(path))


# Replacements of other trainers' keys, for error messages. ``hasten import`` uses the same tables.

KEYS = Path(__file__).parent / "importers" / "keys.json"
VERBS = {"needless": "isn't needed here", "unmapped": "isn't supported", "sizes": "isn't supported"}
TOOLS = {
    "training": "transformers'",
    "training_arguments": "TRL's",
    "llama_factory": "LLaMA-Factory's",
    "axolotl": "Axolotl's",
    "ms_swift": "ms-swift's",
    "accelerate": "accelerate's",
    "preferences": "other trainers'",
}


def foreign_words(key: str) -> str:
    """Returns a phrase on the replacement of another trainer's key; empty if it is unknown."""
    return _foreign_table().get(key, "")


@functools.cache
def _foreign_table() -> Mapping[str, str]:
    tables: dict[str, Any] = json.loads(KEYS.read_text(encoding="utf-8"))
    sentences: dict[str, str] = {}
    for name, tool in TOOLS.items():
        table = tables[name]
        instead = {key: f"is {row[0]} here" for key, row in table.get("named", {}).items()}
        switches = table.get("switch", {})
        instead |= {key: f"is {technique} in plan here" for key, technique in switches.items()}
        instead |= {
            key: f"is {explanation} here" for key, explanation in table.get("instead", {}).items()
        }
        for kind, verb in VERBS.items():
            for explanation, keys in table.get(kind, {}).items():
                instead |= dict.fromkeys(keys, f"{verb}: {explanation}")
        for key, explanation in instead.items():
            sentences.setdefault(key, f"{tool} {key} {explanation}")
    refused = [*tables["refused"]["signs"].items(), *tables["preferences"]["refused"].items()]
    for what, keys in refused:
        for key in keys if elsewhere(what) else ():
            sentences.setdefault(key, f"{key} is of {what}{elsewhere(what)}")
    return sentences


def recipe_from(values: dict[Any, Any], origin: str) -> Recipe:
    """Returns the recipe in a dictionary; messages begin with ``origin``."""
    for key in values:
        if key not in Recipe.model_fields:
            name = str(key)[:60]
            similar = did_you_mean(name, Recipe.model_fields)
            hint = f"{similar}; docs/reference/recipe.md lists all keys"
            if foreign := foreign_words(name):
                hint = f": {foreign}; `hasten import FILE` translates whole files of other trainers"
            raise InputError(f"{origin}: unknown key {key!r:.62}{hint}")
    for key, setting in values.items():
        check_texts(setting, f"{origin}: {key}")
    try:
        return Recipe(**values)
    except ValidationError as error:
        raise InputError(f"{origin}: {first_complaint(error)}") from error


def check_texts(setting: Any, origin: str) -> None:
    """Raises InputError if a text in a nested value can't be a path or be written as UTF-8."""
    values = [setting]
    while values:
        setting = values.pop()
        if isinstance(setting, str) and (character := unwritable_character(setting)):
            raise InputError(f"{origin} has {character} in {setting[:60]!r}; remove it")
        if isinstance(setting, dict):
            values += [*setting, *setting.values()]
        elif isinstance(setting, list | tuple):
            values += setting
