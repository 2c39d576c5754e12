"""A cluster on one machine whose links can be slowed, delayed and cut, for tests and benchmarks.

The folder above this one has to be on Python's path.
"""

from netlab.lab import Lab, LabSupport, Result, RunningCommand, check

__all__ = ["Lab", "LabSupport", "Result", "RunningCommand", "check"]
