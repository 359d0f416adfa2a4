"""What a model is: how it is loaded, what it says of itself, and the libraries that models come from."""

#: The precisions that a model can be run in, by torch's names. Half of them halve the memory of the weights, and are
#: fast where a GPU has units for them.
DTYPES = ("float32", "bfloat16", "float16")
