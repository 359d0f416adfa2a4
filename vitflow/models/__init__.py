"""What a model is: how it is loaded, what it says of itself, and the libraries that models come from."""
