"""Techniques in Transformers' Trainer, TRL, Lightning and plain loops; the articles' trainer."""
