"""A recipe that grows out of another tool's settings: every key's fate, shared keys, refusals.

A **fate** is one of: ``mapped`` (the recipe says it), ``needless`` (hasten does it anyway, or it
has no meaning here), ``unmapped`` (asked for and not to be had: the recipe differs from the
source), ``contradicts`` (two keys of the source can't both be meant).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hasten.errors import InputError
from hasten.recipe.yaml_reader import one_line

Fate = Literal["mapped", "needless", "unmapped", "contradicts"]
SHOWN = 60  # characters of a value


@dataclass(frozen=True)
class ImportedKey:
    """One key of the source."""

    key: str
    value: str
    fate: Fate
    words: str


@dataclass
class RecipeDraft:
    """Values and plan of the recipe so far; ``given`` is the source's mapping."""

    given: Mapping[str, Any]
    values: dict[str, Any] = field(default_factory=dict)
    plan: list[Any] = field(default_factory=list)
    rows: list[ImportedKey] = field(default_factory=list)
    why: dict[str, str] = field(default_factory=dict)  # recipe key -> source key, for comments

    def note(self, key: str, fate: Fate, words: str) -> None:
        self.row(key, self.given.get(key), fate, words)

    def row(self, key: str, value: Any, fate: Fate, words: str) -> None:
        """A row for a part of a key's value."""
        text = " ".join(repr(value).split())
        shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
        self.rows.append(ImportedKey(key, shown, fate, words))

    def say(self, key: str, name: str, value: Any) -> None:
        """The recipe's key ``name`` is ``value``, because the source's ``key`` says so."""
        if name in self.values and self.values[name] != value:
            first = self.why[name]
            words = f"{first} has already made {name} {self.values[name]!r}, which is kept"
            self.note(key, "contradicts", words)
            return
        self.values[name], self.why[name] = value, self.why.get(name, key)
        self.note(key, "mapped", f"{name}: {value}")

    def use(self, key: str, technique: str, settings: Mapping[str, Any] | None = None) -> None:
        """The plan has a technique, because the source's ``key`` says so."""
        entry: Any = {technique: dict(settings)} if settings else technique
        if entry not in self.plan:
            self.plan.append(entry)
        self.note(key, "mapped", f"plan: {technique}")

    @property
    def techniques(self) -> set[str]:
        return {next(iter(e)) if isinstance(e, dict) else e for e in self.plan}


Handler = Callable[[RecipeDraft, str, Any], None]


def drafted(
    given: Mapping[str, Any],
    handlers: Mapping[str, Handler],
    finish: Callable[[RecipeDraft], None] = lambda draft: None,
    quiet: tuple[Any, ...] = (),
) -> RecipeDraft:
    """Every key of the source through its handler; an unknown one that is ``quiet`` asks nothing.

    Raises:
        InputError: a value of a kind that its key can't have.
    """
    draft, key = RecipeDraft(given), ""
    try:
        for key, value in given.items():
            if key in handlers:
                before = len(draft.rows)
                handlers[key](draft, key, value)
                if len(draft.rows) == before and handlers[key] is not later:
                    draft.note(key, "needless", "it is off")
            elif all(value is not word and value != word for word in quiet):
                draft.note(key, "unmapped", "hasten doesn't know this key")
        key = "its batch"
        finish(draft)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InputError(
            f"{key} is {str(given.get(key, 'of another kind'))[:SHOWN]!r}, which it can't be: "
            f"{str(error).splitlines()[0][:SHOWN] if str(error) else type(error).__name__}"
        ) from error
    told = {row.key for row in draft.rows}
    for name in [name for name in given if name not in told and name in handlers]:
        draft.note(name, "needless", "it is off")
    return draft


def later(draft: RecipeDraft, key: str, value: Any) -> None:
    """A key that ``finish`` reads, together with others."""


def named(name: str, kind: Callable[[Any], Any] | None = None) -> Handler:
    """A key that the recipe has too, under ``name``."""

    def handle(draft: RecipeDraft, key: str, value: Any) -> None:
        if value is not None:
            draft.say(key, name, kind(value) if kind else value)

    return handle


def needless(words: str) -> Handler:
    """A key that changes nothing here, and why."""
    return lambda draft, key, value: draft.note(key, "needless", words)


