"""Processes on machines: ranks, supervisor, a cluster on one machine, files for schedulers."""
