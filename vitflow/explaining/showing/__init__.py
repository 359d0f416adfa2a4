"""Maps beside each other: comparisons, layers, the page that answers."""
