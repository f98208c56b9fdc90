"""One optimizer update."""
