"""Audits: who is checked, and how outcomes are judged."""
