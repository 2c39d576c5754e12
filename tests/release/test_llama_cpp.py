"""llama.cpp loads an exported GGUF file and computes what the trained model computes."""

from __future__ import annotations

import itertools
import json
import math
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

from hasten.data.tokenize import train_bpe
from hasten.models.gguf_format import check_convertible, pre_tokenizer, write_gguf
from hasten.models.load import load_model, load_tokenizer
from hasten.models.presets import PRESETS
from hasten.recipe.prepared_data import stored_data
from hasten.recipe.sample import prompt_of
from hasten.recipe.schema import Recipe
from hasten.release.export import Export, export
from hasten.training.run import train
from models.test_gguf_format import CJK, OTHERS, WORDS, steps_of
from sample_data import small

pytestmark = [pytest.mark.long, pytest.mark.slow]
gguf = pytest.importorskip("gguf", reason="needs the package gguf, of the extra gguf")
xllamacpp = pytest.importorskip(
    "xllamacpp", reason="needs the package xllamacpp, which contains llama.cpp"
)

PROMPTS = 20
WRITTEN = 12  # tokens
QWEN3 = "qwen3"
MODELS = ("deepseek-llm-tiny", "r1-distill-qwen-tiny", "v2-lite-tiny", "v3-tiny")


class LlamaCpp:
    """A file in llama.cpp's own server, on one thread of this process."""

    def __init__(self, file: Path) -> None:
        settings = xllamacpp.CommonParams()
        settings.model.path = str(file)
        settings.n_ctx, settings.n_parallel, settings.warmup = 512, 1, False
        settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
        self._server = xllamacpp.Server(settings)

    def _post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        address = self._server.listening_address + route
        request = urllib.request.Request(
            address, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def tokens(self, text: str, add_special: bool = False) -> list[int]:
        body = {"content": text, "add_special": add_special, "parse_special": True}
        tokens: list[int] = self._post("/tokenize", body)["tokens"]
        return tokens

    def complete(self, prompt: list[int], count: int, **options: Any) -> dict[str, Any]:
        fixed = {"temperature": 0, "cache_prompt": False, "repeat_penalty": 1.0}
        return self._post("/completion", {"prompt": prompt, "n_predict": count, **fixed, **options})

    def greedy(self, prompt: list[int]) -> list[int]:
        """The text's tokens, without the one that ends it."""
        tokens: list[int] = self.complete(prompt, WRITTEN, return_tokens=True)["tokens"]
        return tokens


def greedy(model: Any, prompt: list[int], end: int) -> list[int]:
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=WRITTEN,
            do_sample=False,
        )
    found: list[int] = out[0, len(prompt) :].tolist()
    return found[:-1] if found[-1] == end else found


@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_and_tokens_are_those_of_the_trained_model(name: str, tmp_path: Path) -> None:
    # Long enough that the most probable token leads by more than float16 rounds.
    changes = {"model": name, "max_steps": 70, "max_examples": 40, "eval_data": PROMPTS}
    recipe = Recipe(**small(tmp_path, **changes))
    train(recipe, tell=lambda text: None)
    run = tmp_path / "run"
    result = export(Export(run, tmp_path / "out", form="gguf"), tell=lambda text: None)
    assert result.is_equal
    llama = LlamaCpp(tmp_path / "out" / "out-F16.gguf")
    model = load_model(str(run / "model")).eval()
    tokenizer = load_tokenizer(str(run / "model"))
    data = stored_data(recipe, run / "data")
    assert data is not None
    prompts = [prompt_of(data.eval_data[i]) for i in range(PROMPTS)]
    for prompt in prompts:
        assert llama.tokens(tokenizer.decode(prompt)) == prompt
        written = [t for t in llama.greedy(prompt) if t != tokenizer.eos_token_id]
        assert written == greedy(model, prompt, tokenizer.eos_token_id)


