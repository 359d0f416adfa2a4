"""Attribution methods as pure tensor functions: no model, no image, no file.

Names are loaded when they are first used: `import vitflow.methods` imports no torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
