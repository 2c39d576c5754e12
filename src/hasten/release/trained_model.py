"""Loads the model of a finished run, and generates text.

(1) the weights of RUN/model, or RUN/adapter merged into its base.
(2) the tokenizer saved with them; its chat template renders the turns in the sandbox of training.
(3) generation stops at the tokens that the weights name, and at the end of an answer.

Weights are float32 on a processor and bfloat16 on an accelerator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    TextStreamer,
)

from hasten.data.chat_template import answer_end, chat_template_of, render_turns
from hasten.data.prepared import PreparedData, stop_token
from hasten.data.template_sandbox import UnrenderedError
from hasten.data.turns import Message
from hasten.errors import InputError
from hasten.foreign_files import read_json_object, unwritable_character
from hasten.models.adapters import merge, other_base, round_base, with_adapter
from hasten.models.load import load_model, load_tokenizer, quiet, take_own_attention
from hasten.models.weights import ADAPTER
from hasten.recipe.build import lora_of, model_for, requested_plan
from hasten.recipe.schema import Recipe, load_recipe

RECIPE = "recipe.yaml"  # a run's resolved recipe
BASE = "base"  # names the model that a run started from


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model in evaluation mode with its tokenizer.

    Args:
        name: shown next to answers.
        folder: the saved weights or adapter; None for the model that a run started from.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    folder: Path | None = None


def weights_folder(run: Path, weights: str = "") -> Path:
    """Returns the folder of a run's weights: ``weights`` in it, or model, or adapter.

    Raises:
        InputError: there is no such run, or it has no such weights.
    """
    if not run.is_dir():
        raise InputError(f"{run}: there is no such folder; give the folder of a finished run")
    names = [weights] if weights else ["model", "adapter"]
    for name in names:
        if any((run / name / mark).is_file() for mark in ("config.json", ADAPTER)):
            return run / name
    raise InputError(
        f"{run} has no saved weights in {' or '.join(names)}: give the folder of a finished run, "
        "or another folder in it with --weights"
    )


def recipe_of(run: Path) -> Recipe:
    """Returns the resolved recipe of a run.

    Raises:
        InputError: the folder has none.
    """
    if not (run / RECIPE).is_file():
        raise InputError(f"{run} has no {RECIPE}: give the folder of a finished run")
    return load_recipe(run / RECIPE)


def is_data_of(run: Path, prepared: PreparedData) -> bool:
    """Returns False if a run's ``run.json`` names other training data."""
    trained_data = None
    with contextlib.suppress(InputError):
        trained_data = read_json_object(run / "run.json", "start of a run").get("data")
    return trained_data in (None, prepared.identity)


def load_run(run: Path, weights: str = "") -> LoadedModel:
    """Returns the trained model of a run; an adapter is merged into its base.

    Raises:
        InputError: no such run or weights, or the adapter is of another base.
    """
    folder = weights_folder(run, weights)
    check_is_language_model(run)
    if not (folder / ADAPTER).is_file():
        return _ready(run.name, load_model(str(folder)), load_tokenizer(str(folder)), folder)
    recipe = recipe_of(run)
    check_adapter_base(folder, recipe)
    tokenizer = load_tokenizer(str(folder))
    model: Any = model_for(recipe, tokenizer, stop_token(tokenizer, answer_end(tokenizer)))
    lora = lora_of(recipe, requested_plan(recipe))
    if lora is not None and lora.base is not None:
        round_base(model, lora.base)  # the weights that training computed with
    return _ready(run.name, merge(with_adapter(model, folder)), tokenizer, folder)


def check_is_language_model(run: Path) -> None:
    """Raises InputError for the run of a reward model, which gives scores and writes no text."""
    if (run / RECIPE).is_file() and recipe_of(run).stage == "rm":
        raise InputError(
            f"{run} trained a reward model (stage: rm), which writes no text: open its folder "
            "model with transformers' AutoModelForSequenceClassification, or adapter with PEFT"
        )


def check_adapter_base(folder: Path, recipe: Recipe) -> None:
    """Raises InputError if a saved adapter names another base than the run's recipe."""
    if other := other_base(folder, recipe.model):
        raise InputError(
            f"{folder} is an adapter of {other}, but the run's {RECIPE} names the model "
            f"{recipe.model}: set model there to the base that the adapter was trained on"
        )


