"""What an imported LoRA trains: the same tensors as PEFT with the names that the tool gives it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
import yaml
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner

from finished_runs import trained
from hasten.cli.main import app
from hasten.core.plan import Plan
from hasten.core.step import StepMetrics
from hasten.errors import InputError
from hasten.models.adapters import add_lora, merge, with_adapter
from hasten.models.load import read_config
from hasten.parts.distributed.expert_parallel import share_experts
from hasten.planner.inputs import job_of
from hasten.recipe.build import context_of, lora_of
from hasten.recipe.importers import read
from hasten.recipe.memory_check import needs_of, size_of
from hasten.recipe.schema import Recipe, load_recipe, recipe_from
from hasten.techniques.layout.experts import ExpertParallel
from hasten.training.run import train
from tiny import tiny_config

SEVEN = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
ARCHITECTURES = ("llama", "qwen3_moe", "deepseek_v2", "deepseek_v3")
TOKENS = torch.arange(24).reshape(2, 12)
RANK, ALPHA = 2, 6


def base(architecture: str) -> Any:
    torch.manual_seed(0)
    if architecture != "qwen3_moe":
        return hf.AutoModelForCausalLM.from_config(tiny_config(architecture))
    sizes = {"hidden_size": 16, "moe_intermediate_size": 8, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 4}
    sizes["num_experts_per_tok"] = 2
    return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(vocab_size=64, **sizes, **heads))


def learning(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {n: tuple(p.shape) for n, p in model.named_parameters() if p.requires_grad}


def by_peft(architecture: str, targets: str | Sequence[str]) -> Any:
    config = LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=ALPHA, target_modules=targets)
    return get_peft_model(base(architecture), config)


def linear_names(architecture: str) -> list[str]:
    """What LLaMA-Factory, axolotl and ms-swift give PEFT for all linear layers."""
    modules = [n for n, m in base(architecture).named_modules() if isinstance(m, nn.Linear)]
    return sorted({name.split(".")[-1] for name in modules} - {"lm_head"})


LORA = {"lora_r": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.0}
LLAMA_FACTORY: dict[str, Any] = {"model_name_or_path": "m", "stage": "sft", "dataset": "d.jsonl"}
TOOLS: dict[str, tuple[dict[str, Any], str, str, Any]] = {
    "TRL": (
        {"model_name_or_path": "m", "use_peft": True, "dataset_name": "d", **LORA},
        *("lora_target_modules", "all-linear", "all-linear"),
    ),
    "axolotl": (
        {"base_model": "m", "adapter": "lora", "datasets": [{"path": "d.jsonl"}], **LORA},
        *("lora_target_modules", "all-linear", "all-linear"),
    ),
    "axolotl, linear": (
        {"base_model": "m", "adapter": "lora", "datasets": [{"path": "d.jsonl"}], **LORA},
        *("lora_target_linear", True, linear_names),
    ),
    "LLaMA-Factory": (
        {**LLAMA_FACTORY, "lora_rank": RANK, "lora_alpha": ALPHA},
        *("lora_target", "all", linear_names),
    ),
    "LLaMA-Factory, default": (
        {**LLAMA_FACTORY, "lora_rank": RANK, "lora_alpha": ALPHA},
        *("cutoff_len", 64, linear_names),
    ),
    "ms-swift": (
        {"model": "m", "tuner_type": "lora", "dataset": "d.jsonl", "max_length": 64}
        | {"lora_rank": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.0},
        *("target_modules", ["all-linear"], linear_names),
    ),
}


def imported(folder: Path, config: dict[str, Any]) -> Recipe:
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    found = read(folder / "config.yaml")
    filled = {"model": "m", "dataset": "d", "max_steps": 1}
    return recipe_from({**{k: filled[k] for k in found.missing}, **found.values}, "imported")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tool", TOOLS)
def test_an_imported_adapter_has_the_weights_that_the_source_tool_trains(
    tool: str, architecture: str, tmp_path: Path
) -> None:
    config, key, word, names = TOOLS[tool]
    cases = [(word, names(architecture) if callable(names) else names)]
    if key not in ("lora_target_linear", "cutoff_len"):
        cases.append(("q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj", SEVEN))
    for value, expected in cases:
        listed = value.split(",") if expected == SEVEN and key != "lora_target" else value
        lora = lora_of(imported(tmp_path, {**config, key: listed}), Plan())
        assert lora is not None
        assert learning(lora.adapt(base(architecture))) == learning(by_peft(architecture, expected))


@pytest.mark.parametrize("architecture", ["qwen3_moe", "deepseek_v3"])
def test_adapted_experts_and_routers_merge_to_what_peft_computes(
    architecture: str, tmp_path: Path
) -> None:
    model = by_peft(architecture, "all-linear")
    assert any(".experts." in name for name in learning(model))
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.1)
    expected = model.eval()(input_ids=TOKENS).logits
    model.save_pretrained(tmp_path / "adapter")
    found = with_adapter(base(architecture), tmp_path / "adapter")
    assert torch.equal(found.eval()(input_ids=TOKENS).logits, expected)
    merge(found).save_pretrained(tmp_path / "merged")
    merged = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(merged(input_ids=TOKENS).logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dropout": 0.1, "targets": "all-linear"}, "has neither dropout nor DoRA"),
        ({"dora": True, "targets": "all-linear"}, "has neither dropout nor DoRA"),
        ({"targets": ["gate_proj"]}, "gate_proj without also targeting up_proj"),
        ({"targets": ["w1"]}, "'w1'.* not found"),
        ({"targets": ["o_proj", "lm_head"]}, "adapt lm_head, where LoRA can't be"),
        ({"targets": ["o_proj", "embed_tokens"]}, "adapt model.embed_tokens, where"),
    ],
)
def test_names_that_can_not_be_adapted_are_one_sentence(
    changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InputError, match=reason) as error:
        add_lora(base("deepseek_v3"), RANK, ALPHA, resolver="peft", **changes)
    assert "\n" not in str(error.value)


def test_expert_parallelism_refuses_adapted_experts_and_no_others() -> None:
    values = {"model": "v3-tiny", "from_scratch": True, "dataset": "d", "max_steps": 1}
    values |= {"finetuning_type": "lora", "vocabulary": 300}
    for targets, reasons in ((["experts"], 1), ("auto", 0)):
        context = context_of(recipe_from({**values, "lora_targets": targets}, "r"))
        found = [
            r for r in ExpertParallel(size=1).unsupported_reasons(context) if "adapted experts" in r
        ]
        assert len(found) == reasons


def test_experts_that_are_adapted_already_are_not_shared_out() -> None:
    group: Any = None
    with pytest.raises(ValueError, match="adapted experts have one matrix together"):
        share_experts(by_peft("deepseek_v3", "all-linear"), group)


@pytest.mark.parametrize(("targets", "lines"), [("all-linear", 1), ("auto", 0)])
def test_an_estimate_names_the_size_of_adapters_that_it_assumes(targets: str, lines: int) -> None:
    values = {"model": "v3-tiny", "dataset": "d", "max_steps": 1, "finetuning_type": "lora"}
    recipe = recipe_from({**values, "lora_targets": targets}, "r")
    _, assumed = job_of(recipe, 1, None, None, None, None, ())
    assert sum("on routed experts" in line for line in assumed) == lines


def test_memory_counts_adapted_experts_as_they_are_kept_for_backward() -> None:
    values = {"model": "v3-tiny", "from_scratch": True, "dataset": "d", "max_steps": 1}
    values |= {"finetuning_type": "lora", "vocabulary": 300, "lora_rank": 1}
    needs, kept = [], []
    for targets in (["self_attn", "experts"], ["self_attn"]):
        recipe = recipe_from({**values, "lora_targets": targets}, "r")
        context, lora = context_of(recipe), lora_of(recipe, Plan())
        assert lora is not None
        size = size_of(recipe, context)
        needs.append(needs_of(size, context, Plan([lora]), 24).activations)
        torch.manual_seed(0)
        config = read_config("v3-tiny", needs_weights=False)
        model = lora.adapt(hf.AutoModelForCausalLM.from_config(config))
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        storages: dict[int, int] = {}

        def keep(tensor: Tensor, own: set[int] = own, storages: Any = storages) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(input_ids=TOKENS % 300, labels=TOKENS % 300).loss
        kept.append(sum(storages.values()))
        del loss
    # The merged tensors of all layers; the estimate has one layer's again, and its gradient.
    layers = context.model.layers
    assert (needs[0] - needs[1]) * layers / (layers + 2) == pytest.approx(
        kept[0] - kept[1], rel=0.1
    )


@pytest.fixture(scope="module")
def expert_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps on experts and router, with a checkpoint after each second one."""
    folder = tmp_path_factory.mktemp("experts")
    (folder / "base").mkdir()
    model = trained(folder / "base", model="v3-tiny", max_steps=1) / "model"
    return trained(
        folder,
        model=str(model),
        tokenizer=None,
        finetuning_type="lora",
        max_steps=4,
        lora_targets="all-linear",
        lora_resolver="peft",
        lora_rank=RANK,
        plan=[{"experts_implementation": {"kind": "fused"}}],
        checkpoint_every=2,
        learning_rate=1e-2,
    )


