"""Techniques of the slot LAYOUT: which rank holds which part."""
