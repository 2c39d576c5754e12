"""Layouts: which rank holds which part of a model, in plain PyTorch."""
