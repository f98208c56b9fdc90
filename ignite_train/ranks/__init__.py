"""Collectives, statistics and gradients over ranks."""
