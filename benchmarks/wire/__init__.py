"""What bench_wire.py runs on the ranks."""
