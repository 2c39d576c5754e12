"""The chat formats that DeepSeek's models were trained with, and which of them a job uses.

They stand in for the template that a tokenizer may lack, and a recipe can ask for one by name or
give a file of its own.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING

from hasten.data import renderer
from hasten.data.render import check_syntax
from hasten.errors import InputError
from hasten.formatting import open_regular

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The chat format of DeepSeek LLM (DeepSeek-AI 2024, the model card of deepseek-llm-7b-chat).
DEEPSEEK_LLM = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- 'User: ' + message.content + '\n\n' }}
    {%- elif message.role == 'assistant' %}
        {{- 'Assistant: ' + message.content + eos_token }}
    {%- else %}
        {{- message.content + '\n\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'Assistant:' }}
{%- endif %}"""

# The chat format of DeepSeek V3 (DeepSeek-AI 2024, tokenizer_config.json of DeepSeek-V3-0324), with
# calls of tools and their results; how tools are declared is not part of it. As published only the
# first results of a dialogue are opened and a call after results doesn't close them; here all are.
DEEPSEEK_V3 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- set opens = messages[loop.index0 - 1].role != 'tool' %}
        {{- '<｜tool▁outputs▁begin｜>' if opens else '\\n' }}
        {{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<｜tool▁outputs▁end｜>' }}
        {%- endif %}
    {%- elif message.role == 'user' %}
        {{- '<｜User｜>' + message.content }}
    {%- elif message.role == 'assistant' %}
        {{- '' if messages[loop.index0 - 1].role == 'tool' else '<｜Assistant｜>' }}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '<｜tool▁calls▁begin｜>' if loop.first else '\\n' }}
            {{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name }}
            {%- set given = call.function.arguments %}
            {{- '\\n```json\\n' + (given if given is string else given | tojson) }}
            {{- '\\n```<｜tool▁call▁end｜>' + ('<｜tool▁calls▁end｜>' if loop.last else '') }}
        {%- endfor %}
        {{- eos_token }}
    {%- else %}
        {{- message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and (not messages or messages[-1].role != 'tool') %}
    {{- '<｜Assistant｜>' }}
{%- endif %}"""

# The chat format of DeepSeek R1 (DeepSeek-AI 2025, the model card of DeepSeek-R1), no tools: the
# prompt opens the thought, and later turns don't see the thoughts of earlier ones. As published it
# cuts the thought off the last answer too; here it stays, since it is what is trained.
DEEPSEEK_R1 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<｜User｜>' + message.content }}
    {%- elif message.role == 'assistant' and loop.last %}
        {{- '<｜Assistant｜>' + message.content + eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- '<｜Assistant｜>' + message.content.split('</think>')[-1] + eos_token }}
    {%- else %}
        {{- message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<｜Assistant｜><think>\n' }}
{%- endif %}"""

FALLBACKS = {
    "deepseek-llm": DEEPSEEK_LLM,
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-r1": DEEPSEEK_R1,
}
_LARGEST_FILE = 1 << 20  # bytes


def ensure_chat_template(
    tokenizer: PreTrainedTokenizerBase, fallback: str = "deepseek-llm"
) -> bool:
    """Give a tokenizer without a chat template one of FALLBACKS; True if it had none."""
    if fallback not in FALLBACKS:
        close = difflib.get_close_matches(fallback, FALLBACKS, n=1) or list(FALLBACKS)
        raise InputError(f"there is no chat template {fallback!r}: use {' or '.join(close)}")
    if tokenizer.chat_template:
        return False
    tokenizer.chat_template = FALLBACKS[fallback]
    return True


def choose_chat_template(tokenizer: PreTrainedTokenizerBase, choice: str) -> str:
    """Set the template that a recipe asks for; a phrase that says which one it is now.

    `auto` is the tokenizer's own, else deepseek-llm's; a name of FALLBACKS or a `.jinja` file is
    used in any case. Raises InputError for a choice that is none of these.
    """
    if choice == "auto":
        added = ensure_chat_template(tokenizer)
        return "deepseek-llm's (the tokenizer has none)" if added else "the tokenizer's own"
    if choice in FALLBACKS:
        tokenizer.chat_template = FALLBACKS[choice]
        return f"{choice}'s"
    tokenizer.chat_template = template_file(Path(choice))
    return f"that of {choice}"


def template_file(path: Path) -> str:
    """The template in a file; raises InputError where there is none."""
    if path.suffix != ".jinja":
        close = difflib.get_close_matches(str(path), FALLBACKS, n=1)
        known = close or ["auto", *FALLBACKS, "a .jinja file"]
        raise InputError(f"chat_template: there is no {str(path)!r}: use {', '.join(known)}")
    try:
        with open_regular(path) as file:
            data = file.read(_LARGEST_FILE + 1)
        text = data.decode("utf-8")
    except OSError as error:
        raise InputError(f"chat_template: {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"chat_template: {path} is not UTF-8: save it as UTF-8") from error
    if len(data) > _LARGEST_FILE:
        raise InputError(f"chat_template: {path} is larger than 1 MiB; that is not a template")
    renderer.ask(str(path), 0, check_syntax, text, str(path))  # constants are computed there
    return text
