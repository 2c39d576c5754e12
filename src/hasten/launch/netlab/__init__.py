"""A cluster on one machine: hosts as network namespaces, links with a rate, ranks on each host."""

from hasten.launch.netlab.lab import Lab
from hasten.launch.netlab.modes import Finding, check
from hasten.launch.netlab.running import Result, Running

__all__ = ["Finding", "Lab", "Result", "Running", "check"]
