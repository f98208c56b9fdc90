"""Private names of torch and Ignite that the library stands on, each with a test of its own in `tests/internals/`."""
