"""A cluster on one machine: hosts as network namespaces, links with a rate, ranks on each host."""

from hasten.cluster.netlab.lab import Lab
from hasten.cluster.netlab.modes import Finding, check
from hasten.cluster.netlab.running import Result, Running

__all__ = ["Finding", "Lab", "Result", "Running", "check"]
