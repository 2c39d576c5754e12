"""Fixtures of the tests of this package: real data where it is at hand, and one small tokenizer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hasten.data.tokenize import train_bpe

PROSE = (
    "User: How many apples are left? Assistant: She had twelve apples and gave away five. ",
    "def total(values):\n    return sum(value for value in values if value > 0)\n",
    "Über die Brücke, 你好世界, naïve café — 12345 + 67890 = 80235.",
)


@pytest.fixture(scope="session")
def real_data() -> Path:
    return Path(os.environ["HASTEN_TEST_DATA"])  # its tests have the mark ``data``


@pytest.fixture(scope="session")
def _trained() -> Any:
    return train_bpe(PROSE * 20, 420)


@pytest.fixture
def tokenizer(_trained: Any) -> Any:
    template = _trained.chat_template
    yield _trained
    _trained.chat_template = template
