"""The report: one measured job as report.json, as a page that stands alone, and as a small table.

The input is plain data, described key by key in docs/report-schema.md.

1. report_schema.py makes it JSON and checks it against report_shapes.py.
2. report_gains.py and report_rows.py derive what several arms say together, report_words.py says
   its numbers, report_drawings.py draws them (charts.py, charts_svg.py).
3. report_page.py renders the page (report.html.jinja, page/*.jinja), report_markdown.py the table.
4. Both files are rendered before either is written, and each appears by a rename, so that no
   reader ever sees half a report.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hasten.errors import InputError
from hasten.report.report_markdown import render_markdown
from hasten.report.report_page import page_of
from hasten.report.report_schema import as_json, read_report

__all__ = ["render_markdown", "write_report"]


def write_report(report: Mapping[str, Any], folder: Path) -> Path:
    """Write report.json and report.html into `folder` (made if missing); the path of the page.

    Raises InputError where `report` departs from docs/report-schema.md, with no file changed, or
    where the folder can't be written.
    """
    plain, read = as_json(report, "report"), read_report(report)
    page = page_of(plain, read)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / "report.json", json.dumps(plain) + "\n")
        return _replace(folder / "report.html", page)
    except OSError as error:
        why = error.strerror or error
        raise InputError(
            f"The report can't be written to {folder} ({why}): name another folder."
        ) from error


def _replace(path: Path, text: str) -> Path:
    """Write the file beside its place, then rename it there in one act."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        return draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
