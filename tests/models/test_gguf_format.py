"""A GGUF file holds the model's function: by another reader, and by its loader's mathematics."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

from hasten.data.tokenize import train_bpe
from hasten.errors import InputError
from hasten.models.gguf_format import (
    check_convertible,
    normalizers,
    pre_tokenizer,
    read_gguf,
    tensor_rules,
    write_gguf,
)
from hasten.models.load import load_model
from hasten.models.presets import PRESETS
from tiny import logits

gguf = pytest.importorskip("gguf", reason="needs the package gguf, of the extra gguf")

QWEN3 = "qwen3"  # no preset has it
NAMES = ("deepseek-llm-tiny", "r1-distill-qwen-tiny", QWEN3, "v2-lite-tiny", "v3-tiny")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_bpe(["how many apples does she have left"] * 4, 320)


def build(name: str, **changes: Any) -> Any:
    """A model whose vectors are not all ones and whose routers' biases choose, too."""
    if name == QWEN3:
        fields = dict(PRESETS["r1-distill-qwen-tiny"].config) | {"head_dim": 128, "vocab_size": 320}
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[QWEN3](**fields))
    else:
        model = load_model(name, vocab_size=320, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(1)
    for key, tensor in model.state_dict().items():
        if "norm" in key or "bias" in key:
            tensor += 0.1 * torch.randn_like(tensor)
    return model.eval()


def written(model: Any, tokenizer: Any, folder: Path, kind: Any = "f16") -> Path:
    file = folder / "model.gguf"
    model.generation_config.eos_token_id = [2, 4, 3]
    write_gguf(model, tokenizer, file, kind, "a model")
    return file


def stored(file: Path) -> dict[str, Tensor]:
    tensors = gguf.GGUFReader(file).tensors
    values = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in tensors}
    return {name: torch.tensor(value.copy()) for name, value in values.items()}


def fields(file: Path) -> dict[str, Any]:
    return {key: field.contents() for key, field in gguf.GGUFReader(file).fields.items()}


@pytest.mark.parametrize("name", NAMES[:3])
def test_transformers_own_reader_builds_the_same_model(
    name: str, tokenizer: Any, tmp_path: Path
) -> None:
    model = build(name)
    file = written(model, tokenizer, tmp_path)
    other = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    torch.testing.assert_close(logits(other), logits(model), rtol=0, atol=2e-3)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_what_is_read_back_differs_by_its_rounding_alone(
    name: str, kind: str, tokenizer: Any, tmp_path: Path
) -> None:
    model = build(name)
    check_convertible(model, tokenizer)
    file = written(model, tokenizer, tmp_path, kind)
    state = model.state_dict()
    back = read_gguf(file, model.config)
    assert back.keys() == state.keys()
    for key, weight in state.items():
        exact = weight.dim() < 2 or key.endswith("gate.weight")
        # Half a step of 1/127 of the row's largest; the step itself is a float16.
        step = 0 if exact else 2**-11 if kind == "f16" else 0.57 / 127
        # The keys of kv_b are stored transposed, so that their blocks aren't in a row here.
        rows = weight.flatten()[None] if "kv_b" in key else weight
        limit = rows.abs().amax(-1, keepdim=True) * step * 1.01
        assert bool(((back[key] - weight).abs() <= limit).all()), key
    for tensor in gguf.GGUFReader(file).tensors:
        matrix = len(tensor.shape) > 1 and not tensor.name.endswith("gate_inp.weight")
        expected = kind.upper() if matrix else "F32"
        if matrix and tensor.shape[0] % 32:
            expected = "F16"
        assert tensor.tensor_type.name == expected, tensor.name