def unmapped(words: str, off: tuple[Any, ...] = (None, False, 0, "", "none", "no")) -> Handler:
    """A key that hasten can't follow; one that is off asks for nothing."""

    def handle(draft: RecipeDraft, key: str, value: Any) -> None:
        asked = all(value is not word and value != word for word in off)
        draft.note(key, "unmapped" if asked else "needless", words if asked else "it is off")

    return handle


def switch(technique: str, on: tuple[Any, ...] = (True, "auto", "true")) -> Handler:
    """A key that switches a technique on."""

    def handle(draft: RecipeDraft, key: str, value: Any) -> None:
        if value in on:
            draft.use(key, technique)

    return handle


def implied(name: str, meant: Any) -> Handler:
    """A key that, where it is on, says that the recipe's ``name`` is ``meant``."""

    def handle(draft: RecipeDraft, key: str, value: Any) -> None:
        if value:
            draft.say(key, name, meant)

    return handle


ROWS = json.loads(Path(__file__).with_name("keys.json").read_text(encoding="utf-8"))
KINDS: Mapping[str, Callable[[Any], Any]] = {"int": int, "float": float, "bool": bool}


def table(name: str) -> dict[str, Handler]:
    """Handlers of the keys that ``keys.json`` speaks of under ``name``."""
    rows = ROWS[name]
    found: dict[str, Handler] = {}
    for kind, handler in (("needless", needless), ("unmapped", unmapped), ("switch", switch)):
        found |= {key: handler(word) for key, word in rows.get(kind, {}).items()}
    for key, (meant, *kinds) in rows.get("named", {}).items():
        found[key] = named(meant, *(KINDS[kind] for kind in kinds))
    return found


# Settings that most trainers share, under the names of Hugging Face's ``TrainingArguments``.

SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "warmup_stable_decay": "wsd",
}
ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw", "adamw_apex_fused")
INT8 = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "adamw_torch_8bit")
WRITERS = ("tensorboard", "wandb", "mlflow")
BETAS = [0.9, 0.999]  # what the other trainers take where the file says nothing
EPSILON = 1e-8


def epochs(draft: RecipeDraft, key: str, value: Any) -> None:
    """Whole passes; a part of one is rounded up, and said so."""
    whole = math.ceil(float(value))
    draft.say(key, "epochs", whole)
    if whole != float(value):
        draft.note(key, "unmapped", f"epochs are whole here: {whole} in the place of {value}")


def steps(draft: RecipeDraft, key: str, value: Any) -> None:
    if value is not None and int(value) > 0:
        draft.say(key, "max_steps", int(value))


def schedule(draft: RecipeDraft, key: str, value: Any) -> None:
    found = SCHEDULES.get(str(value))
    if found is None:
        known = ", ".join(sorted(set(SCHEDULES.values())))
        draft.note(key, "unmapped", f"there is no schedule {value!r}; hasten has {known}")
    else:
        draft.say(key, "lr_schedule", found)


def warmup(draft: RecipeDraft, key: str, value: Any) -> None:
    """Steps, or a share of all steps below 1, under either of the two names."""
    number = float(value or 0)
    if number:
        draft.say(key, "warmup_steps", number if number < 1 else int(number))


def optimizer(draft: RecipeDraft, key: str, value: Any) -> None:
    if value in ADAMW:
        draft.note(key, "mapped", "AdamW is the optimizer where the plan names none")
    elif value in INT8:
        draft.use(key, "compact_adamw", {"moments": "int8"})
    elif value == "muon":
        draft.use(key, "muon")
    else:
        draft.note(key, "unmapped", f"there is no optimizer {value!r}: AdamW takes its place")


def beta(place: int) -> Handler:
    """One of AdamW's two, beside the other tools' default of the second one."""

    def handle(draft: RecipeDraft, key: str, value: Any) -> None:
        found = list(draft.values.get("adam_betas", BETAS))
        found[place] = BETAS[place] if value is None else float(value)
        draft.values["adam_betas"], draft.why["adam_betas"] = found, "adam_beta1, adam_beta2"
        draft.note(key, "mapped", f"adam_betas: {found}")

    return handle


def epsilon(draft: RecipeDraft, key: str, value: Any) -> None:
    same = value is None or float(value) == EPSILON
    words = f"hasten's AdamW has {EPSILON}" + ("" if same else f", not {value}")
    draft.note(key, "needless" if same else "unmapped", words)


