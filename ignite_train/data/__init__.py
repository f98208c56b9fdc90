"""Groups of micro-batches, and the place in the data."""
