"""A cluster on one machine: hosts as network namespaces, links with a rate, ranks on each host."""

from hasten.launch.netlab.lab import Lab, LabSupport, Result, RunningCommand, check

__all__ = ["Lab", "LabSupport", "Result", "RunningCommand", "check"]
