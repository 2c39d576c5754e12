"""``python -m hasten`` is the command ``hasten``."""

from hasten.cli.main import run

run()
