"""Techniques of the slot COMMUNICATION: data that is sent between ranks."""

from hasten.techniques.communication.compress import Half, PowerSGD, Quantised, TopK

__all__ = ["Half", "PowerSGD", "Quantised", "TopK"]
