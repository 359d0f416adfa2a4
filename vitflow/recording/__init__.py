"""Record one forward pass of an unmodified model; hooks on running models are defined only in this package."""
