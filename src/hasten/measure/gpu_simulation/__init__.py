"""A GPU by simulation: what a training step would ask of one, counted on a machine without any."""
