"""Stages: the engine that runs a range of layers, its sessions, sampling and digests."""
