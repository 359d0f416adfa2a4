"""The mathematics of the maps: tensors in, tensors out. No model, no image, no file."""
