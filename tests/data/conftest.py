"""What the tests of this room share: real data where it is at hand, and one small tokenizer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hasten.data.tokenizer import train_bpe

PROSE = (
    "User: How many apples are left? Assistant: She had twelve apples and gave away five. ",
    "def total(values):\n    return sum(value for value in values if value > 0)\n",
    "Über die Brücke, 你好世界, naïve café — 12345 + 67890 = 80235.",
)


@pytest.fixture(scope="session")
def real_data() -> Path:
    folder = os.environ.get("HASTEN_TEST_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("HASTEN_TEST_DATA names no folder with gsm8k and alpaca records")
    return Path(folder)


@pytest.fixture(scope="session")
def _trained() -> Any:
    return train_bpe(PROSE * 20, 420)


@pytest.fixture
def tokenizer(_trained: Any) -> Any:
    template = _trained.chat_template
    yield _trained
    _trained.chat_template = template
