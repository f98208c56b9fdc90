"""Measuring which settings compute the same update in the least time."""
