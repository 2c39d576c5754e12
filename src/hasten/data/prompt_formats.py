"""Published prompt formats, by name, and the one that a job uses.

A format is a Jinja template that replaces the tokenizer's own, or a missing one.
`chat_templates/formats.json` has a row for each:

  - source: the file or model card that defines the format
  - body: the template in `chat_templates`; most formats share `turns`
  - settings: texts and switches of the body, written at its top as `{% set %}`; `{bos}`
    and `{eos}` are the tokenizer's tokens
  - tokens: the special tokens that the format needs; without them it writes ordinary
    text
  - begins: if it is `tokenizer`, its source leaves the bos token to the tokenizer, and so
    does `choose_chat_template`

Other tools write some formats in their own way. Such a format has the tool's name at
its end.
"""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten.data import renderer
from hasten.data.template_sandbox import check_syntax
from hasten.errors import InputError
from hasten.foreign_files import read_bounded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STANDARD = "deepseek-llm"  # where a tokenizer has no template
_FOLDER = Path(__file__).with_name("chat_templates")
_LARGEST_FILE = 1 << 20  # bytes

# Published, but not to the letter:
#
#   deepseek-v3  how tools are declared is not part of it; each group of results is opened, and a
#                call after results closes them
#   deepseek-r1  the thought of the last answer stays, since it is trained; no tools
#   mistral-*    the system text is in the first question, as the formats' trainers have it


def _formats() -> tuple[dict[str, str], dict[str, tuple[str, ...]], set[str]]:
    """Returns each format's template, its special tokens, and the formats without bos."""
    templates, tokens, without_bos = {}, {}, set()
    for name, row in json.loads((_FOLDER / "formats.json").read_text(encoding="utf-8")).items():
        body = (_FOLDER / f"{row.get('body', 'turns')}.jinja").read_text(encoding="utf-8")
        lines = (
            f"{{%- set {key} = {_literal(v)} %}}" for key, v in row.get("settings", {}).items()
        )
        templates[name] = "\n".join([*lines, body.removesuffix("\n")])
        tokens[name] = tuple(row.get("tokens", ()))
        without_bos |= {name} if row.get("begins") == "tokenizer" else set()
    return templates, tokens, without_bos


def _literal(literal: Any) -> str:
    """Returns a literal in Jinja's notation, with texts as in JSON."""
    if isinstance(literal, list):
        return f"[{', '.join(map(_literal, literal))}]"
    if isinstance(literal, str):
        pieces = [part for part in re.split(r"({bos}|{eos})", literal) if part] or [""]
        names = {"{bos}": "bos_token", "{eos}": "eos_token"}
        return " ~ ".join(names.get(p) or json.dumps(p, ensure_ascii=False) for p in pieces)
    return json.dumps(literal)


PROMPT_FORMATS, _TOKENS, _WITHOUT_BOS = _formats()


def ensure_chat_template(tokenizer: PreTrainedTokenizerBase, fallback: str = STANDARD) -> bool:
    """Adds a published chat template to a tokenizer without one; returns True if it had none."""
    if fallback not in PROMPT_FORMATS:
        close = difflib.get_close_matches(fallback, PROMPT_FORMATS, n=1) or [STANDARD]
        raise InputError(f"there is no chat template {fallback!r}: use {' or '.join(close)}")
    if tokenizer.chat_template:
        return False
    tokenizer.chat_template = PROMPT_FORMATS[fallback]
    return True


def choose_chat_template(tokenizer: PreTrainedTokenizerBase, choice: str) -> str:
    """Sets the template that a recipe requires; returns a phrase that names it.

    `auto` is the tokenizer's own, otherwise deepseek-llm's. A name of PROMPT_FORMATS or a
    `.jinja` file is always used. Raises InputError for a choice that is none of these.
    """
    if choice == "auto":
        added = ensure_chat_template(tokenizer)
        return f"{STANDARD}'s (the tokenizer has none)" if added else "the tokenizer's own"
    if choice in PROMPT_FORMATS:
        begins = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
        bos = "{%- set bos_token = '' %}\n" if choice in _WITHOUT_BOS and not begins else ""
        tokenizer.chat_template = bos + PROMPT_FORMATS[choice]
        return f"{choice}'s"
    tokenizer.chat_template = template_file(Path(choice))
    return f"that of {choice}"


def missing_tokens(tokenizer: PreTrainedTokenizerBase, choice: str) -> list[str]:
    """Returns a format's special tokens that the tokenizer splits into ordinary text."""
    vocabulary = tokenizer.get_added_vocab()
    return [token for token in _TOKENS.get(choice, ()) if token not in vocabulary]


def template_file(path: Path) -> str:
    """Returns the template in a file; raises InputError if there is none."""
    if path.suffix != ".jinja":
        close = difflib.get_close_matches(str(path), PROMPT_FORMATS, n=3) or ["chatml", "llama3"]
        raise InputError(
            f"chat_template: there is no {str(path)!r}: use {', '.join(close)}, another name of "
            "docs/reference/recipe.md, auto, or a .jinja file"
        )
    try:
        text = read_bounded(path, _LARGEST_FILE, "template").decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"chat_template: {path} is not UTF-8: save it as UTF-8") from error
    except InputError as error:
        raise InputError(f"chat_template: {error}") from error
    renderer.ask(str(path), 0, check_syntax, text, str(path))  # constants are computed there
    return text
