"""Benchmarks with pinned inputs: ``python -m benchmarks [GROUP...] --json FILE``. They report; they never gate a test."""
