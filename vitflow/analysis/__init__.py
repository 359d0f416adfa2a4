"""Results made of several maps: comparisons, layers, features, clips, and data of the explorer."""
