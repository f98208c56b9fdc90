"""Evaluation of a model, and Ignite's metrics over ranks that differ."""
