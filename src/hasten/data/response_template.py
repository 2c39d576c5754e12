"""How transformers separates the thought from the answer in what a model writes.

``transformers serve`` and its pipelines read a ``response_template`` of the tokenizer's config.
Without one, the server has parsers for some kinds of models. They look for the opening of the
published chat template in the prompt. With another chat template, as of DeepSeek-R1-Distill-Qwen,
they find nothing there and return the prompt as a part of the answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hasten.data.chat_template import AnswerEnd

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Beginning of a model_type -> the opening and the ends that the server's parser expects; it also
# reads the tool calls of that kind of model (transformers/cli/serving/utils.py).
_PARSED = {
    "qwen": ("<|im_start|>assistant\n", ("<|im_end|>", "<|endoftext|>")),
    "gemma4": ("<|turn>model\n", ("<turn|>", "<eos>")),
}
_PROMPT = r"\A.*"  # nothing in it belongs to the answer
_UNTIL_THOUGHT = r"\A.*?(?=(?:<think>\s*)?\Z)"  # except a thought that it opens at its end


def response_template(
    tokenizer: PreTrainedTokenizerBase,
    written: AnswerEnd | None,
    model_type: str,
    opens_thoughts: bool,
) -> dict[str, Any] | None:
    """Returns a rule for any prompt; None if the parser of transformers' server fits.

    Args:
        tokenizer: that of the trained model.
        written: the text that its chat template writes around an answer.
        model_type: that of the model's config.
        opens_thoughts: if False, the model's text is an answer even if the prompt opens a thought.
    """
    prompt, end = (written.prompt, written.token) if written is not None else ("", "")
    for kind, (opening, ends) in _PARSED.items():
        fits = opening in prompt and {end, tokenizer.eos_token} <= {*ends}
        if model_type.startswith(kind) and fits and opens_thoughts:
            return None
    specials = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    closes = sorted({*specials, end} - {""})
    return {
        "defaults": {"role": "assistant", "content": ""},
        "start_anchor_pattern": _UNTIL_THOUGHT if opens_thoughts else _PROMPT,
        "fields": {
            "thinking": {  # servers call it reasoning_content; those of 5.17 read this name
                "open_pattern": r"<think>\s*",
                "close_pattern": r"\s*</think>\s*",
                "content": "text",
            },
            "content": {  # special tokens are left out, every other character is kept
                **({"close": closes} if closes else {}),
                "content": "text",
                "content_args": {"strip": False},
                "repeats": True,
                "join": "",
            },
        },
    }


def is_published(template: dict[str, Any] | None) -> bool:
    """Returns True for a tokenizer's own rule; False for one of `response_template`."""
    anchors = (_PROMPT, _UNTIL_THOUGHT)
    return template is not None and template.get("start_anchor_pattern") not in anchors
