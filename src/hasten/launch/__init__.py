"""Processes on machines: ranks, supervisor, files for schedulers."""
