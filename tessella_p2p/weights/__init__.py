"""Artifacts on disk: catalogue, download, verification, manifest."""
