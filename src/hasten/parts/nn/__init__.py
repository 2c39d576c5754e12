"""Modules and functions of a model: attention, losses, fused layers, recomputation."""
