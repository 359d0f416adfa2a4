"""Attention flow: exact maximum flow from the output to each token."""
