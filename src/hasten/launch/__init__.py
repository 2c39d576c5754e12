"""Describing a cluster, and starting a job's processes."""
