"""What bench_layouts.py runs on its ranks, and how it counts."""
