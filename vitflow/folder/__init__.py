"""Runs over many images, which can be resumed."""
