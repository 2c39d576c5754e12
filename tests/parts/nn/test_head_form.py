"""The way from states to loss: what is recognised equals transformers' own loss, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from packaging.version import Version
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoraConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    TaskType,
    get_peft_model,
)
from torch import Tensor, nn

from hasten.parts.data.collate import IGNORED
from hasten.parts.nn.head_form import HeadForm, head_form, plain_head_reason
from hasten.parts.nn.losses import LabelOnlyLoss, LanguageModelLoss, WholeLogitsLoss
from tiny import ARCHITECTURES, COMMON, NEWER, VOCABULARY, tiny_config, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
HEADS = {**COMMON, "num_key_value_heads": 2}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ASKED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
SCALED: dict[str, tuple[Callable[[], Any], HeadForm]] = {
    "capped": (
        lambda: hf.Gemma2Config(**HEADS, head_dim=8, final_logit_softcapping=0.5),
        HeadForm(softcap=0.5),
    ),
    "divided": (lambda: hf.GraniteConfig(**HEADS, logits_scaling=8.0), HeadForm(scale=0.125)),
    "multiplied": (lambda: hf.CohereConfig(**HEADS, logit_scale=0.3), HeadForm(scale=0.3)),
    "states divided": (
        lambda: hf.MiniCPM3Config(
            **{**HEADS, "num_key_value_heads": 4},
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            v_head_dim=8,
            dim_model_base=8,
        ),
        HeadForm(state_scale=0.25),
    ),
}
ROUTED: dict[str, Callable[[], Any]] = {
    "mixtral": lambda: hf.MixtralConfig(
        **HEADS, **ASKED, num_local_experts=4, num_experts_per_tok=2
    ),
    "qwen2_moe": lambda: hf.Qwen2MoeConfig(
        **HEADS, **ASKED, **MOE, shared_expert_intermediate_size=16, decoder_sparse_step=1
    ),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(
        **HEADS, **ASKED, **MOE, decoder_sparse_step=1, head_dim=8
    ),
    "granitemoe": lambda: hf.GraniteMoeConfig(
        **HEADS, **ASKED, num_local_experts=4, num_experts_per_tok=2, logits_scaling=4.0
    ),
    "olmoe": lambda: hf.OlmoeConfig(**HEADS, **ASKED, num_experts=4, num_experts_per_tok=2),
    "gpt_oss": lambda: hf.GptOssConfig(
        **HEADS, **ASKED, num_local_experts=4, num_experts_per_tok=2, head_dim=8
    ),
    "deepseek_v4": lambda: _changed(tiny_config("deepseek_v4"), ASKED),
}
IDS = torch.randint(3, VOCABULARY, (3, 11), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(IDS)
MASK[1, 7:] = MASK[2, 5:] = 0
LABELS = IDS.masked_fill(MASK == 0, IGNORED)
LABELS[0, :4] = IGNORED
ALIGNED = nn.functional.pad(LABELS[:, 1:], (0, 1), value=IGNORED)


def _changed(config: Any, settings: dict[str, Any]) -> Any:
    for name, value in settings.items():
        setattr(config, name, value)
    return config


def built(config: Any, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.to(dtype).train()


def same_as_transformers(model: Any, loss: LanguageModelLoss, rel: float = 1e-6) -> None:
    """Loss (whose cross-entropy transformers takes in float32) and each gradient."""
    model.zero_grad()
    own = model(input_ids=IDS, attention_mask=MASK, labels=LABELS).loss
    own.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    total, count = loss(labels=ALIGNED, input_ids=IDS, attention_mask=MASK)
    (total / count).backward()
    assert float(total / count) == pytest.approx(float(own), rel=rel)
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert found
    assert found.keys() == expected.keys()
    scale = torch.stack([g.norm() for g in expected.values()]).norm()
    for name, gradient in found.items():
        assert (gradient - expected[name]).norm() <= 1e-5 * scale, name


@pytest.mark.parametrize("name", SCALED)
def test_scaled_and_capped_logits_give_the_models_own_loss(name: str) -> None:
    make, form = SCALED[name]
    model = built(make())
    assert head_form(model) == form
    same_as_transformers(model, WholeLogitsLoss(model))
    same_as_transformers(model, LabelOnlyLoss(model, chunk=5))


@pytest.mark.parametrize("name", SCALED)
def test_a_head_with_an_adapter_is_scaled_too(name: str) -> None:
    lora = LoraConfig(target_modules=["q_a_proj", "q_proj", "lm_head"], task_type="CAUSAL_LM")
    model = get_peft_model(built(SCALED[name][0]()), lora)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.1)
    same_as_transformers(model, LabelOnlyLoss(model, chunk=5))


@pytest.mark.parametrize("name", ROUTED)
def test_the_loss_that_routers_ask_for_is_part_of_both_losses(name: str) -> None:
    if name == "granitemoe" and Version(hf.__version__) < Version("5.18"):
        pytest.skip("the model of transformers 5.17 ends in an AttributeError of its own")
    model = built(ROUTED[name]())
    form = head_form(model)
    assert (form.router_weight, form.router_top_k) == (0.5, 2)
    same_as_transformers(model, WholeLogitsLoss(model), rel=3e-6)
    same_as_transformers(model, LabelOnlyLoss(model, chunk=5), rel=3e-6)


def test_given_a_number_of_items_the_mean_is_that_of_the_models_forward() -> None:
    model = built(ROUTED["mixtral"]())
    batch = {"input_ids": IDS, "attention_mask": MASK}
    own = model(**batch, labels=LABELS, num_items_in_batch=torch.tensor(50)).loss
    for loss in (WholeLogitsLoss(model), LabelOnlyLoss(model, chunk=5)):
        found = loss.mean(labels=ALIGNED, items=torch.tensor(50), **batch)
        assert float(found) == pytest.approx(float(own), rel=3e-6)


def test_filler_is_left_out_of_the_routers_loss_with_a_mask_of_its_own() -> None:
    """Rows whose filler no attention sees need no attention mask, and the routers still do."""
    model = built(ROUTED["qwen3_moe"]())
    masked = WholeLogitsLoss(model)(labels=ALIGNED, input_ids=IDS, attention_mask=MASK)
    for loss in (WholeLogitsLoss(model), LabelOnlyLoss(model)):
        found, _ = loss(labels=ALIGNED, input_ids=IDS, real_tokens=MASK.bool().flatten())
        assert float(found) == pytest.approx(float(masked[0]), rel=1e-9)
        without, _ = loss(labels=ALIGNED, input_ids=IDS)
        assert abs(float(without - masked[0])) > 1e-3


def test_an_evaluation_is_cross_entropy_alone() -> None:
    model = built(ROUTED["mixtral"]())
    logits = model(input_ids=IDS).logits.detach()
    plain = nn.functional.cross_entropy(logits.flatten(0, 1), ALIGNED.flatten(), reduction="sum")
    for loss in (WholeLogitsLoss(model), LabelOnlyLoss(model)):
        assert float(loss.eval()(labels=ALIGNED, input_ids=IDS)[0]) == pytest.approx(float(plain))


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *NEWER])
def test_a_skeleton_without_weights_is_recognised(architecture: str) -> None:
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(tiny_config(architecture))
    assert head_form(model) == HeadForm()


def state_of(model: nn.Module) -> Any:
    places = {n: (id(m), m.training, len(m._forward_hooks)) for n, m in model.named_modules()}
    return places, torch.get_rng_state().tolist(), {n: id(p) for n, p in model.named_parameters()}


def test_looking_at_a_model_leaves_it_and_the_random_state_as_they_were() -> None:
    model = get_peft_model(built(SCALED["capped"][0]()), LoraConfig(task_type="CAUSAL_LM"))
    model.eval()
    model.base_model.model.lm_head.train()
    before = state_of(model)
    assert plain_head_reason(model) is None
    assert state_of(model) == before
    broken = adding_a_loss()
    before = state_of(broken)
    assert plain_head_reason(broken) is not None
    assert state_of(broken) == before


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.5),
        LoraConfig(task_type="CAUSAL_LM", use_dora=True),
        LoraConfig(task_type="CAUSAL_LM", modules_to_save=["lm_head"]),
        LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "lm_head"]),
        IA3Config(task_type="CAUSAL_LM"),
    ],
    ids=["lora", "dora", "saved head", "adapted head", "ia3"],
)
def test_a_tuner_that_works_inside_the_layers_is_recognised(config: Any) -> None:
    assert plain_head_reason(get_peft_model(tiny_model("llama"), config)) is None


class Penalised(hf.LlamaForCausalLM):
    """A forward of the user's own that adds to the loss in training."""

    def forward(self, *args: Any, **named: Any) -> Any:  # type: ignore[override]
        output = super().forward(*args, **named)
        if self.training and output.loss is not None:
            output.loss = output.loss + 0.01 * self.lm_head.weight.square().mean()
        return output


