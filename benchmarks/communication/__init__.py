"""What bench_communication.py runs on the ranks."""
