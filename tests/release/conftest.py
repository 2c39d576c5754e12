"""The finished runs that the tests of this package use."""

from finished_runs import full_run, lora_run

__all__ = ["full_run", "lora_run"]
