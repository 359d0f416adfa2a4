"""What a model answers where patches are hidden from it, or left out."""