@pytest.mark.slow
def test_exported_experts_are_the_trained_ones(expert_run: Path, tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM

    trained_model = AutoPeftModelForCausalLM.from_pretrained(expert_run / "adapter").eval()
    plain = hf.AutoModelForCausalLM.from_pretrained(expert_run.parent / "base/run/model")
    expected = trained_model(input_ids=TOKENS).logits
    assert (plain(input_ids=TOKENS).logits - expected).abs().max() > 1e-3
    for words in ([], ["--adapter"]):
        output = tmp_path / ("out" + "".join(words))
        result = CliRunner().invoke(app, ["export", str(expert_run), "-o", str(output), *words])
        assert result.exit_code == 0, result.output
    merged = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(merged(input_ids=TOKENS).logits, expected, rtol=0, atol=1e-5)
    files = [
        f / "adapter_model.safetensors" for f in (expert_run / "adapter", tmp_path / "out--adapter")
    ]
    one, other = map(load_file, files)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_on_experts_resumes_to_the_bits_of_an_uninterrupted_one(
    expert_run: Path, tmp_path: Path
) -> None:
    recipe = load_recipe(expert_run.parent / "recipe.yaml", [f"output={tmp_path / 'run'}"])
    stop = tmp_path / "run" / "stop"

    def request(metrics: StepMetrics) -> None:
        if metrics.step == 2:
            stop.touch()

    train(recipe, tell=lambda text: None, on_step=request)
    lines: list[str] = []
    train(recipe.model_copy(update={"resume": "auto"}), tell=lines.append)
    assert any(line.startswith("resuming from") for line in lines)
    one, other = (
        load_file(run / "adapter" / "adapter_model.safetensors")
        for run in (expert_run, tmp_path / "run")
    )
    assert any("experts" in name for name in one)
    assert all(torch.equal(one[name], other[name]) for name in one)
    config = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert {"gate_up_proj", "down_proj", "gate.weight"} <= set(config["target_parameters"])
