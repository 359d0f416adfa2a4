"""The precisions that a model can be run in; loads no torch."""

#: By torch's names. Half of them halve the memory of the weights, and are fast where a GPU has units for them.
DTYPES = ("float32", "bfloat16", "float16")
