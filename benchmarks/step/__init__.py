"""The variants of ``bench_step.py``: hasten and its peers on one and the same data."""
