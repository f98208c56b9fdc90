"""Copies between host and device, both ways."""
