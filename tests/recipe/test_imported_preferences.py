"""Preference training of other trainers becomes stage, preference and reference of a recipe.

Each case is a trainer's file with keys of preference training, and the recipe's values. The
meanings are read in the trainers' sources, which the comments name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hasten.parts.nn.preference_objectives import STAGES
from hasten.recipe.importers import read

BASES: dict[str, dict[str, Any]] = {
    "LLaMA-Factory": {
        "model_name_or_path": "org/base",
        "do_train": True,
        "finetuning_type": "full",
        "dataset": "pairs.json",
        "template": "llama3",
        "cutoff_len": 512,
        "learning_rate": 5e-6,
    },
    "axolotl": {
        "base_model": "org/base",
        "datasets": [{"path": "pairs.jsonl", "type": "chat_template.default"}],
        "sequence_len": 512,
        "micro_batch_size": 2,
        "learning_rate": 5e-6,
        "num_epochs": 1,
        "warmup_steps": 10,
    },
    "ms-swift": {
        "model": "org/base",
        "tuner_type": "full",
        "dataset": "pairs.jsonl",
        "max_length": 512,
        "truncation_strategy": "right",
    },
    "TRL": {"model_name_or_path": "org/base", "dataset_name": "org/pairs", "max_length": 512},
}
PLAIN = {"beta": 0.1}
SIMPO = {"beta": 0.1, "gamma": 0.5}
# Tool, keys, stage, preference.
CASES: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    # LLaMA-Factory: hparams/finetuning_args.py, train/dpo/trainer.py, train/kto/trainer.py
    ("LLaMA-Factory", {"stage": "dpo"}, "dpo", {}),
    (
        "LLaMA-Factory",
        {"stage": "dpo", "pref_beta": 0.2, "pref_loss": "ipo"},
        "dpo",
        {"loss": "ipo", "beta": 0.2},
    ),
    ("LLaMA-Factory", {"stage": "dpo", "pref_loss": "hinge"}, "dpo", {"loss": "hinge"}),
    (
        "LLaMA-Factory",
        {"stage": "dpo", "pref_loss": "sigmoid", "dpo_label_smoothing": 0.1},
        "dpo",
        {"loss": "cdpo", "label_smoothing": 0.1},
    ),
    (
        "LLaMA-Factory",
        {"stage": "dpo", "pref_ftx": 0.5},
        "dpo",
        {"sft_weight": 0.5, "sft_mean": "examples"},
    ),
    (
        "LLaMA-Factory",
        {"stage": "dpo", "ld_alpha": 0.3},
        "dpo",
        {"ld_alpha": 0.3},
    ),
    (
        "LLaMA-Factory",
        {"stage": "dpo", "pref_loss": "orpo", "pref_beta": 0.1},
        "orpo",
        {"beta": 0.1, "sft_mean": "examples", "sft_span": "answer"},
    ),
    (
        "LLaMA-Factory",
        {"stage": "dpo", "pref_loss": "simpo", "simpo_gamma": 1.2, "pref_beta": 2},
        "simpo",
        {"beta": 2.0, "gamma": 1.2},
    ),
    (
        "LLaMA-Factory",
        {"stage": "kto", "pref_beta": 0.1, "kto_chosen_weight": 1.3},
        "kto",
        {"beta": 0.1, "desirable_weight": 1.3},
    ),
    ("LLaMA-Factory", {"stage": "rm"}, "rm", {}),
    # axolotl: core/builders/rl.py, core/trainers/dpo/__init__.py
    ("axolotl", {"rl": "dpo"}, "dpo", {}),
    ("axolotl", {"rl": "dpo", "rl_beta": 0.05, "dpo_label_smoothing": 0.1}, "dpo", {"beta": 0.05}),
    ("axolotl", {"rl": "ipo", "rl_beta": 0.1}, "dpo", {"loss": "ipo", "beta": 0.1}),
    (
        "axolotl",
        {"rl": "dpo", "dpo_loss_type": ["robust"], "dpo_label_smoothing": 0.1},
        "dpo",
        {"loss": "robust", "label_smoothing": 0.1},
    ),
    (
        "axolotl",
        {"rl": "dpo", "dpo_loss_type": ["sigmoid", "sft"], "dpo_loss_weights": [1, 0.2]},
        "dpo",
        {"sft_weight": 0.2, "sft_mean": "tokens"},
    ),
    (
        "axolotl",
        {"rl": "orpo", "orpo_alpha": 0.2},
        "orpo",
        {"beta": 0.2, "sft_mean": "tokens", "sft_span": "all"},
    ),
    (
        "axolotl",
        {"rl": "simpo", "rl_beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0},
        "simpo",
        {"beta": 2.0, "gamma": 1.0},
    ),
    (
        "axolotl",
        {"rl": "kto", "kto_desirable_weight": 0.8, "kto_undesirable_weight": 1.0},
        "kto",
        {"desirable_weight": 0.8, "undesirable_weight": 1.0},
    ),
    (
        "axolotl",
        {"reward_model": True, "num_labels": 1, "center_rewards_coefficient": 0.01},
        "rm",
        {"centre": 0.01},
    ),
    # ms-swift: arguments/rlhf_args.py
    (
        "ms-swift",
        {"rlhf_type": "dpo", "rpo_alpha": 0.1},
        "dpo",
        {"sft_weight": 0.1, "sft_mean": "tokens"},
    ),
    (
        "ms-swift",
        {"rlhf_type": "dpo", "beta": 0.2, "label_smoothing": 0.1},
        "dpo",
        {"loss": "cdpo", "beta": 0.2, "label_smoothing": 0.1},
    ),
    (
        "ms-swift",
        {"rlhf_type": "simpo"},
        "simpo",
        {"beta": 2.0, "sft_weight": 1.0, "gamma": 1.0, "sft_mean": "tokens"},
    ),
    (
        "ms-swift",
        {"rlhf_type": "cpo", "beta": 0.1, "cpo_alpha": 1.0},
        "simpo",
        {"loss": "cpo", "beta": 0.1, "sft_weight": 1.0, "sft_mean": "tokens"},
    ),
    (
        "ms-swift",
        {"rlhf_type": "kto", "desirable_weight": 1, "undesirable_weight": 2},
        "kto",
        {"desirable_weight": 1.0, "undesirable_weight": 2.0},
    ),
    ("ms-swift", {"rlhf_type": "orpo"}, "orpo", {"sft_mean": "tokens", "sft_span": "all"}),
    ("ms-swift", {"rlhf_type": "rm"}, "rm", {}),
    # TRL: trainer/dpo_config.py, kto_config.py, reward_config.py, experimental/cpo
    ("TRL", {"beta": 0.1}, "dpo", PLAIN),
    ("TRL", {"beta": 0.1, "label_smoothing": 0.1}, "dpo", PLAIN),
    (
        "TRL",
        {"loss_type": ["sigmoid_norm"], "beta": 0.5, "max_completion_length": 128},
        "dpo",
        {"loss": "sigmoid_norm", "beta": 0.5},
    ),
    (
        "TRL",
        {"loss_type": ["sppo_hard", "sft"], "loss_weights": [0.5, 1.0], "beta": 0.1},
        "dpo",
        {"loss": "sppo", "beta": 0.1, "sft_weight": 2.0, "sft_mean": "tokens"},
    ),
    ("TRL", {"loss_type": "nca_pair"}, "dpo", {"loss": "nca"}),
    ("TRL", {"beta": 0.1, "desirable_weight": 1.5}, "kto", {"beta": 0.1, "desirable_weight": 1.5}),
    ("TRL", {"loss_type": "apo_zero_unpaired"}, "kto", {"loss": "apo_zero_unpaired"}),
    (
        "TRL",
        {"loss_type": "simpo", "simpo_gamma": 0.4, "cpo_alpha": 0.0, "beta": 2.5},
        "simpo",
        {"beta": 2.5, "gamma": 0.4},
    ),
    ("TRL", {"center_rewards_coefficient": 0.01}, "rm", {"centre": 0.01}),
]


def imported(folder: Path, tool: str, keys: dict[str, Any]) -> Any:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(BASES[tool] | keys))
    return read(path)


@pytest.mark.parametrize(
    ("tool", "keys", "stage", "preference"),
    CASES,
    ids=[f"{tool}: {keys}" for tool, keys, *_ in CASES],
)
def test_keys_become_a_stage_and_its_loss(
    tmp_path: Path, tool: str, keys: dict[str, Any], stage: str, preference: dict[str, Any]
) -> None:
    found = imported(tmp_path, tool, keys)
    assert found.format in (tool, "TrainingArguments", "TRL")
    assert found.values["stage"] == stage
    assert found.values.get("preference", {}) == preference
    assert "reference" not in found.values
    recipe = found.check("config.yaml")
    assert recipe.loss_name == preference.get("loss", STAGES[stage][0])
    assert {"loss_on", "global_batch_tokens"}.isdisjoint(found.values)
    assert {*keys} <= {row.key for row in found.rows}
    assert not [r for r in found.rows if r.key in keys and r.fate in ("unmapped", "contradicts")]


RATES = {"dpo": 1e-6, "kto": 1e-6, "simpo": 1e-6, "rm": 1e-4}


@pytest.mark.parametrize(
    ("keys", "stage"), [(keys, stage) for tool, keys, stage, _ in CASES if tool == "TRL"]
)
def test_trls_learning_rates_are_those_of_the_trainer(
    tmp_path: Path, keys: dict[str, Any], stage: str
) -> None:
    assert imported(tmp_path, "TRL", keys).values["learning_rate"] == RATES[stage]


@pytest.mark.parametrize(
    ("tool", "keys"),
    [("LLaMA-Factory", {"stage": "dpo"}), ("ms-swift", {"rlhf_type": "kto"})],
)
def test_another_reference_is_taken_over_and_the_model_itself_is_the_start(
    tmp_path: Path, tool: str, keys: dict[str, Any]
) -> None:
    found = imported(tmp_path, tool, keys | {"ref_model": "org/other"})
    assert found.values["reference"] == "org/other"
    assert "reference" not in imported(tmp_path, tool, keys | {"ref_model": "org/base"}).values


TYPES: list[tuple[str, Any, dict[str, Any]]] = [
    ("dpo", "chatml.intel", {"chat_template": "chatml"}),
    ("dpo", "llama3.ultra", {"chat_template": "llama3"}),
    (
        "dpo",
        "chatml.prompt_pairs",
        {"chat_template": "chatml", "columns": {"instruction": "prompt"}},
    ),
    ("kto", "llama3.intel", {"chat_template": "llama3", "columns": {"answer": "completion"}}),
    (
        "dpo",
        {"field_prompt": "ask", "field_chosen": "yes", "field_rejected": "no"},
        {"columns": {"instruction": "ask", "chosen": "yes", "rejected": "no"}},
    ),
    ("dpo", "passthrough", {}),
]


@pytest.mark.parametrize(("rl", "kind", "values"), TYPES, ids=[str(kind) for _, kind, _ in TYPES])
def test_axolotls_types_become_columns_and_a_template(
    tmp_path: Path, rl: str, kind: Any, values: dict[str, Any]
) -> None:
    keys = {"rl": rl, "datasets": [{"path": "pairs.jsonl", "type": kind}]}
    found = imported(tmp_path, "axolotl", keys)
    names = ("chat_template", "columns")
    assert {name: found.values[name] for name in names if name in found.values} == values
    assert not [row for row in found.rows if row.fate == "unmapped" and "datasets" in row.key]


def test_fields_of_axolotls_messages_are_columns_of_pairs(tmp_path: Path) -> None:
    fields = {"field_messages": "turns", "field_chosen": "yes", "field_rejected": "no"}
    entry = {"path": "pairs.jsonl", "type": "chat_template.default", **fields}
    found = imported(tmp_path, "axolotl", {"rl": "dpo", "datasets": [entry]})
    assert found.values["columns"] == {"messages": "turns", "chosen": "yes", "rejected": "no"}


def test_a_type_of_ranked_answers_is_told(tmp_path: Path) -> None:
    entry = {"path": "pairs.jsonl", "type": "zephyr.nectar"}
    found = imported(tmp_path, "axolotl", {"rl": "dpo", "datasets": [entry]})
    assert [row.fate for row in found.rows if row.key == "datasets[0].type"] == ["unmapped"]
