"""Evaluate saliency maps: localisation, faithfulness, sanity, grids and sameness.

`evaluate` runs all of them on a data set; the parts can be used separately. Names are imported lazily, so that the
table of metrics does not import torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
