"""Files and texts of others: a pipe is refused at once, and a text moves no cursor."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hasten.data.prompt_formats import template_file
from hasten.data.readers import read_examples
from hasten.errors import InputError
from hasten.foreign_files import open_regular
from hasten.formatting import shown


def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.json.gz", "a.parquet", "a.jinja"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(OSError, match="not a regular file"):
            open_regular(tmp_path / name)
        read = template_file if name.endswith("jinja") else lambda path: read_examples([path])
        with pytest.raises(InputError, match="not a regular file"):
            read(tmp_path / name)


def test_control_characters_are_shown_and_text_stays() -> None:
    assert shown("a\x1b]0;b\x07\x7f\r\tc\n你") == "a\\x1b]0;b\\x07\\x7f\\x0d\tc\n你"
    assert shown("a\x9b\u202eb\u2028c") == "a\\u009b\\u202eb\\u2028c"
