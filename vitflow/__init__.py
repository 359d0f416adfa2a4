"""vitflow: see what a Vision Transformer looks at.

    import vitflow
    saliency = vitflow.explain("cat.jpg", model="vit_base_patch16_224.augreg2_in21k_ft_in1k", method="rollout")
    saliency.save("cat-rollout.png")

Names are loaded when they are first used: `import vitflow` imports no torch.
"""

import lazy_loader

__version__ = "0.1.0"

# What is public, and where it lies, is written once: in the stub beside this file.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
