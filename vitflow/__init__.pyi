from .errors import VitflowError as VitflowError
from .errors import VitflowWarning as VitflowWarning
from .evaluation.run import evaluate as evaluate
from .explaining.comparison import Comparison as Comparison
from .explaining.comparison import compare as compare
from .explaining.explainer import Explainer as Explainer
from .explaining.explainer import explain as explain
from .explaining.layer_maps import LayerMaps as LayerMaps
from .explaining.method_table import list_methods as list_methods
from .explaining.method_table import register_method as register_method
from .explaining.saliency import Saliency as Saliency
from .explaining.targets import Contrast as Contrast
from .folder.batch_explainer import BatchExplainer as BatchExplainer
from .folder.draw import draw_run as draw_run
from .folder.draw import read_grids as read_grids
from .folder.run import FolderSummary as FolderSummary
from .folder.run import explain_folder as explain_folder
from .methods.flow.attention_flow import FlowResult as FlowResult
from .methods.flow.attention_flow import attention_flow as attention_flow
from .methods.flow.graph import attention_graph as attention_graph
from .methods.rollout import attention_rollout as attention_rollout
from .methods.tokens import TokenLayout as TokenLayout
from .models.loading import load_model as load_model
from .recording.recorder import record_attention as record_attention
from .recording.trace import Trace as Trace

__version__: str
