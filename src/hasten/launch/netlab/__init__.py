"""A cluster on one machine: hosts as network namespaces, links with a rate, ranks on each host."""

from hasten.launch.netlab.lab import Finding, Lab, Result, Running, check

__all__ = ["Finding", "Lab", "Result", "Running", "check"]