def load_other(source: str, run: Path, weights: str = "") -> LoadedModel:
    """Returns the model to compare with: ``base``, another run, a folder or a hub name.

    The base is the model that the run started from; its tokenizer is the run's.
    """
    if source == BASE:
        tokenizer = load_tokenizer(str(weights_folder(run, weights)))
        stop = stop_token(tokenizer, answer_end(tokenizer))
        return _ready(BASE, model_for(recipe_of(run), tokenizer, stop), tokenizer)
    if (Path(source) / RECIPE).is_file():
        return load_run(Path(source))
    return _ready(source, load_model(source), load_tokenizer(source), Path(source))


def _ready(
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path | None = None,
) -> LoadedModel:
    take_own_attention(model)
    if torch.accelerator.is_available():
        for parameter in model.parameters():  # buffers stay float32, as in training
            parameter.data = parameter.data.to(torch.bfloat16)
        model.to(torch.accelerator.current_accelerator())
    model.requires_grad_(False)
    return LoadedModel(name, model.eval(), tokenizer, folder)


def check_template(loaded: LoadedModel) -> None:
    """Refuses a model without a chat template, and one with a template that renders no question.

    Raises:
        InputError: as above.
    """
    if not chat_template_of(loaded.tokenizer).plain:
        raise InputError(
            f"the tokenizer of {loaded.folder or loaded.name} has no chat template, so it can't "
            "render questions: set chat_template in the recipe, or save chat_template.jinja there"
        )
    prompt_tokens(loaded, [Message("user", "?")])


def prompt_tokens(loaded: LoadedModel, messages: Sequence[Message]) -> list[int]:
    """Returns the tokens of a conversation up to the beginning of the next answer."""
    template = chat_template_of(loaded.tokenizer)
    try:
        text = render_turns(template, messages, True, "the question")
    except UnrenderedError as error:
        raise InputError(
            f"the chat template of {loaded.name} refuses the turns: {error}"
        ) from error
    if reason := unwritable_character(text):
        raise InputError(f"a question is not UTF-8 text: it has {reason}; correct it")
    ids: list[int] = loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


@dataclass(frozen=True)
class Sampling:
    """Settings for the choice of the next token.

    Args:
        max_tokens: most tokens of an answer.
        temperature: 0 takes the most probable token.
        top_p: smallest probability that the sampled tokens share (arXiv 1904.09751).
    """

    max_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0


class _Pieces(TextStreamer):
    """Calls a function with each piece of text as soon as it is final."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._on_text(text)


def generate(
    loaded: LoadedModel,
    prompt: Sequence[int],
    sampling: Sampling = Sampling(),
    on_text: Callable[[str], None] | None = None,
    until: Callable[[list[int]], bool] | None = None,
) -> list[int]:
    """Returns the tokens after a prompt, including the stop token.

    ``on_text`` receives the text piece by piece. Generation also ends if ``until`` returns True
    for the tokens so far.

    Raises:
        InputError: the prompt leaves no position free.
    """
    model: Any = loaded.model
    longest = getattr(model.config, "max_position_embeddings", None) or 2**31
    if len(prompt) >= longest:
        raise InputError(
            f"the conversation has {len(prompt)} tokens and {loaded.name} takes {longest}: "
            "start a new one, or shorten the question"
        )
    inputs = torch.tensor([list(prompt)], device=model.device)
    chosen: dict[str, Any] = {"do_sample": False}
    if sampling.temperature:
        chosen = {"do_sample": True, "temperature": sampling.temperature}
        chosen |= {"top_p": sampling.top_p, "top_k": 0}
    if until is not None:

        def is_over(ids: torch.Tensor, _: Any) -> torch.Tensor:
            return ids.new_tensor([until(ids[0, len(prompt) :].tolist())], dtype=torch.bool)

        chosen["stopping_criteria"] = StoppingCriteriaList([is_over])
    with quiet(), torch.inference_mode():
        written = model.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=min(sampling.max_tokens, longest - len(prompt)),
            pad_token_id=loaded.tokenizer.pad_token_id,
            streamer=None if on_text is None else _Pieces(loaded.tokenizer, on_text),
            **chosen,
        )
    tokens: list[int] = written[0, len(prompt) :].tolist()
    return tokens


def answer(
    loaded: LoadedModel,
    messages: Sequence[Message],
    sampling: Sampling = Sampling(),
    on_text: Callable[[str], None] = lambda text: None,
) -> str:
    """Returns the text of the next answer in a conversation, without special tokens."""
    tokens = generate(loaded, prompt_tokens(loaded, messages), sampling, on_text)
    return str(loaded.tokenizer.decode(tokens, skip_special_tokens=True)).strip()
