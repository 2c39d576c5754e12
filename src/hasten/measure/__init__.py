"""The measuring machine: processes, interleaved rounds, example, statistics."""
