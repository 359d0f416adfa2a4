"""Attribution of the outputs and generated words of language models to their tokens.

Names are imported lazily: `import vitflow.text` does not import torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