class Documented(hf.LlamaForCausalLM):
    """A subclass that leaves the forward as it is."""


def adding_a_loss() -> Any:
    """A forward that is the library's by name, and a loss function that isn't."""
    model: Any = tiny_model("llama")
    usual = model.loss_function
    model.loss_function = lambda *args, **named: usual(*args, **named) + 0.01
    return model


def adapted(config: Any) -> Any:
    return get_peft_model(tiny_model("llama"), config)


def with_hook(place: str) -> Any:
    model = tiny_model("llama")
    model.get_submodule(place).register_forward_hook(lambda module, given, output: None)
    return model


def with_its_own_forward(model: Any) -> Any:
    usual = model.forward
    model.forward = lambda *args, **named: usual(*args, **named)
    return model


class NormedHead(nn.Linear):
    """A head of another kind, under the name of the usual one."""

    def forward(self, states: Tensor) -> Tensor:
        return super().forward(states / states.norm(dim=-1, keepdim=True))


def scaled_by_a_weight() -> Any:
    """Cohere's scale as something that learns."""
    model = built(SCALED["multiplied"][0](), torch.float32)
    del model.logit_scale
    model.logit_scale = nn.Parameter(torch.full((VOCABULARY,), 0.3).uniform_())
    return model


PROMPT = {"task_type": TaskType.CAUSAL_LM, "num_virtual_tokens": 2}
NOT_PLAIN: dict[str, tuple[Callable[[], Any], str]] = {
    "adalora": (lambda: adapted(AdaLoraConfig(task_type="CAUSAL_LM", total_step=10)), "AdaLora"),
    "prompt tuning": (lambda: adapted(PromptTuningConfig(**PROMPT)), "prompt"),
    "prefix tuning": (lambda: adapted(PrefixTuningConfig(**PROMPT)), "prompt"),
    "p-tuning": (lambda: adapted(PromptEncoderConfig(**PROMPT)), "prompt"),
    "subclass": (lambda: Penalised(tiny_config("llama")), "Penalised"),
    "loss function": (adding_a_loss, "adds a loss"),
    "instance": (lambda: with_its_own_forward(tiny_model("llama")), "replaced"),
    "wrapped": (lambda: with_its_own_forward(adapted(LoraConfig(task_type="CAUSAL_LM"))), "repl"),
    "hook on head": (lambda: with_hook("lm_head"), "hook"),
    "hook on model": (lambda: with_hook(""), "hook"),
    "learned scale": (scaled_by_a_weight, "logits"),
    "decoder inside": (lambda: hf.OPTForCausalLM(hf.OPTConfig(**OPT)), "trunk"),
    "no model": (lambda: nn.Linear(2, 2), "not a Hugging Face"),
}
OPT = {"vocab_size": 64, "hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 1}
OPT |= {"num_attention_heads": 2, "word_embed_proj_dim": 16}


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_a_forward_that_does_more_has_a_reason(name: str) -> None:
    make, word = NOT_PLAIN[name]
    model = make()
    reason = plain_head_reason(model)
    assert reason is not None
    assert word in reason
    assert "\n" not in reason
    if name != "no model":
        with pytest.raises(ValueError, match=r".") as error:
            LabelOnlyLoss(model)
        assert str(error.value) == reason


def test_a_subclass_that_keeps_the_forward_has_none() -> None:
    assert plain_head_reason(Documented(tiny_config("llama"))) is None
    assert plain_head_reason(copy.deepcopy(tiny_model("llama"))) is None


def test_a_head_of_another_kind_is_called_as_it_is() -> None:
    model: Any = tiny_model("llama", dtype=torch.float64)
    head = NormedHead(32, VOCABULARY, bias=False, dtype=torch.float64)
    model.lm_head = head
    same_as_transformers(model.train(), LabelOnlyLoss(model, chunk=5))
