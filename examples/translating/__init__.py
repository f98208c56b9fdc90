"""Parts of translation.py: the pairs with their vocabulary, and the network with its beam search."""
