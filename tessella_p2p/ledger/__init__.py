"""Tickets, proofs and credits: settlement rules, the double-entry ledger and the worker's proof log."""
