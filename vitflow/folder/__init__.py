"""Many images: resumable local runs, Ray Data, and overlays and reports of finished runs.

Names are loaded when they are first used: `import vitflow.folder` imports no torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
