"""The version of the package; every other file imports it from here."""

__version__ = "0.1.0"
