from .batch_explainer import BatchExplainer as BatchExplainer
from .draw import draw_run as draw_run
from .draw import read_grids as read_grids
from .report import report_run as report_run
from .run import FolderSummary as FolderSummary
from .run import explain_folder as explain_folder
