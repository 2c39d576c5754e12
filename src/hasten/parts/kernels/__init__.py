"""Kernels: C++ for the processor (rows, codecs, bf16 on AMX), Triton for GPUs."""
