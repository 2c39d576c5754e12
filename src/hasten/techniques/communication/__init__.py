"""Techniques of the slot COMMUNICATION: what travels between ranks."""

from hasten.techniques.communication.compress import Half, PowerSGD, Quantised, TopK

__all__ = ["Half", "PowerSGD", "Quantised", "TopK"]
