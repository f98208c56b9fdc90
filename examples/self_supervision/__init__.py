"""Parts of self_supervised.py: samples of several crops, the network and its losses, the optimizer."""
