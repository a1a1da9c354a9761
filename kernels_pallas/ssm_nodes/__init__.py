"""One pass over the recurrent states of rows: fold what is pending, then look ahead along draft trees."""

from kernels_pallas.ssm_nodes.api import Inputs as Inputs
from kernels_pallas.ssm_nodes.api import NodesPlan as NodesPlan
from kernels_pallas.ssm_nodes.api import ssm_nodes as ssm_nodes
from kernels_pallas.ssm_nodes.plan import check_plan as check_plan
