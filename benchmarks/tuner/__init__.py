"""What bench_tuner.py runs beside its problems: the recorded grid, and real tunings."""