def defaults(draft: RecipeDraft) -> None:
    """What the other trainers do where the file says nothing and hasten does something else."""
    if "adam_betas" not in draft.values:
        draft.values["adam_betas"], draft.why["adam_betas"] = [*BETAS], "that tool's default"


def half(dtype: str) -> Handler:
    """``bf16: true`` and ``fp16: true``, of which one may be on."""

    def handle(draft: RecipeDraft, key: str, value: Any) -> None:
        if value not in (True, "auto", "full"):
            return
        if "autocast" in draft.techniques or "bf16_master_weights" in draft.techniques:
            draft.note(key, "contradicts", "another number format is on already, which is kept")
        else:
            draft.use(key, "autocast", {"dtype": dtype})

    return handle


def writers(draft: RecipeDraft, key: str, value: Any) -> None:
    asked = [value] if isinstance(value, str) else list(value or [])
    known = [w for w in asked if w in WRITERS]
    if known:
        draft.say(key, "log_to", known)
    rest = [w for w in asked if w not in (*WRITERS, "none", "all")]
    if rest:
        draft.note(key, "unmapped", f"hasten doesn't write to {', '.join(map(str, rest))}")


recompute = switch("recompute", on=(True, "true", "unsloth", "offload"))


def share_or_count(draft: RecipeDraft, key: str, value: Any) -> None:
    """What is held out: a share below 1, or a number of records."""
    number = float(value or 0)
    draft.say(key, "held_out", number if number < 1 else int(number))


def packing(draft: RecipeDraft, key: str, value: Any) -> None:
    """Records share rows, and documents don't see each other."""
    if value in (True, "auto"):
        draft.use(key, "packed")
        if "document_attention" not in draft.plan:
            draft.plan.append("document_attention")


def batch(draft: RecipeDraft, each: str, accumulation: str, ranks: int) -> None:
    """Records of a pass x passes x ranks make the global batch; the cut stays as it was."""
    size = int(draft.given.get(each) or 1)
    passes = int(draft.given.get(accumulation) or 1)
    draft.say(each, "global_batch_size", size * passes * ranks)
    if accumulation in draft.given:
        words = f"{size} records x {passes} passes x {ranks} ranks make the global batch"
        draft.note(accumulation, "mapped", words)
    if passes > 1:
        draft.use(each, "accumulate", {"micro_batch_size": size})


def resumed(draft: RecipeDraft, key: str, value: Any) -> None:
    if value in (True, "auto"):
        draft.say(key, "resume", "auto")
    elif isinstance(value, str) and value:
        words = "another trainer's checkpoint can't be gone on with: name its model as `model`"
        draft.note(key, "unmapped", words)


def saves(draft: RecipeDraft, key: str, value: Any) -> None:
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 1:
        draft.say(key, "checkpoint_every", int(value))
    else:
        draft.note(key, "needless", "the model is saved at the end")


def deepspeed(draft: RecipeDraft, key: str, value: Any) -> None:
    if isinstance(value, str) and value:
        draft.say(key, "deepspeed", value)


TRAINING: dict[str, Handler] = table("training") | {
    "num_train_epochs": epochs,
    "max_steps": steps,
    "lr_scheduler_type": schedule,
    "warmup_steps": warmup,
    "warmup_ratio": warmup,
    "optim": optimizer,
    "adam_beta1": beta(0),
    "adam_beta2": beta(1),
    "adam_epsilon": epsilon,
    "bf16": half("bf16"),
    "fp16": half("fp16"),
    "gradient_checkpointing": recompute,
    "save_steps": saves,
    "report_to": writers,
    "resume_from_checkpoint": resumed,
    "deepspeed": deepspeed,
}


# Files of other trainers that ask for another training than hasten's: they are refused by name.
#
# The keys are those of LLaMA-Factory, axolotl and TRL. A file of preference training that became a
# recipe would train the rejected answers, or none.

OURS = ("sft", "pt", "pretrain")
PREFERENCES = "preference training"
STAGES: Mapping[str, str] = ROWS["refused"]["stages"]
SIGNS: Mapping[str, str] = ROWS["refused"]["signs"]  # keys that ask for it wherever they are on
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
