"""The articles' code blocks as they stand, their imports taken from hasten, run to their end.

The blocks aren't part of this project. ``HASTEN_TEST_ARTICLES`` names a folder that has them, as
``snippets/000_01_amp.py`` and so on; each runs as a script in a fresh folder, with the names that
the article takes for granted. Without it hasten's own examples are what is tested.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from articles import article_blocks
from articles.article_blocks import on_two_ranks
from ranks import on_ranks

pytestmark = pytest.mark.articles
BLOCKS = article_blocks.BLOCKS


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_runs_to_its_end_and_does_what_it_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check: Callable[[], Any] = BLOCKS[name]
    check()


@pytest.mark.slow
def test_blocks_of_several_ranks_run_on_two(tmp_path: Path) -> None:
    one, two = on_ranks(on_two_ranks, tmp_path)
    for name in ("compressor", "collective", "begun", "trainer"):
        assert one[name] == two[name], f"{name}: ranks differ"
    assert not set(one["examples"]) & set(two["examples"])
    assert len(one["examples"]) + len(two["examples"]) == 64


def test_every_block_of_the_folder_is_run_or_listed_as_one_that_cannot() -> None:
    there = {path.stem for path in article_blocks.folder().iterdir()}
    assert there == set(BLOCKS) | set(article_blocks.OTHERS)
