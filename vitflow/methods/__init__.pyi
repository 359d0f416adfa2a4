from .flow.attention_flow import FlowResult as FlowResult
from .flow.attention_flow import attention_flow as attention_flow
from .flow.layers import attention_graph as attention_graph
from .rollout import attention_rollout as attention_rollout
from .tokens import TokenLayout as TokenLayout
