"""Techniques of the slot WIRE: what travels between ranks."""

from hasten.techniques.wire.compress import Half, PowerSGD, Quantised, TopK

__all__ = ["Half", "PowerSGD", "Quantised", "TopK"]
