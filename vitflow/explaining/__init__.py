"""A model, a picture and a question become a map."""
