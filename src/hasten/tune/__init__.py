"""Tuning a whole job: a recipe's plan and hyper-parameters, or a training loop of anybody's."""
