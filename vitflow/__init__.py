"""vitflow: see what a Vision Transformer looks at.

    import vitflow
    saliency = vitflow.explain("cat.jpg", model="vit_base_patch16_224.augreg2_in21k_ft_in1k", method="rollout")
    saliency.save("cat-rollout.png")

Names are loaded when they are first used: `import vitflow` imports no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitflow.comparison import Comparison, compare
    from vitflow.errors import VitflowError, VitflowWarning
    from vitflow.evaluation import evaluate
    from vitflow.explainer import Explainer, explain
    from vitflow.folder import FolderSummary, explain_folder
    from vitflow.methods import list_methods, register_method
    from vitflow.methods.flow.attention_flow import FlowResult, attention_flow
    from vitflow.methods.flow.graph import attention_graph
    from vitflow.methods.rollout import attention_rollout
    from vitflow.methods.tokens import TokenLayout
    from vitflow.models.loading import load_model
    from vitflow.recording.recorder import record_attention
    from vitflow.recording.trace import Trace
    from vitflow.saliency import Saliency

__version__ = "0.1.0"

_HOMES = {
    "Comparison": "comparison",
    "Explainer": "explainer",
    "FlowResult": "methods.flow.attention_flow",
    "FolderSummary": "folder",
    "Saliency": "saliency",
    "TokenLayout": "methods.tokens",
    "Trace": "recording.trace",
    "VitflowError": "errors",
    "VitflowWarning": "errors",
    "attention_flow": "methods.flow.attention_flow",
    "attention_graph": "methods.flow.graph",
    "attention_rollout": "methods.rollout",
    "compare": "comparison",
    "evaluate": "evaluation",
    "explain": "explainer",
    "explain_folder": "folder",
    "list_methods": "methods",
    "load_model": "models.loading",
    "record_attention": "recording.recorder",
    "register_method": "methods",
}

__all__ = [
    "Comparison",
    "Explainer",
    "FlowResult",
    "FolderSummary",
    "Saliency",
    "TokenLayout",
    "Trace",
    "VitflowError",
    "VitflowWarning",
    "attention_flow",
    "attention_graph",
    "attention_rollout",
    "compare",
    "evaluate",
    "explain",
    "explain_folder",
    "list_methods",
    "load_model",
    "record_attention",
    "register_method",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vitflow' has no attribute {name!r}")
    value = getattr(import_module(f"vitflow.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
