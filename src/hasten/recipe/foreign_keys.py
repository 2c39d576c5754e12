"""Keys that other trainers' files have: what a recipe has instead, in words for an error.

The tables are those of ``hasten import`` (``importers/keys.json``), which translates whole files.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KEYS = Path(__file__).parent / "importers" / "keys.json"
VERBS = {"needless": "isn't needed here", "unmapped": "isn't supported", "sizes": "isn't supported"}
TOOLS = {
    "training": "transformers'",
    "training_arguments": "TRL's",
    "llama_factory": "LLaMA-Factory's",
    "axolotl": "Axolotl's",
    "ms_swift": "ms-swift's",
    "accelerate": "accelerate's",
}


def foreign_words(key: str) -> str:
    """What to write instead of another trainer's key, as the rest of a sentence; empty: unknown."""
    return _words().get(key, "")


@functools.cache
def _words() -> Mapping[str, str]:
    tables: dict[str, Any] = json.loads(KEYS.read_text(encoding="utf-8"))
    found: dict[str, str] = {}
    for name, tool in TOOLS.items():
        table = tables[name]
        instead = {key: f"is {row[0]} here" for key, row in table.get("named", {}).items()}
        switches = table.get("switch", {})
        instead |= {key: f"is {technique} in plan here" for key, technique in switches.items()}
        instead |= {key: f"is {words} here" for key, words in table.get("instead", {}).items()}
        for kind, verb in VERBS.items():
            for words, keys in table.get(kind, {}).items():
                instead |= dict.fromkeys(keys, f"{verb}: {words}")
        for key, words in instead.items():
            found.setdefault(key, f"{tool} {key} {words}")
    return found
