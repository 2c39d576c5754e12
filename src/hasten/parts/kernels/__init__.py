"""Kernels in C++ for the processor: fused passes over rows, bf16 products and attention on AMX."""
