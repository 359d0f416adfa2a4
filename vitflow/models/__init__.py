"""Loading models and reading their structure, across timm, transformers, torchvision and open_clip."""

#: Supported model precisions (torch dtype names). The 16-bit ones halve weight memory and are fast on GPUs that
#: support them.
DTYPES = ("float32", "bfloat16", "float16")
