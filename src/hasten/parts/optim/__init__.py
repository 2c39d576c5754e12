"""Optimizers, master weights and running averages."""
