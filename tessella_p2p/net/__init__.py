"""Streams between authenticated peers: py-libp2p and its guards, and the in-memory network beside it."""
