"""Attention flow: the maximum flow from the answer to each token, exact."""
