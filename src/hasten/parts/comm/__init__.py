"""Ways to average gradients over ranks in fewer bytes, and what they have in common."""
