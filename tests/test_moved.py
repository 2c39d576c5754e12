"""Module paths of earlier versions are imported for one more release, with a warning."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import warnings

import pytest

from hasten._moved import table


def test_an_old_path_has_what_the_new_one_has_and_warns_where_it_is_imported() -> None:
    code = (
        "import warnings, hasten\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    from hasten.search.layout import Layout\n"
        "    import hasten.evidence.statistics as old\n"
        "from hasten.measure import statistics\n"
        "from hasten.planner.layout import PlannedLayout\n"
        "assert Layout is PlannedLayout and old.Interval is statistics.Interval\n"
        "print(*(f'{w.category.__name__} {w.filename} {w.message}' for w in seen), sep='\\n')\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = found.stdout.splitlines()
    assert all(line.startswith("DeprecationWarning <string> hasten.") for line in lines)
    assert any("hasten.search.layout is hasten.planner.layout now" in line for line in lines)


def test_every_old_path_leads_somewhere_and_no_new_one_is_covered() -> None:
    for old, new in table()["modules"].items():
        assert importlib.util.find_spec(f"hasten.{new}"), new
        assert old not in set(table()["modules"].values()), old


@pytest.mark.parametrize(
    ("package", "name", "home"), [("wire", "TopK", "compress"), ("layout", "DDP", "ddp")]
)
def test_a_module_that_is_a_package_now_still_has_its_classes(
    package: str, name: str, home: str
) -> None:
    old = importlib.import_module(f"hasten.techniques.{package}")
    new = importlib.import_module(f"hasten.techniques.{package}.{home}")
    assert getattr(old, name) is getattr(new, name)


def test_every_name_that_went_another_way_is_there() -> None:
    wrong = []
    for old, home in table()["names"].items():
        module, _, renamed = home.partition(":")
        name = renamed or old.rpartition(".")[2]
        if not hasattr(importlib.import_module(f"hasten.{module}"), name):
            wrong.append(f"{old}: {home}")
    assert not wrong


def test_a_name_that_never_was_is_no_attribute_of_an_old_module() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ImportError, match="no_such_name"):
            from hasten.search.layout import no_such_name  # noqa: F401
