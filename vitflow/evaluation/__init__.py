"""Measure maps instead of only looking at them: against objects, against the model's own answers, against each other.

`evaluate` does all of it on a folder of images; the parts can be used alone. Names are loaded when they are first
used, so that the tables of metrics load no torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
