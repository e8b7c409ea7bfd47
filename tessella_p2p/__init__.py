"""Tessella-P2P: one language model, run by many machines that nobody has to trust."""

__version__ = "0.1.0"
