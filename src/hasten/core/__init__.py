"""Defines slots, techniques, plans, jobs and the training step, which all other packages use."""