# Attention, rotary positions and experts, in forms that published models have.

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 64}
LATENT_YARN = {"rope_parameters": {**YARN, "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 0.7}}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "original_max_position_embeddings": 64}
LLAMA3 |= {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def random_model(preset: str, tokenizer: Any, **changes: Any) -> Any:
    """A model with random weights of float16 whose logits are far apart."""
    if preset == QWEN3:  # no preset has it
        fields = dict(PRESETS["r1-distill-qwen-tiny"].config) | {"vocab_size": len(tokenizer)}
        config = CONFIG_MAPPING[QWEN3](**fields)
    else:
        config = load_model(preset, vocab_size=len(tokenizer), skeleton=True).config
    for key, value in changes.items():
        setattr(config, key, value)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    draw = torch.Generator().manual_seed(1)
    for name, weight in model.state_dict().items():
        noise = torch.randn(weight.shape, generator=draw)
        if "norm" in name or weight.dim() < 2:
            noise = weight + 0.1 * noise
        elif "embed" in name or "lm_head" in name or name.endswith("gate.weight"):
            noise = 0.4 * noise
        else:
            noise = 0.7 * noise / math.sqrt(weight.shape[-1])
        weight.copy_(noise.half().float())
    model.tie_weights()
    return model


@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("deepseek-llm-tiny", {"rms_norm_eps": 0.05, "attention_bias": True, "head_dim": 32}),
        ("deepseek-llm-tiny", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
        ("deepseek-llm-tiny", {"rope_parameters": YARN | {"rope_type": "linear", "factor": 4.0}}),
        ("deepseek-llm-tiny", {"rope_parameters": YARN | {"factor": 4.0}}),
        (
            "deepseek-llm-tiny",
            {"rope_parameters": YARN | {"factor": 4.0, "attention_factor": 1.3}},
        ),
        ("r1-distill-qwen-tiny", {"rope_parameters": YARN | {"factor": 4.0}}),
        (QWEN3, {"head_dim": 32}),
        (QWEN3, {"head_dim": 64, "rope_parameters": YARN | {"factor": 4.0}}),
        ("v2-lite-tiny", LATENT_YARN),
        ("v2-lite-tiny", {"q_lora_rank": 32, "routed_scaling_factor": 4.0}),
        ("v3-tiny", LATENT_YARN),
        ("v3-tiny", {"norm_topk_prob": False, "n_group": 1, "topk_group": 1}),
        ("v3-tiny", {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.0}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_probabilities_of_the_next_token_are_those_of_the_model(
    preset: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    tokenizer = train_bpe(["how many apples does she have left"] * 4, 320)
    model = random_model(preset, tokenizer, **changes)
    check_convertible(model, tokenizer)
    write_gguf(model, tokenizer, tmp_path / "model.gguf", "f16", "a model")
    llama = LlamaCpp(tmp_path / "model.gguf")
    draw = torch.Generator().manual_seed(0)
    differences = []
    for length in (3, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120):
        prompt = torch.randint(5, len(tokenizer), (1, length), generator=draw)
        with torch.no_grad():
            expected = model(input_ids=prompt).logits[0, -1].log_softmax(-1)
        answer = llama.complete(prompt[0].tolist(), 1, n_probs=20, post_sampling_probs=False)
        for written in answer.get("completion_probabilities", []):  # none where the text ends
            differences.append(
                max(abs(expected[t["id"]] - t["logprob"]) for t in written["top_logprobs"])
            )
    assert len(differences) > 6
    # The median: float16 in the cache of keys can send a token to another expert.
    assert sorted(differences)[len(differences) // 2] < 0.05


# The six rules of splitting. Every pair of pieces that rules treat in their own way.

PIECES = (
    *("a", "Word's", "I'LL", "1", "1234567", "½", "你好", "，。", "カナ", "é", "ß", "Привет"),
    *(" ", "   ", "\t", "\n", "\r\n\n", "\u00a0", "_", "->", "!!", "('"),
    *("<｜User｜>", "🙂", "a\u0301"),
)
CASED = r"\s?[A-Za-zµÀ-ÖØ-öø-ƺ\p{Lu}\p{Ll}\p{Lt}]+"  # the published one lists these letters
V3_REST = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
RULES: dict[str, tuple[str, ...]] = {
    "gpt-2": (),
    "llama-bpe": (rf"{WORDS}|\p{{N}}{{1,3}}|{OTHERS}",),
    "qwen2": (rf"{WORDS}|\p{{N}}|{OTHERS}",),
    "deepseek-llm": ("[\r\n]", CASED, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", CJK),
    "deepseek-coder": ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK),
    "deepseek-v3": (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", V3_REST),
}


def splitting_tokenizer(name: str, texts: list[str]) -> Any:
    """A tokenizer trained with the splitting of that name."""
    bpe = Tokenizer(models.BPE(ignore_merges=name == "llama-bpe"))
    bpe.pre_tokenizer = steps_of(RULES[name], name in ("deepseek-llm", "deepseek-coder"))
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<｜begin▁of▁sentence｜>",
        eos_token="<｜end▁of▁sentence｜>",
    )


@pytest.mark.parametrize("name", RULES)
def test_texts_have_the_tokens_of_the_tokenizer(name: str, tmp_path: Path) -> None:
    texts = [*PIECES, *("".join(pair) for pair in itertools.product(PIECES, repeat=2))]
    tokenizer = splitting_tokenizer(name, texts)
    assert pre_tokenizer(tokenizer) == name
    model = load_model("deepseek-llm-tiny", vocab_size=len(tokenizer))
    write_gguf(model, tokenizer, tmp_path / "model.gguf", "f16", "a model")
    llama = LlamaCpp(tmp_path / "model.gguf")
    wrong = [text for text in texts if llama.tokens(text) != tokenizer(text)["input_ids"]]
    assert wrong == []
