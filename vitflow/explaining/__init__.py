"""Explain images: models, methods and targets to saliency maps."""
