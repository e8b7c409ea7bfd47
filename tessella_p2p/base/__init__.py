"""Ids, ranges, limits, errors and the clock: what every floor may lean on."""
