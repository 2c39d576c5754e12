"""The measuring machine: processes, interleaved rounds, record, statistics."""
