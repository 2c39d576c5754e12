"""Techniques of the slot LAYOUT: which rank holds which part."""

from hasten.techniques.layout.ddp import DDP

__all__ = ["DDP"]
