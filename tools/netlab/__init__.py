"""A cluster on one machine whose links can be slowed, delayed and cut, for tests and benchmarks.

It builds on ``hasten.launch.lab``. The folder above this one has to be on Python's path.
"""

from hasten.launch.lab import Result
from netlab.lab import Lab, LabSupport, RunningCommand, check

__all__ = ["Lab", "LabSupport", "Result", "RunningCommand", "check"]
