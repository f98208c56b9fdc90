"""What crosses ranks: collectives, statistics, gradients."""
