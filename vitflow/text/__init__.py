"""Texts: which tokens a language model's output, or a word that it generates, is attributed to.

Names are loaded when they are first used: `import vitflow.text` imports no torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
