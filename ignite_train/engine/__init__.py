"""The loop around the update: Ignite's Engine, with its events, limits and exceptions."""