def test_queries_of_llama_rotate_neighbours_as_they_rotated_halves(
    tokenizer: Any, tmp_path: Path
) -> None:
    """Scores of rotated queries and keys, by llama.cpp's rotation, are those of transformers."""
    model = build("deepseek-llm-tiny")
    tensors = stored(written(model, tokenizer, tmp_path))
    layer, heads = model.model.layers[0].self_attn, model.config.num_attention_heads
    hidden = torch.randn(5, model.config.hidden_size)
    position = torch.arange(5.0)
    size = model.config.hidden_size // heads
    angles = position[:, None] / 10000.0 ** (torch.arange(0, size, 2) / size)  # position, pair

    def scores(q: Tensor, k: Tensor, pairs: Any) -> Tensor:
        rotated = []
        for weight in (q, k):
            x = (hidden @ weight.T).view(5, heads, size)
            one, other = pairs(x)
            turned = torch.complex(one, other) * torch.polar(torch.ones(()), angles)[:, None]
            rotated.append(torch.cat([turned.real, turned.imag], -1))
        return torch.einsum("qhd,khd->hqk", *rotated)

    halves = scores(layer.q_proj.weight, layer.k_proj.weight, lambda x: x.chunk(2, -1))
    neighbours = scores(
        tensors["blk.0.attn_q.weight"],
        tensors["blk.0.attn_k.weight"],
        lambda x: (x[..., ::2], x[..., 1::2]),
    )
    torch.testing.assert_close(neighbours, halves, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("name", NAMES[3:])
def test_latent_attention_by_the_split_tensors_is_that_of_the_model(
    name: str, tokenizer: Any, tmp_path: Path
) -> None:
    model = build(name)
    config, tensors = model.config, stored(written(model, tokenizer, tmp_path))
    heads, nope = config.num_attention_heads, config.qk_nope_head_dim
    latent = torch.randn(7, config.kv_lora_rank)
    query = torch.randn(heads, nope)
    whole = latent @ model.model.layers[0].self_attn.kv_b_proj.weight.T
    keys, values = whole.view(7, heads, -1).split([nope, config.v_head_dim], -1)
    k_b, v_b = tensors["blk.0.attn_k_b.weight"], tensors["blk.0.attn_v_b.weight"]
    absorbed = torch.einsum("hrn,hn->hr", k_b, query)
    scores = torch.einsum("hr,tr->ht", absorbed, latent)
    torch.testing.assert_close(scores, torch.einsum("thn,hn->ht", keys, query), rtol=0, atol=2e-2)
    found = torch.einsum("hvr,tr->thv", v_b, latent)
    torch.testing.assert_close(found, values, rtol=0, atol=2e-3)


def test_experts_are_stacked_and_metadata_is_that_of_the_loader(
    tokenizer: Any, tmp_path: Path
) -> None:
    model = build("v3-tiny")
    file = written(model, tokenizer, tmp_path)
    config, tensors, found = model.config, stored(file), fields(file)
    experts = model.model.layers[1].mlp.experts
    middle = config.moe_intermediate_size
    shape = (config.n_routed_experts, middle, config.hidden_size)
    assert tensors["blk.1.ffn_gate_exps.weight"].shape == shape
    for part, rows in (("gate", slice(0, middle)), ("up", slice(middle, None))):
        torch.testing.assert_close(
            tensors[f"blk.1.ffn_{part}_exps.weight"],
            experts.gate_up_proj.detach()[:, rows],
            rtol=1e-3,
            atol=1e-6,
        )
    assert "blk.0.ffn_gate_exps.weight" not in tensors
    expected = {
        "attention.head_count_kv": 1,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "leading_dense_block_count": 1,
        "rope.dimension_count": config.qk_rope_head_dim,
    }
    assert {key: found[f"deepseek2.{key}"] for key in expected} == expected


def test_the_tokenizer_is_in_the_file(tokenizer: Any, tmp_path: Path) -> None:
    model = build("r1-distill-qwen-tiny")
    found = fields(written(model, tokenizer, tmp_path))
    assert found["tokenizer.ggml.model"] == "gpt2"
    assert found["tokenizer.ggml.pre"] == "gpt-2"
    texts = found["tokenizer.ggml.tokens"]
    vocabulary = tokenizer.get_vocab()
    assert len(texts) == 320
    assert {text: number for number, text in enumerate(texts) if text in vocabulary} == vocabulary
    types = found["tokenizer.ggml.token_type"]
    special = set(tokenizer.all_special_ids)
    assert {number for number, kind in enumerate(types) if kind == 3} >= special
    assert found["tokenizer.ggml.eos_token_id"] == tokenizer.eos_token_id
    assert found["tokenizer.ggml.eot_token_id"] == 3
    assert found["tokenizer.ggml.eom_token_id"] == 4
    assert found["tokenizer.ggml.add_bos_token"] is True
    assert found["tokenizer.chat_template"] == tokenizer.chat_template


def test_named_templates_are_in_the_file_under_their_names(tokenizer: Any, tmp_path: Path) -> None:
    named = copy.deepcopy(tokenizer)
    named.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    found = fields(written(build("r1-distill-qwen-tiny"), named, tmp_path))
    assert found["tokenizer.chat_template"] == "{{ messages }}"
    assert found["tokenizer.chat_template.tool_use"] == "{{ tools }}"


def test_a_tied_head_is_the_embedding_alone(tokenizer: Any, tmp_path: Path) -> None:
    model = build("deepseek-llm-tiny")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    names = set(stored(written(model, tokenizer, tmp_path)))
    assert "output.weight" not in names
    assert "token_embd.weight" in names


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', and supported is silu"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type is 'longrope'"),
        ({"mlp_bias": True}, "mlp_bias is true"),
        ({"n_shared_experts": 0}, "n_shared_experts is 0"),
        ({"rope_interleave": False}, "rope_interleave is false"),
        ({"num_hidden_layers": 27}, "a model of 27 layers has none there"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_type is 'linear'"),
        ({"rope_parameters": {"beta_fast": 16}}, "beta_fast is 16, and supported is 32"),
        ({"rope_parameters": {"truncate": False}}, "truncate is False"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "equal mscale and mscale_all_dim alone"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(
    changes: dict[str, Any], sentence: str, tokenizer: Any
) -> None:
    model = load_model("v3-tiny", vocab_size=320, skeleton=True)
    for key, value in changes.items():
        setattr(model.config, key, value)
    with pytest.raises(InputError, match=sentence) as caught:
        check_convertible(model, tokenizer)
    assert "\n" not in str(caught.value)


def test_another_architecture_is_refused(tokenizer: Any) -> None:
    model: Any = SimpleNamespace(config=SimpleNamespace(model_type="gpt2"))
    with pytest.raises(InputError, match="a gpt2 model has no GGUF form here"):
        check_convertible(model, tokenizer)


def steps_of(patterns: Sequence[str], digits: bool) -> Any:
    """The rules of a tokenizer that splits by patterns, then by bytes."""
    steps: list[Any] = [pre_tokenizers.Split(Regex(p), "isolated") for p in patterns]
    steps += [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not patterns))
    return pre_tokenizers.Sequence(steps)


def splitting(*patterns: str, digits: bool = False, **model: Any) -> Any:
    bpe = Tokenizer(models.BPE(vocab={"a": 0}, merges=[], **model))
    bpe.pre_tokenizer = steps_of(patterns, digits)
    return PreTrainedTokenizerFast(tokenizer_object=bpe)


WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CJK = "[一-龥ࠀ-一가-퟿]+"


@pytest.mark.parametrize(
    ("tokenizer", "name"),
    [
        (splitting(rf"{WORDS}|\p{{N}}|{OTHERS}"), "qwen2"),
        (splitting(rf"{WORDS}|\p{{N}}{{1,3}}|{OTHERS}", ignore_merges=True), "llama-bpe"),
        (
            splitting("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, digits=True),
            "deepseek-coder",
        ),
    ],
    ids=["qwen2", "llama-bpe", "deepseek-coder"],
)
def test_the_rules_of_splitting_are_recognised(tokenizer: Any, name: str) -> None:
    assert pre_tokenizer(tokenizer) == name


@pytest.mark.parametrize(
    "tokenizer",
    [
        splitting(r"\p{L}+"),
        splitting(rf"{WORDS}|\p{{N}}|{OTHERS}", ignore_merges=True),
        splitting(digits=True),
    ],
    ids=["another pattern", "whole words first", "digits"],
)
def test_unrecognised_rules_of_splitting_are_refused(tokenizer: Any) -> None:
    with pytest.raises(InputError, match="rules that aren't recognised for GGUF"):
        pre_tokenizer(tokenizer)


def changed_tokenizer(**changes: Any) -> Any:
    """A tokenizer with fields of its tokenizer.json changed."""
    content = json.loads(train_bpe(["how many apples"], 320).backend_tokenizer.to_str())
    content["added_tokens"][0] |= changes.pop("token", {})
    raw = Tokenizer.from_str(json.dumps(content | changes))
    return PreTrainedTokenizerFast(tokenizer_object=raw)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "changes text by Lowercase"),
        ({"token": {"lstrip": True}}, "includes spaces around it"),
        ({"token": {"single_word": True}}, "is for whole words alone"),
    ],
)
def test_a_text_that_llama_cpp_would_take_for_another_is_refused(
    changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        normalizers(changed_tokenizer(**changes))


def test_composed_accents_are_a_warning() -> None:
    model = load_model("r1-distill-qwen-tiny", vocab_size=320, skeleton=True)
    [warning] = check_convertible(model, changed_tokenizer(normalizer={"type": "NFC"}))
    assert "text with accents as characters of their own has other tokens there" in warning


@pytest.mark.parametrize("name", ["v2-lite-tiny", "v3-tiny"])
def test_norms_of_latent_vectors_with_another_epsilon_are_a_warning(
    name: str, tokenizer: Any
) -> None:
    model = load_model(name, vocab_size=320, skeleton=True)
    norm = model.model.layers[0].self_attn.kv_a_layernorm
    assert check_convertible(model, tokenizer) == []
    model.config.rms_norm_eps = 10 * norm.variance_epsilon
    [warning] = check_convertible(model, tokenizer)
    assert "latent vectors add 1e-06 and llama.cpp adds rms_norm_eps, 1e-05" in warning


def test_a_weight_beyond_float16_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    model = build("deepseek-llm-tiny")
    model.lm_head.weight.data[0, 0] = 1e5
    with pytest.raises(InputError, match=r"lm_head\.weight has values that float16 can't hold"):
        written(model, tokenizer, tmp_path)


def test_a_name_in_the_file_is_one_that_the_package_lists(tokenizer: Any) -> None:
    for name in NAMES:
        config = build(name).config
        kinds = {v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}
        kind = kinds[config.model_type if name in NAMES[:3] else "deepseek2"]
        listed = {gguf.TENSOR_NAMES[t].format(bid=1) for t in gguf.MODEL_TENSORS[kind]}
        rules = [r for r in tensor_rules(config) if "blk.1." in "".join(r.targets)]
        biases = {"blk.1.attn_output"}  # llama.cpp's loader takes it for llama, too
        assert {t.rpartition(".")[0] for r in rules for t in r.targets} <= listed | biases
