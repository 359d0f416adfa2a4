"""Words and their weights, drawn: shaded text, sheets of layers and of generated words, the attention graph."""
