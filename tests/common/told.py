"""What a run has written, what a command answers, and what a call is refused with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Hasten = Callable[..., tuple[int, str, str]]  # a command: its exit code, stdout and stderr


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of JSON; none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def refusal(call: Callable[..., object], *given: Any, **named: Any) -> str:
    """The words of the error that a call ends with; nothing where it does what was asked."""
    try:
        call(*given, **named)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""
