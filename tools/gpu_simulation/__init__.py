"""A GPU by simulation: what a training step would ask of one, counted on a machine without any.

The folder above this one has to be on Python's path.
"""
