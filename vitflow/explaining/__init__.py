"""A model, an image and a question become a map."""
