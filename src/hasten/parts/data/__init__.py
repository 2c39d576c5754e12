"""Batches: collation, packing, order of an epoch, prefetching."""
