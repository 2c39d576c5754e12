"""llama.cpp loads an exported GGUF file and writes the text that the trained model writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hasten.models.load import load_model, load_tokenizer
from hasten.recipe.prepared_data import stored_data
from hasten.recipe.sample import prompt_of
from hasten.recipe.schema import Recipe
from hasten.release.export import Export, export
from hasten.training.run import train
from sample_data import small

PROMPTS = 20
WRITTEN = 12  # tokens
MODELS = ("deepseek-llm-tiny", "r1-distill-qwen-tiny", "v2-lite-tiny", "v3-tiny")


def greedy(model: Any, prompt: list[int]) -> list[int]:
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=WRITTEN,
            do_sample=False,
            eos_token_id=None,
        )
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


def greedy_in_llama(llama: Any, prompt: list[int]) -> list[int]:
    written: list[int] = []
    for token in llama.generate(prompt, temp=0.0, repeat_penalty=1.0):
        written.append(token)
        if len(written) == WRITTEN:
            break
    return written


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_and_tokens_are_those_of_the_trained_model(name: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the package gguf, of the extra gguf")
    llama_cpp = pytest.importorskip(
        "llama_cpp", reason="needs llama-cpp-python, which compiles llama.cpp when installed"
    )
    # Long enough that the most probable token leads by more than float16 rounds.
    changes = {"model": name, "max_steps": 40, "max_examples": 40, "eval_data": PROMPTS}
    recipe = Recipe(**small(tmp_path, **changes))
    train(recipe, tell=lambda text: None)
    run = tmp_path / "run"
    result = export(Export(run, tmp_path / "out", form="gguf"), tell=lambda text: None)
    assert result.is_equal
    llama = llama_cpp.Llama(
        str(tmp_path / "out" / "out-F16.gguf"), n_ctx=512, n_threads=1, verbose=False
    )
    model = load_model(str(run / "model")).eval()
    tokenizer = load_tokenizer(str(run / "model"))
    data = stored_data(recipe, run / "data")
    assert data is not None
    prompts = [prompt_of(data.eval_data[i]) for i in range(PROMPTS)]
    for prompt in prompts:
        text = tokenizer.decode(prompt).encode()
        assert llama.tokenize(text, add_bos=False, special=True) == prompt
        assert greedy_in_llama(llama, prompt) == greedy(model, prompt)
    assert llama.token_eos() == tokenizer.eos_token_id
