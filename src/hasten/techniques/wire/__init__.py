"""Techniques of the slot WIRE: what travels between ranks."""
